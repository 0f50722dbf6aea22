"""How gradients leave the recurrent GPU kernels, tile by tile."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import TILE, matrix, send, sent, together
from lm.ops.linear_attention.gpu.recurrent.features import Features, widened
from lm.ops.linear_attention.gpu.recurrent.plan import CHUNK, RecurrentPlan


class Results:
    """What goes to memory.

    Of given features their gradients, bfloat16 [N, M / 64, L, 64]. Of features that the kernel makes, the part of each
    slice of the gradient of the vectors, float32 [S, N, L, E], and of that of the shifts [S, N, L]. With decay also
    ⟨φ, dφ⟩ of each slice, float32 [S, N, L], and last those of the values, if there are any.
    """

    def __init__(self, plan: RecurrentPlan, features: Features, outputs: list, scratch: list, register: list):
        """
        Args:
            plan: the call.
            features: whose gradients they are.
            outputs: in memory, of `types(…)`.
            scratch: `scratch(…)`.
            register: `spare(plan)`.
        """
        self.plan, self.features, self.outputs, self.register = plan, features, outputs, register
        self.chunks, self.vectors, self.tokens, self.met = scratch

    @staticmethod
    def types(plan: RecurrentPlan, shape: tuple, with_values: bool) -> list[jax.ShapeDtypeStruct]:
        n, length, size = shape
        tokens = jax.ShapeDtypeStruct((plan.slices, n, length), jnp.float32)
        given = jax.ShapeDtypeStruct((n, plan.slices * plan.chunks, length, CHUNK), jnp.bfloat16)
        made = jax.ShapeDtypeStruct((plan.slices, n, length, TILE), jnp.float32)
        values = jax.ShapeDtypeStruct((plan.slices, n, length, size), jnp.float32)
        features = [given] if plan.feature_map is None else [made, tokens]
        return features + [tokens] * plan.decay + [values] * with_values

    @staticmethod
    def scratch(plan: RecurrentPlan, with_values: bool) -> list:
        """Values and the gradients of vectors leave through the same place."""
        tokens, is_made = plgpu.SMEM((TILE,), jnp.float32), plan.feature_map is not None
        chunks = [] if is_made else [matrix(TILE, CHUNK) for _ in range(plan.chunks)]
        vectors = [matrix(TILE, TILE, dtype=jnp.float32)] * (with_values or is_made)
        return [chunks, vectors, [tokens] * is_made, [tokens] * plan.decay]

    def send_values(self, number, dv_TxD: jax.Array) -> None:
        """Of one tile; what was sent before has left."""
        send(dv_TxD, *self.vectors, self._of_tile(self.outputs[-1], number))

    def send(self, number, tiles: list, features: Callable[[], list], gradient: Callable[[int], jax.Array]) -> None:
        """Of one tile; what was sent before, but values, has left.

        Args:
            number: of the tile.
            tiles: of the features' sources.
            features: gives them, a chunk each.
            gradient: of those of chunk c, float32 [T, 64].
        """
        part, head = lax.axis_index('slice'), lax.axis_index('head')
        phi_TxF = features() if self.plan.decay else None
        met_T, dshift_T, dz = 0.0, 0.0, []
        for c in range(self.plan.chunks):
            dphi_TxF = gradient(c)
            if self.plan.decay:
                met_T += jnp.sum(widened(phi_TxF[c]) * dphi_TxF, axis=1)
            if self.plan.feature_map is None:
                place = self.outputs[0].at[head, part * self.plan.chunks + c, pl.ds(number * TILE, TILE)]
                send(dphi_TxF, self.chunks[c], place)
                continue
            dz_TxF = self.features.pulled(tiles, c, dphi_TxF)
            dshift_T -= jnp.sum(dz_TxF, axis=1)
            dz.append(dz_TxF.astype(jnp.bfloat16))
        if self.plan.feature_map is not None:
            products = [(d, w) for rows in self.features.rows for d, w in zip(dz, rows, strict=True)]
            dx_TxE = together(products, spare=self.register)[0]
            sent()
            send(dx_TxE, *self.vectors, self._of_tile(self.outputs[0], number))
            send(dshift_T, *self.tokens, self._of_tile(self.outputs[1], number))
        if self.plan.decay:
            at = 1 if self.plan.feature_map is None else 2
            send(met_T, *self.met, self._of_tile(self.outputs[at], number))

    @staticmethod
    def _of_tile(array, number):
        return array.at[lax.axis_index('slice'), lax.axis_index('head'), pl.ds(number * TILE, TILE)]
