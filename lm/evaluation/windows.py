"""The windows in which a split is scored: the tokens of each window, and the targets that count."""

import dataclasses
import math
from typing import Self

import numpy as np

from lm.data.store import TokenStore
from lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class EvaluationWindows:
    """Windows over the n tokens of a split.

    Window i starts at i·stride. After the first window, only the last `stride` targets are scored. So each token is
    scored once, with at least context_length - stride tokens before it.
    """

    n_tokens: int
    context_length: int
    stride: int

    @classmethod
    def create(cls, n_tokens: int, context_length: int, window: str, first_tokens: int | None = None) -> Self:
        """Makes the windows of the `first_tokens` of a split of `n_tokens`; None: of all.

        Raises ConfigError when the context is longer than these tokens, or the stride longer than the context.
        """
        if context_length > n_tokens:
            raise ConfigError(
                f'evaluate.context_length = {context_length}: the split has only {n_tokens} tokens; shorten the context'
            )
        if first_tokens is not None and context_length > first_tokens:
            raise ConfigError(f'train.eval_tokens = {first_tokens}: a window has {context_length} tokens; take more')
        stride = context_length if window == 'disjoint' else int(window.partition(':')[2])
        if stride > context_length:
            raise ConfigError(f"evaluate.window = '{window}': the stride must be at most the context, {context_length}")
        return cls(min(n_tokens, first_tokens or n_tokens), context_length, stride)

    def __len__(self) -> int:
        return 1 + max(0, math.ceil((self.n_tokens - self.context_length) / self.stride))

    def batch(self, store: TokenStore, split: str, eod: int, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads windows first, …, first+size-1: (token ids [size, L+1], bool [size, L] of the targets that count)."""
        L, n = self.context_length, self.n_tokens
        tokens = np.full((size, L + 1), eod, np.int32)
        scored = np.zeros((size, L), bool)
        starts = [i * self.stride for i in range(first, min(first + size, len(self)))]
        inner = [row for row, start in enumerate(starts) if start > 0 and start + L <= n]
        if inner:
            tokens[inner] = store.read_many(split, np.array([starts[row] - 1 for row in inner]), L + 1)
        for row, start in enumerate(starts):
            if row not in inner:  # the first window begins with an end-of-document token, and the last one is short
                text = store.read(split, max(start - 1, 0), min(start + L, n))
                offset = 1 if start == 0 else 0
                tokens[row, offset : offset + len(text)] = text
            scored[row, L - self.stride if start else 0 : min(L, n - start)] = True
        return tokens, scored


class WholeWindows(EvaluationWindows):
    """Windows of L tokens instead of L + 1: no token precedes them."""

    def batch(self, store: TokenStore, split: str, eod: int, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads windows first, …, first+size-1: (token ids [size, L], bool [size, L] of the tokens that count)."""
        L, n = self.context_length, self.n_tokens
        index = np.arange(first, first + size)
        starts = np.minimum(np.where(index < len(self), index, 0) * L, n - L)
        tokens = store.read_many(split, starts, L).astype(np.int32)
        is_new = starts[:, None] + np.arange(L) >= index[:, None] * L
        return tokens, is_new & (index < len(self))[:, None]
