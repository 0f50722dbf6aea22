"""The tokens around a text, as config.json of a checkpoint or run.json of an import states them."""

from collections.abc import Mapping
from typing import NamedTuple

from lm.errors import MismatchError
from lm.files import AnyPath, find_entries


class TextMarks(NamedTuple):
    """The tokens that stand behind and before a text.

    Attributes:
        ends: the tokens that may end a document, the preferred one first.
        begin: the token before every text; None: there is none.
        is_exact: the first of `ends` and `begin` count, whatever the tokenizer says. Otherwise `ends` choose among its
            tokens of the usual names, and `begin` counts where its file names no such token.
    """

    ends: tuple[int, ...] = ()
    begin: int | None = None
    is_exact: bool = False


def read_marks(folder: AnyPath) -> TextMarks:
    """Returns the tokens that run.json in a folder states, or else config.json; none where there is neither."""
    if ends := list_ids(_read(folder / 'run.json').get('end_id')):
        return TextMarks(ends, is_exact=True)
    return read_config_marks(_read(folder / 'config.json'), folder)


def read_config_marks(config: Mapping[str, object], folder: AnyPath) -> TextMarks:
    """Returns the tokens that a config.json states, and tokenizer_config.json beside it may take back."""
    marks = find_marks(config)
    adds_begin = marks.begin is None or _read(folder / 'tokenizer_config.json').get('add_bos_token') is not False
    return marks if adds_begin else marks._replace(begin=None)


def find_marks(config: Mapping[str, object]) -> TextMarks:
    """Returns the tokens that the contents of a config.json state. Tokens that the model does not have do not count."""
    config = _with_text(config)
    size = config.get('vocab_size')
    ends, begins = (
        [i for i in list_ids(config.get(name)) if not isinstance(size, int) or i < size]
        for name in ('eos_token_id', 'bos_token_id')
    )
    return TextMarks(tuple(ends), begins[0] if begins else None)


def check_marks(config: Mapping[str, object], where: AnyPath) -> None:
    """Raises MismatchError if the config.json `where` names a token beyond its model; -1 stands for no token."""
    config = _with_text(config)
    size = config.get('vocab_size')
    for name in ('eos_token_id', 'bos_token_id'):
        value = config.get(name)
        for index in value if isinstance(value, list) else [value]:
            if isinstance(index, int) and not (-1 <= index < size if isinstance(size, int) else index >= -1):
                raise MismatchError(f'{where}: {name} = {index}: the ids of this model are below {size}; correct it')


def _with_text(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the entries of a config.json with the entries of its language model."""
    text = config.get('text_config')
    return {**text, **config} if isinstance(text, dict) else config


def list_ids(value: object) -> tuple[int, ...]:
    """Returns the tokens that an entry names, one or a list; none for a value of another kind."""
    values = value if isinstance(value, list) else [value]
    return tuple(i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def _read(path: AnyPath) -> dict[str, object]:
    """Returns the object in a file of JSON; {} where the file is missing or damaged."""
    try:
        return find_entries(path.read_bytes())
    except OSError:
        return {}
