"""Chips and their figures; slices of TPU pods by name, and their devices as libtpu describes them without a TPU.

Peak bfloat16 FLOP/s, HBM bandwidth and interconnect are Google's, of the pages docs.cloud.google.com/tpu/docs/{v4,v5e,
v5p,v6e,tpu7x}; there "bidirectional ICI bandwidth per chip" is the sum over the links and both directions: half of it,
divided by the links (4 on v5e and v6e, 6 on the others), is one direction of one link. For v4, whose page gives none: 6
links of 50 GB/s (Jouppi et al. 2023, "TPU v4", table 4). Which axes of a slice are closed to a ring: "How to
Scale Your Model" (jax-ml.github.io/scaling-book), chapter 2. A chip's share of the network between slices: the page of
tpu7x, and for v5e its pod's 6.4 Tbit/s by 256 chips; the page of v4 gives none. GPUs: the data sheets, without
sparsity. Memory and matrix units: `lm.ops.chips`.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Protocol

from lm.errors import ConfigError, require
from lm.ops.chips import LIMITS, ChipLimits, limits_of

MATRIX_UNITS = 4
"""Matrix units of a core."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation of TPUs, or one GPU.

    Attributes:
        limits: the memory and units that kernels may use.
        flops: peak bfloat16 FLOP/s of a chip, without sparsity.
        devices: JAX devices of a chip. The two cores of v4 and v5p are one device ("megacore"). The cores of v2, v3 and
            v7x are two devices.
        hbm_bytes: HBM bandwidth of a chip, bytes/s.
        link_bytes: one direction of one link to a neighbour, bytes/s.
        axes: of the network: 2 or 3; 0 where libtpu describes no slices.
        cores: what the number in an accelerator type such as v4-64 counts on each chip.
        libtpu: its name there.
        options: that libtpu needs.
        dcn_bytes: a chip's share of the data-centre network between slices, one direction, bytes/s; 0: not published.
    """

    limits: ChipLimits
    flops: float
    devices: int = 1
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0
    axes: int = 0
    cores: int = 1
    libtpu: str = ''
    options: tuple[tuple[str, str], ...] = ()
    dcn_bytes: float = 0.0

    @property
    def name(self) -> str:
        """The generation, as in 'v5e:4x8'."""
        return self.limits.name

    @property
    def clock(self) -> float:
        """The clock of a TPU's cores, Hz: the peak over the multiply-adds per cycle of all matrix units."""
        return self.flops / 2 / (MATRIX_UNITS * self.cores * self.limits.matrix_side**2)


MEGACORE = (('chip_config_name', 'megacore'),)
CHIPS = (
    Chip(LIMITS['v2'], 45e12, devices=2),
    Chip(LIMITS['v3'], 123e12, devices=2),
    Chip(LIMITS['v4'], 275e12, 1, 1200e9, 50e9, axes=3, cores=2, options=MEGACORE),
    Chip(LIMITS['v5e'], 197e12, 1, 819e9, 50e9, axes=2, dcn_bytes=25e9 / 8),
    Chip(LIMITS['v5p'], 459e12, 1, 2765e9, 100e9, axes=3, cores=2, options=MEGACORE, dcn_bytes=50e9 / 8),
    Chip(LIMITS['v6e'], 918e12, 1, 1638e9, 100e9, axes=2, dcn_bytes=100e9 / 8),
    Chip(LIMITS['v7x'], 2307e12, 2, 7380e9, 100e9, axes=3, cores=2, libtpu='tpu7x', dcn_bytes=100e9 / 8),
    Chip(LIMITS['A100'], 312e12),
    Chip(LIMITS['H100'], 989e12),
    Chip(LIMITS['H200'], 989e12),
    Chip(LIMITS['B200'], 2250e12),
)
BY_NAME = {chip.name: chip for chip in CHIPS}
GENERATIONS = {chip.name: chip for chip in CHIPS if chip.axes}
"""The generations whose slices libtpu describes."""
ALIASES = {'v5litepod': 'v5e', 'tpu7x': 'v7x', 'v6litepod': 'v6e'}

