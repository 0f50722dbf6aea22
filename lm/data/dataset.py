"""The data of a run: prepared tokens, a mixture of them, or the examples of a synthetic task."""

from typing import Protocol

import numpy as np

from lm.config.configurable import Configurable, configurable, field
from lm.data.mixture import Mixture, check_mixture
from lm.data.store import TokenStore
from lm.data.tokenizers import Tokenizer, token_dtype
from lm.errors import ConfigError, MismatchError
from lm.ops.documents import Documents, TextBegin
from lm.tasks import Task, TaskStore


class HasTokenizer(Protocol):
    """The data of a run, or its tokenizer alone."""

    def tokenizer(self) -> Tokenizer: ...


Store = TokenStore | Mixture | TaskStore
"""The data that training and evaluation read."""


@configurable('data')
class DataConfig(Configurable):
    """The prepared tokens, or the synthetic task, to train and evaluate on."""

    path: str = field(
        default='', resume=True, help='the token store that `lm prepare` writes: a folder, gs://… or s3://…'
    )
    mixture: tuple[tuple[str, float], ...] = field(
        default=(), check=check_mixture, help="token stores below `path` and their shares: {'books': 0.7, 'web': 0.3}"
    )
    train_split: str = field(default='train', help='the split to train on')
    eval_split: str = field(default='validation', help='the split of the periodic evaluation')
    task: Task | None = field(default=None, help='a synthetic task in place of a token store')
    mask_documents: bool = field(default=False, help='no token sees another document; False: a window is one text')
    restart_positions: bool = field(default=False, help='positions count from the beginning of each masked document')
    begin_id: int | None = field(
        default=None,
        minimum=0,
        help='the token before each text, in place of the end-of-document token; None: as train.init_from or the '
        'teacher has it',
    )
    begin_windows: bool | None = field(
        default=None,
        help='windows that start inside a text begin with that token too; None: where it is not the end-of-document '
        'token',
    )

    def __post_init__(self):
        if self.restart_positions and not self.mask_documents:
            raise ConfigError(
                'data.restart_positions = True: only documents that do not see each other have positions of their own; '
                'set data.mask_documents = True, or delete this'
            )
        for name, given in (('mixture', list(self.mixture)), ('path', self.path)):
            if self.task and given:
                raise ConfigError(f'data.{name} = {given!r}: a task needs no token store; delete this or data.task')
        for name, given in (('mask_documents', self.mask_documents), ('begin_id', self.begin_id)):
            if self.task and given not in (False, None):
                raise ConfigError(f'data.{name} = {given}: the examples of a task are no documents; delete this')

    def documents(self, store: Store | None, mask: bool | None = None) -> Documents | None:
        """Returns how the documents of a window are separated; None: they are not.

        Args:
            store: the result of `open`; None where no store is opened, and any token may end a document.
            mask: whether they are separated; None: as `mask_documents` is set.
        """
        if not (self.mask_documents if mask is None else mask):
            return None
        opening = self.begin_id
        if opening is None:
            opening = 0 if store is None else store.tokenizer().eod_id
        return Documents(opening, self.restart_positions)

    def text_begin(self, store: 'HasTokenizer | None', windows: bool | None = None) -> TextBegin | None:
        """Returns the token that stands before the texts of a window; None: the tokens of the store say it all.

        Raises MismatchError if the documents of the store begin with another one.

        Args:
            store: has the tokenizer; as in `documents`.
            windows: whether it stands before every window; None: as `begin_windows` is set.
        """
        windows = self.begin_windows if windows is None else windows
        if self.task or (self.begin_id is None and not windows):
            return None
        eod = 0 if store is None else store.tokenizer().eod_id
        stored = getattr(store, 'begin_id', None)
        if stored is not None and self.begin_id not in (None, eod, stored):
            raise MismatchError(
                f'data.begin_id = {self.begin_id}: the documents of {self.path} begin with token {stored} already; set '
                f'data.begin_id = {stored}, or prepare them without it'
            )
        begin = eod if self.begin_id is None else self.begin_id
        windows = begin != eod if windows is None else windows
        return TextBegin(begin, eod, windows) if windows or begin != eod else None

    def guess_dtype(self, vocab_size: int) -> np.dtype:
        """Returns the type of tokens for a tokenizer with so many pieces; the data stay closed."""
        return np.dtype(np.int32) if self.task else token_dtype(vocab_size)

    def open(self, context_length: int, timeout: float | None = None) -> Store:
        """Opens the store that `path`, `mixture` or `task` names. Examples of a task have `context_length` tokens;
        `timeout` is in seconds.

        Raises ConfigError, and the errors of `TokenStore.open`, `Mixture.open` and `TaskStore`.
        """
        if self.task is None and self.mixture:
            return Mixture.open(self.path, self.mixture, timeout)
        if self.task is None:
            return TokenStore.open(self.path, timeout)
        return TaskStore(self.task, context_length)
