"""Cycles of the TPU kernels without a TPU: read from the compiler's final schedule (`scripts.kernels.cycles`).

libtpu compiles for a described topology on any machine. It dumps the bundles that the core would issue, one per cycle.
Our kernels are straight-line code, so bundles × grid steps is the time without waits for memory. It is more where the
matrix units do not keep up (`lm.cost_model.schedules`). For JAX's splash attention this count reproduces the
published forward time within 5 %, and is about 25 % below the backward time.

`measure_kernels` starts a separate process: libtpu reads its flags once, when it is loaded.
"""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from lm import hardware
from lm.attention import HeadDims
from lm.cost_model import schedules
from lm.errors import ConfigError
from lm.ops.platform import SEQUENCE_AXIS
from scripts.kernels.cases import cases

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOPOLOGIES = {'v4': 'v4:2x2x1', 'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'v7x': 'tpu7x:2x2x1'}
LENGTH, HEADS, HEAD_DIM = 32768, 12, 64


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One kernel on one generation, for `HEADS` heads of one sequence of `LENGTH` tokens in bfloat16.

    Attributes:
        case: one of `cases`.
        generation: a key of `TOPOLOGIES`.
        kernel: 'forward' or 'backward'. 'sums': a backward pass recomputes the sums before each block. '2 folds', for a
            part of a window: the sums over its keys and over its queries.
        cycles: per token and head.
        matrix_unit: the fraction of the rows that the matrix units could take in these cycles.
        vector_unit: the fraction of the vector units' slots in use.
        spills: registers stored because there are too few, per grid step.
        vmem_mib: on-chip memory; 0 if the compiler does not report it.
        temporaries_mib: HBM beside arguments and results, forward and backward together.
    """

    case: str
    generation: str
    kernel: str
    cycles: float
    matrix_unit: float
    vector_unit: float
    spills: int
    vmem_mib: float
    temporaries_mib: float


class Refused(ConfigError):
    """The error if some cases do not compile; `rows` belong to the others."""

    def __init__(self, message: str, rows: list[KernelRow]):
        super().__init__(message)
        self.rows = rows


def find_generation(topology: str) -> str:
    """Returns the name of the generation of 'v5e', or of a slice such as 'v5litepod:4x8'. Raises ConfigError."""
    generation = hardware.generation(topology.partition(':')[0]).name
    if generation not in TOPOLOGIES:
        raise ConfigError(f'--topology {topology}: the generation must be one of {", ".join(TOPOLOGIES)}')
    return generation


def measure_kernels(topology: str, names: Iterable[str] | None = None, parts: int = 1) -> list[KernelRow]:
    """Compiles the kernels for a TPU generation and reads their schedules; takes seconds per case.

    Args:
        topology: 'v5e', or a topology such as 'v5e:4x8'; only the generation matters.
        names: of `cases`; None: all cases, or with `parts` all cases that have kernels for parts.
        parts: chips that share a window; each has as many tokens as the whole window has otherwise.

    Raises:
        Refused: the compiler is missing, or fails with some of the cases.
        ConfigError: an unknown generation or case, more parts than chips, or no case has kernels for parts.
    """
    generation = find_generation(topology)
    chips = math.prod(map(int, TOPOLOGIES[generation].partition(':')[2].split('x')))
    if parts > chips:
        raise ConfigError(f'--parts {parts}: at most {chips}, the chips of {TOPOLOGIES[generation]}')
    names = list(cases() if names is None else names)
    if unknown := [name for name in names if name not in cases()]:
        raise ConfigError(f'case {unknown[0]!r}: must be one of {", ".join(map(repr, cases()))}')
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, '-m', 'scripts.kernels.measure', generation, dump, str(parts), *names]
        environment = schedules.environment(dump)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
    errors = [line['error'] for line in lines if 'error' in line]
    rows = [KernelRow(**line) for line in lines if 'error' not in line]
    if done.returncode == 0 and not lines:
        raise ConfigError(f'--parts {parts}: no kernels of {", ".join(names)} work on a part of a window; leave it out')
    if done.returncode:
        errors.append((done.stderr.strip().splitlines() or ['no output'])[-1] + ' (the `tpu` extra brings libtpu)')
    if errors:
        raise Refused(f'--topology {topology}: cannot compile {"; ".join(errors)}', rows)
    return rows


def _work(generation: str, dump: str, parts: str, *cases: str) -> None:
    for case in cases:
        try:
            rows = [dataclasses.asdict(row) for row in measure_case(case, generation, dump, int(parts))]
        except Exception as error:  # The compiler raises many kinds; the parent process reports the first line.
            rows = [{'error': f'{case}: {str(error).strip().splitlines()[0]}'}]
        for row in rows:
            print(json.dumps(row), flush=True)


def in_parts(inputs: Any, parts: int) -> tuple[Any, Any]:
    """Returns how chips share arrays [B, L, …], and the arrays with `parts` times as many tokens; each chip has all
    others."""

    def is_split(x):
        return x.shape[1:2] == (LENGTH,)

    def longer(x):
        return jax.ShapeDtypeStruct((x.shape[0], parts * LENGTH, *x.shape[2:]), x.dtype) if is_split(x) else x

    specs = jax.tree.map(lambda x: PartitionSpec(None, SEQUENCE_AXIS) if is_split(x) else PartitionSpec(), inputs)
    return specs, jax.tree.map(longer, inputs)


def measure_case(case: str, generation: str, dump: str, parts: int = 1) -> list[KernelRow]:
    """Yields the rows of one case, in a process whose libtpu dumps to `dump`; none if a part of a window has no
    kernels."""
    devices = topologies.get_topology_desc(platform='tpu', topology_name=TOPOLOGIES[generation]).devices
    shutil.rmtree(dump, ignore_errors=True)
    with jax.set_mesh(Mesh(np.array(devices[:parts]), (SEQUENCE_AXIS if parts > 1 else 'data',))):
        call = cases()[case](HeadDims(HEADS, HEADS, HEAD_DIM), LENGTH)
        steps, inputs, function = call.steps, call.inputs, call.function
        if parts > 1:
            if call.part_steps is None:
                return []
            steps = call.part_steps
            specs, inputs = in_parts(inputs, parts)
            function = jax.shard_map(
                function, in_specs=specs, out_specs=PartitionSpec(None, SEQUENCE_AXIS), check_vma=False
            )

        def step(inputs, gradient):
            o, vjp = jax.vjp(function, *inputs)
            return o, vjp(gradient)

        compiled = jax.jit(step).lower(inputs, jax.eval_shape(function, *inputs)).compile()
    try:
        text = compiled.as_text() or ''
    except jax.errors.JaxRuntimeError:  # On v7x copies move to SparseCores, in operations that jaxlib lacks.
        text = ''
    memory = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes if memory else 0
    rows = []
    for (kernel, name), tokens in steps.items():
        schedule = schedules.read_schedule(dump, name, longest=call.skips)
        rows.append(
            KernelRow(
                case=case,
                generation=generation,
                kernel=kernel,
                cycles=round(schedule.cycles / tokens, 3),
                matrix_unit=round(schedule.matrix_use, 3),
                vector_unit=round(schedule.use('VALU'), 3),
                spills=schedule.count('VSTORE:SPILL'),
                vmem_mib=round(_vmem(text, name) / 2**20, 2),
                temporaries_mib=round(temporaries / 2**20, 1),
            )
        )
    return rows


def _vmem(text: str, name: str) -> int:
    """Returns the bytes of scoped VMEM that the compiled program `text` gives to the kernel."""
    size = r'"memory_space":"1","offset":"\d+","size":"(\d+)"'
    lines = [line for line in text.splitlines() if 'tpu_custom_call' in line and name in line]
    return max(
        (int(n) for line in lines for n in re.findall(rf'used_scoped_memory_configs":\[\{{{size}', line)), default=0
    )


if __name__ == '__main__':
    _work(*sys.argv[1:])
