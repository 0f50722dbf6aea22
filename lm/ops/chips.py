"""The chips as kernels see them: on-chip memory, matrix units and memory of each, and which GPUs have kernels.

The memory that a program may use is what the compiler names when it refuses one (libtpu 0.0.51): a little less than the
chip's 32, 16, 96, 32 and 2 × 96 GiB.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ChipLimits:
    """One generation of TPUs, or one GPU, as kernels see it.

    Attributes:
        name: such as 'v5e'.
        kinds: how JAX's `device_kind` begins.
        vmem_mib: on-chip memory of a TPU's core, at least, MiB.
        matrix_side: rows and columns of a TPU's matrix unit.
        device_cores: cores of one JAX device, which share its kernels.
        rotates_by_steps: whether the compiler moves the rows of a TPU's register by one row at a time.
        hbm_gib: HBM that a program may use on one device, GiB; 0: not known.
    """

    name: str
    kinds: tuple[str, ...]
    vmem_mib: int = 64
    matrix_side: int = 128
    device_cores: int = 1
    rotates_by_steps: bool = False
    hbm_gib: float = 0.0


LIMITS = {
    limits.name: limits
    for limits in (
        ChipLimits('v2', ('TPU v2',), vmem_mib=16),
        ChipLimits('v3', ('TPU v3',), vmem_mib=16),
        ChipLimits('v4', ('TPU v4',), vmem_mib=16, device_cores=2, rotates_by_steps=True, hbm_gib=30.75),
        ChipLimits('v5e', ('TPU v5 lite', 'TPU v5e'), vmem_mib=128, hbm_gib=15.75),
        ChipLimits('v5p', ('TPU v5', 'TPU v5p'), device_cores=2, hbm_gib=95.73),
        ChipLimits('v6e', ('TPU v6 lite', 'TPU v6e'), vmem_mib=128, matrix_side=256, hbm_gib=31.24),
        ChipLimits('v7x', ('TPU7x',), matrix_side=256, hbm_gib=94.74),
        ChipLimits('A100', ('NVIDIA A100',)),
        ChipLimits('H100', ('NVIDIA H100',)),
        ChipLimits('H200', ('NVIDIA H200',)),
        ChipLimits('B200', ('NVIDIA B200',)),
    )
}
"""Name → limits."""

HOPPER = re.compile(r'\bG?H(20|100|200|800)\b')
"""Device kinds of the GPUs that the Mosaic GPU kernels are written for."""
MOSAIC_GPU_JAX = (0, 11)
"""The JAX that has what the Mosaic GPU kernels use."""


def limits_of(device_kind: str) -> ChipLimits | None:
    """Returns the limits of a device by JAX's name of its kind; None for a kind that is in no table (CPUs)."""
    kinds = {kind: chip for chip in LIMITS.values() for kind in chip.kinds if device_kind.startswith(kind)}
    return kinds[max(kinds, key=len)] if kinds else None
