"""Tokenizers: text ↔ token ids, one file per kind. Importing this package registers all of them."""

from collections.abc import Callable
from typing import cast

from lm.config.configurable import import_modules
from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.base import token_dtype as token_dtype
from lm.data.tokenizers.config import TokenizerChoice, TokenizerConfig
from lm.data.tokenizers.marks import TextMarks, read_marks
from lm.errors import ConfigError, MismatchError
from lm.files import AnyPath, open_path

import_modules(__name__, __path__)

FILE_NAMES = tuple(sorted({kind.file_name for kind in Tokenizer.__subclasses__()}))
"""The names of the files of all kinds, beside tokens and weights."""


def from_bytes(model: bytes, eod: int | str | None = None, name: str = 'tokenizer.model') -> Tokenizer:
    """Makes the tokenizer that the contents of a file describe.

    Args:
        eod: the end-of-document token, by id or name; None: the choice of the tokenizer.
        name: the name of the file, for messages.

    Raises:
        MismatchError: it is of no kind that is known, or damaged.
        ConfigError: it has no end-of-document token, or its library is not installed.
    """
    for kind in Tokenizer.__subclasses__():
        if kind.recognises(model):
            make = cast(Callable[[bytes, int | str | None], Tokenizer], kind)  # the subclasses read the vocabulary
            return make(model, eod)
    kinds = ', '.join(kind.what for kind in Tokenizer.__subclasses__())
    raise MismatchError(f'{name}: none of {kinds}; restore the file')


def from_marked(model: bytes, marks: TextMarks, name: str = 'tokenizer.model') -> Tokenizer:
    """Makes a tokenizer like `from_bytes`; `marks` decide on the end-of-document token."""
    if marks.is_exact and marks.ends:
        return from_bytes(model, marks.ends[0], name)
    try:
        made = from_bytes(model, None, name)
    except ConfigError:
        made = from_bytes(model, marks.ends[0], name) if marks.ends else None
        if made is None or made.eod_id >= made.vocab_size:
            raise
        return made
    end = next((i for i in marks.ends if i in made.end_ids), made.eod_id)
    return made if end == made.eod_id else from_bytes(model, end, name)


def load(path: str | AnyPath, config: TokenizerConfig | None = None, *, marks: TextMarks | None = None) -> Tokenizer:
    """Reads the file of a tokenizer, or the one in a folder, such as an imported run.

    Args:
        config: what the file may lack.
        marks: decide on the end-of-document token where `config` has none; None: run.json or config.json beside it.

    Raises ConfigError if there is none or it is of no kind.
    """
    config, label = config or TokenizerConfig(), f'tokenizer.model_path = {str(path)!r}'
    try:
        found = open_path(path, 'tokenizer.model_path')
        if inside := [found / name for name in FILE_NAMES if (found / name).exists()]:
            found = inside[0]
        content = found.read_bytes()
        for kind in Tokenizer.__subclasses__():
            content = kind.complete(content, config)
        if config.end_of_document:
            return from_bytes(content, config.end_of_document)
        return from_marked(content, read_marks(found.parent) if marks is None else marks)
    except OSError as error:
        raise ConfigError(f'{label}: {error.strerror}; name the file of a tokenizer, or a run that has one') from None
    except MismatchError as error:
        reason = str(error).removeprefix('tokenizer.model: ').removesuffix('; restore the file')
        raise ConfigError(f'{label}: {reason}') from None


def load_existing(choice: TokenizerChoice) -> Tokenizer | None:
    """Loads the file that `tokenizer.model_path` names; None where there is none. Raises the errors of `load`."""
    if isinstance(choice, TokenizerConfig) and choice.model_path is not None:
        return load(choice.model_path, choice)
    return None
