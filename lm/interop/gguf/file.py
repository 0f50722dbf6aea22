"""A GGUF file of llama.cpp, in the form of a folder of Hugging Face."""

import collections
import functools
import logging
import pathlib
from typing import Any

import numpy as np

from lm.data import tokenizers
from lm.data.tokenizers.companions import TEMPLATE
from lm.data.tokenizers.marks import TextMarks, check_marks, find_marks
from lm.errors import ConfigError, MismatchError, MissingPackageError
from lm.interop.deferred import Deferred
from lm.interop.families import check_layers, reading_config
from lm.interop.families.base import Tensors
from lm.interop.found_tokenizer import FoundTokenizer, add_begin
from lm.interop.gguf.architectures import ARCHITECTURES, describe
from lm.interop.gguf.tokenizer import UnreadableTokenizerError, find_begin, write_tokenizer
from lm.interop.hyperparameters import Hyperparameters

FACTORS = 'rope_freqs.weight'
"""The tensor of factors by which Llama 3.1 and later slow down each rotary pair."""
UNUSED = ('rope_factors_long.weight', 'rope_factors_short.weight')

log = logging.getLogger(__name__)


class GgufFile:
    """One model. Numbers become float32, whatever the file quantizes them to."""

    def __init__(self, path: pathlib.Path):
        """Raises MissingPackageError without the package `gguf`, MismatchError for a damaged file, and ConfigError for
        one part of a model."""
        try:
            import gguf
        except ImportError:
            raise MissingPackageError(str(path), 'gguf', 'gguf') from None
        from lm.interop.gguf.header import check_header  # it imports the package

        self.path = path
        try:
            check_header(path)
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, LookupError, OverflowError) as error:
            reason = ' '.join(str(error).split())[:150]
            raise MismatchError(f'{path}: is no GGUF file, or a damaged one ({reason}); fetch it again') from None
        if (count := self._metadata('split.').integer('count', 1)) > 1:
            raise ConfigError(f'{path}: is one of {count} parts; join them with llama-gguf-split --merge')

    def count_tensors(self) -> int:
        """Returns how many tensors the file holds."""
        return len(self._reader.tensors)

    @property
    def notes(self) -> str:
        """A line on what happens to the numbers."""
        kinds = collections.Counter(tensor.tensor_type.name for tensor in self._reader.tensors).most_common()
        said = ', '.join(f'{count} of {kind}' for kind, count in kinds)
        return f'{self.path}: all tensors become float32 ({said})'

    @functools.cached_property
    def config(self) -> Hyperparameters:
        """The metadata in the form of config.json.

        Raises ConfigError for an architecture that is not known here, or that has options which are not, and the errors
        of `reading_config`.
        """
        with reading_config(self.path):
            return self._describe()

    def _describe(self) -> Hyperparameters:
        name = self._metadata('general.').get('architecture')
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ', '.join(sorted(ARCHITECTURES))
            raise ConfigError(f'{self.path}: general.architecture = {name!r}: can be imported are {known}')
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        check_layers(self._metadata(f'{name}.'), lambda: len(tensors), self.path)
        rows = int(tensors['token_embd.weight'].shape[1])
        config, unknown = describe(name, self._metadata(f'{name}.'), rows, 'output.weight' not in tensors)
        if unknown:
            raise ConfigError(f'{self.path}: a {name} model that no model here equals: it has {", ".join(unknown)}')
        if FACTORS in tensors:
            factors = np.asarray(tensors[FACTORS].data, np.float64)
            config |= {'rope_scaling': _scaling_of(factors, config.number('rope_theta'))}
        tokens = self._metadata('tokenizer.ggml.')
        return config | {f'{key}_token_id': tokens.get(f'{key}_token_id') for key in ('bos', 'eos')}

    def read_companions(self) -> dict[str, bytes]:
        """Returns the chat template by the name of its file, if there is one."""
        template = self._metadata('tokenizer.').find_text('chat_template')
        return {} if template is None else {TEMPLATE: template.encode()}

    @property
    def marks(self) -> TextMarks:
        """The tokens around a text, as the metadata say."""
        check_marks(self.config, self.path)
        return find_marks(self.config)._replace(begin=find_begin(self._metadata('tokenizer.ggml.')))

    def find_tokenizers(self) -> list[FoundTokenizer]:
        """Returns the file's tokenizer; none where the file says too little."""
        try:
            name, model = write_tokenizer(self._metadata('tokenizer.ggml.'))
            tokenizer = tokenizers.from_marked(model, self.marks, name)
        except (UnreadableTokenizerError, ConfigError, MismatchError) as error:
            log.warning('the tokenizer of %s cannot be read: %s', self.path, error)
            return []
        return [add_begin(tokenizer, self.path, self.marks)]

    def read_tensors(self) -> Tensors:
        """Returns name in Hugging Face's form → float32 array, which is read when it is asked for (`Deferred`).

        Raises the errors of `reading_config`, and when it is read ConfigError for a type of numbers that the package
        cannot read.
        """
        found = {}
        with reading_config(self.path):
            architecture = ARCHITECTURES[self._metadata('general.').text('architecture')]
            for tensor in self._reader.tensors:
                if tensor.name not in (FACTORS, *UNUSED):
                    array: Any = Deferred(tensor.shape[::-1].tolist(), functools.partial(self._dequantize, tensor))
                    found[architecture.rename(tensor.name)] = architecture.restore(tensor.name, array, self.config)
        return found

    def _dequantize(self, tensor: Any) -> np.ndarray:
        """Reads one tensor. The package maps the whole file: what was read of the map would stay in memory."""
        from gguf.quants import dequantize

        stored = tensor.data
        try:
            numbers = np.fromfile(self.path, stored.dtype, stored.size, offset=tensor.data_offset)
            return dequantize(numbers.reshape(stored.shape), tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ConfigError(
                f'{self.path}: {tensor.name} has the type {kind}, which gguf cannot read; fetch another file'
            ) from None
        except (OSError, ValueError) as error:
            said = ' '.join(str(error).split())
            raise MismatchError(f'{self.path}: {tensor.name} cannot be read ({said}); fetch the file again') from None

    def _read(self, key: str) -> object:
        field = self._reader.fields[key]
        value = field.contents()
        # A float32 such as 1e-5 has more digits as a float64.
        return float(str(np.float32(value))) if field.types[0].name == 'FLOAT32' else value

    def _metadata(self, prefix: str) -> Hyperparameters:
        """Returns the keys that begin with `prefix`, without it, and their values."""
        keys = [key for key in self._reader.fields if key.startswith(prefix)]
        return Hyperparameters({key.removeprefix(prefix): self._read(key) for key in keys})


def _scaling_of(factors: np.ndarray, base: float) -> dict[str, object]:
    """Returns `rope_scaling` that gives these factors, [C/2], of wavelengths with this base.

    All models of Llama 3.1 to 3.3 have the same limits and differ in the factor. Other factors have the type
    'rope_freqs', which no family reads.
    """
    factor = float(factors.max())
    wavelengths = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    turns = 8192 / wavelengths
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
    expected = 1 / (smooth + (1 - smooth) / factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        return {'rope_type': 'rope_freqs'}
    limits = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192}
    return {'rope_type': 'llama3', 'factor': factor, **limits}
