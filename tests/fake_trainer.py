"""Stands in for `python -m lm.sweep.child PARENT train --run_dir DIR --gin_file FILE`, and imports nothing heavy.

The loss falls towards a value that the learning rate and the number of layers decide. $FAKE_TRAINER names a folder. A
file there called TRIAL.CODE makes the next training of that trial end with CODE, half-way. TRIAL.begun and TRIAL.last
kill its machine, before the first step and between the last step and its checkpoint. Where the learning rate is above
$FAKE_LIMIT the training diverges half-way. Two trainings of one trial at the same time make a file `twice`.
"""

import ctypes
import fcntl
import json
import math
import os
import pathlib
import re
import signal
import sys
import time


def end_with_parent(pid: str) -> None:
    """Makes Linux send SIGTERM when the search ends, as `lm.sweep.child` does."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != int(pid):
            sys.exit(128 + signal.SIGTERM)


def kill_machine() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    folder, source = (pathlib.Path(arguments[arguments.index(flag) + 1]) for flag in ('--run_dir', '--gin_file'))
    text = source.read_text()

    def number(name: str) -> float:
        return float(re.search(rf'^{re.escape(name)} = (.*)$', text, re.MULTILINE)[1])

    steps, every = int(number('train.steps')), int(number('train.eval_every'))
    rate, limit = number('optimizer.peak_learning_rate'), float(os.environ.get('FAKE_LIMIT', 'inf'))
    end = 2 + math.log10(rate / 1e-3) ** 2 + 0.1 * number('model.n_layers')
    notes = pathlib.Path(os.environ['FAKE_TRAINER'])
    with open(notes / 'log', 'a') as log:
        log.write(f'{folder.name}\n')
    fault = next(notes.glob(f'{folder.name}.*'), None)
    kind = fault.suffix[1:] if fault else ''
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    busy = open(notes / f'busy-{folder.parent.name}-{folder.name}', 'a')  # noqa: SIM115 (this process's end closes it)
    try:
        fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (notes / 'twice').touch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'new').write_text(text)
    (folder / 'new').rename(folder / 'config.gin')  # as lm writes it, whole
    if kind == 'begun':
        fault.unlink()
        kill_machine()
    path = folder / 'metrics.jsonl'
    done = len(path.read_text().splitlines()) if path.exists() else 0
    for i in range(done + 1, steps // every + 1):
        if kind.isdecimal() and i > steps // every // 2:
            fault.unlink()
            return int(kind)
        if rate > limit and i > steps // every // 2:
            return 43
        if stopped:
            return 42
        record = {'kind': 'eval', 'step': i * every, 'loss': end + 5 / i, 'perplexity': 1.0, 'split': 'validation'}
        with open(path, 'a') as file:
            file.write(json.dumps(record) + '\n')
        time.sleep(float(os.environ.get('FAKE_SECONDS', '0')))
    if kind == 'last':
        fault.unlink()
        kill_machine()
    target = folder / 'checkpoints' / str(steps)
    target.mkdir(parents=True, exist_ok=True)
    (target / 'commit_success.txt').write_text('')
    return 0


if __name__ == '__main__':
    end_with_parent(sys.argv[sys.argv.index('train') - 1])
    sys.exit(main(sys.argv[1:]))
