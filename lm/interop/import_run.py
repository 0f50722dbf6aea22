"""`lm import`: turns a checkpoint of other programs into a run."""

import dataclasses
import logging
import math
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lm.checkpoint.finite import describe_not_finite, find_not_finite
from lm.checkpoint.snapshot import flatten
from lm.checkpoint.stream import StepWriter
from lm.config.read import read
from lm.config.text import dump
from lm.data import tokenizers
from lm.data.tokenizers.companions import read_companions, write_companions
from lm.data.tokenizers.marks import TextMarks, read_marks
from lm.errors import ConfigError, LmError, MismatchError, writing
from lm.experiment import OF_THE_JOB, Experiment, load, load_of_run
from lm.files import AnyPath, local_path, open_path, write_atomically
from lm.inference.no_data import check_pieces
from lm.interop.checkpoints import (
    Checkpoint,
    FoundTokenizer,
    add_begin,
    choose_companions,
    open_checkpoint,
    read_tokenizer,
)
from lm.interop.families import Family, check_layers, choose, reading_config
from lm.interop.names import Place, find_places, from_tensors
from lm.interop.tensors import predict_memory
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions
from lm.runs.config_diff import compare_texts, parse_bindings
from lm.runs.info import read_raw, write_start_from
from lm.runs.run_dir import RunDir
from lm.training.config import TrainConfig
from lm.training.inputs import check_vocabulary

log = logging.getLogger(__name__)

SHAPE = 'model.gin'
"""The model of an import without its mechanism, for runs that continue with another mechanism."""
LEFT_OUT = ('data.path', 'data.mixture', 'train.init_from', 'train.adapters', *OF_THE_JOB)
"""Bindings of an exported run that describe the training job and not the model."""


