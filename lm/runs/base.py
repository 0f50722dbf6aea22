"""The run whose configuration `lm train`, and `lm check` before it, changes."""

from typing import Any

from lm.errors import ConfigError
from lm.runs.run_dir import RunDir


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
