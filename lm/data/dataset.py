"""What a run learns from: prepared tokens, or the examples of a synthetic task."""

import numpy as np

from lm.config.configurable import configurable, field
from lm.data.store import TokenStore
from lm.data.tokenizer import token_dtype
from lm.errors import ConfigError
from lm.tasks import Task, TaskStore


@configurable('data')
class DataConfig:
    """Which prepared tokens, or which synthetic task, to train and evaluate on."""

    path: str = field('', resume=True, help='the token store that `lm prepare` writes: a folder, gs://… or s3://…')
    train_split: str = field('train', help='the split to train on')
    eval_split: str = field('validation', help='the split of the periodic evaluation')
    task: Task | None = field(None, help='a synthetic task in place of a token store')

    def dtype(self, vocab_size: int) -> np.dtype:
        """Of the tokens of a batch, known without opening anything."""
        return np.dtype(np.int32) if self.task else token_dtype(vocab_size)

    def open(self, context_length: int, timeout: float | None = None) -> TokenStore | TaskStore:
        """What `path` or `task` names; `context_length` is that of the examples of a task, `timeout` in seconds.

        Raises ConfigError, and what `TokenStore.open` raises.
        """
        if self.task is None:
            return TokenStore.open(self.path, timeout)
        if self.path:
            raise ConfigError(f'data.path = {self.path!r}: a task needs no token store; delete this or data.task')
        return TaskStore(self.task, context_length)
