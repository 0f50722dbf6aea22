"""`lm inspect`: what a run directory, a sweep or a token store holds, without touching a device or changing a byte."""

import sys
from typing import Any

import jax
from etils import epath
from rich.console import Console

import lm.experiment  # noqa: F401 (fills the registry, which knows the names of bindings)
from lm.errors import ConfigError, MismatchError
from lm.files import open_path
from lm.runs import sweep_file
from lm.runs.records import is_run, to_json
from lm.summary.runs import inspect_run
from lm.summary.stores import inspect_store
from lm.summary.tables import print_run, print_store, print_sweep


def main(_: Any, arguments: Any) -> int:
    """The `lm inspect` command. Raises MismatchError, after everything was printed, if something is damaged."""
    # The accelerators of this machine may be busy with the very run that is looked at.
    jax.config.update('jax_platforms', 'cpu')
    path = epath.Path(open_path(arguments.path))
    if (path / 'dataset.json').exists():
        found, show = inspect_store(arguments.path, arguments.verify), print_store
    elif is_run(path):
        found, show = inspect_run(path, arguments.verify, arguments.allow_gin_imports), print_run
    elif sweep_file.is_sweep(path):
        found, show = {'kind': 'sweep', 'points': sweep_file.read_rows(path)}, print_sweep
    elif not path.exists():
        raise ConfigError(f'{arguments.path}: does not exist; name a run directory, a sweep or a token store')
    elif (path / 'unfinished').is_dir():
        raise ConfigError(f'{arguments.path}: is an unfinished token store; run the same lm prepare again to finish it')
    else:
        raise ConfigError(f'{arguments.path}: holds no config.gin, sweep.json or dataset.json, so it is nothing of lm')
    if arguments.json:
        print(to_json(found))
    else:
        show(found, Console(width=None if sys.stdout.isatty() else 160, soft_wrap=True, highlight=False))
    if damage := found.get('damage'):
        raise MismatchError(f'{arguments.path}: {damage[0]}' + (f' (and {len(damage) - 1} more)' if damage[1:] else ''))
    return 0
