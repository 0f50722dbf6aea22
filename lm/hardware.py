"""TPU topologies without TPUs: chips and their figures, names of slices, and the devices that libtpu describes.

Peak bfloat16 FLOP/s, HBM bandwidth and interconnect are Google's, of the pages docs.cloud.google.com/tpu/docs/{v4,v5e,
v5p,v6e,tpu7x}; there "bidirectional ICI bandwidth per chip" is the sum over the links and both directions: half of it,
divided by the links (4 on v5e and v6e, 6 on the others), is one direction of one link. For v4, whose page gives none: 6
links of 50 GB/s (Jouppi et al. 2023, "TPU v4", table 4). The HBM that a program may use is what the compiler names when
it refuses one (libtpu 0.0.51): a little less than the chip's 32, 16, 96, 32 and 2 × 96 GiB. Which axes of a slice are
closed to a ring: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter 2.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
from typing import Any

from lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
        name: as in 'v5e:4x8'.
        flops: peak bfloat16 FLOP/s of a chip.
        hbm_gib: HBM that a program may use on one device, GiB.
        hbm_bytes: HBM bandwidth of a chip, bytes/s.
        link_bytes: one direction of one link to a neighbour, bytes/s.
        axes: of the network: 2 or 3.
        devices: JAX devices of a chip. The two cores of v4 and v5p are one device ("megacore"), those of v7x are two.
        cores: what the number in an accelerator type such as v4-64 counts on each chip.
        libtpu: its name there.
        options: that libtpu needs.
    """

    name: str
    flops: float
    hbm_gib: float
    hbm_bytes: float
    link_bytes: float
    axes: int
    devices: int = 1
    cores: int = 1
    libtpu: str = ''
    options: tuple[tuple[str, str], ...] = ()


PEAK_FLOPS = {
    # Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets. A v2/v3/v7x device is one core.
    'TPU v2': 22.5e12,
    'TPU v3': 61.5e12,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'TPU7x': 1153.5e12,
    'NVIDIA A100': 312e12,
    'NVIDIA H100': 989e12,
    'NVIDIA H200': 989e12,
    'NVIDIA B200': 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device; None where no data sheet gives one (CPUs)."""
    matches = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


MEGACORE = (('chip_config_name', 'megacore'),)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip('v4', 275e12, 30.75, 1200e9, 50e9, axes=3, cores=2, options=MEGACORE),
        Chip('v5e', 197e12, 15.75, 819e9, 50e9, axes=2),
        Chip('v5p', 459e12, 95.73, 2765e9, 100e9, axes=3, cores=2, options=MEGACORE),
        Chip('v6e', 918e12, 31.24, 1638e9, 100e9, axes=2),
        Chip('v7x', 2307e12, 94.74, 7380e9, 100e9, axes=3, devices=2, cores=2, libtpu='tpu7x'),
    )
}
ALIASES = {'v5litepod': 'v5e', 'tpu7x': 'v7x', 'v6litepod': 'v6e'}

SHAPES = {
    2: ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
    3: (
        '2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x4x12', '4x8x8', '8x8x8', '8x8x16', '8x16x16',
        '16x16x16', '16x16x24',
    ),
}  # fmt: skip
"""The slices that are offered, by the axes of the network."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a pod.

    Attributes:
        chip: its generation.
        shape: chips along each axis.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f'{self.chip.name}:{"x".join(map(str, self.shape))}'

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def ici_bytes(self) -> float:
        """Bytes/s that the chip in the corner of the slice can send: a line gives it one link an axis, a ring two."""
        if self.chip.axes == 2:
            rings = [n == 16 for n in self.shape]
        else:
            rings = [all(m % 4 == 0 for m in self.shape)] * 3
        links = sum((2 if ring else 1) for n, ring in zip(self.shape, rings, strict=True) if n > 1)
        return links * self.chip.link_bytes

    @functools.cached_property
    def devices(self) -> list[Any]:
        """What libtpu describes: devices to compile for, not to run on.

        Raises ConfigError when libtpu is missing or does not know the slice.
        """
        if importlib.util.find_spec('libtpu') is None:
            raise ConfigError(
                f"--topology {self.name}: compiling for TPUs needs libtpu; pip install -e '.[tpu]' (no TPU is needed)"
            )
        # Read when libtpu is loaded, which is when the first topology is described. Without them it asks the network
        # which machine this is, and refuses to start beside another process that uses it.
        for name, value in {
            'TPU_SKIP_MDS_QUERY': '1',
            'TPU_WORKER_HOSTNAMES': 'localhost',
            'TPU_WORKER_ID': '0',
            'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
            'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
        }.items():
            os.environ.setdefault(name, value)
        from jax.experimental import topologies

        name = f'{self.chip.libtpu or self.chip.name}:{"x".join(map(str, self.shape))}'
        try:
            return list(topologies.get_topology_desc(name, platform='tpu', **dict(self.chip.options)).devices)
        except Exception as error:  # libtpu raises several kinds
            raise ConfigError(f'--topology {self.name}: {str(error).splitlines()[0]}; {offered(self.chip)}') from None


def parse(name: str) -> Topology:
    """'v5e:4x8', or an accelerator type: 'v5litepod-32', 'v4-64' (which counts cores).

    Raises ConfigError for a generation or a slice that is not offered.
    """
    found = re.fullmatch(r'(\w+?)(?:[:=]([\dx]+)|-(\d+))', name.strip().lower())
    kind = ALIASES.get(found[1], found[1]) if found else ''
    if kind not in CHIPS:
        raise ConfigError(
            f'--topology {name}: write GENERATION:SHAPE, such as v5e:4x8 or v4:2x4x4; there are {", ".join(CHIPS)}'
        )
    chip = CHIPS[kind]
    if found[2]:
        shapes = [shape for shape in SHAPES[chip.axes] if shape == found[2]]
    else:
        chips = int(found[3]) / chip.cores
        shapes = [shape for shape in SHAPES[chip.axes] if math.prod(map(int, shape.split('x'))) == chips]
    if not shapes:
        counted = f' (the number counts cores, {chip.cores} a chip)' if found[3] and chip.cores > 1 else ''
        raise ConfigError(f'--topology {name}: no such slice{counted}; {offered(chip)}')
    return Topology(chip, tuple(map(int, shapes[0].split('x'))))


def offered(chip: Chip) -> str:
    return f'{chip.name} has {", ".join(SHAPES[chip.axes])}'
