"""Cycles of the TPU kernels without a TPU: read from the compiler's final schedule (`lm bench kernels`).

libtpu compiles for a described topology on any machine and dumps the bundles that the core would issue, one a cycle.
Our kernels are straight-line code, so bundles × grid steps is the time without waits for memory. For JAX's splash
attention the same count reproduces the published forward time within 5 % and is about 25 % short on the backward one.

`kernels` starts a process of its own: libtpu reads its flags once, when it is loaded.
"""

import argparse
import dataclasses
import glob
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from lm.errors import ConfigError

TOPOLOGIES = {'v4': 'v4:2x2x1', 'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'v7x': 'tpu7x:2x2x1'}
LENGTH, HEADS, HEAD_DIM = 32768, 12, 64
CASES = {
    'polysketch r=32 block=256': {'sketch_size': 32, 'block': 256},
    'polysketch r=32 block=512': {'sketch_size': 32, 'block': 512},
    'polysketch r=32 block=1024': {'sketch_size': 32, 'block': 1024},
    'polysketch r=32 without local': {'sketch_size': 32, 'block': None},
    'polysketch r=64 block=256': {'sketch_size': 64, 'block': 256},
    'polysketch r=64 block=1024': {'sketch_size': 64, 'block': 1024},
    'features 256': {'features': 256, 'block': None},
    'performer 2048': {'performer': 2048},
    'llops 256, p=4': {'llops': 256},
    'taylor 16': {'features': 16, 'powers': (1.0, 1.0, 0.5), 'block': None},
    'polynomial p=4': {'degree': 4},
    'sketch networks r=32': {'networks': 32},
    'sketch networks r=64': {'networks': 64},
    'splash': {},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel on one generation, for `HEADS` heads of one sequence of `LENGTH` tokens in bfloat16.

    Attributes:
        case: a key of `CASES`.
        generation: a key of `TOPOLOGIES`.
        kernel: 'forward' or 'backward'.
        cycles: per token and head.
        matrix_unit: share of the cycles in which a matrix unit takes a row.
        vector_unit: share of the vector units' slots in use.
        spills: registers stored for want of registers, per grid step.
        vmem_mib: on-chip memory; 0 where the compiler does not say.
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


def kernels(topology: str, cases: Iterable[str] | None = None) -> list[Row]:
    """Compiles the kernels for a TPU generation and reads their schedules; takes seconds a case.

    Args:
        topology: 'v5e', or a topology such as 'v5e:4x8', of which the generation matters.
        cases: keys of `CASES`; None: all.

    Raises:
        ConfigError: an unknown generation or case, or the compiler is missing or fails.
    """
    generation = topology.split(':')[0].replace('tpu7x', 'v7x').replace('v5litepod', 'v5e')
    if generation not in TOPOLOGIES:
        raise ConfigError(f'--topology {topology}: the generation must be one of {", ".join(TOPOLOGIES)}')
    cases = list(CASES if cases is None else cases)
    if unknown := [case for case in cases if case not in CASES]:
        raise ConfigError(f'case {unknown[0]!r}: must be one of {", ".join(CASES)}')
    with tempfile.TemporaryDirectory() as dump:
        flags = (
            f'--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*(final|util).*'
        )
        environment = os.environ | {
            'JAX_PLATFORMS': 'cpu',
            'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
            'TPU_SKIP_MDS_QUERY': '1',
            'TPU_WORKER_HOSTNAMES': 'localhost',
            'LIBTPU_INIT_ARGS': flags,
        }
        command = [sys.executable, '-m', 'lm.bench.kernels', '--worker', dump, '--topology', generation, *cases]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
    errors = [row['error'] for row in rows if 'error' in row]
    if done.returncode or not rows:
        errors.append((done.stderr.strip().splitlines() or ['no output'])[-1] + ' (the `tpu` extra brings libtpu)')
    if errors:
        raise ConfigError(f'--topology {topology}: cannot compile {"; ".join(errors)}')
    return [Row(**row) for row in rows]


def table(rows: list[Row]) -> str:
    """The rows as text, with the sum of forward and backward, and how many times faster than splash that is."""
    lines = [f'{"":32}{"gen":5}{"kernel":10}{"cycles":>9}{"matrix":>8}{"vector":>8}{"spills":>8}{"VMEM":>8}{"temp":>9}']
    for row in rows:
        lines.append(
            f'{row.case:32}{row.generation:5}{row.kernel:10}{row.cycles:9.2f}{row.matrix_unit:8.0%}{row.vector_unit:8.0%}'
            f'{row.spills:8}{row.vmem_mib:8.1f}{row.temporaries_mib:9.1f}'
        )
    lines.append(f'\n{"cycles per token and head":32}{"gen":5}{"sum":>10}{"splash / sum":>16}')
    sums = total(rows)
    for (case, generation), cycles in sums.items():
        splash = sums.get(('splash', generation))
        lines.append(f'{case:32}{generation:5}{cycles:10.2f}{f"{splash / cycles:.1f}" if splash else "":>16}')
    return '\n'.join(lines)


def total(rows: list[Row]) -> dict[tuple[str, str], float]:
    """(case, generation) → cycles per token and head, forward plus backward."""
    result: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.case, row.generation)
        result[key] = result.get(key, 0.0) + row.cycles
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='lm bench kernels', description=__doc__.splitlines()[0])
    parser.add_argument('--topology', default='v5e', help='v4, v5e, v5p, v6e, v7x; several with commas')
    parser.add_argument('--json', help='also write the rows to this file')
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    parser.add_argument('cases', nargs='*', metavar='case', help=f'of {", ".join(CASES)}')
    options = parser.parse_args(arguments)
    if options.worker:
        return _work(options.cases, options.topology, options.worker)
    rows = [row for topology in options.topology.split(',') for row in kernels(topology, options.cases or None)]
    print(table(rows))
    if options.json:
        with open(options.json, 'w') as file:
            json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """`lm bench kernels`: `main`, with a heading, and JSON that says with which versions it was made."""
    from lm.bench import results

    results.check_writable(arguments.json, None)
    rows = [row for topology in arguments.topology for row in kernels(topology, arguments.cases or None)]
    machine = results.machine()
    printer = results.Printer()
    printer.line(results.heading('lm bench kernels', machine, ('jax', 'jaxlib', 'libtpu')))
    printer.line(f'compiled, not run: {LENGTH:,} tokens, {HEADS} heads of {HEAD_DIM}, bfloat16\n')
    printer.line(table(rows))
    settings = {'topologies': arguments.topology, 'length': LENGTH, 'heads': HEADS, 'head_dim': HEAD_DIM}
    results.write_json(arguments.json, 'kernels', machine, settings, rows)
    return 0


