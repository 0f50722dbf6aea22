"""The shared parts of the formulas of mechanisms: masks, norms, gates and the registry of formulas.

The formulas stand as papers and manuals print them, in NumPy and float64: all weights at once, or token by token. They
take nothing from `lm` but configurations and the names of arrays.

B batch, L queries, M keys, H query heads, K key heads, C size of queries and keys, V size of values. Query head h reads
key head h // (H / K).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

EPSILON = 1e-5
"""Added to the variance where a norm has no number of its own."""
FORMULAS: dict[str, Callable] = {}
"""The mechanism's name in gin files → a function of `Layer` that returns [B, L, H, V]."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The arrays and settings that the formula of a mechanism reads.

    Attributes:
        config: the configuration of the mechanism.
        weights: its arrays by name, nested.
        q: queries [B, L, H, C].
        k: keys [B, M, K, C].
        v: values [B, M, K, V].
        inputs: its further inputs by name, [B, L, …].
        starts: the first token of each token's document [B, L].
        causal: whether later tokens are hidden.
    """

    config: Any
    weights: dict[str, Any]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    inputs: dict[str, np.ndarray]
    starts: np.ndarray
    causal: bool

    @property
    def visible(self) -> np.ndarray:
        """The mask of pairs, [B, 1, L, M]: True where a query sees a key."""
        i, j = self.places
        return ((j <= i) | (not self.causal)) & (j >= self.starts[:, None, :, None])

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of queries [L, 1] and of keys [M] in the window."""
        return np.arange(self.q.shape[1])[:, None], np.arange(self.k.shape[1])

    @property
    def groups(self) -> int:
        """The query heads of a key head."""
        return self.q.shape[2] // self.k.shape[2]

    def recent(self, window: int | None) -> np.ndarray:
        """Returns which keys are among the newest `window` ones of a query, its own included, [L, M]."""
        i, j = self.places
        return (j > i - window) | (window is None) if window is not None else np.ones((len(i), len(j)), bool)

    def mix(self, weights_BxHxLxM: np.ndarray) -> np.ndarray:
        """Returns Σ_j w_ij v_j."""
        return np.einsum('bhlm,bmhv->blhv', weights_BxHxLxM, repeat(self.v, self.groups))

    def forgotten(self) -> np.ndarray | float:
        """Returns Π_{j < m ≤ i} a_m, a = σ(x W + b), of a mechanism with `gate` (Lin et al. 2025), [B, H, L, M]."""
        if not getattr(self.config, 'gate', False):
            return 1.0
        logits = self.inputs['gate_BxLxK'] + self.weights['gate']['bias']
        return fade(np.log(special.expit(logits)), self.groups)


def formula(name: str) -> Callable:
    """Registers the formula of a mechanism."""

    def register(function: Callable) -> Callable:
        assert name not in FORMULAS, name
        FORMULAS[name] = function
        return function

    return register


def repeat(x: np.ndarray, count: int) -> np.ndarray:
    """Repeats each head, [B, L, K, …] → [B, L, H, …]."""
    return np.repeat(x, count, axis=2)


def compare(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns the inner products of queries and keys, [B, H, L, M]."""
    return np.einsum('blhc,bmhc->bhlm', q, repeat(k, q.shape[2] // k.shape[2]))


def fade(log_a_BxLxK: np.ndarray, groups: int) -> np.ndarray:
    """Returns Π_{j < m ≤ i} a_m for each query head, [B, H, L, M]; 0 for later keys."""
    total = np.repeat(np.cumsum(log_a_BxLxK, axis=1), groups, axis=2).swapaxes(1, 2)
    between = total[..., :, None] - total[..., None, :]
    return np.where(np.tril(np.ones(between.shape[-2:], bool)), np.exp(np.minimum(between, 0.0)), 0.0)


def layer_norm(x: np.ndarray, weights: dict | None = None, epsilon: float = EPSILON) -> np.ndarray:
    """Returns (x - mean) / √(variance + ε), times the gain, plus the bias."""
    centred = x - x.mean(-1, keepdims=True)
    standard = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return standard if weights is None else standard * weights['scale'] + weights['bias']


def rms_norm(x: np.ndarray, weights: dict, epsilon: float = EPSILON) -> np.ndarray:
    """Returns x / √(mean of squares + ε) times the gain (Zhang and Sennrich 2019)."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weights['scale']


def gelu(x: np.ndarray) -> np.ndarray:
    """Returns GELU by its tanh approximation (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x * special.expit(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
