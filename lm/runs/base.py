"""The run whose configuration `lm train`, and `lm check` before it, changes."""

from typing import Any

from lm.errors import ConfigError
from lm.runs.run_dir import RunDir


def check_start(branch_from: str | None, step: int | None, rewind_to: int | None) -> None:
    """Raises ConfigError where these flags of `lm train` say nothing together."""
    if (branch_from is None) != (step is None):
        given = f'--step {step}' if branch_from is None else f'--branch_from {branch_from}'
        raise ConfigError(f'{given}: give both --branch_from and --step, or none of them')
    if branch_from is not None and rewind_to is not None:
        raise ConfigError('--branch_from and --rewind_to: give one of them')


def base_of(arguments: Any) -> str | None:
    """The run's own config.gin if it exists and no --gin_file is given, or that of the run that it is a branch of.

    Raises ConfigError where --branch_from names no run.
    """
    own = _config(arguments.run_dir) if arguments.branch_from or not arguments.gin_file else None
    if arguments.branch_from is None or own:
        return own
    if (base := _config(arguments.branch_from)) is None:
        raise ConfigError(f'--branch_from {arguments.branch_from}: holds no config.gin, so it is not a run of lm train')
    return base


def _config(run_dir: str | None) -> str | None:
    """The path of the run's config.gin, if there is one."""
    path = None if run_dir is None else RunDir(run_dir).config
    return str(path) if path and path.exists() else None
