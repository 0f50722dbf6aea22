"""The gradients that the recurrent GPU kernels write, tile by tile."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, matrix, send, sum_products, wait_for_copies, widen
from lm.ops.linear_attention.gpu.recurrent.features import Features
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan, Ref, SideArrays


def describe_results(
    plan: RecurrentPlan, shape: tuple[int, ...], with_values: bool
) -> SideArrays[jax.ShapeDtypeStruct]:
    """Returns the types of the gradients of one side; `shape` is the shape of the outputs.

    They are gradients of features, bfloat16 [B, L, H M], and else the part of each slice, to be summed over S: vectors
    and values [S, B, L, H E], shifts and decay float32 [S, N, T].
    """
    batch, length, size = shape
    n = batch * plan.heads * plan.segments
    tokens = jax.ShapeDtypeStruct((plan.slices, n, length // plan.segments), jnp.float32)
    given = jax.ShapeDtypeStruct((batch, length, plan.heads * plan.slices * plan.chunks * CHUNK), jnp.bfloat16)
    part = jax.ShapeDtypeStruct((plan.slices, batch, length, size), plan.part_type)
    makes = plan.feature_map is not None
    return SideArrays(
        features=None if makes else given,
        vectors=part if makes else None,
        shifts=tokens if makes else None,
        decay=tokens if plan.decay else None,
        values=part if with_values else None,
    )


def allocate_results(plan: RecurrentPlan, with_values: bool) -> SideArrays[Ref]:
    """Returns shared memory for gradients on their way to memory: `vectors` has values, too."""
    tokens, makes = plgpu.SMEM((TILE,), jnp.float32), plan.feature_map is not None
    return SideArrays(
        features=None if makes else [matrix(TILE, CHUNK) for _ in range(plan.chunks)],
        vectors=matrix(TILE, TILE, dtype=plan.part_type) if with_values or makes else None,
        shifts=tokens if makes else None,
        decay=tokens if plan.decay else None,
    )


class Results:
    """Writes the gradients of one side to memory."""

    def __init__(
        self,
        plan: RecurrentPlan,
        features: Features,
        outputs: SideArrays[Ref],
        memory: SideArrays[Ref],
    ):
        """Stores the features of the side, the arrays in memory and the staging memory."""
        self.plan, self.features, self.outputs, self.memory = plan, features, outputs, memory

    def send_values(self, number: jax.Array, dv_TxD: jax.Array) -> None:
        """Sends the gradient of a tile's values, after earlier copies have ended."""
        send(dv_TxD, self.memory.vectors, self.plan.slice_part(self.outputs.values).at[pl.ds(number * TILE, TILE)])

    def send_features(
        self,
        number: jax.Array,
        tile: SideArrays[Ref],
        make: Callable[[], list],
        differentiate: Callable[[int], jax.Array],
    ) -> None:
        """Sends all other gradients of a tile, after earlier copies except values have ended.

        Args:
            tile: the sources of its features.
            make: returns the features, a chunk each.
            differentiate: returns the gradient of the features of chunk c, float32 [T, 64].
        """
        outputs, memory = self.outputs, self.memory
        tokens = pl.ds(number * TILE, TILE)
        phi_TxF = make() if outputs.decay is not None else []
        decay_T: jax.Array | float = 0.0
        dshift_T: jax.Array | float = 0.0
        dz = []
        for c in range(self.plan.chunks):
            dphi_TxF = differentiate(c)
            if outputs.decay is not None:
                decay_T += jnp.sum(widen(phi_TxF[c]) * dphi_TxF, axis=1)
            if outputs.features is not None:
                send(dphi_TxF, cast(list, memory.features)[c], self.plan.slice_head(outputs.features, c).at[tokens])
                continue
            dz_TxF = self.features.differentiate(tile, c, dphi_TxF)
            dshift_T -= jnp.sum(dz_TxF, axis=1)
            dz.append(dz_TxF.astype(jnp.bfloat16))
        if outputs.vectors is not None:
            products = [(d, w) for rows in self.features.rows for d, w in zip(dz, rows, strict=True)]
            dx_TxE = sum_products(products)[0]
            wait_for_copies()
            send(dx_TxE, memory.vectors, self.plan.slice_part(outputs.vectors).at[tokens])
            send(cast(jax.Array, dshift_T), memory.shifts, _find_tokens(outputs.shifts, tokens))
        if outputs.decay is not None:
            send(cast(jax.Array, decay_T), memory.decay, _find_tokens(outputs.decay, tokens))


def _find_tokens(array: Ref, tokens: pl.Slice | slice) -> Ref:
    return array.at[lax.axis_index('slice'), lax.axis_index('head'), tokens]