def _work(cases: list[str], generation: str, dump: str) -> int:
    for case in cases:
        try:
            rows = [dataclasses.asdict(row) for row in measure(case, generation, dump)]
        except Exception as error:  # The compiler raises many kinds; the parent process reports the first line.
            rows = [{'error': f'{case}: {str(error).strip().splitlines()[0]}'}]
        for row in rows:
            print(json.dumps(row), flush=True)
    return 0


def measure(case: str, generation: str, dump: str) -> list[Row]:
    """The rows of one case, in a process whose libtpu dumps to `dump`."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    devices = topologies.get_topology_desc(platform='tpu', topology_name=TOPOLOGIES[generation]).devices
    shutil.rmtree(dump, ignore_errors=True)
    with jax.set_mesh(Mesh(np.array(devices[:1]), ('data',))):
        builders = {'networks': _networks, 'degree': _polynomial, 'performer': _performer, 'llops': _llops}
        build = _splash if case == 'splash' else builders.get(next(iter(CASES[case])), _linear)
        function, inputs, steps = build(**CASES[case])

        def step(*arrays):
            o, vjp = jax.vjp(function, *arrays[:-1])
            return o, vjp(arrays[-1])

        compiled = jax.jit(step).lower(*inputs).compile()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # On v7x the compiler moves copies to SparseCores in words that jaxlib lacks.
        text = ''
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    rows = []
    for (kernel, name), tokens in steps.items():
        schedule = read_schedule(dump, name, longest=case == 'splash' or 'degree' in CASES[case])
        rows.append(
            Row(
                case=case,
                generation=generation,
                kernel=kernel,
                cycles=round(schedule.bundles / tokens, 3),
                matrix_unit=round(schedule.use('MATMUL', 'MXU'), 3),
                vector_unit=round(schedule.use('VALU'), 3),
                spills=schedule.count('VSTORE:SPILL'),
                vmem_mib=round(_vmem(text, name) / 2**20, 2),
                temporaries_mib=round(temporaries / 2**20, 1),
            )
        )
    return rows


def _linear(block: int | None, sketch_size: int = 0, features: int = 0, powers: tuple[float, ...] = ()):
    """A function, abstract inputs and output gradient, and the tokens · heads of a grid step of each kernel."""
    import jax

    from lm.ops import linear_attention as op
    from lm.ops.linear_attention.tpu import attention as pallas_tpu

    size = sketch_size or features
    local = None if block is None else op.PolynomialKernel(4)
    options = {'powers': powers or (op.SQUARE if sketch_size else op.PLAIN), 'local': local, 'block': block}
    wide, narrow = (_bfloat16(1, LENGTH, HEADS, n) for n in (HEAD_DIM, size))
    inputs = [narrow, narrow, wide] + ([] if local is None else [wide, wide])

    def function(q, k, v, q_local=None, k_local=None):
        with_local = {'q_local_BxLxHxC': q_local, 'k_local_BxLxKxC': k_local}
        return op.linear_attention(q, k, v, **with_local, **options, implementation='pallas_tpu')

    sizes = (size, HEAD_DIM, 0 if local is None else HEAD_DIM, 2)
    plan = pallas_tpu.plan_for(op.Options(**options), LENGTH, HEADS, *sizes)
    steps = {(kernel, f'linear_attention_{kernel}'): plan.block * plan.heads for kernel in ('forward', 'backward')}
    return function, [*inputs, jax.ShapeDtypeStruct(wide.shape, wide.dtype)], steps


def _performer(performer: int):
    """The same for Performer, whose feature map the kernels compute; its projection has no gradient."""
    import jax

    from lm.attention.maps.random_features import Keys, Queries
    from lm.attention.performer import Performer

    feature_map = Performer(n_features=performer).feature_map(HEAD_DIM)
    projection = jax.ShapeDtypeStruct((performer, HEAD_DIM), 'float32')
    return _mapped(feature_map, _bfloat16(1, LENGTH, HEADS, HEAD_DIM), Queries(projection), Keys(projection), bias=0.0)


def _llops(llops: int):
    """The same for LLoPS of degree 4: its queries and keys, normalised, are float32."""
    import jax

    from lm.attention.llops import Sketch

    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, HEAD_DIM), 'float32')
    factors = jax.ShapeDtypeStruct((2, 1, HEAD_DIM, llops), 'float32')
    return _mapped(Sketch(True, False, 'bfloat16', n_features=llops), x, factors, factors, bias=1.0)


def _mapped(feature_map, x, *parameters, bias: float):
    from lm.ops import linear_attention as op
    from lm.ops.linear_attention.tpu import attention as pallas_tpu

    v = _bfloat16(1, LENGTH, HEADS, HEAD_DIM)

    def function(q, k, v, *parameters):
        options = {'feature_map': feature_map, 'bias': bias, 'implementation': 'pallas_tpu'}
        return op.linear_attention(q, k, v, q_parameters=parameters[0], k_parameters=parameters[1], **options)

    made = pallas_tpu.made_by(feature_map, x, parameters[0])
    options = op.Options(feature_map=feature_map, bias=bias)
    plan = pallas_tpu.plan_for(options, LENGTH, HEADS, HEAD_DIM, HEAD_DIM, 0, 2, *made)
    steps = {(kernel, f'linear_attention_{kernel}'): plan.block * plan.heads for kernel in ('forward', 'backward')}
    return function, [x, x, v, *parameters, v], steps


def _networks(networks: int):
    """The same for the networks of learned sketches of `networks` numbers, of queries and keys together."""
    import jax

    from lm.ops import sketch_networks as op
    from lm.ops.sketch_networks.tpu import networks as pallas_tpu

    r, hidden = networks, 8 * networks
    sizes = ((HEAD_DIM, hidden), (hidden, r), (r, hidden), (hidden, r))
    kernels = tuple(jax.ShapeDtypeStruct((1, *size), 'float32') for size in sizes)
    norms = tuple(jax.ShapeDtypeStruct((1, 1, size), 'float32') for size in (HEAD_DIM, r))
    nodes = ((op.Network(kernels, norms, norms),) * 2,)
    wide, narrow = (_bfloat16(1, LENGTH, 1, HEADS, n) for n in (HEAD_DIM, r))

    def function(nodes, q, k):
        return op.sketch_networks(nodes, q, k, implementation='pallas_tpu')

    plan = pallas_tpu.plan_for(LENGTH, HEADS, HEAD_DIM, hidden, r, 2)
    tokens = plan.block / 2  # A grid step takes a block of queries or one of keys.
    steps = {(kernel, f'sketch_networks_{kernel}'): tokens for kernel in ('forward', 'backward')}
    return function, [nodes, wide, wide, (narrow, narrow)], steps


def _splash():
    """The same for causal softmax attention; a grid step takes one block of queries and one of keys."""
    from lm.ops import exact_attention as op
    from lm.ops.exact_attention.splash import block_size, key_block_size

    wide = _bfloat16(1, LENGTH, HEADS, HEAD_DIM)
    block = block_size(LENGTH)
    key_block = key_block_size(LENGTH, block)
    tokens = LENGTH / sum(start // key_block + 1 for start in range(0, LENGTH, block))
    names = {('forward', 'splash_mha_fwd'): tokens, ('backward', 'splash_mha_dkv'): tokens}
    names |= {('backward', 'splash_mha_dq'): tokens}
    return lambda q, k, v: op.softmax_attention(q, k, v, implementation='splash'), [wide] * 4, names


def _polynomial(degree: int):
    """The same for causal polynomial attention; a grid step takes one block of queries and one of keys."""
    from lm.ops import exact_attention as op
    from lm.ops.exact_attention.splash import block_size

    blocks = LENGTH // block_size(LENGTH)
    tokens = LENGTH / (blocks * (blocks + 1) // 2)
    steps = {(kernel, f'polynomial_attention_{kernel}'): tokens for kernel in ('forward', 'backward')}
    inputs = [_bfloat16(1, LENGTH, HEADS, HEAD_DIM)] * 4
    return lambda q, k, v: op.polynomial_attention(q, k, v, degree=degree, implementation='pallas_tpu'), inputs, steps


def _bfloat16(*shape: int):
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """Bundles, and for each unit how often it is used and how many of it there are."""

    bundles: int
    units: dict[str, tuple[int, int]]

    def count(self, name: str) -> int:
        return self.units.get(name, (0, 1))[0]

    def use(self, *names: str) -> float:
        for name in names:
            if name in self.units:
                used, capacity = self.units[name]
                return used / capacity / self.bundles
        return 0.0


def read_schedule(dump: str, name: str, longest: bool = False) -> KernelSchedule:
    """The final schedule of the kernel whose name holds `name`.

    Args:
        dump: where libtpu wrote its files.
        name: of the kernel.
        longest: only the longest run of bundles without a branch target, where a kernel that skips work is busy.
    """
    import numpy as np

    lines = _dumped(dump, name, 'final_hlo-static-per-bundle').splitlines()
    names, capacities = lines[1].split(', '), [int(n) for n in lines[2].split()]
    used = np.array([[int(n) for n in line.split()] for line in lines[4:] if re.fullmatch(r'[\d ]+', line)])
    if longest:
        marks = re.findall(r'^\s*(0x[0-9a-f]+|0)\s+(?:LH|LB|LE|PB|PF)\b', _dumped(dump, name, 'final_bundles'), re.M)
        ends = sorted({0, len(used), *(int(mark, 16) for mark in marks)})
        low, high = max(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0])
        used = used[low:high]
    units = {unit: (int(n), c) for unit, n, c in zip(names, used.sum(0), capacities, strict=True)}
    return KernelSchedule(len(used), units)


def _dumped(dump: str, name: str, part: str) -> str:
    matches = [p for p in glob.glob(f'{dump}/*') if re.match(rf'\d+-[^-]*{name}[^-]*-\d+-{part}', os.path.basename(p))]
    if not matches:
        raise ConfigError(f'{name}: libtpu left no {part}; its dump format may have changed')
    with open(max(matches)) as file:
        return file.read()


def _vmem(text: str, name: str) -> int:
    """Bytes of scoped VMEM that the compiled program `text` gives to the kernel."""
    size = r'"memory_space":"1","offset":"\d+","size":"(\d+)"'
    lines = [line for line in text.splitlines() if 'tpu_custom_call' in line and name in line]
    return max(
        (int(n) for line in lines for n in re.findall(rf'used_scoped_memory_configs":\[\{{{size}', line)), default=0
    )


if __name__ == '__main__':
    sys.exit(main())
