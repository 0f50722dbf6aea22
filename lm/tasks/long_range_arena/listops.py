"""ListOps of the Long Range Arena (Tay et al. 2021, §2.2.1; Nangia & Bowman 2018): what is the value of an expression?

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ] = → 5

Operators are minimum, maximum, median (of an even number the mean of the middle two, rounded down) and sum modulo 10.
A node is an expression with probability 1/4, until the depth is reached, and has 2 to 10 arguments; else it is a digit.
Expressions of more than 500 and fewer than 2,000 tokens are taken. The model reads one from left to right and tells its
value at the mark behind it, one of ten digits; the Arena's models are classifiers that see it in both directions.
"""

import jax
import numpy as np

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.tasks.base import Task
from lm.tasks.draws import Draws

FILLER, DIGIT, END, ASK = 0, 1, 15, 16
"""The tokens: digit d is DIGIT + d, and the operators stand between digits and END."""
OPERATORS = (
    min,
    max,
    lambda values: int(np.median(values)),
    lambda values: sum(values) % 10,
)
OPERATOR = DIGIT + 10
"""The token of the first of them."""
LIST_PROBABILITY = 0.25
TRIES = 200_000
"""Expressions that are drawn for one example, at most. A time limit would make the examples depend on the machine."""


@configurable('listops')
class ListOps(Task):
    """The value of a nested expression."""

    min_length: int = field(default=500, minimum=2, help='expressions have more tokens than this')
    max_length: int = field(default=2000, minimum=5, help='and fewer than this')
    max_depth: int = field(default=10, minimum=2, help='of nested expressions, and the digits in them')
    max_arguments: int = field(default=10, minimum=2, help='of one operator')
    train_examples: int = field(default=96_000, minimum=1, help='they come again every epoch')
    eval_examples: int = field(default=2000, minimum=1, help='in each of validation and test')

    def __post_init__(self):
        if self.max_length < self.min_length + 3:
            raise ConfigError(
                f'listops.max_length = {self.max_length}: must be at least listops.min_length + 3 = '
                f'{self.min_length + 3}'
            )
        if (longest := self._find_longest()) <= self.min_length:
            raise ConfigError(
                f'listops.min_length = {self.min_length}: expressions of listops.max_depth = {self.max_depth} and '
                f'listops.max_arguments = {self.max_arguments} have at most {longest} tokens; lower min_length, or '
                'raise one of the others'
            )

    @property
    def vocab_size(self) -> int:
        return ASK + 1

    def shortest_context(self) -> int:
        return self.max_length

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        tokens_NxL = np.full((draws.n, length), FILLER)
        for row, one in zip(tokens_NxL, draws.each(), strict=True):
            tokens, value = self.expression(one)
            row[: len(tokens) + 2] = [*tokens, ASK, DIGIT + value]
        return tokens_NxL

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        return tokens_BxN[:, :-1] == ASK

    def expression(self, draws: Draws) -> tuple[list[int], int]:
        """Returns tokens and value of the first drawn expression whose length is allowed.

        Raises ConfigError if none of `TRIES` has such a length.
        """
        levels = next(filter(None, (self._levels(draws) for _ in range(TRIES))), None)
        if levels is None:
            raise ConfigError(
                f'listops.max_depth = {self.max_depth}: none of {TRIES:,} expressions has more tokens than '
                f'listops.min_length = {self.min_length} and fewer than listops.max_length = {self.max_length}; raise '
                'max_depth, or lower min_length'
            )
        below: list[tuple[list[int], int]] = []
        for choices, arguments in reversed(levels):
            subtrees, here = iter(below), []
            for choice, count in zip(choices, arguments, strict=True):
                if not count:
                    here.append(([DIGIT + int(choice)], int(choice)))
                    continue
                parts = [next(subtrees) for _ in range(count)]
                tokens = [OPERATOR + int(choice), *(token for part, _ in parts for token in part), END]
                here.append((tokens, OPERATORS[choice]([value for _, value in parts])))
            below = here
        return below[0]

    def _find_longest(self) -> int:
        """Returns the tokens of the longest expression, or a number above `min_length` where there are more."""
        length = 1
        for _ in range(self.max_depth - 1):
            if length > self.min_length:
                break
            length = 2 + self.max_arguments * length
        return length

    def _levels(self, draws: Draws) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Draws a tree, level by level: for each node its operator or digit, and its number of arguments (0: a digit).

        Returns None if its length is not allowed.
        """
        nodes, length, levels = 1, 0, []
        for depth in range(1, self.max_depth + 1):
            is_list, pick, count = draws.uniform(3 * nodes).reshape(3, nodes)
            is_list = (is_list < LIST_PROBABILITY) & (depth < self.max_depth)
            arguments = is_list * (2 + (count * (self.max_arguments - 1)).astype(int))
            levels.append(((pick * np.where(is_list, len(OPERATORS), 10)).astype(int), arguments))
            length += nodes + int(is_list.sum())  # each list also has an end token
            nodes = int(arguments.sum())
            if length + nodes >= self.max_length:
                return None
            if not nodes:
                break
        return levels if length > self.min_length else None
