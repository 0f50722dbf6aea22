"""The tokenizer of a checkpoint, and the token that stands before its texts."""

from typing import NamedTuple

from lm.data.tokenizers import Tokenizer
from lm.data.tokenizers.marks import TextMarks
from lm.files import AnyPath


class FoundTokenizer(NamedTuple):
    """A tokenizer of a checkpoint.

    Attributes:
        tokenizer: as it is read here.
        where: the file that holds it.
        begin_id: the token that stands before every text; None: there is none.
    """

    tokenizer: Tokenizer
    where: AnyPath
    begin_id: int | None = None


def add_begin(tokenizer: Tokenizer, where: AnyPath, marks: TextMarks) -> FoundTokenizer:
    """Returns a tokenizer with the token that stands before every text."""
    names_begin = tokenizer.names_begin and not marks.is_exact
    return FoundTokenizer(tokenizer, where, tokenizer.begin_id if names_begin else marks.begin)
