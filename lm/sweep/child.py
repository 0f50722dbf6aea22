"""`python -m lm.sweep.child PARENT VERB …` becomes `lm VERB …`, as a child that does not outlive its parent, and
`… PARENT -- PROGRAM …` becomes `PROGRAM …`.

The request comes here, after exec: between fork and exec no Python code may run in a process with threads, and JAX has
threads.
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1


def main(argv: list[str]) -> int | None:
    """Makes Linux send SIGTERM when the thread that started this process ends, for any reason, and runs the program."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(argv[0]):  # the parent ended before this request
            return 128 + signal.SIGTERM
    program = argv[2:] if argv[1] == '--' else [sys.executable, '-m', 'lm', *argv[1:]]
    os.execvp(program[0], program)  # the request outlives exec


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