SHAPES = {
    2: ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
    3: (
        '2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x4x12', '4x8x8', '8x8x8', '8x8x16', '8x16x16',
        '16x16x16', '16x16x24',
    ),
}  # fmt: skip
"""The slices that are offered, by the axes of the network."""


LIBTPU_ENVIRONMENT = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
"""Variables with which libtpu describes chips that are not there. libtpu reads them when the first slice is described.
Without them, it asks the network for the machine, and refuses to start beside another process that uses it."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip that a device belongs to, by JAX's name of its kind; None for one that is in no table (CPUs)."""
    limits = limits_of(device_kind)
    return limits and BY_NAME[limits.name]


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device; None where no data sheet gives one (CPUs)."""
    chip = chip_of(device_kind)
    return chip and chip.flops / chip.devices


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a pod, or several equal ones.

    Attributes:
        chip: its generation.
        shape: chips of a slice along each axis.
        slices: how many; between them is the data-centre network (DCN).
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        return f'{self.slices}*{self.slice_name}' if self.slices > 1 else self.slice_name

    @property
    def slice_name(self) -> str:
        """The name of one slice alone."""
        return f'{self.chip.name}:{"x".join(map(str, self.shape))}'

    @property
    def chips(self) -> int:
        """The number of chips of all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def ici_bytes(self) -> float:
        """Bytes/s that the chip in the corner of the slice can send: a line gives it one link an axis, a ring two."""
        if self.chip.axes == 2:
            rings = [n == 16 for n in self.shape]
        else:
            rings = [all(m % 4 == 0 for m in self.shape)] * 3
        links = sum((2 if ring else 1) for n, ring in zip(self.shape, rings, strict=True) if n > 1)
        return links * self.chip.link_bytes


