"""The gin files that the project ships, by kind."""

import pathlib

import tiny

CONFIGS = tiny.ROOT / 'configs'
_FILES = sorted(CONFIGS.rglob('*.gin'))
SWEEPS = [path for path in _FILES if path.parent.name == 'sweeps' or path.name.startswith('sweep')]
"""Files for --sweep_file; their values are lists."""
SEARCHES = [path for path in _FILES if path.parent.name == 'searches']
"""Files for --sweep_file of a search, with distributions."""
SINGLE = [path for path in [*_FILES, *sorted(tiny.ROOT.glob('data/*.gin'))] if path not in [*SWEEPS, *SEARCHES]]
"""Files for --gin_file."""
EXPERIMENTS = [path for path in SINGLE if path.relative_to(tiny.ROOT).parts[1] in ('experiments', 'papers')]
"""Files for --gin_file that are whole experiments."""


def name_of(path: pathlib.Path) -> str:
    """Returns the name of a file in configs/, such as 'papers/llops/table_1_arena/listops'."""
    return path.relative_to(CONFIGS).with_suffix('').as_posix()


def experiment(name: str) -> str:
    """Returns the path, relative to the project, of the one shipped experiment whose folder and name end like this."""
    (found,) = (path for path in EXPERIMENTS if f'/{name_of(path)}'.endswith(f'/{name}'))
    return found.relative_to(tiny.ROOT).as_posix()
