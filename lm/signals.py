"""Ending a process: the signals that ask for it, what each command makes of them, and an end from any thread."""

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from lm.errors import Preempted

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that stop a process; the last one comes when its terminal is closed."""
INTERRUPTED = (Preempted.exit_code, *(128 + number for number in ENDING), *(-number for number in ENDING))
"""Exit codes of a process that a signal has stopped; `subprocess` gives negative ones."""

LAST_ACT_SECONDS = 5.0
"""Seconds that `end_process` waits for the last acts: storage may hang, too."""
AGAIN_SECONDS = 0.1
"""Seconds until an ignored Ctrl-C is repeated: the callback is over by then."""
_last_acts: list[Callable[[], object]] = []


@contextlib.contextmanager
def last_act(act: Callable[[], object]) -> Iterator[None]:
    """Inside, `end_process` calls `act` before it ends the process, from another thread than the main one."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def end_process(message: str, code: int = Preempted.exit_code) -> NoReturn:
    """Ends this process at once, from any thread, with one line on stderr: for what no exception can end, such as a
    main thread that waits for a process that is gone. Nothing is cleaned up but by `last_act`."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # such as that no thread can be started any more
        acts = threading.Thread(target=_act, args=(list(_last_acts),), daemon=True)
        acts.start()
        acts.join(LAST_ACT_SECONDS)
    os._exit(code)


def _act(acts: list[Callable[[], object]]) -> None:
    for act in reversed(acts):
        with contextlib.suppress(Exception):
            act()


def end_on_signals(label: str) -> None:
    """Makes SIGTERM and a closed terminal end the process with 42 and Ctrl-C with 130, and one line.

    `lm.pod.preemption` and others replace these handlers later. A thread ends the process. Python's handlers wait
    until the main thread returns from C code, such as waiting for the other processes of a job. An exception might be
    swallowed by a library that is being imported.
    """
    first = threading.Lock()

    def end(number: int, *_) -> None:
        if first.acquire(blocking=False):
            if number == signal.SIGINT:
                end_process(f'{label}: interrupted', 128 + signal.SIGINT)
            end_process(f'{label}: told to stop ({signal.Signals(number).name}): run the same command again')

    def listen(pipe: int) -> None:
        while number := os.read(pipe, 1):
            if number[0] in ENDING and signal.getsignal(number[0]) is end:
                end(number[0])

    reading, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as shells begin what runs in the background, and nohup
            signal.signal(number, end)
    threading.Thread(target=listen, args=(reading,), name='signals', daemon=True).start()


def print_stacks_on_signal() -> None:
    """Makes SIGUSR1 print the stacks of all threads to stderr; the process goes on. The handler is C code, which runs
    while the main thread waits for other processes."""
    if sys.__stderr__ is not None and hasattr(faulthandler, 'register'):  # Windows has no such signal
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def end_plainly() -> None:
    """Makes the signals do what they do to other Python programs: Ctrl-C is KeyboardInterrupt, the others kill."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def end_in_order() -> None:
    """Makes SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does, for code that must put workers or
    files away. The system and the shell may both signal a closed terminal: once is enough."""

    def hang_up(*_) -> NoReturn:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has started it
        signal.signal(signal.SIGHUP, hang_up)


@contextlib.contextmanager
def handle_signals(install: Callable[[], object]) -> Iterator[None]:
    """A block in which the signals that end a process do what `install` makes of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in ENDING}
    # A listener there would act on a signal a second time, if the earlier handlers are back by then.
    listened = signal.set_wakeup_fd(-1)
    hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_ask_again, hook)
    install()
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(listened, warn_on_full_buffer=False)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _ask_again(others: Callable[['sys.UnraisableHookArgs'], object], ignored: 'sys.UnraisableHookArgs') -> None:
    """Repeats a Ctrl-C that came during a callback, such as JAX's at garbage collections: Python ignores exceptions
    there, and the command would go on."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        others(ignored)
        return
    again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()
