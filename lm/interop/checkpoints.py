"""Checkpoints of other programs: folders of Hugging Face, exports of lm, and GGUF files, in one form."""

import functools
import logging
import pathlib
from typing import Any, NamedTuple

from lm.data import tokenizers
from lm.errors import ConfigError, MismatchError
from lm.files import parse_json
from lm.interop.export_run import UNFINISHED
from lm.interop.families.base import Tensors
from lm.interop.formats import MODEL_TYPE
from lm.interop.gguf.file import GgufFile
from lm.interop.gguf.tokenizer import UnreadableTokenizerError
from lm.interop.tensors import check_safetensors, read_tensors

log = logging.getLogger(__name__)


class FoundTokenizer(NamedTuple):
    """A tokenizer of a checkpoint.

    Attributes:
        tokenizer: as it is read here.
        where: the file that holds it.
        end_id: the token that ends a document, where the checkpoint says it because the tokenizer does not.
        begin_id: the token that stands before every text; None: there is none.
    """

    tokenizer: tokenizers.Tokenizer
    where: pathlib.Path
    end_id: int | None = None
    begin_id: int | None = None


class CheckpointFolder:
    """A folder with config.json and safetensors, or with what `lm export` has written."""

    notes = ''

    def __init__(self, path: pathlib.Path):
        """Raises MismatchError if the folder holds an unfinished export."""
        check_safetensors()
        if (path / UNFINISHED).exists():
            raise MismatchError(f'{path}: holds half an export; run that lm export again, or wait for its end')
        self.path = path

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json. Raises MismatchError if it is missing or damaged."""
        path = self.path / 'config.json'
        if not path.exists() and (self.path / 'config.gin').exists():
            return {'model_type': MODEL_TYPE}
        try:
            config = parse_json(path.read_text())
            config.get('model_type')
        except FileNotFoundError:
            raise MismatchError(
                f'{path}: there is none; name a folder with config.json and model.safetensors, or a .gguf file'
            ) from None
        except (ValueError, AttributeError, OSError):
            raise MismatchError(f'{path}: cannot be read; fetch it again') from None
        return config

    def read_tensors(self) -> Tensors:
        """Returns name → float32 array."""
        return read_tensors(self.path)

    def find_tokenizers(self) -> list[FoundTokenizer]:
        """Returns the tokenizers in the folder that can be read here, tokenizer.json first."""
        paths = [self.path / name for name in tokenizers.FILE_NAMES]
        found = [self._read_tokenizer(path) for path in paths if path.exists()]
        return [one for one in found if one is not None]

    def _read_tokenizer(self, path: pathlib.Path) -> FoundTokenizer | None:
        end, kind = self.config.get('eos_token_id'), self.config['model_type']
        try:
            return read_tokenizer(path, end if isinstance(end, int) else None, begins=kind != MODEL_TYPE)
        except ConfigError as error:
            log.warning('the tokenizer of %s is not compared: %s', self.path, error)
            return None


class GgufCheckpoint:
    """A GGUF file of llama.cpp."""

    def __init__(self, path: pathlib.Path):
        self.path, self._file = path, GgufFile(path)

    @property
    def config(self) -> dict[str, Any]:
        """The metadata in the form of config.json. Raises the errors of `GgufFile.config`."""
        return self._file.config

    @property
    def notes(self) -> str:
        """A line on what happens to the numbers."""
        kinds = ', '.join(f'{count} of {kind}' for kind, count in self._file.kinds.items())
        return f'{self.path}: all tensors become float32 ({kinds})'

    def read_tensors(self) -> Tensors:
        """Returns name → float32 array, dequantized."""
        return self._file.read_tensors()

    def find_tokenizers(self) -> list[FoundTokenizer]:
        """Returns the file's tokenizer; none where the file says too little."""
        try:
            name, model = self._file.tokenizer
            end, ending = self.config.get('eos_token_id'), None
            try:
                tokenizer = tokenizers.from_bytes(model, None, name)
            except ConfigError:
                if end is None:
                    raise
                tokenizer, ending = tokenizers.from_bytes(model, end, name), end
        except (UnreadableTokenizerError, ConfigError, MismatchError) as error:
            log.warning('the tokenizer of %s cannot be read: %s', self.path, error)
            return []
        return [FoundTokenizer(tokenizer, self.path, ending, self._file.begin_id)]


def read_tokenizer(path: pathlib.Path, end: int | None = None, *, begins: bool = True) -> FoundTokenizer:
    """Reads the tokenizer in a file.

    Args:
        path: the file.
        end: the end-of-document token of a tokenizer that has none of the usual ones.
        begins: the file says which token stands before every text.

    Raises ConfigError as `lm.data.tokenizers.load` does.
    """
    ending = None
    try:
        tokenizer = tokenizers.load(path)
    except ConfigError:
        if end is None:
            raise
        tokenizer, ending = tokenizers.load(path, end=end), end
    return FoundTokenizer(tokenizer, path, ending, tokenizer.begin_id if begins else None)


Checkpoint = CheckpointFolder | GgufCheckpoint


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Opens a folder, or a GGUF file. Raises the errors of `CheckpointFolder` and `GgufFile`."""
    return GgufCheckpoint(path) if path.is_file() else CheckpointFolder(path)
