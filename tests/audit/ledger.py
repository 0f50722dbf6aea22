"""What the audit compares: rows, each of ours against a stranger's on the same numbers, at single or double precision.

A comparison yields pairs of arrays; the difference of a row is the largest of |ours - theirs|, as a part of the largest
number that theirs holds. Their side is in float64 wherever it can be, at both precisions.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

TOLERANCES = {32: 1e-5, 64: 1e-10}
"""Of a row, by the bits of our numbers."""
Pairs = Iterable[tuple[str, Any, Any]]
"""(what, ours, theirs)."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the table.

    Attributes:
        what: of ours.
        against: whose code.
        pairs: makes the arrays; takes our dtype.
        bits: of the precisions at which it can be made.
        exact: whether nothing may differ.
    """

    what: str
    against: str
    pairs: Callable[[np.dtype], Pairs]
    bits: tuple[int, ...] = (32, 64)
    exact: bool = False


COMPARISONS: list[Comparison] = []


def compares(what: str, against: str, **options: Any) -> Callable:
    """Makes a comparison of a function; `options` are the fields of `Comparison`."""

    def register(function):
        COMPARISONS.append(Comparison(what, against, function, **options))
        return function

    return register


def difference(pairs: Pairs) -> tuple[float, int]:
    """(largest difference, how many numbers were compared); infinite where shapes differ or a number is not finite."""
    worst, count = 0.0, 0
    for what, ours, theirs in pairs:
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        if ours.shape != theirs.shape or not np.isfinite(ours).all() or not np.isfinite(theirs).all():
            print(f'{what}: {ours.shape} and {theirs.shape}, or not finite', file=sys.stderr)
            return np.inf, count
        apart = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))
        worst, count = max(worst, apart), count + ours.size
    return worst, count


class Wider(ModuleType):
    """jax.numpy, but float32 is float64: what our code writes as float32 is then computed in double precision."""

    def __getattr__(self, name: str) -> Any:
        return jnp.float64 if name == 'float32' else getattr(jnp, name)


def widen() -> None:
    """Every module of `lm` that has been imported computes in double precision from here on."""
    for operation in ('cross_entropy', 'delta_rule', 'exact_attention', 'linear_attention'):
        for implementation in ('reference', 'xla'):  # else imported when it is first used
            importlib.import_module(f'lm.ops.{operation}.{implementation}')
    jax.config.update('jax_enable_x64', True)
    wider = Wider('jax.numpy')
    for name, module in list(sys.modules.items()):
        if name.split('.')[0] == 'lm' and getattr(module, 'jnp', None) is jnp:
            module.jnp = wider


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Normal numbers in float64."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def values_and_gradients(ours: Callable, theirs: Callable, arrays: list[np.ndarray], dtype: np.dtype) -> Iterator:
    """The results of both functions of these arrays, and the gradients for one and the same cotangent."""
    o, pull = jax.vjp(jax.jit(ours), *(jnp.asarray(x, dtype) for x in arrays))
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]
    expected = theirs(*leaves)
    cotangent = np.cos(np.arange(o.size)).reshape(o.shape)
    yield 'values', o, expected.detach().numpy()
    gradients = torch.autograd.grad(expected, leaves, torch.tensor(cotangent, dtype=expected.dtype))
    for i, (got, want) in enumerate(zip(pull(jnp.asarray(cotangent, o.dtype)), gradients, strict=True)):
        yield f'gradient {i}', got, want.numpy()
