"""The folder of the checkpoints of a run: what is removed from it, what is moved aside, and which steps it holds."""

import contextlib
import logging

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from lm.checkpoint.snapshot import COMMITTED, find_committed_steps, find_steps, list_last
from lm.errors import ConfigError, MismatchError
from lm.files import is_remote

TEMPORARY = '.orbax-checkpoint-tmp'
"""A part of the names of unfinished saves."""

log = logging.getLogger(__name__)


def remove_unfinished(directory: epath.Path) -> None:
    """Removes the leftovers of unfinished saves; makes the folder where it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in list(directory.iterdir()) if directory.exists() else ():  # a bucket has no folders
        unmarked = is_remote(path) and path.name.isdigit() and not (path / COMMITTED).exists()
        if TEMPORARY in path.name or unmarked:
            path.rmtree()


def remove_failed(directory: epath.Path, step: int) -> None:
    """Removes the leftovers of a save of `step` that has failed, as far as the file system allows it."""
    with contextlib.suppress(OSError):
        for path in list(directory.iterdir()):
            if path.name.startswith(f'{step}{TEMPORARY}'):
                path.rmtree(missing_ok=True)


def set_aside(directory: epath.Path, step: int, why: str) -> None:
    """Renames the folder of `step` to `<step>.<why>`. An object store cannot rename a folder: there it is deleted."""
    path = directory / str(step)
    if is_remote(path):
        path.rmtree()
        log.warning('%s checkpoint %s deleted', why, path)
        return
    target = directory / f'{step}.{why}'
    if target.is_dir():
        target.rmtree()
    path.rename(target)
    log.warning('%s checkpoint moved to %s', why, target)


def agree_on_steps(directory: epath.Path) -> list[int]:
    """Returns the steps that process 0 finds. Unfinished ones count where a rename, not a marker, completes a step."""
    steps = find_committed_steps(directory) if is_remote(directory) else find_steps(directory)
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    steps = multihost_utils.broadcast_one_to_all(np.resize(np.array(steps or [0], np.int32), count))
    return steps.tolist()


def check_step(step: int | None, known: list[int], directory: epath.Path) -> None:
    """Raises ConfigError for a step that is not among the `known` ones; MismatchError if there are none."""
    if step is not None and step not in known:
        wrong = ConfigError if known else MismatchError
        there = f'not in {directory}, which has {list_last(known)}'
        raise wrong(f'checkpoint step {step}: {there}; choose one of these')
