"""The interpreter of TPU kernels as all tests use it: as unkind as a machine may be."""

import os
import zlib
from contextlib import AbstractContextManager

from jax.experimental.pallas import tpu as pltpu

RACES_IN_ONE_OF = 1 if os.environ.get('RACES') else 6
"""How many tests of kernels share one search for races: two cores take four times as long to interpret as one."""

cores = 1
"""The cores of the machine that `interpret_kernels` imitates."""


def draw_cores(test: str) -> int:
    """Returns 2 for a test in which races are looked for, by its name, and 1 for others."""
    return 1 if zlib.crc32(test.encode()) % RACES_IN_ONE_OF else 2


def interpret_kernels() -> AbstractContextManager:
    """Returns a context in which TPU kernels run on the CPU.

    Memory that nobody has written holds NaN. Parallel grid steps run in random order. Reads out of bounds fail. In one
    of `RACES_IN_ONE_OF` tests the steps run on two cores, and races are printed: the fixture `no_races` fails on them.
    """
    return pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(
            random_seed=7,
            num_cores_or_threads=cores,
            uninitialized_memory='nan',
            out_of_bounds_reads='raise',
            detect_races=cores > 1,
        )
    )


def interpret_plainly() -> AbstractContextManager:
    """Returns a context in which TPU kernels run on the CPU as XLA operations, in order and without checks.

    The strict interpreter calls back to Python. XLA aborts on such calls where only some axes of a mesh are split by
    hand.
    """
    return pltpu.force_tpu_interpret_mode(True)
