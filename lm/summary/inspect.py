"""`lm inspect`: the contents of a run directory, a sweep or a token store, without a device or a change."""

import sys

import jax
from etils import epath
from rich.console import Console

from lm.errors import ConfigError, MismatchError
from lm.experiment import load_registry
from lm.files import open_path
from lm.runs import sweep_file
from lm.runs.paths import explain_absence, find_import
from lm.runs.records import is_run, to_json
from lm.summary.runs import inspect_run
from lm.summary.stores import inspect_store
from lm.summary.tables import print_run, print_store, print_sweep


def inspect_path(path: str, *, verify: bool = False, as_json: bool = False, allow_imports: bool = False) -> None:
    """Prints a description of the run, the sweep or the token store at `path`.

    Args:
        verify: read everything and compare checksums.
        allow_imports: the configuration of a run may import modules.

    Raises ConfigError if `path` is none of these, and MismatchError, after everything was printed, for damage.
    """
    load_registry()  # it knows the names of bindings
    # The accelerators of this machine may be busy with this very run.
    jax.config.update('jax_platforms', 'cpu')
    folder = epath.Path(open_path(path))
    if (folder / 'dataset.json').exists():
        found, show = inspect_store(path, verify), print_store
    elif find_import(folder):
        raise ConfigError(f'{path}: {explain_absence(folder)}')
    elif is_run(folder):
        found, show = inspect_run(folder, verify, allow_imports), print_run
    elif sweep_file.is_sweep(folder):
        found, show = {'kind': 'sweep', 'points': sweep_file.read_rows(folder)}, print_sweep
    elif not folder.exists():
        raise ConfigError(f'{path}: does not exist; name a run directory, a sweep or a token store')
    elif (folder / 'parts').is_dir():
        raise ConfigError(f'{path}: is an unfinished token store; run the same lm prepare again to finish it')
    else:
        raise ConfigError(
            f'{path}: holds no config.gin, sweep.json or dataset.json, so it is nothing of lm; name a run, a sweep or '
            'a token store, such as runs/quickstart'
        )
    if as_json:
        print(to_json(found))
    else:
        show(
            found,
            Console(
                width=None if sys.stdout.isatty() else 160, soft_wrap=True, highlight=False, markup=False, emoji=False
            ),
        )
    if damage := found.get('damage'):
        raise MismatchError(f'{path}: {damage[0]}' + (f' (and {len(damage) - 1} more)' if damage[1:] else ''))
