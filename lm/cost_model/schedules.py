"""Static schedules of TPU kernels: the bundles that the core would issue, one per cycle, and their number of runs.

libtpu writes the final schedule of everything that it compiles into a folder, if flags ask for it before it is loaded.
Our kernels are straight-line code inside the loop over their grid. So cycles × grid steps is their time without waits
for memory.

A core issues a bundle per cycle, but its matrix units take one row each. On v4, v5e and v5p libtpu schedules 16 rows
in 12 or 13 cycles of a unit, whose peak is one row per cycle: a kernel that is mostly products then waits for them.
"""

import base64
import dataclasses
import glob
import itertools
import math
import os
import re
import shutil
from typing import Any

from lm.errors import ConfigError
from lm.hardware import LIBTPU_ENVIRONMENT, MATRIX_UNITS

FLAGS = '--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_(hlo|bundles).*'
VARIABLE = 'LIBTPU_INIT_ARGS'
"""Flags of libtpu; read once, when it is loaded."""

SKIPPING = ('splash_mha', 'flash_attention')
"""Kernels whose grid steps skip work: only the longest run of bundles without a branch counts.

The grid of JAX's kernels has all pairs of blocks. The pairs on and below the diagonal count.
"""
ALL_PAIRS = SKIPPING[:1]


ROWS = {'f32': 8, 'bf16': 16, 's8': 32, 'u8': 32, 'f8': 32}
"""The rows of an operand that one instruction passes to a matrix unit, by the start of its type's name."""
_PRODUCT = re.compile(r'\bvmatmul(?:\.\w+)*?\.(f32|bf16|s8|u8|f8)')


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The bundles of a kernel, and what they use.

    Attributes:
        bundles: their number.
        rows: of operands that they pass to the matrix units.
        units: for each other unit, its uses and the number of such units.
    """

    bundles: int
    rows: int
    units: dict[str, tuple[int, int]]

    @property
    def cycles(self) -> float:
        """The cycles of one grid step without waits for memory."""
        return max(self.bundles, self.rows / MATRIX_UNITS)

    @property
    def matrix_use(self) -> float:
        """The share of these cycles' rows that the matrix units take."""
        return self.rows / MATRIX_UNITS / self.cycles

    def count(self, name: str) -> int:
        return self.units.get(name, (0, 1))[0]

    def use(self, *names: str) -> float:
        for name in names:
            if name in self.units:
                used, capacity = self.units[name]
                return used / capacity / self.bundles
        return 0.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """The steps along each axis of a kernel's grid.

    Attributes:
        steps: of each axis.
        parallel: whether the cores of a device may share the steps of the axis.
        blocks: the shapes of the blocks that one step sees, per operand and result.
    """

    steps: tuple[int, ...]
    parallel: tuple[bool, ...]
    blocks: tuple[tuple[int, ...], ...] = ()

    def steps_of_a_core(self, cores: int) -> int:
        """Returns the grid steps of the busiest core. With an odd number, another core has less work."""
        shared = math.prod(n for n, parallel in zip(self.steps, self.parallel, strict=True) if parallel)
        return math.prod(self.steps) // shared * -(-shared // cores)


def environment(folder: str) -> dict[str, str]:
    """Returns the environment of a process that compiles for described TPUs and writes schedules into `folder`."""
    given = {VARIABLE: f'{os.environ.get(VARIABLE, "")} {FLAGS.format(folder)}'.strip(), 'JAX_PLATFORMS': 'cpu'}
    return os.environ | LIBTPU_ENVIRONMENT | given


def clear(dump: str) -> None:
    """Forgets the earlier compilations."""
    shutil.rmtree(dump, ignore_errors=True)
    os.makedirs(dump)


def read_schedule(dump: str, name: str, longest: bool = False) -> KernelSchedule:
    """Reads the final schedule of the kernel whose name contains `name`.

    Args:
        dump: the folder with libtpu's files.
        name: of the kernel.
        longest: only the longest run of bundles without a branch target counts: there a kernel that skips work is busy.

    Raises ConfigError if there is none.
    """
    import numpy as np

    lines = _dumped(dump, name, 'final_hlo-static-per-bundle').splitlines()
    names, capacities = lines[1].split(', '), [int(n) for n in lines[2].split()]
    used = np.array([[int(n) for n in line.split()] for line in lines[4:] if re.fullmatch(r'[\d ]+', line)])
    bundles = re.findall(r'^\s*(0x[0-9a-f]+|0)\s(.*)', _dumped(dump, name, 'final_bundles'), re.M)
    if longest:
        marks = (address for address, text in bundles if re.match(r'\s*(?:LH|LB|LE|PB|PF)\b', text))
        ends = sorted({0, len(used), *(int(mark, 16) for mark in marks)})
        low, high = max(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0])
        used, bundles = used[low:high], bundles[low:high]
    units = {unit: (int(n), c) for unit, n, c in zip(names, used.sum(0), capacities, strict=True)}
    rows = sum(ROWS[kind] for _, text in bundles for kind in _PRODUCT.findall(text))
    return KernelSchedule(len(used), rows, units)


def read_grid(body: str) -> Grid | None:
    """Reads the grid of a kernel from its program, which the compiled program holds in base64; None: unreadable."""
    try:
        # JAX has no public way to read the lowered form of its kernels; this one is private.
        from jax._src.interpreters import mlir
        from jax._src.lib import tpu  # pyright: ignore[reportPrivateImportUsage]
        from jax.extend.mlir import ir

        with ir.Context() as context:
            context.append_dialect_registry(mlir.upstream_dialects)
            context.load_all_available_dialects()
            tpu.register_dialect(context)
            context.allow_unregistered_dialects = True
            attributes: Any = ir.Module.parse(base64.b64decode(body)).body.operations[0].attributes
            parallel = tuple('parallel' in str(axis) for axis in attributes['dimension_semantics'])
            windows = attributes.get('window_params', ())
            blocks = tuple(tuple(w['window_bounds']) for w in windows if 'window_bounds' in w)
            return Grid(tuple(attributes['iteration_bounds']), parallel, blocks)
    except Exception:  # MLIR raises several kinds, and a private module may disappear.
        return None


def causal_share(first: int, second: int) -> float:
    """Returns the share of block pairs that a causal kernel computes, in a grid of `first` × `second` pairs.

    These pairs are on and below the diagonal. A block of keys is as long as a block of queries, or twice as long.
    """
    rows, columns = max(first, second), min(first, second)
    return sum(-(-(row + 1) * columns // rows) for row in range(rows)) / (rows * columns)


def _dumped(dump: str, name: str, part: str) -> str:
    pattern = rf'\d+-[^-]*{name}[^-]*-\d+-{part}'
    matches = [p for p in glob.glob(f'{dump}/*') if re.match(pattern, os.path.basename(p))]
    if not matches:
        raise ConfigError(f'{name}: libtpu left no {part}; its dump format may have changed')
    with open(max(matches)) as file:
        return file.read()
