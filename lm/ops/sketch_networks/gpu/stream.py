"""How weights of the sketch networks pass through the shared memory of a thread block, CHUNK hidden units at a time.

A *pass* goes over all hidden units of one level of one network. The maps of all passes are one stream: while those of
one chunk are used the next come, also those of the next pass. The first warpgroup asks for them.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import matrix
from lm.ops.sketch_networks.gpu.plan import CHUNK, SLOTS

AHEAD = 2
"""Chunks to come, at least; of those in use and used, warpgroups may be apart by SLOTS - AHEAD."""


def scratch(warpgroups: int, size: int, r: int, hidden: int) -> list:
    """Shared memory and barriers of a `Stream` of networks with inputs of `size`."""
    return [
        matrix(SLOTS, CHUNK, size),
        matrix(SLOTS, CHUNK, r),
        matrix(SLOTS, CHUNK, r),
        plgpu.SMEM((4, hidden // CHUNK, CHUNK), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=SLOTS),
        plgpu.Barrier(),
    ]


class Stream:
    """The maps of all passes of a kernel, in the order in which it takes them."""

    def __init__(self, passes, warpgroup, maps, biases, scratch):
        """Asks for the first.

        Args:
            passes: (network, level) of each.
            warpgroup: which one this is.
            maps: of both networks, in memory: [2, E, M], [2, E, r], [2, E, r], [2, E, r].
            biases: [4, E / CHUNK, CHUNK], those of the first level before those of the second.
            scratch: `scratch(…)`.
        """
        self.passes, self.warpgroup, self.maps, self.at = passes, warpgroup, maps, 0
        *self.slots, self.biases, self.arrived, self.used, self.ready = scratch
        self.chunks = self.maps[0].shape[1] // CHUNK

        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_gmem_to_smem(biases, self.biases, self.ready)
            for step in range(AHEAD):
                self._fetch(jnp.int32(step))

        plgpu.barrier_wait(self.ready)

    def _fetch(self, step) -> None:
        slot, number = lax.rem(step, SLOTS), lax.div(step, self.chunks)
        hidden = pl.ds(lax.rem(step, self.chunks) * CHUNK, CHUNK)
        network = sum(n * (number == i).astype(jnp.int32) for i, (n, _) in enumerate(self.passes))
        level = sum(n * (number == i).astype(jnp.int32) for i, (_, n) in enumerate(self.passes))
        for wanted in range(2):

            @pl.when(level == wanted)
            def _(wanted=wanted):
                w, v = self.maps[2 * wanted : 2 * wanted + 2]
                plgpu.copy_gmem_to_smem(w.at[network, hidden], self.slots[wanted].at[slot], self.arrived.at[slot])
                plgpu.copy_gmem_to_smem(v.at[network, hidden], self.slots[2].at[slot], self.arrived.at[slot])

    def next_pass(self, use: Callable) -> None:
        """use(w, v, c) for each chunk of the next pass: [CHUNK, M or r] and [CHUNK, r] in shared memory, the biases
        [CHUNK] too."""
        network, level = self.passes[self.at]
        first, steps = self.at * self.chunks, len(self.passes) * self.chunks
        self.at += 1

        def chunk(i, carry):
            step = first + i
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(self.arrived.at[slot])
            use(
                self.slots[level].at[slot],
                self.slots[2].at[slot],
                self.biases.at[2 * level + network, i],
            )
            # Were products in flight until the next round, the compiler would let none overlap with what follows it.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.used.at[slot])

            @pl.when((self.warpgroup == 0) & (step + AHEAD < steps))
            def _():
                @pl.when(step + AHEAD >= SLOTS)
                def _():
                    plgpu.barrier_wait(self.used.at[lax.rem(step + AHEAD, SLOTS)])

                self._fetch(step + AHEAD)

            return carry

        lax.fori_loop(0, self.chunks, chunk, ())
