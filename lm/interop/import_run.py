"""`lm import`: turns a checkpoint of other programs into a run."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lm.checkpoint.checkpointer import Checkpointer
from lm.config.text import dump
from lm.data import tokenizers
from lm.errors import ConfigError, MismatchError, writing
from lm.experiment import OF_THE_JOB, Experiment, load
from lm.files import local_path
from lm.interop.export_run import UNFINISHED
from lm.interop.families import Family, find
from lm.interop.names import from_tensors
from lm.interop.tensors import check_safetensors, read_tensors
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions
from lm.runs.config_diff import compare_texts, parse_bindings
from lm.runs.info import read_raw
from lm.runs.run_dir import RunDir
from lm.training.inputs import check_vocabulary

log = logging.getLogger(__name__)

SHAPE = 'model.gin'
"""The model of an import without its mechanism, for runs that continue with another mechanism."""
LEFT_OUT = ('data.path', 'data.mixture', 'train.init_from', *OF_THE_JOB)
"""Bindings of an exported run that describe the training job and not the model."""


def load_given(
    folder_name: str, gin_files: Sequence[str], gin_params: Sequence[str], *, allow_imports: bool = False
) -> Experiment:
    """Returns the configuration of an import, changed by gin files and parameters.

    It starts from the one in the checkpoint's folder, if this is one of our exports. Its data path and its devices do
    not count.

    Raises the errors of `lm.interop.families.find` and `lm.config.load.load`, and MismatchError for half an export.
    """
    folder = local_path(folder_name, 'DIR')
    check_whole(folder)
    settings = find(folder)[0].settings(folder)
    left_out = LEFT_OUT if settings else ()
    return load(gin_files, gin_params, allow_imports=allow_imports, base=settings, leave_out=left_out)


def check_whole(folder: pathlib.Path) -> None:
    """Raises MismatchError if the folder holds an unfinished export."""
    if (folder / UNFINISHED).exists():
        raise MismatchError(f'{folder}: holds half an export; run that lm export again, or wait for its end')


def import_run(experiment: Experiment, folder_name: str, run_dir: str, *, allow_imports: bool = False) -> None:
    """Makes a run directory of the checkpoint in the folder `folder_name`: its step 0, without optimizer state.

    It also writes model.gin, the model without its mechanism. The model comes from the checkpoint, and everything else
    from the given configuration, which must not ask for another model. With data, the vocabulary is compared, and the
    tokenizer if the checkpoint's folder has one.

    Raises the errors of `lm.interop.families.find`, `check_given` and `from_tensors`.
    """
    check_safetensors()
    folder, run = local_path(folder_name, 'DIR'), RunDir(run_dir)
    unfinished = 'imported' in read_raw(run.info) and not run.has_checkpoint()  # after a kill or a full disk
    if run.path.exists() and not unfinished and (not run.path.is_dir() or any(run.path.iterdir())):
        raise ConfigError(f'--run_dir {run.path}: is there already; name a new directory')
    check_whole(folder)
    family, config = find(folder)
    given = experiment
    experiment = dataclasses.replace(given, model=describe_model(family, config, folder, allow_imports))
    check_given(given, experiment, folder)
    experiment.model.check_length(experiment.train.context_length)
    fingerprints = fingerprints_of(experiment, folder)
    functions = ModelFunctions(experiment.model, jnp.float32)
    weights = read_weights(family, config, folder, functions)
    parameters = sum(functions.count_parameters().values())
    if unfinished:
        for path in (run.config, run.info):  # run.json shows that an import began, so it is deleted last
            path.unlink(missing_ok=True)
    run.create_or_resume(experiment, {'parameters': parameters, 'imported': str(folder), **fingerprints})
    with writing(run.path / SHAPE):
        (run.path / SHAPE).write_text(shape_of(experiment))
    with Checkpointer(run.checkpoints, experiment.checkpoint, fingerprints, run.record_saved) as checkpointer:
        checkpointer.save(0, jax.tree.map(jnp.asarray, weights), metadata={'config': dump(experiment)})
        checkpointer.wait()  # the import is complete now
    print(
        f'{parameters:,} parameters of {folder} written to {run.path}; to go on from them, with any mechanism:\n'
        f'lm train --gin_file {run.path / SHAPE} --gin_param "train.init_from = {str(run.path)!r}" …'
    )


def describe_model(
    family: Family, config: Mapping[str, Any], folder: pathlib.Path, allow_imports: bool = False
) -> ModelConfig:
    """Returns the model of a checkpoint. Raises MismatchError if its config.json lacks something."""
    try:
        return family.model(folder, config, allow_imports)
    except KeyError as error:
        raise MismatchError(f'{folder / "config.json"}: lacks {error}; fetch it again') from None


def read_weights(
    family: Family, config: Mapping[str, Any], folder: pathlib.Path, functions: ModelFunctions
) -> dict[str, Any]:
    """Returns the weights of a checkpoint, for a model whose functions are given.

    Raises MismatchError if tensors are missing or have other shapes, and ConfigError if some are left over.
    """
    theirs = read_tensors(folder)
    try:
        tensors = family.tensors(theirs, config)
    except KeyError as error:
        raise MismatchError(f'{folder}: lacks the tensor {error}; fetch it again') from None
    if theirs:
        raise ConfigError(f'{folder}: a model that no model here equals: it has {", ".join(sorted(theirs)[:3])}')
    return from_tensors(tensors, functions.abstract, str(folder))


def check_given(given: Experiment, imported: Experiment, folder: pathlib.Path) -> None:
    """Raises ConfigError if a setting of the model differs from the checkpoint's: it would have no effect."""
    default = parse_bindings(dump(Experiment()))
    for name, imported_value, asked in compare_texts(dump(imported), dump(given)):
        if asked is not None and asked != default.get(name):
            has = 'has none' if imported_value is None else f'has {imported_value}'
            raise ConfigError(
                f'{name} = {asked}: an import keeps the model of the checkpoint, and {folder} {has}; leave this out, '
                'and give it to the run that starts from the import, or to lm evaluate'
            )


def shape_of(experiment: Experiment) -> str:
    """Returns the bindings of the model without its attention, as gin text."""
    lines = [line for line in dump(experiment).splitlines() if line.startswith('model.')]
    return '\n'.join(line for line in lines if not line.startswith('model.attention ')) + '\n'


def fingerprints_of(experiment: Experiment, folder: pathlib.Path) -> dict[str, str]:
    """Returns the fingerprint of the tokenizer of the data, or else of the only tokenizer in the folder.

    Raises MismatchError if data are given and no tokenizer of the folder is theirs.
    """
    known = tokenizers_in(folder)
    if not experiment.data.path and not experiment.data.mixture:
        return {'tokenizer': next(iter(known))} if len(known) == 1 else {}
    store = experiment.data.open(experiment.train.context_length)
    check_vocabulary(store, experiment.data, experiment.model)
    ours = store.fingerprints['tokenizer']
    if known and ours not in known:
        path = next(iter(known.values()))
        raise MismatchError(
            f"{path}: is not the tokenizer of {store.path}; prepare the data with tokenizer.model_path = '{path}'"
        )
    return {'tokenizer': ours}


def tokenizers_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns fingerprint → file of the tokenizers in a folder that can be read here."""
    found = {}
    for path in (folder / name for name in tokenizers.FILE_NAMES):
        if path.exists():
            try:
                found[tokenizers.load(path).sha256] = path
            except ConfigError as error:
                log.warning('the tokenizer of %s is not compared: %s', folder, error)
    return found
