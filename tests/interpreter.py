"""The interpreter of TPU kernels as all tests use it: as unkind as a machine may be."""

from contextlib import AbstractContextManager

from jax.experimental.pallas import tpu as pltpu


def interpret_kernels() -> AbstractContextManager:
    """Returns a context in which TPU kernels run on the CPU.

    Memory that nobody has written holds NaN. Parallel grid steps run in random order, on two cores. Reads out of bounds
    fail. Races are printed, which fails tests with the fixture `no_races`.
    """
    return pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(
            random_seed=7,
            num_cores_or_threads=2,
            uninitialized_memory='nan',
            out_of_bounds_reads='raise',
            detect_races=True,
        )
    )


def interpret_plainly() -> AbstractContextManager:
    """Returns a context in which TPU kernels run on the CPU as XLA operations, in order and without checks.

    The strict interpreter calls back to Python. XLA aborts on such calls where only some axes of a mesh are split by
    hand.
    """
    return pltpu.force_tpu_interpret_mode(True)
