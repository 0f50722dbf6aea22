"""How weights of the sketch networks pass through the shared memory of a thread block, CHUNK hidden units at a time.

A *pass* goes over all hidden units of one level of one network. The maps of all passes are one stream: while the maps
of one chunk are used the next ones come, also across passes. The first warpgroup asks for them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm.ops.gpu import matrix
from lm.ops.sketch_networks.folding import LevelMaps
from lm.ops.sketch_networks.gpu.plan import CHUNK, SLOTS
from lm.ops.sketch_networks.types import ByLevel

AHEAD = 2
"""Chunks to come, at least; of those in use and used, warpgroups may be apart by SLOTS - AHEAD."""


class StreamMemory(NamedTuple):
    """Shared memory and barriers of a `Stream`: SLOTS chunks of each map, and all biases.

    Attributes:
        wide: the wide maps of each level.
        narrow: the narrow maps of either level.
        biases: [4, E / CHUNK, CHUNK], the lower level before the upper level.
        arrived: of each slot, its maps are there.
        used: of each slot, all warpgroups have used its maps.
        ready: the biases are there.
    """

    wide: ByLevel[Any]
    narrow: Any
    biases: Any
    arrived: Any
    used: Any
    ready: Any


def allocate(warpgroups: int, size: int, r: int, hidden: int) -> StreamMemory:
    """Returns the memory for a `Stream` of networks with inputs of `size`."""
    return StreamMemory(
        wide=ByLevel(matrix(SLOTS, CHUNK, size), matrix(SLOTS, CHUNK, r)),
        narrow=matrix(SLOTS, CHUNK, r),
        biases=plgpu.SMEM((4, hidden // CHUNK, CHUNK), jnp.float32),
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        used=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=SLOTS),
        ready=plgpu.Barrier(),
    )


class Stream:
    """The maps of all passes of a kernel, in the order in which it takes them."""

    def __init__(
        self,
        passes: Sequence[tuple[int, int]],
        warpgroup: jax.Array,
        maps: ByLevel[LevelMaps[jax.Ref]],
        biases: Any,
        memory: StreamMemory,
    ):
        """Asks for the first chunks.

        Args:
            passes: (network, level) of each pass of the kernel, 0 or 1 each.
            warpgroup: the number of this warpgroup.
            maps: of both networks, in global memory: [2, E, M] and [2, E, r] for each level.
            biases: [4, E / CHUNK, CHUNK], the lower level before the upper level.
        """
        self.passes, self.warpgroup, self.maps, self.memory, self.at = passes, warpgroup, maps, memory, 0
        self.chunks = maps.lower.wide_Nx2xExM.shape[1] // CHUNK

        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_gmem_to_smem(biases, memory.biases, memory.ready)
            for step in range(AHEAD):
                self._fetch(jnp.int32(step))

        plgpu.barrier_wait(memory.ready)

    @property
    def r(self) -> int:
        """The size of the networks' outputs."""
        return self.maps.lower.narrow.shape[2]

    def _fetch(self, step: jax.Array) -> None:
        """Asks for the chunk of a step."""
        slot, number = lax.rem(step, SLOTS), lax.div(step, self.chunks)
        hidden = pl.ds(lax.rem(step, self.chunks) * CHUNK, CHUNK)
        network, level = (
            sum(which * (number == i).astype(jnp.int32) for i, which in enumerate(one))
            for one in zip(*self.passes, strict=True)
        )
        for which, (wide, narrow) in enumerate(self.maps):

            @pl.when(level == which)
            def _(which=which, wide=wide, narrow=narrow):
                memory, arrived = self.memory, self.memory.arrived.at[slot]
                plgpu.copy_gmem_to_smem(wide.at[network, hidden], memory.wide[which].at[slot], arrived)
                plgpu.copy_gmem_to_smem(narrow.at[network, hidden], memory.narrow.at[slot], arrived)

    def next_pass(self, use: Callable[[Any, Any, Any], None]) -> None:
        """Calls use(w, v, c) for each chunk of the next pass.

        The arguments are the chunk's maps, [CHUNK, M or r] and [CHUNK, r], and its biases [CHUNK], in shared memory.
        """
        network, level = self.passes[self.at]
        first, steps, memory = self.at * self.chunks, len(self.passes) * self.chunks, self.memory
        self.at += 1

        def chunk(i, carry):
            step = first + i
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(memory.arrived.at[slot])
            use(
                memory.wide[level].at[slot],
                memory.narrow.at[slot],
                memory.biases.at[2 * level + network, i],
            )
            # Were products in flight until the next round, the compiler would let none overlap with what follows it.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(memory.used.at[slot])

            @pl.when((self.warpgroup == 0) & (step + AHEAD < steps))
            def _():
                @pl.when(step + AHEAD >= SLOTS)
                def _():
                    plgpu.barrier_wait(memory.used.at[lax.rem(step + AHEAD, SLOTS)])

                self._fetch(step + AHEAD)

            return carry

        lax.fori_loop(0, self.chunks, chunk, ())
