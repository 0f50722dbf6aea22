"""Errors for people: one line that names the field, the value and the remedy, and the exit code of the command."""

import contextlib
import os
from collections.abc import Iterator


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


@contextlib.contextmanager
def writing(path: os.PathLike | str) -> Iterator[None]:
    """A block that writes `path`: what the operating system refuses (a full disk, a read-only one) is an LmError."""
    try:
        yield
    except OSError as error:
        raise LmError(
            f'{os.fspath(path)} cannot be written ({error.strerror or error}); '
            'make room or allow it, then run the same command again'
        ) from error
