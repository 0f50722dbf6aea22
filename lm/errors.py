"""Errors for people: one line that names the field, the value and the remedy, and the exit code of the command."""

import signal


class LmError(Exception):
    """Base of the errors that the `lm` command prints as one line, without a traceback."""

    exit_code = 1
    meaning = 'any other error'


class ConfigError(LmError):
    """A wrong command line, gin file or value."""

    exit_code = 2
    meaning = 'wrong command, configuration or value'


class Preempted(LmError):
    """The process was told to stop; the state is saved and the same command continues it."""

    exit_code = 42
    meaning = 'preempted: the state is saved, run the same command again'


class Diverged(LmError):
    """Too many non-finite steps in a row; the last good checkpoint is kept."""

    exit_code = 43
    meaning = 'diverged: change something before running it again'


class MismatchError(LmError):
    """Data, tokenizer or checkpoint are damaged, missing or belong to something else."""

    exit_code = 44
    meaning = 'data, tokenizer or checkpoint do not match or are damaged'


_KINDS = (LmError, ConfigError, Preempted, Diverged, MismatchError)
EXIT_CODES = '\n'.join(['exit codes:', '  0  done', *(f'  {kind.exit_code:<3}{kind.meaning}' for kind in _KINDS)])
"""The table for `--help`. Only what was preempted is safe to run again as it is."""
FINAL = (ConfigError.exit_code, Diverged.exit_code, MismatchError.exit_code)
"""Exit codes that the same command would give again."""
INTERRUPTED = (Preempted.exit_code, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a process that was told to stop; negative ones as `subprocess` gives them."""
