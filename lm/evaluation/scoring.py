"""Log-likelihoods of given tokens instead of a split: of texts, and of answers to questions."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.evaluation.perplexity import make_scoring_program
from lm.model.functions import ModelFunctions, Scored, Weights
from lm.training.mesh import batch_sharding, round_up_rows

SHORTEST = 32
"""Rows are padded to this many tokens or a power of two above, so that few programs serve all lengths."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of one text: its tokens, the end-of-document token after them, and the nats of each.

    Attributes:
        tokens: ids [T].
        nats: negative log-likelihood of each, [T] float64.
        n_bytes: of the text in UTF-8.
    """

    tokens: np.ndarray
    nats: np.ndarray
    n_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum()) / math.log(2) / max(1, self.n_bytes)


class Scorer:
    """Scores rows of tokens with the weights of a model, on all devices; compiles once per length.

    Each token is scored with at most `context_length` tokens before it. Raises ConfigError for a model whose tokens see
    later ones.
    """

    def __init__(self, functions: ModelFunctions, mesh: Mesh, weights: Weights, context_length: int, batch_size: int):
        if setting := functions.config.looks_ahead:
            raise ConfigError(
                f'{setting}: a text has no probability where tokens see later ones; score what a split hides with '
                'lm evaluate'
            )
        self.mesh, self.weights, self.context_length = mesh, weights, context_length
        self.batch_size = round_up_rows(batch_size, mesh)
        self._sharding = batch_sharding(mesh)

        self._programs = {
            accuracy: make_scoring_program(functions, mesh, accuracy=accuracy) for accuracy in (False, True)
        }

    def score_rows(self, rows: Sequence[np.ndarray], accuracy: bool = False) -> list[Scored]:
        """Scores all tokens of each row [N + 1] but its first; N is at most `context_length`.

        Returns nats [N] float64, and with `accuracy` whether each token is the most probable one.
        """
        found: dict[int, Scored] = {}
        padded: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if not 2 <= len(row) <= self.context_length + 1:
                raise ValueError(f'a row of {len(row)} tokens: must be 2 to {self.context_length + 1}')
            length = max(SHORTEST, 1 << (len(row) - 2).bit_length())
            padded.setdefault(min(length, self.context_length), []).append(i)
        for length, indices in sorted(padded.items()):
            for first in range(0, len(indices), self.batch_size):
                chosen = indices[first : first + self.batch_size]
                tokens = np.zeros((self.batch_size, length + 1), np.int32)
                for at, i in enumerate(chosen):
                    tokens[at, : len(rows[i])] = rows[i]
                with jax.set_mesh(self.mesh):
                    array = jax.make_array_from_callback(tokens.shape, self._sharding, tokens.__getitem__)
                    batch = jax.device_get(self._programs[accuracy](self.weights, array))
                for at, i in enumerate(chosen):
                    n = len(rows[i]) - 1
                    correct = None if batch.correct is None else batch.correct[at, :n]
                    found[i] = Scored(batch.nats[at, :n].astype(np.float64), correct)
        return [found[i] for i in range(len(rows))]

    def score_text(self, tokenizer: Tokenizer, text: str, begin_id: int | None = None) -> Scores:
        """Scores a text as a document: an end-of-document token (or `begin_id`) stands before it, and the one after it
        is scored too."""
        (nats,) = self.score_documents(tokenizer, [text], begin_id)
        tokens = np.append(tokenizer.encode(text), tokenizer.eod_id)
        return Scores(tokens, nats, len(text.encode()))

    def score_documents(
        self, tokenizer: Tokenizer, texts: Sequence[str], begin_id: int | None = None
    ) -> list[np.ndarray]:
        """Returns the nats of each document's tokens and of the end-of-document token after them, float64.

        Documents are cut into windows of `context_length` targets, as `lm evaluate` cuts a split of one document. An
        end-of-document token, or `begin_id`, opens the first window. The last target of each window opens the next one.
        """
        rows, owners, L, eod = [], [], self.context_length, tokenizer.eod_id
        begin = eod if begin_id is None else begin_id
        for i, text in enumerate(texts):
            stream = np.concatenate([[begin], tokenizer.encode(text), [eod]]).astype(np.int32)
            cut = [stream[start : start + L + 1] for start in range(0, len(stream) - 1, L)]
            rows, owners = rows + cut, owners + [i] * len(cut)
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for owner, scored in zip(owners, self.score_rows(rows), strict=True):
            parts[owner].append(scored.nats)
        return [np.concatenate(part) for part in parts]