class Device(Protocol):
    """A JAX device, or one that libtpu describes. TPUs have a `slice_index` too."""

    platform: str
    device_kind: str
    process_index: int


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a plan is for, as far as they are known.

    Attributes:
        platform: 'cpu', 'gpu' or 'tpu'.
        slices: the number of devices of each slice; None: not known.
        memory: of a device, bytes; None: not known.
    """

    platform: str = 'cpu'
    slices: tuple[int, ...] | None = None
    memory: int | None = None

    @classmethod
    def of_devices(cls, devices: Sequence[Device]) -> 'Target':
        """Describes JAX devices; CPU devices belong to one slice."""
        slices = tuple(len(members) for members in group_by_slice(devices))
        return cls(devices[0].platform, slices, _measure_memory(devices[0]))

    @property
    def devices(self) -> int | None:
        """The number of all devices; None: not known."""
        return None if self.slices is None else sum(self.slices)


def _measure_memory(device: Device) -> int | None:
    """Returns the bytes of memory of a device that is there; of a CPU, of the whole machine. None: not known."""
    if device.platform != 'cpu':
        limits = limits_of(device.device_kind)
        return int(limits.hbm_gib * 2**30) if limits and limits.hbm_gib else None
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if 'SC_PHYS_PAGES' in os.sysconf_names else None


def read_host_memory(entry: str) -> int | None:
    """Returns an entry of /proc/meminfo, such as 'MemAvailable' or 'MemTotal', in bytes; None: there is none."""
    try:
        lines = pathlib.Path('/proc/meminfo').read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{entry}:')), None)


def group_by_slice(devices: Sequence[Device]) -> list[list[Device]]:
    """Groups JAX devices by their slice, in the order of the slices."""
    slices: dict[int, list[Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, 'slice_index', 0), []).append(device)
    return [slices[index] for index in sorted(slices)]


def describe_devices(topology: Topology) -> list[Device]:
    """Devices to compile for, not to run on, as libtpu describes them.

    Sets `LIBTPU_ENVIRONMENT` in this process, but for what is set already, and loads libtpu.

    Raises ConfigError when libtpu is missing or does not know the slice.
    """
    check_libtpu(topology)
    os.environ.update(LIBTPU_ENVIRONMENT | os.environ)
    from jax.experimental import topologies

    chip = topology.chip
    name = topology.slice_name.replace(chip.name, chip.libtpu or chip.name)
    options: dict[str, object] = dict(chip.options)
    if topology.slices > 1:
        options['num_slices'] = topology.slices
    if math.prod(topology.shape) == 1:
        options['chips_per_host_bounds'] = (1, 1, 1)  # older ones, such as 0.0.42, take it that a host has 2x2
    try:
        return list(topologies.get_topology_desc(name, platform='tpu', **options).devices)
    except Exception as error:  # libtpu raises several kinds
        raise ConfigError(f'--topology {topology.name}: {str(error).splitlines()[0]}; {offered(chip)}') from None


def check_libtpu(topology: Topology) -> None:
    """Raises ConfigError when libtpu is missing."""
    require('libtpu', f'--topology {topology.name}', 'tpu', ' (no TPU is needed)')


def describe_libtpu_fault() -> str | None:
    """Describes what is known to be wrong with the installed libtpu, with the remedy; None: nothing, or no libtpu.

    JAX issue 39744: a kernel with an operand that it never reads gets zeros. Our kernels read all operands.
    """
    try:
        version = importlib.metadata.version('libtpu')
    except importlib.metadata.PackageNotFoundError:
        return None
    if re.match(r'0\.0\.4[345]\b', version) is None:
        return None
    return (
        f'libtpu {version} has a fault: kernels that leave an operand unread get zeros (JAX issue 39744). Kernels of '
        'lm read all; for kernels of your own take the libtpu of another JAX'
    )


def parse(name: str) -> Topology:
    """'v5e:4x8', or an accelerator type: 'v5litepod-32', 'v4-64' (which counts cores); '2*v5e:4x8' is two such slices.

    Raises ConfigError for a generation or a slice that is not offered.
    """
    number, several, one = name.strip().lower().rpartition('*')
    if several and not re.fullmatch(r'[1-9]\d*', number):
        raise ConfigError(f'--topology {name}: write SLICES*GENERATION:SHAPE for several slices, such as 2*v5e:4x8')
    found = re.fullmatch(r'(\w+?)(?:[:=]([\dx]+)|-(\d+))', one)
    kind = ALIASES.get(found[1], found[1]) if found else ''
    if found is None or kind not in GENERATIONS:
        raise ConfigError(
            f'--topology {name}: write GENERATION:SHAPE, such as v5e:4x8 or v4:2x4x4; there are '
            f'{", ".join(GENERATIONS)}'
        )
    chip = GENERATIONS[kind]
    if found[2]:
        shapes = [shape for shape in SHAPES[chip.axes] if shape == found[2]]
    else:
        chips = int(found[3]) / chip.cores
        shapes = [shape for shape in SHAPES[chip.axes] if math.prod(map(int, shape.split('x'))) == chips]
    if not shapes:
        counted = f' (the number counts cores, {chip.cores} a chip)' if found[3] and chip.cores > 1 else ''
        raise ConfigError(f'--topology {name}: no such slice{counted}; {offered(chip)}')
    return Topology(chip, tuple(map(int, shapes[0].split('x'))), int(number or 1))


def generation(name: str) -> Chip:
    """The chip of 'v5e', or of a slice of one chip, 'v5e:1x1'. Raises ConfigError for others."""
    kind, _, shape = name.strip().lower().partition(':')
    kind = ALIASES.get(kind, kind)
    if kind not in GENERATIONS or set(shape) - {'1', 'x'}:
        raise ConfigError(f'--topology {name}: name a chip, one of {", ".join(GENERATIONS)}')
    return GENERATIONS[kind]


def smallest(chip: Chip) -> Topology:
    """The least slice of a generation: one chip, or four."""
    return Topology(chip, tuple(map(int, SHAPES[chip.axes][0].split('x'))))


def offered(chip: Chip) -> str:
    return f'{chip.name} has {", ".join(SHAPES[chip.axes])}'
