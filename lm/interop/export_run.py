"""`lm export`: the weights of a run for other programs."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping

from lm.checkpoint.snapshot import flatten
from lm.checkpoint.stored_array import StoredArray
from lm.errors import ConfigError, writing
from lm.experiment import Experiment
from lm.files import local_path
from lm.inference.loaded_run import LoadedRun, load_run
from lm.interop.card import write_card
from lm.interop.deferred import Deferred
from lm.interop.formats import FORMATS, is_exported
from lm.interop.native import NativeFormat, find_family
from lm.interop.tensors import WeightFiles, predict_memory
from lm.lease import HeldError, Lease
from lm.model import ModelConfig

UNFINISHED = '.unfinished_export'
"""The lease in the folder of an unfinished export."""


def export_run(
    experiment: Experiment,
    run_dir: str,
    step: int | None,
    *,
    format_name: str,
    out: str,
    weights: WeightFiles = WeightFiles(),  # noqa: B008
    check: Callable[[int, pathlib.Path], None] = lambda step, folder: None,
) -> None:
    """Writes the weights of a run at `step` (None: the newest) to the folder `out`, in a format of `FORMATS` or
    natively, with a model card.

    `check` gets the step and the folder in the end; the export is deleted if `check` fails or is interrupted.
    """
    format = {**FORMATS, NativeFormat.name: NativeFormat()}[format_name]
    folder = local_path(out, '--out')
    check_out(folder, (folder / UNFINISHED).is_file())
    format.check(experiment.model)
    run = load_run(experiment, run_dir, step, on_disk=True)
    print(describe_memory(format.tensors(run), run))
    for array in flatten(run.weights).values():
        if isinstance(array, StoredArray):
            array.verify()
    with exporting(folder):
        format.write(run, folder, weights)
        write_card(run, folder, format_name, weights.dtype, format.find_imports(experiment.model))
        check(run.step, folder)
    names = ', '.join(sorted(path.name for path in folder.iterdir()))
    print(f'step {run.step} of {run_dir} written to {folder}: {names}')
    if format_name != NativeFormat.name:
        print(describe_classes(experiment.model))


def describe_memory(tensors: Mapping[str, Deferred], run: LoadedRun) -> str:
    """Returns a line on the memory that an export needs: it holds one tensor at a time, or one piece of a checkpoint.

    Adapters are merged in memory.
    """
    arrays = flatten(run.weights)
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    if run.experiment.train.adapters:
        whole = sum(x.nbytes for x in arrays.values())
        return predict_memory(tensors[largest].nbytes, f'its largest tensor, {largest},', whole)
    piece = max(arrays, key=lambda name: arrays[name].piece_bytes)
    if arrays[piece].piece_bytes > tensors[largest].nbytes:
        return predict_memory(arrays[piece].piece_bytes, f'{piece}, which the checkpoint holds in one piece,')
    return predict_memory(tensors[largest].nbytes, f'its largest tensor, {largest},')


def describe_classes(model: ModelConfig) -> str:
    """Returns a line on the class of another package that computes the model, or on why there is none."""
    try:
        return f'--format native writes it as {find_family(model).architecture}, which loads without trust_remote_code'
    except ConfigError as error:
        reason = str(error).partition('; export with')[0]
        return f'{reason}; configs/experiments/quickstart_llama.gin has a model that leaves as a class of transformers'


def check_out(folder: pathlib.Path, was_stopped: bool) -> list[pathlib.Path]:
    """Returns the files in `folder` from a killed export; raises ConfigError if other files are there."""
    if not folder.exists():
        return []
    others = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    others = [path for path in others if not path.name.startswith(UNFINISHED)]
    for path in others:
        if not (was_stopped and is_exported(path.name) and path.is_file()):
            why = f'an export was stopped there, but {path.name} is not of it' if was_stopped else 'is there already'
            raise ConfigError(f'--out {folder}: {why}; name a new or empty folder')
    return others


@contextlib.contextmanager
def exporting(folder: pathlib.Path) -> Iterator[None]:
    """Writes an export in its block, with the lease `UNFINISHED` beside it.

    Half an export is deleted if the block fails. If the process is killed, the next export deletes it: it would stand
    in the way of the same command.

    Raises ConfigError if another process writes there or has just done so, and LmError if the folder cannot be written.
    """
    lease = Lease(folder, UNFINISHED)
    with contextlib.ExitStack() as stack:
        try:
            with writing(folder / UNFINISHED):
                stack.enter_context(lease)
        except HeldError:
            raise ConfigError(f'--out {folder}: another process exports to it; wait for its end') from None
        for path in check_out(folder, lease.inherited):
            path.unlink()
        try:
            yield
        except BaseException:
            for path in list(folder.iterdir()):
                if is_exported(path.name):
                    path.unlink()
            raise