def load_given(
    folder_name: str, gin_files: Sequence[str], gin_params: Sequence[str], *, allow_imports: bool = False
) -> Experiment:
    """Returns the configuration of an import, changed by gin files and parameters.

    It starts from the one in the checkpoint's folder, if this is one of our exports. Its data path and its devices do
    not count. Other checkpoints say their longest context, which is kept unless `train` is given another size.

    Raises the errors of `open_checkpoint`, `choose_family` and `lm.config.load.load`.
    """
    path = open_path(folder_name, 'DIR')
    checkpoint = open_checkpoint(path)
    config, family = checkpoint.config, choose_family(checkpoint)
    if settings := family.settings(path):
        return load(gin_files, gin_params, allow_imports=allow_imports, base=settings, leave_out=LEFT_OUT)
    given = {statement.key for statement in read(gin_files, gin_params, allow_imports=allow_imports)}
    length = None if given & {'train.context_length', 'train.tokens_per_step'} else family.context_length(config)
    if isinstance(length, int) and length > 0:
        step = length * max(1, TrainConfig().tokens_per_step // length)
        gin_params = [f'train.context_length = {length}', f'train.tokens_per_step = {step}', *gin_params]
        log.info('the context length is %d, as the checkpoint says', length)
    return load(gin_files, gin_params, allow_imports=allow_imports)


def import_run(
    experiment: Experiment,
    folder_name: str,
    run_dir: str,
    *,
    tokenizer: str | None = None,
    allow_imports: bool = False,
) -> None:
    """Makes a run directory of the checkpoint in `folder_name`, a folder or file: its step 0, without optimizer state.

    It also writes model.gin, the model without its mechanism, and the file of the tokenizer. The model comes from the
    checkpoint, and everything else from the given configuration, which must not ask for another model. With data, the
    vocabulary is compared, and the tokenizer if the checkpoint has one.

    Args:
        experiment: what `load_given` returned.
        folder_name: the checkpoint.
        run_dir: the new directory.
        tokenizer: the file of the tokenizer; None: the one of the checkpoint.
        allow_imports: a config.gin in the folder may import modules.

    Raises the errors of `open_checkpoint`, `choose_family`, `check_given` and `from_tensors`.
    """
    path, run = open_path(folder_name, 'DIR'), RunDir(run_dir)
    unfinished = 'imported' in read_raw(run.info) and not run.has_checkpoint()  # after a kill or a full disk
    if run.path.exists() and not unfinished and (not run.path.is_dir() or any(run.path.iterdir())):
        raise ConfigError(f'--run_dir {run.path}: is there already; name a new directory')
    checkpoint = open_checkpoint(path)
    family, given = choose_family(checkpoint), experiment
    experiment = describe_import(given, checkpoint, allow_imports)
    check_given(given, experiment, path)
    experiment.model.check_length(experiment.train.context_length)
    marks = checkpoint.marks
    named = None if tokenizer is None else local_path(tokenizer, '--tokenizer')
    asked = None if named is None else [read_tokenizer(named, marks)]
    found = choose_tokenizers(experiment, asked or checkpoint.find_tokenizers(), path, marks)
    if checkpoint.notes:
        print(checkpoint.notes)
    functions = ModelFunctions(experiment.model, jnp.float32)
    tensors, expected = find_tensors(family, checkpoint, functions)
    print(describe_memory(expected, functions))
    check_finite(checkpoint)
    parameters = sum(functions.count_parameters().values())
    if unfinished:
        for left in (run.config, run.info):  # run.json shows that an import began, so it is deleted last
            left.unlink(missing_ok=True)
    run.create_or_resume(
        experiment, {'parameters': parameters, 'imported': str(path), **found.fingerprints, **found.facts}
    )
    found.write(run)
    write_companions(run.path, choose_companions(checkpoint, named))
    shape = [line for line in dump(experiment).splitlines() if re.match(r'model\.(?!attention )', line)]
    with writing(run.path / SHAPE):
        (run.path / SHAPE).write_text('\n'.join(shape) + '\n')
    writer = StepWriter(run.checkpoints, 0)
    for name, leaf in flatten(functions.abstract).items():
        own = [place for place in expected if place.source == name]
        parts = (place.read(tensors)[None if place.layer is not None else ...] for place in own)
        writer.write(name, leaf.shape, leaf.dtype, parts)
    writer.commit(found.fingerprints, {'config': dump(experiment)})  # the import is complete now
    run.record_saved(0)
    print(f'{parameters:,} parameters of {path} written to {run.path}')
    if not found.found and experiment.data.task is None:
        log.warning(
            '%s: the checkpoint has no tokenizer that can be read here; lm generate and run.score need one. Add it: '
            'lm import --run_dir %s --tokenizer tokenizer.json',
            *(run.path, shlex.quote(str(run.path))),
        )
    print(f'to go on from them, with any mechanism:\n{write_start_from(run.path)} …')


def complete_import(run_dir: str, tokenizer: str) -> None:
    """Adds the file of a tokenizer to an import that has none.

    Raises ConfigError if the run is no import or has a tokenizer, and MismatchError if it is not the model's.
    """
    run = RunDir(run_dir)
    if 'imported' not in (info := read_raw(run.info)):
        raise ConfigError(f'--run_dir {run.path}: holds no import; name the run of an import')
    if has := [name for name in tokenizers.FILE_NAMES if (run.path / name).exists()]:
        raise ConfigError(f'--tokenizer {tokenizer}: {run.path} has {has[0]} already; leave this out')
    file = local_path(tokenizer, '--tokenizer')
    read = read_tokenizer(file, find_marks_of_import(info, file))
    if info.get('tokenizer', read.tokenizer.sha256) != read.tokenizer.sha256:
        raise MismatchError(f'--tokenizer {tokenizer}: is not the tokenizer of the data that the import was made with')
    check_pieces(read.tokenizer, load_of_run(run_dir).model.vocab_size, f'--tokenizer {tokenizer}')
    found = ChosenTokenizers({}, [read])
    found.write(run)
    write_companions(run.path, read_companions(file.parent))
    run.record_facts(found.facts)
    print(f'{run.path / read.tokenizer.file_name} written: lm generate, run.score and lm prepare can use the run now')


def find_marks_of_import(info: Mapping[str, Any], file: pathlib.Path) -> TextMarks:
    """Returns the tokens around a text that the checkpoint of an import says, whose run.json is `info`.

    Where the checkpoint is gone, the folder of the tokenizer's `file` counts, and then run.json.
    """
    try:
        found = open_checkpoint(open_path(info['imported'])).marks
    except LmError:
        found = read_marks(file.parent)
    end = info.get('end_id')
    return found if found.ends or end is None else found._replace(ends=(end,))


def choose_family(checkpoint: Checkpoint) -> Family:
    """Returns the family of a checkpoint. Raises the errors of `check_layers` and `choose`."""
    check_layers(checkpoint.config, checkpoint.count_tensors, checkpoint.path)
    return choose(checkpoint.config, checkpoint.path)


def describe_import(experiment: Experiment, checkpoint: Checkpoint, allow_imports: bool = False) -> Experiment:
    """Returns a given configuration with the model of a checkpoint. Raises the errors of `describe_model`."""
    model = describe_model(choose_family(checkpoint), checkpoint, allow_imports)
    return dataclasses.replace(experiment, model=model)


def describe_model(family: Family, checkpoint: Checkpoint, allow_imports: bool = False) -> ModelConfig:
    """Returns the model of a checkpoint. Raises MismatchError if its config.json lacks something."""
    with reading_config(checkpoint.path):
        return family.model(checkpoint.path, checkpoint.config, allow_imports)


def read_weights(family: Family, checkpoint: Checkpoint, functions: ModelFunctions) -> dict[str, Any]:
    """Returns the weights of a checkpoint, for a model whose functions are given.

    Raises the errors of `find_tensors` and `check_finite`.
    """
    tensors, _ = find_tensors(family, checkpoint, functions)
    check_finite(checkpoint)
    return from_tensors(tensors, functions.abstract, str(checkpoint.path))


def check_finite(checkpoint: Checkpoint) -> None:
    """Raises MismatchError for a checkpoint with numbers that are not finite."""
    for name, tensor in checkpoint.read_tensors().items():
        if find_not_finite({name: np.asarray(tensor)}):
            raise MismatchError(
                f'{checkpoint.path}: {describe_not_finite(name)}; fetch it again, or take another checkpoint'
            )


def describe_memory(expected: Sequence[Place], functions: ModelFunctions) -> str:
    """Returns a line on the memory that an import needs: it holds one tensor at a time."""
    flat = flatten(functions.abstract)
    largest = max(expected, key=lambda place: math.prod(place.shape_in(flat[place.source])))
    size = 4 * math.prod(largest.shape_in(flat[largest.source]))
    return predict_memory(size, f'its largest tensor, {largest.name},')


def find_tensors(
    family: Family, checkpoint: Checkpoint, functions: ModelFunctions
) -> tuple[dict[str, Any], list[Place]]:
    """Returns the tensors of a checkpoint under our names, and their places in the weights of a model.

    Raises MismatchError if tensors are missing or have other shapes, and ConfigError if some are left over.
    """
    theirs, path = checkpoint.read_tensors(), checkpoint.path
    before = sorted(theirs)
    try:
        tensors = family.tensors(theirs, checkpoint.config, functions.config)
    except KeyError as error:
        raise MismatchError(f'{path}: lacks the tensor {error}{advise_on_names(str(error.args[0]), before)}') from None
    except (ValueError, IndexError, TypeError, ArithmeticError) as error:
        said = ' '.join(str(error).split())
        raise MismatchError(f'{path}: its tensors have other shapes than its configuration says ({said})') from error
    if theirs:
        raise ConfigError(f'{path}: a model that no model here equals: it has {", ".join(sorted(theirs)[:3])}')
    return tensors, find_places(tensors, functions.abstract, str(path))


def advise_on_names(missing: str, names: Sequence[str]) -> str:
    """Returns what to do about a tensor that is missing among the names of a checkpoint."""
    for name in names:
        if missing.endswith(f'.{name}'):
            return f", and has '{name}': it was saved without its head; save the whole causal model, and import that"
        if name.endswith(f'.{missing}'):
            return f", and has '{name}': it was saved inside another module; save the model itself, and import that"
    return '; fetch it again'


def check_given(given: Experiment, imported: Experiment, folder: AnyPath) -> None:
    """Raises ConfigError if a setting of the model differs from the checkpoint's: it would have no effect."""
    default = parse_bindings(dump(Experiment()))
    for name, imported_value, asked in compare_texts(dump(imported), dump(given)):
        if asked is not None and asked != default.get(name):
            has = 'has none' if imported_value is None else f'has {imported_value}'
            raise ConfigError(
                f'{name} = {asked}: an import keeps the model of the checkpoint, and {folder} {has}; leave this out, '
                'and give it to the run that starts from the import, or to lm evaluate'
            )


class ChosenTokenizers(NamedTuple):
    """The tokenizers that go along with an import.

    Attributes:
        fingerprints: what the checkpoint depends on; empty if it is not known which of several tokenizers is right.
        found: the tokenizers, the first of which the run uses. Many checkpoints have one tokenizer in two kinds.
        end_id: the token that ends a document, where no tokenizer is known.
    """

    fingerprints: dict[str, str]
    found: Sequence[FoundTokenizer]
    end_id: int | None = None

    @property
    def facts(self) -> dict[str, int]:
        """The entries of run.json on the first one."""
        end, begin = self.end_id, None
        if self.found:
            end, begin = self.found[0].tokenizer.eod_id, self.found[0].begin_id
        return {name: value for name, value in {'end_id': end, 'begin_id': begin}.items() if value is not None}

    def write(self, run: RunDir) -> None:
        """Writes the files of the tokenizers. Raises LmError where that fails."""
        for tokenizer in (one.tokenizer for one in self.found):
            path = run.path / tokenizer.file_name
            with writing(path):
                write_atomically(path, tokenizer.model)


def choose_tokenizers(
    experiment: Experiment, found: Sequence[FoundTokenizer], path: AnyPath, marks: TextMarks
) -> ChosenTokenizers:
    """Returns the tokenizer of the data, or else all tokenizers of the checkpoint at `path`, which says `marks`.

    Raises MismatchError if data are given and no tokenizer of the checkpoint is theirs. The error is also raised if a
    text can hold a token that the model has not.
    """
    known = {one.tokenizer.sha256: one for one in found}
    if not experiment.data.path and not experiment.data.mixture:
        for one in found:
            check_pieces(one.tokenizer, experiment.model.vocab_size, str(one.where))
        fingerprints = {'tokenizer': next(iter(known))} if len(known) == 1 else {}
        return ChosenTokenizers(fingerprints, found, next(iter(marks.ends), None))
    store = experiment.data.open(experiment.train.context_length)
    check_vocabulary(store, experiment.data, experiment.model)
    ours = store.fingerprints['tokenizer']
    if known and ours not in known:
        where = found[0].where
        raise MismatchError(
            f"{where}: is not the tokenizer of {store.path}; prepare the data with tokenizer.model_path = '{where}'"
        )
    theirs = known[ours] if known else add_begin(store.tokenizer(), path, marks)
    return ChosenTokenizers({'tokenizer': ours}, [theirs])
