"""One head in one block, which the forward and the backward kernel read tile by tile."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from lm.ops.linear_attention.tpu.features import cut_tiles
from lm.ops.linear_attention.tpu.maps import MapFeatures
from lm.ops.linear_attention.tpu.plan import KernelInputs, Ref, TpuPlan
from lm.ops.linear_attention.types import Sides
from lm.ops.tpu.decay import LogSums, columns, last, since_start, until_end

Method = TypeVar('Method', bound=Callable)


def once(method: Method) -> Method:
    """Decorates a method to keep its result for the same arguments as long as its object lives."""

    @functools.wraps(method)
    def call(self, *arguments):
        kept = self.__dict__.setdefault('_once', {})
        key = (method.__name__, *arguments)
        if key not in kept:
            kept[key] = method(self, *arguments)
        return kept[key]

    return cast(Method, call)


class BlockFactors(NamedTuple):
    """The decay of a block.

    Attributes:
        sums_Tx1: running sums of log factors.
        sums_1xT: running sums of log factors, as a row.
        whole_1x1: the factor of the whole block.
        since_start_1xT: factors from the block's start to each token, by which a query reads the sums.
        until_end_1xT: factors from each token to the block's end, by which later queries see a key.
    """

    sums_Tx1: LogSums
    sums_1xT: LogSums
    whole_1x1: jax.Array
    since_start_1xT: jax.Array
    until_end_1xT: jax.Array

    def row(self, tokens: slice) -> LogSums:
        """Returns the sums of some tokens as a row."""
        return self.sums_1xT.map(lambda x: x[:, tokens])

    def column(self, tokens: slice) -> LogSums:
        """Returns the sums of some tokens as a column."""
        return self.sums_Tx1.map(lambda x: x[tokens])


class Head:
    """One head in one block.

    Attributes:
        plan: the plan.
        inputs: references for all heads of a grid step.
        state, moment: references for the sums of all heads of a grid step, `UNUSED` where no one reads them.
        head: the number of the head in the grid step.
        tiles: the tiles of tokens.
    """

    def __init__(
        self, plan: TpuPlan, inputs: KernelInputs, sums: tuple[Ref, Ref], head: int, made: Sides[MapFeatures] | None
    ):
        """Stores the arguments; `made` holds features of queries and of keys, None without a map."""
        self.plan, self.inputs, self.head, self.made = plan, inputs, head, made
        self.state, self.moment = sums
        self.tiles = cut_tiles(plan)

    def _take(self, ref: Ref, i: int) -> jax.Array:
        return ref[self.head, :, self.tiles[i]]

    def _take_x(self, i: int) -> jax.Array:
        return self._take(self.inputs.x_NxFxL, i) if self.made is None else self.made.queries.phi_MxT[:, self.tiles[i]]

    def _take_y(self, i: int) -> jax.Array:
        return self._take(self.inputs.y_NxFxL, i) if self.made is None else self.made.keys.phi_MxT[:, self.tiles[i]]

    @once
    def x(self, i: int) -> jax.Array:
        """Returns features of queries i."""
        return self._take_x(i)

    @once
    def y(self, i: int) -> jax.Array:
        """Returns features of keys i."""
        return self._take_y(i)

    @once
    def v(self, i: int) -> jax.Array:
        """Returns values i."""
        return self._take(self.inputs.v_NxDxL, i)

    # Where a and b are x and y, they are loaded once more: registers need not hold them for tokens outside the block.

    @once
    def a(self, i: int) -> jax.Array:
        """Returns the vectors of queries i that weights inside the block compare."""
        return self._take_x(i) if self.inputs.a_NxCxL is None else self._take(self.inputs.a_NxCxL, i)

    @once
    def b(self, i: int) -> jax.Array:
        """Returns the vectors of keys i that weights inside the block compare."""
        return self._take_y(i) if self.inputs.b_NxCxL is None else self._take(self.inputs.b_NxCxL, i)

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the operands of products."""
        return self.inputs.v_NxDxL.dtype

    @property
    def head_dim(self) -> int:
        return self.inputs.v_NxDxL.shape[1]

    @functools.cached_property
    def features(self) -> int:
        """The number of features."""
        return self.inputs.x_NxFxL.shape[1] if self.made is None else self.made.queries.phi_MxT.shape[0]

    @functools.cached_property
    def factors(self) -> BlockFactors | None:
        """The factors of decay; None without decay."""
        if self.inputs.c_Nx1xL is None:
            return None
        rest = self.inputs.rest_Nx1xL
        row = LogSums(self.inputs.c_Nx1xL[self.head], None if rest is None else rest[self.head])
        return BlockFactors(columns(row), row, since_start(row.map(last)), since_start(row), until_end(row))

    def kept(self, i: int) -> jax.Array | None:
        """Returns the factor of the sums before tile i: the whole block's factor at the first tile; None: 1."""
        return self.factors.whole_1x1 if self.factors is not None and i == 0 else None

    def reads(self, i: int) -> jax.Array | None:
        """Returns the factors of the sums for queries i, as decayed since the block began; None: 1."""
        return None if self.factors is None else self.factors.since_start_1xT[:, self.tiles[i]]

    def adds(self, i: int) -> jax.Array | None:
        """Returns the factors of keys i at the block's end, for queries after it; None: 1."""
        return None if self.factors is None else self.factors.until_end_1xT[:, self.tiles[i]]
