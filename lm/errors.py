"""Errors for people: one line that names the field, the value and the remedy, and the exit code of the command."""

import contextlib
import importlib.util
import os
import pathlib
import shlex
import traceback
from collections.abc import Collection, Iterator
from importlib import metadata

from lm.ops.errors import OperationError


class LmError(Exception):
    """Base of the errors that the `lm` command prints as one line, without a traceback."""

    exit_code = 1
    meaning = 'any other error'


class ConfigError(LmError):
    """A wrong command line, gin file or value."""

    exit_code = 2
    meaning = 'wrong command, configuration or value'


class MissingPackageError(ConfigError):
    """A package is not installed that a choice of the user needs."""

    def __init__(self, what: str, package: str, extra: str = '', remark: str = ''):
        """Writes the same hint everywhere.

        Args:
            what: the choice, such as 'prepare.source = @parquet()'.
            package: the name of the package that is missing.
            extra: the extra of this project that installs it; empty: none does.
            remark: what to do without it.
        """
        wanted = _name_extra(extra) if extra else package
        super().__init__(f'{what}: needs {package}; pip install {wanted}{remark}')


class BrokenPackageError(ConfigError):
    """A package is installed, and its own code fails when it is imported."""

    @classmethod
    def find(cls, error: BaseException) -> 'BrokenPackageError | None':
        """Returns the error for people where `error` comes from the code of another package during its import."""
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == '<module>')
        modules = (str(frame.f_globals.get('__name__')).partition('.')[0] for frame in frames)
        if (module := next((name for name in modules if name not in ('lm', '__main__')), None)) is None:
            return None
        package = metadata.packages_distributions().get(module, [module])[0]
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        return cls(f'{package}: is installed and does not load ({reason}); pip install --force-reinstall {package}')


def require(package: str, what: str, extra: str = '', remark: str = '') -> None:
    """Raises MissingPackageError, with these arguments, where a package is missing that has the name of its module."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(what, package, extra, remark)


def _name_extra(extra: str) -> str:
    """Returns what pip installs for an extra. The project is on no index: its checkout, or without one the packages."""
    root = pathlib.Path(__file__).resolve().parent.parent
    if (root / 'pyproject.toml').is_file():
        place = '.' if os.path.samefile(root, '.') else root
        return f'-e {shlex.quote(f"{place}[{extra}]")}'
    (name,) = set(metadata.packages_distributions()['lm'])
    lines = [line.replace("'", '"').partition(';') for line in metadata.requires(name) or ()]
    return shlex.join(wanted.strip() for wanted, _, condition in lines if f'extra == "{extra}"' in condition)


class UnnamedError(ConfigError):
    """A configuration does not name its data. A command line may do so later."""


class Preempted(LmError):
    """A signal has stopped the process. The state is saved, and the same command continues it."""

    exit_code = 42
    meaning = 'preempted: the state is saved, run the same command again'


class Diverged(LmError):
    """Too many non-finite steps in a row, where the last good checkpoint is kept; or figures that are not finite."""

    exit_code = 43
    meaning = 'diverged, or activations overflow: change something before running it again'


class MismatchError(LmError):
    """Data, tokenizer or checkpoint are damaged, missing or belong to something else."""

    exit_code = 44
    meaning = 'data, tokenizer or checkpoint do not match or are damaged'


class WrongResults(LmError):
    """Chips that must agree to the bit do not. Nothing that they computed is saved."""

    exit_code = 45
    meaning = 'this machine computes wrongly: run the same command on another one'

    def __init__(self, message: str, processes: Collection[int] = ()):
        """`processes` are the ones whose chips are named."""
        super().__init__(message)
        self.processes = frozenset(processes)


class AbsentError(MismatchError):
    """Data or a run that a configuration names are not there. Elsewhere they may be."""


EXPECTED = (LmError, OperationError)
"""Errors that are one line for people, without a traceback."""


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a command that ends with `error`; a call that an operation refuses is a wrong value."""
    if isinstance(error, OperationError):
        return ConfigError.exit_code
    return getattr(error, 'exit_code', LmError.exit_code)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a compiler, a device or the host ran out of memory."""
    known = ('resource_exhausted', 'out of memory', 'out_of_memory')
    is_of_jax = type(error).__name__ in ('JaxRuntimeError', 'XlaRuntimeError')  # jax is not imported here
    return isinstance(error, MemoryError) or (is_of_jax and any(word in str(error).lower() for word in known))


_KINDS = (LmError, ConfigError, Preempted, Diverged, MismatchError, WrongResults)
EXIT_CODES = '\n'.join(['exit codes:', '  0  done', *(f'  {kind.exit_code:<3}{kind.meaning}' for kind in _KINDS)])
"""The table for `--help`. Only what was preempted is safe to run again as it is."""
FINAL = (ConfigError.exit_code, Diverged.exit_code, MismatchError.exit_code)
"""Exit codes that the same command would give again."""


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
