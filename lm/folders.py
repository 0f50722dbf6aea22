"""Folders with several uses: a token store, a run and a sweep need one each, since some of their files share names."""

from lm.errors import ConfigError
from lm.files import AnyPath

STORE, SWEEP = 'dataset.json', 'sweep.json'
"""The files that make a folder a token store (`lm.data.store`) or the folder of a sweep (`lm.runs.sweep_file`)."""
MARKS = {STORE: 'a token store', SWEEP: 'a sweep', 'run.json': 'a run', 'config.gin': 'a run or an export'}
"""File → the use of its folder."""


def check_unshared(folder: AnyPath, label: str, *own: str) -> None:
    """Raises ConfigError where a folder has another use already.

    `label` names the flag or field with its value, and `own` are the files of MARKS that may lie there.
    """
    for name, use in MARKS.items():
        if name not in own and (folder / name).exists():
            raise ConfigError(f'{label}: holds {use}, which needs a folder of its own; name another folder')
