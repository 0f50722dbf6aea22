"""The data of a run that has a tokenizer and no tokens, such as an import."""

import dataclasses
import hashlib
import shlex
from pathlib import Path
from typing import Any

from lm.data import tokenizers
from lm.data.dataset import Store
from lm.data.tokenizers import Tokenizer
from lm.errors import AbsentError, LmError, MismatchError, UnnamedError
from lm.experiment import Experiment
from lm.runs.info import read_info, read_raw
from lm.runs.run_dir import RunDir


class NoData:
    """Only a tokenizer: texts can be written and scored, and no split can be read.

    Args:
        tokenizer: of the model.
        absence: the data that the configuration names are not there; None: it names none.
    """

    def __init__(self, tokenizer: Tokenizer, absence: AbsentError | None = None):
        self._tokenizer, self._absence = tokenizer, absence
        self.vocab_size = tokenizer.vocab_size
        self.fingerprints = {'tokenizer': tokenizer.sha256}

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer."""
        return self._tokenizer

    @property
    def error(self) -> LmError:
        """The error where a split is wanted."""
        return self._absence or UnnamedError(
            "data.path = '': this run has a tokenizer and no data; name a token store that lm prepare made with it: "
            "--set data.path=data/mine, or score a text with run.score('…')"
        )


def open_data(experiment: Experiment, directory: RunDir) -> Store | NoData:
    """Opens the data that the configuration names, or else reads the tokenizer of the run.

    A relative path counts from the current folder, and then from the folder where the run was started.

    Raises the errors of `DataConfig.open` and `read_tokenizer`, and UnnamedError if there are neither data nor a
    tokenizer.
    """
    data, info = experiment.data, read_raw(directory.info)
    if data.path or data.mixture or data.task or 'imported' not in info:
        try:
            return data.open(experiment.train.context_length)
        except AbsentError as error:
            folder = read_info(directory.info).get('folder')
            if isinstance(folder, str) and data.path and (path := Path(folder, data.path)).exists():
                return dataclasses.replace(data, path=str(path)).open(experiment.train.context_length)
            if (tokenizer := read_tokenizer(directory, info)) is None:
                raise
            return NoData(tokenizer, error)
    tokenizer = read_tokenizer(directory, info)
    if tokenizer is None:
        command = shlex.join(['lm', 'import', '--run_dir', str(directory.path), '--tokenizer', 'tokenizer.json'])
        raise UnnamedError(
            f'{directory.path}: this import has no tokenizer; add it: {command}, or name data: '
            '--set data.path=data/mine'
        )
    check_pieces(tokenizer, experiment.model.vocab_size, str(directory.path))
    return NoData(tokenizer)


def choose_fingerprints(store: Store | NoData, directory: RunDir) -> dict[str, str]:
    """Returns the fingerprints that the checkpoint of a run must have: the tokenizer's, as other data may be read.

    An import does not always know its tokenizer. Then the tokenizer of the data must be one of those in the directory,
    if there are any, or else MismatchError is raised.
    """
    ours = {name: value for name, value in store.fingerprints.items() if name == 'tokenizer'}
    info = read_raw(directory.info)
    if 'imported' not in info or 'tokenizer' in info:
        return ours
    contents = [directory.path / name for name in tokenizers.FILE_NAMES]
    known = {hashlib.sha256(path.read_bytes()).hexdigest() for path in contents if path.exists()}
    if ours and known and ours['tokenizer'] not in known:
        raise MismatchError(
            f'{directory.path}: has another tokenizer than the data; prepare them with tokenizer.model_path = '
            f'{str(directory.path)!r}'
        )
    return {}


def read_tokenizer(directory: RunDir, info: dict[str, Any]) -> Tokenizer | None:
    """Returns the tokenizer in the directory of a run, whose run.json is `info`; None: it has none.

    Raises the errors of `lm.data.tokenizers.from_bytes`.
    """
    for name in tokenizers.FILE_NAMES:
        if (path := directory.path / name).exists():
            return tokenizers.from_bytes(path.read_bytes(), info.get('end_id'), name)
    return None


def check_pieces(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raises MismatchError if a text can hold a token that a model of `vocab_size` tokens does not know.

    Special tokens may lie above: a text does not hold them.
    """
    special = set(tokenizer.special_ids)
    highest = next((i for i in reversed(range(tokenizer.vocab_size)) if i not in special), 0)
    if max(highest, tokenizer.eod_id) >= vocab_size:
        raise MismatchError(
            f'{where}: the tokenizer has the token {highest}, and the model {vocab_size} tokens; give the tokenizer of '
            'the model'
        )
