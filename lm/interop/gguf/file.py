"""A GGUF file of llama.cpp, in the form of a folder of Hugging Face."""

import collections
import functools
import pathlib
from typing import Any

import numpy as np

from lm.errors import ConfigError, MismatchError, MissingPackageError
from lm.interop.deferred import Deferred
from lm.interop.families import check_layers
from lm.interop.families.base import Tensors
from lm.interop.gguf.architectures import ARCHITECTURES, describe
from lm.interop.gguf.tokenizer import find_begin, write_tokenizer
from lm.interop.hyperparameters import Hyperparameters

FACTORS = 'rope_freqs.weight'
"""The tensor of factors by which Llama 3.1 and later slow down each rotary pair."""
UNUSED = ('rope_factors_long.weight', 'rope_factors_short.weight')


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

    @property
    def count(self) -> int:
        """The number of tensors."""
        return len(self._reader.tensors)

    @functools.cached_property
    def kinds(self) -> dict[str, int]:
        """The types of the tensors, such as 'Q4_K', and how many have each."""
        return dict(collections.Counter(tensor.tensor_type.name for tensor in self._reader.tensors).most_common())

    @functools.cached_property
    def config(self) -> Hyperparameters:
        """The contents of config.json.

        Raises ConfigError for an architecture that is not known here, or that has options which are not. What is
        missing or of another kind raises Python's errors, for `reading_config`.
        """
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

    @property
    def tokenizer(self) -> tuple[str, bytes]:
        """The (name, contents) of the tokenizer's file. Raises UnreadableTokenizerError if the file says too little."""
        return write_tokenizer(self._metadata('tokenizer.ggml.'))

    @property
    def chat_template(self) -> str | None:
        """The template of conversations, if there is one."""
        return self._metadata('tokenizer.').find_text('chat_template')

    @property
    def begin_id(self) -> int | None:
        """The token that stands before every text, if there is one."""
        return find_begin(self._metadata('tokenizer.ggml.'))

    def read_tensors(self) -> Tensors:
        """Returns name in Hugging Face's form → float32 array, which is read when it is asked for (`Deferred`).

        Then a type of numbers that the package cannot read raises ConfigError.
        """
        architecture, found = ARCHITECTURES[self._metadata('general.').text('architecture')], {}
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
