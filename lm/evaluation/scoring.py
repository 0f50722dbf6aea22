"""Log-likelihoods of given tokens instead of a split: of texts, and of answers to questions."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.evaluation.finite import refuse_not_finite
from lm.evaluation.perplexity import make_scoring_program
from lm.model.functions import ModelFunctions, Scored, Weights
from lm.ops.platform import SEQUENCE_AXIS
from lm.pod.mesh import batch_sharding, round_up_rows

SHORTEST = 32
"""The least number of tokens to which rows are padded (`pad_length`)."""


def pad_length(length: int) -> int:
    """Returns the length to which a row of `length` tokens is padded; beyond 128 tokens at most a fifth is padding.

    There are four lengths between two powers of two, so that few programs serve all rows.
    """
    step = max(SHORTEST, 1 << max(0, (length - 1).bit_length() - 3))
    return math.ceil(length / step) * step


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
    """Scores rows of tokens with the weights of a model, on all devices; compiles once per length and number of rows.

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
        self._functions, self._parts = functions, mesh.shape.get(SEQUENCE_AXIS, 1)
        self.batch_size = round_up_rows(batch_size, mesh)
        self._sharding = batch_sharding(mesh)

        self._programs = {
            accuracy: make_scoring_program(functions, mesh, accuracy=accuracy) for accuracy in (False, True)
        }

    def score_rows(self, rows: Sequence[np.ndarray], accuracy: bool = False) -> list[Scored]:
        """Scores all tokens of each row [N + 1] but its first; N is at most `context_length`.

        Returns nats [N] float64, and with `accuracy` whether each token is the most probable one.

        Raises Diverged, which names the first layer, if a score is not finite.
        """
        found: dict[int, Scored] = {}
        padded: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if not 2 <= len(row) <= self.context_length + 1:
                raise ValueError(f'a row of {len(row)} tokens: must be 2 to {self.context_length + 1}')
            padded.setdefault(self._choose_length(len(row) - 1), []).append(i)
        for length, indices in sorted(padded.items()):
            # Few rows are no whole batch: most of it would be padding. Powers of two keep the number of programs small.
            n_rows = min(self.batch_size, round_up_rows(1 << (len(indices) - 1).bit_length(), self.mesh))
            for first in range(0, len(indices), n_rows):
                chosen = indices[first : first + n_rows]
                tokens = np.zeros((n_rows, length + 1), np.int32)
                for at, i in enumerate(chosen):
                    tokens[at, : len(rows[i])] = rows[i]
                with jax.set_mesh(self.mesh):
                    array = jax.make_array_from_callback(tokens.shape, self._sharding, tokens.__getitem__)
                    batch = jax.device_get(self._programs[accuracy](self.weights, array))
                for at, i in enumerate(chosen):
                    n = len(rows[i]) - 1
                    correct = None if batch.correct is None else batch.correct[at, :n]
                    found[i] = Scored(batch.nats[at, :n].astype(np.float64), correct)
                    if not np.isfinite(found[i].nats).all():
                        refuse_not_finite(self._functions.merge(self.weights), rows[i][:-1], 'the score of a text')
        return [found[i] for i in range(len(rows))]

    def _choose_length(self, length: int) -> int:
        """Returns the length to which a row is padded. Devices that cannot share it compute it whole."""
        padded = min(pad_length(length), self.context_length)
        is_shared = self._functions.config.why_parts(self._parts, padded) is None
        return padded if is_shared else padded + 1  # parts > 1 do not divide it then

    def score_text(
        self, tokenizer: Tokenizer, text: str, begin_id: int | None = None, begins_windows: bool = False
    ) -> Scores:
        """Scores a text as a document: an end-of-document token (or `begin_id`) stands before it, and the one after it
        is scored too."""
        (nats,) = self.score_documents(tokenizer, [text], begin_id, begins_windows)
        tokens = np.append(tokenizer.encode(text), tokenizer.eod_id)
        return Scores(tokens, nats, len(text.encode()))

    def score_documents(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        begin_id: int | None = None,
        begins_windows: bool = False,
    ) -> list[np.ndarray]:
        """Returns the nats of each document's tokens and of the end-of-document token after them, float64.

        Documents are cut into windows of `context_length` targets, as `lm evaluate` cuts a split of one document. An
        end-of-document token, or `begin_id`, opens the first window. With `begins_windows` it opens all of them, else
        the last target of each window opens the next one.
        """
        rows, owners, L, eod = [], [], self.context_length, tokenizer.eod_id
        begin = eod if begin_id is None else begin_id
        for i, text in enumerate(texts):
            stream = np.concatenate([[begin], tokenizer.encode(text), [eod]]).astype(np.int32)
            cut = [stream[start : start + L + 1] for start in range(0, len(stream) - 1, L)]
            if begins_windows:
                cut = [np.concatenate([[begin], row[1:]]).astype(np.int32) for row in cut]
            rows, owners = rows + cut, owners + [i] * len(cut)
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for owner, scored in zip(owners, self.score_rows(rows), strict=True):
            parts[owner].append(scored.nats)
        return [np.concatenate(part) for part in parts]
