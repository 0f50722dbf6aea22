"""A machine of a search: `python search_machine.py FLAGS` is `lm sweep FLAGS`, and dies where it is told to.

Its trainings are processes of the program $TRAINER. The file itself is such a program, with the real `lm train`, if its
arguments begin with `-m lm.sweep.child`; tests/fake_trainer.py is a quick one. More variables
command the machine:

    DIE     a function of `lm` and the number of its call, as in "after lm.sweep.sweep.Sweep.prepare 3".
    HOST    the name of the machine, which its locks bear.
    BEAT    seconds between two renewals of a lock, which expires after six of them.
    LOOK    seconds between two looks at the folder.
"""

import contextlib
import itertools
import os
import pathlib
import pkgutil
import signal
import socket
import sys
import types

import fake_trainer


def kill_machine(pid: int) -> None:
    """Ends a machine as a cut of its power does: the search and its trainings at once."""
    children = []
    for path in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    for process in (*children, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def die(moment: str) -> None:
    """Arranges that this machine ends at a moment of DIE."""
    when, name, number = moment.split()
    place, _, function = name.rpartition('.')
    place = pkgutil.resolve_name(place)
    original, calls = getattr(place, function), itertools.count(1)

    def call(*arguments, **options):
        is_due = next(calls) == int(number)
        if is_due and when == 'before':
            kill_machine(os.getpid())
        result = original(*arguments, **options)
        if is_due:
            kill_machine(os.getpid())
        return result

    setattr(place, function, call)


def main(arguments: list[str]) -> int:
    if arguments[0] == '-m':
        fake_trainer.end_with_parent(arguments[2])
    from lm import cli, lease
    from lm.sweep import runner
    from lm.sweep.search import run

    if host := os.environ.get('HOST'):
        socket.gethostname = lambda: host
    if beat := os.environ.get('BEAT'):
        lease.HEARTBEAT = float(beat)
        lease.EXPIRES = 6 * lease.HEARTBEAT
    if arguments[0] == '-m':
        return cli.main(arguments[3:])
    runner.sys = types.SimpleNamespace(executable=os.environ['TRAINER'], stdout=sys.stdout)
    runner.POLL_SECONDS, run.LOOK_SECONDS = 0.01, float(os.environ.get('LOOK', '0.05'))
    run.validate_point = lambda *_: []
    if moment := os.environ.get('DIE'):
        die(moment)
    return cli.main(['sweep', *arguments])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
