"""The tokens that the scored tokens of a window are conditioned on. Perplexities that differ in them measure
different things.

A token is predicted from those before it in its window. So the first tokens of a window depend on what stands there:
the token that a model has before each text, the token before them in the split, or a part of the window before.
"""

import dataclasses
from collections.abc import Mapping
from typing import Self

from lm.data.tokenizers import Tokenizer
from lm.evaluation.windows import EvaluationWindows
from lm.ops.documents import TextBegin

BEGIN, END, PREVIOUS, NOTHING = 'begin', 'end of document', 'previous token', 'nothing'
"""The kinds of tokens before a text or a window: the model's own token for it, the end-of-document token, or, before a
window, the token before it in the split."""
ONE_TOKEN = 'the token before the window'
FIELD = 'conditioning'
"""The entry of an evaluation."""


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """The tokens that an evaluation is conditioned on, in words that hold for any tokenizer.

    Attributes:
        before_texts: BEGIN, END or NOTHING.
        before_windows: BEGIN, END, PREVIOUS or NOTHING.
        first_token_sees: what the first scored token of a window sees.
    """

    before_texts: str = END
    before_windows: str = PREVIOUS
    first_token_sees: str = ONE_TOKEN

    @classmethod
    def of_windows(cls, windows: EvaluationWindows, begin: TextBegin | None) -> Self:
        """Returns the conditioning of windows; `begin` is the token before a text, None the end-of-document token."""
        before_texts = BEGIN if begin and begin.begin_id != begin.eod_id else END
        before_windows = before_texts if begin and begin.windows else PREVIOUS
        return cls(before_texts, before_windows, _describe_overlap(windows.context_length - windows.stride))

    @classmethod
    def read(cls, record: Mapping[str, object]) -> Self:
        """Returns the conditioning that an evaluation states. Earlier versions stated none and always had the same."""
        stated = record.get(FIELD)
        if isinstance(stated, Mapping):
            return cls(*(str(stated.get(field.name)) for field in dataclasses.fields(cls)))
        kind, _, stride = str(record.get('window')).partition(':')
        length = record.get('context_length', 0)
        is_sliding = kind == 'sliding' and stride.isdecimal()
        overlap = length - int(stride) if is_sliding and isinstance(length, int) else 0
        return cls(first_token_sees=_describe_overlap(overlap))

    def state(self, tokenizer: Tokenizer, begin: TextBegin | None) -> dict[str, object]:
        """Returns the entry of an evaluation, with the id of the token before each text and its piece."""
        index = tokenizer.eod_id if begin is None else begin.begin_id
        token = {} if self.before_texts == NOTHING else {'token_id': index, 'token': tokenizer.piece(index)}
        return dataclasses.asdict(self) | token

    def __str__(self) -> str:
        return f'before texts: {self.before_texts}; before windows: {self.before_windows}; the first token sees ' + (
            self.first_token_sees
        )


UNCONDITIONED = Conditioning(NOTHING, NOTHING, NOTHING)
"""The conditioning of windows whose tokens see both sides: no token is put before them."""


def _describe_overlap(tokens: int) -> str:
    return f'{tokens} tokens of the window before' if tokens > 0 else ONE_TOKEN
