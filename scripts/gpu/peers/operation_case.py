"""One timed call of an operation: its sizes, and its arrays, equal for every library."""

import dataclasses

import numpy as np

ARRAYS = {
    'retention': ('q', 'k', 'v'),
    'gated_linear': ('q', 'k', 'v', 'gate'),
    'delta': ('q', 'k', 'v', 'beta'),
    'gated_delta': ('q', 'k', 'v', 'beta', 'gate'),
    'softmax': ('q', 'k', 'v'),
    'polysketch': ('x', 'y', 'v', 'q', 'k'),
}
"""Operation → its arguments, all of which get gradients. `x` and `y` are sketches, `gate` holds logs of factors."""
FLOAT32 = ('gate', 'beta')
SCALE = 0.125
"""Peers multiply inner products by it. Ours get queries that are multiplied already, exactly so in bfloat16."""
SKETCH = 32
DRAWN = 4096
"""Tokens that are drawn; longer calls repeat them."""


@dataclasses.dataclass(frozen=True)
class OperationCase:
    """The sizes of a call.

    Attributes:
        window: tokens per sequence.
        tokens: tokens per call.
        size: of queries, keys and values.
        backward: whether all gradients are computed too.
    """

    operation: str
    window: int
    tokens: int
    heads: int
    size: int
    backward: bool

    @property
    def passes(self) -> str:
        """The name of the passes, as in `lm bench attention`."""
        return 'forward+backward' if self.backward else 'forward'

    @property
    def key(self) -> str:
        """The name of the case."""
        return f'{self.operation} {self.heads}x{self.size} {self.window} {self.passes}'

    def draw(self) -> dict[str, np.ndarray]:
        """Returns name → array [B, L, H, …], float32, with the gradient of the output as `do`."""
        count, random = min(DRAWN, self.tokens), np.random.default_rng(0)
        shape = (self.tokens // self.window, self.window, self.heads)

        def normal(*last: int) -> np.ndarray:
            return random.standard_normal((count, self.heads, *last), np.float32)

        found = {name: normal(self.size) for name in ('q', 'k', 'v', 'do')}
        if 'delta' in self.operation:  # the state grows unless keys have length 1
            for name in ('q', 'k'):
                found[name] /= np.linalg.norm(found[name], axis=-1, keepdims=True)
        if self.operation == 'polysketch':
            found |= {name: normal(SKETCH) * SKETCH**-0.5 for name in ('x', 'y')}
            found |= {name: found[name] * self.size**-0.5 for name in ('q', 'k')}
        found |= {'beta': 1 / (1 + np.exp(-normal())), 'gate': -np.log1p(np.exp(-normal())) / 16}
        wanted = (*ARRAYS[self.operation], 'do')
        repeats = -(-self.tokens // count)
        return {
            name: np.concatenate([found[name]] * repeats)[: self.tokens].reshape(*shape, *found[name].shape[2:])
            for name in wanted
        }


def list_longest(sums: dict[str, list[float]], calls: int) -> list[dict[str, object]]:
    """Lists name, milliseconds and count per call of each kernel, the longest first. `sums` holds the two sums by name:
    milliseconds per call, and the number of kernels in all calls."""
    longest = sorted(sums.items(), key=lambda entry: -entry[1][0])
    return [{'name': name[:90], 'ms': round(ms, 4), 'count': n / calls} for name, (ms, n) in longest]
