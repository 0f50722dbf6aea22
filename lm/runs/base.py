"""The run whose configuration `lm train`, and `lm check` before it, changes."""

from lm.errors import ConfigError
from lm.runs.paths import explain_absence, find_import
from lm.runs.run_dir import RunDir


def check_start(branch_from: str | None, step: int | None, rewind_to: int | None) -> None:
    """Raises ConfigError where these flags of `lm train` contradict each other."""
    if (branch_from is None) != (step is None):
        given = f'--step {step}' if branch_from is None else f'--branch_from {branch_from}'
        raise ConfigError(f'{given}: give both --branch_from and --step, or none of them')
    if branch_from is not None and rewind_to is not None:
        raise ConfigError('--branch_from and --rewind_to: give one of them')


def find_base(run_dir: str | None, branch_from: str | None, has_gin_files: bool) -> str | None:
    """Returns the config.gin of the run if it exists and no gin file is given.

    Otherwise returns the config.gin of the run that it branches from. Raises ConfigError where `branch_from` names no
    run.
    """
    own = RunDir(run_dir).config if run_dir is not None and (branch_from or not has_gin_files) else None
    existing = str(own) if own and own.exists() else None
    if branch_from is None or existing:
        return existing
    parent = RunDir(branch_from, found=True)
    if not parent.config.exists() or find_import(parent.path):
        raise ConfigError(f'--branch_from {branch_from}: {explain_absence(parent.path)}')
    return str(parent.config)
