"""Features of queries or keys, tile by tile in the recurrent GPU kernels.

T tokens of a tile, C chunks of 64 features, E size of the vectors that a feature map takes.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, load_rows, matrix, release, repeat_per_row, sum_products
from lm.ops.linear_attention.feature_maps import ElementwiseMap
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan, Ref, SideArrays


class FeaturesMemory(NamedTuple):
    """Shared memory for features that the kernel makes.

    Attributes:
        made: for each side, chunks of its features; empty for a side whose features are never placed.
        rows: high and low parts of the slice's rows, a chunk each.
        ready: the barrier of the rows.
    """

    made: list[list[Ref]]
    rows: list[list[Ref]]
    ready: Ref

    @classmethod
    def allocate(cls, plan: RecurrentPlan, placed: tuple[bool, ...]) -> 'FeaturesMemory':
        """Allocates the memory; none where features are given.

        `placed`: per side, True if its features are ever placed in shared memory.
        """
        if plan.feature_map is None:
            return cls([], [], [])

        def allocate_chunks(needed: bool) -> list[Ref]:
            return [matrix(TILE, CHUNK) for _ in range(plan.chunks)] if needed else []

        rows = [allocate_chunks(True) for _ in range(2)]
        return cls([allocate_chunks(each) for each in placed], rows, plgpu.Barrier(num_arrivals=2 * plan.chunks))


class Features:
    """The features of one side in a thread block.

    Attributes:
        sources: arrays in memory.
        rows: the slice's rows, high and low parts in shared memory; empty where features are given.
        queries: True for the side of the queries.
    """

    def __init__(
        self, plan: RecurrentPlan, sources: SideArrays[Ref], made: list[Ref], rows: list[list[Ref]], queries: bool
    ):
        """Stores the arguments; `made` is shared memory for features that are `placed`."""
        self.plan, self.sources, self.made, self.rows, self.queries = plan, sources, made, rows, queries

    @staticmethod
    def load_sides(
        plan: RecurrentPlan,
        sides: list[tuple[SideArrays[Ref], bool]],
        rows: list[Ref] | None,
        memory: FeaturesMemory,
    ) -> list['Features']:
        """Makes the features of each of `sides`, (arrays, True for queries), once the rows have arrived."""
        part, head = lax.axis_index('slice'), lax.axis_index('head')
        chunks, first = range(plan.chunks), part * plan.chunks
        if rows is None:
            return [
                Features(plan, SideArrays([plan.slice_head(side.features, c) for c in chunks]), [], [], queries)
                for side, queries in sides
            ]
        for array, parts in zip(rows, memory.rows, strict=True):
            for c in chunks:
                plgpu.copy_gmem_to_smem(array.at[first + c], parts[c], memory.ready)
        plgpu.barrier_wait(memory.ready)
        return [
            Features(
                plan,
                SideArrays(vectors=plan.slice_head(side.vectors), shifts=cast(Ref, side.shifts).at[head]),
                made,
                memory.rows,
                queries,
            )
            for (side, queries), made in zip(sides, memory.made, strict=True)
        ]

    def make(self, tile: SideArrays[Ref], placed: bool = True) -> list:
        """Returns the features of a tile, [T, 64], C of them.

        They are in shared memory, or in registers where the kernel makes them and they are not to be `placed`.
        """
        if self.plan.feature_map is None:
            return cast(Ref, tile.features)
        made = (self._apply_map(self._shift(tile, c)).astype(jnp.bfloat16) for c in range(self.plan.chunks))
        if not placed:
            return list(made)
        release()
        for to, phi_TxF in zip(self.made, made, strict=True):
            to[...] = phi_TxF
        plgpu.commit_smem()
        return self.made

    def differentiate(self, tile: SideArrays[Ref], c: int, dphi_TxF: jax.Array) -> jax.Array:
        """Computes the gradient of z = ⟨w_m, x⟩ - s(x) from the gradient of the features of chunk c."""
        return jax.vjp(self._apply_map, self._shift(tile, c))[1](dphi_TxF)[0]

    def _apply_map(self, z_TxF: jax.Array) -> jax.Array:
        feature_map = cast(ElementwiseMap, self.plan.feature_map)
        return feature_map.of_shifted(z_TxF, self.plan.slices * self.plan.chunks * CHUNK, self.queries)

    def _shift(self, tile: SideArrays[Ref], c: int) -> jax.Array:
        """Computes z."""
        products = [(tile.vectors, w[c].transpose((1, 0))) for w in self.rows]
        return sum_products(products)[0] - repeat_per_row(load_rows(tile.shifts), CHUNK)
