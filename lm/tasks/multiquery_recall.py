"""Multi-query associative recall, MQAR, as its authors publish it (Arora et al., "Zoology", 2023; LLoPS App. B.1).

    inputs     A 4 B 3 C 6 | 9 7 B 2 C 8 1 A …
    answers    . . . . . . | . . 3 . 6 . . 4 …

Key-value pairs come first; then each key is asked once, more often soon than late: the slot i = 1, 2, … of two tokens
is chosen with a probability ∝ i^(power - 1). All other places hold random tokens of the whole vocabulary, and no answer
stands in the input: the model tells it at the question and reads something random next. Training mixes segments, which
are lengths with numbers of pairs; tests run others, up to longer and fuller ones than were trained.
Accuracy is the share of questions answered. `associative_recall` is an easier form: filler between the questions,
answers in the input, one length.
"""

from collections.abc import Sequence

import numpy as np

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.tasks.base import Slice
from lm.tasks.draws import Draws
from lm.tasks.separate_answers import AnswersApart


def _check_segments(segments: tuple[tuple[int, ...], ...]) -> str | None:
    if segments and all(n[0] % 2 == 0 and 4 * n[1] <= n[0] and min(n) > 0 for n in segments):
        return None
    return 'must list segments, each of an even length of at least four times its pairs, and nothing below 1'


@configurable('multiquery_recall')
class MultiqueryRecall(AnswersApart):
    """Recall the value that was paired with a key. Examples of a split take their segments in turn."""

    vocab_size: int = field(
        default=8192, minimum=4, maximum=AnswersApart.LARGEST, even=True, help='half keys (without 0), half values'
    )
    train_segments: tuple[tuple[int, int, int], ...] = field(
        default=((64, 4, 5), (128, 8, 1), (256, 16, 1), (256, 32, 1), (256, 64, 1)),
        check=_check_segments,
        help='(tokens, pairs, share of the examples)',
    )
    eval_segments: tuple[tuple[int, int], ...] = field(
        default=((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)),
        check=_check_segments,
        help='(tokens, pairs), equal shares; each is scored at its own length, whatever the context',
    )
    train_examples: int = field(default=180_000, minimum=1, help='they come again every epoch')
    eval_examples: int = field(default=7000, minimum=1, help='in each of validation and test')
    power: float = field(
        default=0.01, above=0, maximum=1, help='1: all slots are alike; smaller: questions come sooner'
    )

    whole_answers = False

    def __post_init__(self):
        longest = max(pairs for _, pairs, *_ in self.train_segments + self.eval_segments)
        if longest >= self.vocab_size // 2:
            raise ConfigError(
                f'multiquery_recall.vocab_size = {self.vocab_size}: half of it must be more than {longest}, the most '
                'pairs of a segment'
            )

    def shortest_context(self) -> int:
        return max(length for length, *_ in self.train_segments)

    def examples(self, split: str, index_N: Sequence[int] | np.ndarray, context_length: int) -> np.ndarray:
        """Returns examples packed for `unpack`; segments shorter than the context are padded at the end."""
        self.count(split)
        index_N, turn = np.asarray(index_N), self._turn(split)
        packed_NxL = np.zeros((len(index_N), context_length + 1), np.int32)
        for length, pairs in set(turn):
            rows = np.array([turn[i % len(turn)] == (length, pairs) for i in index_N], bool)
            if rows.any() and context_length < length:
                raise ConfigError(
                    f'train.context_length = {context_length}: @{self.gin_name}() has segments of {length} tokens in '
                    f'{split}'
                )
            if rows.any():
                segment = self.segment(Draws(self.seed, split, index_N[rows]), length, pairs)
                packed_NxL[rows] = self.pack(*segment, context_length)
        return packed_NxL

    def segment(self, draws: Draws, length: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and answers of a segment, in the layout of `lay_out`."""
        half, slots = self.vocab_size // 2, length // 2 - pairs
        return lay_out(
            length,
            keys_NxP=1 + draws.distinct(half - 1, pairs),
            values_NxP=half + draws.distinct(half, pairs),
            slot_NxP=draws.distinct(slots, pairs, np.arange(1, slots + 1) ** (self.power - 1)),
            random_NxL=draws.integers(self.vocab_size, length),
        )

    def slices(self, split: str, context_length: int) -> dict[str, Slice]:
        if split == 'train':
            return super().slices(split, context_length)
        turn, count = self._turn(split), self.count(split)
        return {
            f'{pairs} pairs in {length}': Slice(np.arange(i, count, len(turn)), length)
            for i, (length, pairs) in enumerate(turn)
            if i < count
        }

    def _turn(self, split: str) -> list[tuple[int, int]]:
        """Returns (tokens, pairs) of examples 0, 1, …; after the last one the first follows again."""
        if split == 'train':
            return [(length, pairs) for length, pairs, share in self.train_segments for _ in range(share)]
        return list(self.eval_segments)


def lay_out(
    length: int, keys_NxP: np.ndarray, values_NxP: np.ndarray, slot_NxP: np.ndarray, random_NxL: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lays out examples of P pairs from the drawn values.

    Args:
        length: L, the length of an example.
        keys_NxP, values_NxP: the pairs, in their order.
        slot_NxP: the position of each key's question, in steps of two tokens from the last pair on.
        random_NxL: tokens for the positions that hold neither a pair nor a question.

    Returns:
        inputs [N, L], and the answers to questions [N, L], -1 elsewhere.
    """
    N, P = keys_NxP.shape
    inputs_NxL, answers_NxL = np.zeros((N, length), np.int64), np.full((N, length), -1)
    inputs_NxL[:, 0 : 2 * P : 2], inputs_NxL[:, 1 : 2 * P : 2] = keys_NxP, values_NxP
    asked_NxP = 2 * (P + slot_NxP)
    np.put_along_axis(inputs_NxL, asked_NxP, keys_NxP, axis=1)
    np.put_along_axis(answers_NxL, asked_NxP, values_NxP, axis=1)
    return np.where(inputs_NxL == 0, random_NxL, inputs_NxL), answers_NxL
