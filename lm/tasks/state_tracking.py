"""State tracking: the product of all group elements so far, after each of them (Liu et al. 2023; Merrill et al. 2024).

     group 'parity'     0 1 1 0 1 …   → 0 1 0 0 1 …     the sum modulo 2
     group 's5'         permutations of five things   → their composition, first to last: NC¹-complete

Element number 0 is the identity; the others follow in the order of `itertools.permutations`. An example counts when all
of its states are right.
"""

import itertools

import numpy as np

from lm.config.configurable import configurable, field
from lm.tasks.base import Slice
from lm.tasks.draws import Draws
from lm.tasks.separate_answers import AnswersApart

GROUPS = {'parity': 2, 's3': 3, 's4': 4, 's5': 5}
"""Name → the number of permuted things."""


@configurable('state_tracking')
class StateTracking(AnswersApart):
    """Compose all elements so far."""

    group: str = field(default='parity', choices=tuple(GROUPS), help='of two things, which is parity, up to five')
    eval_lengths: tuple[int, ...] = field(
        default=(), check=lambda lengths: None if all(n >= 1 for n in lengths) else 'must list lengths of at least 1',
        help='lengths that are evaluated; none: the length of the training',
    )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def table(self) -> np.ndarray:
        """Returns [n, n]: entry (a, b) is the element that results if b follows a."""
        permutations = list(itertools.permutations(range(GROUPS[self.group])))
        number = {p: i for i, p in enumerate(permutations)}
        return np.array([[number[tuple(b[x] for x in a)] for b in permutations] for a in permutations])

    def shortest_context(self) -> int:
        return 1

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        table_KxK = self.table
        inputs_NxL = draws.integers(len(table_KxK), length - 1)
        states_NxL, state_N = np.empty_like(inputs_NxL), np.zeros(draws.n, int)
        for i in range(length - 1):
            state_N = states_NxL[:, i] = table_KxK[state_N, inputs_NxL[:, i]]
        return self.pack(inputs_NxL, states_NxL, length - 1)

    def slices(self, split: str, context_length: int) -> dict[str, Slice]:
        whole = super().slices(split, context_length)['']
        return {f'{n} tokens': Slice(whole.index_N, n) for n in self.eval_lengths} or {'': whole}
