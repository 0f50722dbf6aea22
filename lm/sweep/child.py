"""`python -m lm.sweep.child PARENT VERB …` becomes `lm VERB …`, as the child of a process that it does not outlive.

Asked for here, behind exec: between fork and exec no Python code may run in a process with threads, and JAX has them.
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1


def main(argv: list[str]) -> int | None:
    """On Linux the system sends SIGTERM when the thread that started this process ends, however it ends."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(argv[0]):  # it ended before it could be watched
            return 128 + signal.SIGTERM
    os.execv(sys.executable, [sys.executable, '-m', 'lm', *argv[1:]])  # the request outlives exec


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
