"""`lm export`: the weights of a run for other programs."""

import contextlib
import pathlib
from collections.abc import Iterator

from lm.errors import ConfigError, writing
from lm.experiment import Experiment
from lm.files import LockedError, local_path, lock
from lm.inference.loaded_run import load_run
from lm.interop.card import write_card
from lm.interop.formats import FORMATS, is_exported
from lm.interop.native import NativeFormat
from lm.interop.tensors import WeightFiles, check_safetensors

UNFINISHED = '.unfinished_export'
"""A file in the folder of an unfinished export."""


def export_run(
    experiment: Experiment,
    run_dir: str,
    step: int | None,
    *,
    format_name: str,
    out: str,
    weights: WeightFiles = WeightFiles(),  # noqa: B008
) -> None:
    """Writes the weights of a run at `step` (None: the newest) to the folder `out`, in a format of `FORMATS` or
    natively, with a model card."""
    check_safetensors()
    format = {**FORMATS, NativeFormat.name: NativeFormat()}[format_name]
    folder = local_path(out, '--out')
    check_out(folder)
    format.check(experiment.model)
    run = load_run(experiment, run_dir, step)
    with exporting(folder):
        format.write(run, folder, weights)
        write_card(run, folder, format_name, weights.dtype, format.find_imports(experiment.model))
    names = ', '.join(sorted(path.name for path in folder.iterdir()))
    print(f'step {run.step} of {run_dir} written to {folder}: {names}')


def check_out(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files in `folder` from a killed export; raises ConfigError if other files are there."""
    if not folder.exists():
        return []
    mark = folder / UNFINISHED
    others = [path for path in sorted(folder.iterdir()) if path != mark] if folder.is_dir() else [folder]
    is_unfinished = folder.is_dir() and mark.is_file() and mark.stat().st_size > 0
    for path in others:
        if not (is_unfinished and is_exported(path.name) and path.is_file()):
            why = f'an export was stopped there, but {path.name} is not of it' if is_unfinished else 'is there already'
            raise ConfigError(f'--out {folder}: {why}; name a new or empty folder')
    return others


@contextlib.contextmanager
def exporting(folder: pathlib.Path) -> Iterator[None]:
    """Writes an export in its block, with the locked file `UNFINISHED` beside it.

    Half an export is deleted if the block fails. If the process is killed, the next export deletes it: it would stand
    in the way of the same command.

    Raises ConfigError if another process writes there or has just done so, and LmError if the folder cannot be written.
    """
    mark = folder / UNFINISHED
    try:
        with writing(mark):
            held = lock(mark)
    except LockedError:
        raise ConfigError(f'--out {folder}: another process exports to it; wait for its end') from None
    with held, contextlib.ExitStack() as stack:
        if not held.tell():  # it is new, and is deleted even if the folder is refused
            stack.callback(mark.unlink, missing_ok=True)
        left = check_out(folder)
        with writing(mark):
            held.write(b'The files beside this one are half an export of lm.\n')
            held.flush()
        for path in left:
            path.unlink()
        try:
            yield
        except BaseException:
            for path in list(folder.iterdir()):
                if is_exported(path.name):
                    path.unlink()
            raise
        finally:
            mark.unlink(missing_ok=True)
