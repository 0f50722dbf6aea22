"""Checkpoints of other programs: folders of Hugging Face, exports of lm, and GGUF files, in one form."""

import functools
import json
import logging
import pathlib
import re

from lm.data import tokenizers
from lm.data.tokenizers.companions import GENERATION_CONFIG, OF_THE_TOKENIZER, read_companions
from lm.data.tokenizers.marks import TextMarks, check_marks, find_marks, read_config_marks
from lm.errors import ConfigError, MismatchError
from lm.files import AnyPath, is_remote, parse_json_object, refuse_special_files
from lm.interop.export_run import UNFINISHED
from lm.interop.families.base import Tensors
from lm.interop.formats import BEGIN, END, MODEL_TYPE
from lm.interop.found_tokenizer import FoundTokenizer, add_begin
from lm.interop.gguf.file import GgufFile
from lm.interop.hyperparameters import Hyperparameters
from lm.interop.tensors import count_tensors, read_metadata, read_tensors

GGUF = '.gguf'

log = logging.getLogger(__name__)


class CheckpointFolder:
    """A folder with config.json and safetensors, or with what `lm export` has written."""

    notes = ''

    def __init__(self, path: AnyPath):
        """Raises MismatchError if the folder has a pipe or device among its files."""
        if not is_remote(path):
            refuse_special_files(pathlib.Path(path))
        self.path = path

    @functools.cached_property
    def config(self) -> Hyperparameters:
        """The contents of config.json. Raises MismatchError if it is missing or damaged."""
        path = self.path / 'config.json'
        if not path.exists() and (self.path / 'config.gin').exists():
            return Hyperparameters({'model_type': MODEL_TYPE})
        try:
            return Hyperparameters(parse_json_object(path.read_bytes()))  # with a byte order mark, too
        except FileNotFoundError:
            raise MismatchError(
                f'{path}: there is none; name a folder with config.json and model.safetensors, or a .gguf file'
            ) from None
        except (ValueError, OSError):
            raise MismatchError(f'{path}: cannot be read; fetch it again') from None

    def read_tensors(self) -> Tensors:
        """Returns name → float32 array."""
        return read_tensors(self.path)

    def count_tensors(self) -> int:
        """Returns how many tensors the files hold."""
        return count_tensors(self.path)

    @functools.cached_property
    def marks(self) -> TextMarks:
        """The tokens around a text: the ones of the run that was exported, or else what config.json says."""
        header = read_metadata(self.path)
        facts = {name: int(header[name]) for name in (END, BEGIN) if re.fullmatch(r'\d{1,10}', header.get(name, ''))}
        if END in facts:
            return TextMarks((facts[END],), facts.get(BEGIN), is_exact=True)
        check_marks(self.config, self.path / 'config.json')
        if self.config.get('model_type') != MODEL_TYPE:
            return read_config_marks(self.config, self.path)
        found = find_marks(self.config)
        # Earlier exports name the end-of-document token as the beginning too, where the run has no other.
        return TextMarks(found.ends, None if found.begin in found.ends else found.begin, is_exact=True)

    def read_companions(self) -> dict[str, bytes]:
        """Returns name → contents of the files that go along with the weights as they are.

        Where only config.json names several tokens that end a text, generation_config.json says so, as transformers
        would write it.
        """
        found = read_companions(self.path)
        if GENERATION_CONFIG not in found and len(self.marks.ends) > 1:
            found[GENERATION_CONFIG] = json.dumps({'eos_token_id': list(self.marks.ends)}, indent=2).encode() + b'\n'
        return found

    def find_tokenizers(self) -> list[FoundTokenizer]:
        """Returns the tokenizers in the folder that can be read here, tokenizer.json first."""
        paths = [self.path / name for name in tokenizers.FILE_NAMES]
        found = [self._read_tokenizer(path) for path in paths if path.exists()]
        return [one for one in found if one is not None]

    def _read_tokenizer(self, path: AnyPath) -> FoundTokenizer | None:
        try:
            return read_tokenizer(path, self.marks)
        except ConfigError as error:
            log.warning('the tokenizer of %s is not compared: %s', self.path, error)
            return None


def choose_companions(checkpoint: 'Checkpoint', tokenizer: pathlib.Path | None) -> dict[str, bytes]:
    """Returns the companions of a checkpoint; of another `tokenizer`'s file, the ones beside it are its own."""
    found = checkpoint.read_companions()
    if tokenizer is None or tokenizer.parent == checkpoint.path:
        return found
    beside = read_companions(tokenizer.parent)
    own = {name: contents for name, contents in beside.items() if name in OF_THE_TOKENIZER}
    return {name: contents for name, contents in found.items() if name not in OF_THE_TOKENIZER} | own


def read_tokenizer(path: AnyPath, marks: TextMarks) -> FoundTokenizer:
    """Reads the tokenizer in a file; the checkpoint says `marks`. Raises ConfigError as `lm.data.tokenizers.load`."""
    return add_begin(tokenizers.load(path, marks=marks), path, marks)


Checkpoint = CheckpointFolder | GgufFile


def open_checkpoint(path: AnyPath) -> Checkpoint:
    """Opens a folder, also in a bucket, or a GGUF file.

    Raises MismatchError if the folder holds an unfinished export, and the errors of `CheckpointFolder` and `GgufFile`.
    """
    if path.suffix == GGUF and is_remote(path):
        raise ConfigError(f'{path}: GGUF files must lie on a disk of this machine; copy it from there')
    if not is_remote(path) and path.is_file():
        return GgufFile(pathlib.Path(path))
    if (path / UNFINISHED).exists():
        raise MismatchError(f'{path}: holds half an export; run that lm export again, or wait for its end')
    return CheckpointFolder(path)
