"""One head in one block, as the forward and the backward kernel read it: tile by tile."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.ops.linear_attention.tpu.features import TpuPlan, tiles
from lm.ops.tpu.decay import column, last


def once(method: Callable) -> Callable:
    """A method whose result for the same arguments is kept as long as its object is."""

    @functools.wraps(method)
    def call(self, *arguments):
        kept = self.__dict__.setdefault('_once', {})
        key = (method.__name__, *arguments)
        if key not in kept:
            kept[key] = method(self, *arguments)
        return kept[key]

    return call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """What both kernels read, and the sums that they keep, of all heads of a grid step; None: of no use to the plan."""

    x: Any
    y: Any
    v: Any
    a: Any
    b: Any
    c: Any
    state: Any
    moment: Any


def inputs_of(plan: TpuPlan, refs: tuple) -> tuple[tuple, dict[str, Any], tuple]:
    """A kernel's references taken apart: the maps, x to c by name, and those behind them."""
    maps, (x, y, v, *refs) = (refs[:2], refs[2:]) if plan.feature_map else ((), refs)
    (a, b), refs = (refs[:2], refs[2:]) if plan.exact_local else ((x, y), refs)
    c, refs = (refs[0], refs[1:]) if plan.decay else (None, refs)
    return maps, dict(x=x, y=y, v=v, a=a, b=b, c=c), refs


class Head:
    """Attributes: plan; refs: of all heads of a grid step; head: its number; cut: the tokens of each tile."""

    def __init__(self, plan: TpuPlan, refs: Refs, head: int, made: tuple):
        """`made`: features of queries and of keys, [M, T] each; () without a map."""
        self.plan, self.refs, self.head = plan, refs, head
        self.cut = tiles(plan)
        self._made = dict(zip('xy' if plan.exact_local else 'xyab', made * 2, strict=False)) if made else {}

    @once
    def of(self, name: str, i: int) -> jax.Array:
        """Tile i of an array: x, y, v, a, b, or features where a map makes them."""
        at = self.cut[i]
        if name in self._made:
            return self._made[name][:, at]
        return getattr(self.refs, name)[self.head, :, at]

    @functools.cached_property
    def features(self) -> int:
        """Of x and y."""
        return self._made['x'].shape[0] if self._made else self.refs.x.shape[1]

    @functools.cached_property
    def fading(self) -> tuple[jax.Array, ...]:
        """Of decay: c as column and as row, and the factors of the block, of what a query reads, of what a key adds."""
        c_1xT = self.refs.c[self.head]
        return column(c_1xT), c_1xT, jnp.exp(last(c_1xT)), jnp.exp(c_1xT), jnp.exp(last(c_1xT) - c_1xT)

    def kept(self, i: int) -> jax.Array | None:
        """What tile i leaves of the sums before it: the first one all that the block does; None: all."""
        return self.fading[2] if self.plan.decay and i == 0 else None

    def reads(self, i: int) -> jax.Array | None:
        """What queries i see of the sums, which have faded since the block began; None: all."""
        return self.fading[3][:, self.cut[i]] if self.plan.decay else None

    def adds(self, i: int) -> jax.Array | None:
        """What queries after the block see of keys i, as of the block's end; None: all."""
        return self.fading[4][:, self.cut[i]] if self.plan.decay else None
