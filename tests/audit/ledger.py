"""The rows of the audit: each compares our code with public code on the same numbers, in single or double precision.

A comparison yields pairs of arrays. The difference of a row is the largest |ours - theirs|, divided by the largest
number in their array. Their side computes in float64 wherever it can, at both precisions.
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
"""Tolerances of a row, by the bits of our numbers."""
Pairs = Iterable[tuple[str, Any, Any]]
"""(name, ours, theirs)."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the table.

    Attributes:
        what: the part of our code.
        against: the code that it is compared with.
        pairs: makes the arrays; takes our dtype.
        bits: the precisions at which the row can be computed.
        exact: whether no difference is allowed.
    """

    what: str
    against: str
    pairs: Callable[[np.dtype], Pairs]
    bits: tuple[int, ...] = (32, 64)
    exact: bool = False


COMPARISONS: list[Comparison] = []


def compares(what: str, against: str, **options: Any) -> Callable:
    """Registers a function as a comparison; `options` are the fields of `Comparison`."""

    def register(function):
        COMPARISONS.append(Comparison(what, against, function, **options))
        return function

    return register


def difference(pairs: Pairs) -> tuple[float, int]:
    """Returns (largest difference, count of compared numbers); infinite if shapes differ or a number is not finite."""
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
    """A stand-in for jax.numpy whose float32 is float64: code that asks for float32 computes in double precision."""

    def __getattr__(self, name: str) -> Any:
        return jnp.float64 if name == 'float32' else getattr(jnp, name)


def widen() -> None:
    """Makes every imported module of `lm` compute in double precision from here on."""
    for operation in ('cross_entropy', 'delta_rule', 'exact_attention', 'linear_attention'):
        for implementation in ('reference', 'xla'):  # otherwise they would be imported at their first use
            importlib.import_module(f'lm.ops.{operation}.{implementation}')
    jax.config.update('jax_enable_x64', True)
    wider = Wider('jax.numpy')
    for name, module in list(sys.modules.items()):
        if name.split('.')[0] == 'lm' and getattr(module, 'jnp', None) is jnp:
            module.jnp = wider


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Returns normally distributed numbers in float64."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def values_and_gradients(ours: Callable, theirs: Callable, arrays: list[np.ndarray], dtype: np.dtype) -> Iterator:
    """Yields the results of both functions on these arrays, and the gradients for one shared cotangent."""
    o, pull = jax.vjp(jax.jit(ours), *(jnp.asarray(x, dtype) for x in arrays))
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]
    expected = theirs(*leaves)
    cotangent = np.cos(np.arange(o.size)).reshape(o.shape)
    yield 'values', o, expected.detach().numpy()
    gradients = torch.autograd.grad(expected, leaves, torch.tensor(cotangent, dtype=expected.dtype))
    for i, (got, want) in enumerate(zip(pull(jnp.asarray(cotangent, o.dtype)), gradients, strict=True)):
        yield f'gradient {i}', got, want.numpy()
