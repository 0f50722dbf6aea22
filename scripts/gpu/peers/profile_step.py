"""A trace of three steps of `lm` on this device, as a table of its kernels.

python -m scripts.gpu.peers.profile_step --context 2048 --save profile.json
"""

import argparse
import collections
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

if cache := os.environ.get('CACHE'):
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', f'{cache}/jax')

import jax

from scripts.gpu.peers.jax_steps import LmStep
from scripts.gpu.peers.turns import Batch, Column

STEPS = 3
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"')
PRODUCTS = re.compile('gemm|cutlass|xmma|nvjet|cublas|gemv|^dot')
SCOPES = ('attention_out', 'attention', 'rotary', 'qkv', 'glu', 'norms', 'cross_entropy', 'embedding')


class Kernel(NamedTuple):
    """One run of a kernel; times in nanoseconds."""

    name: str
    instruction: str
    start: float
    duration: float


def read_kernels(folder: str) -> Iterator[Kernel]:
    """Yields the kernels of a trace; on a CPU these are the runs of HLO operations."""
    path = next(pathlib.Path(folder).rglob('*.xplane.pb'))
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith('/device:GPU')] or planes
    for plane in devices:
        for line in plane.lines:
            if line.name.startswith(('XLA', 'Steps', 'Framework', 'Source', 'Launch')):
                continue  # sums over kernels that stand on other lines
            for event in line.events:
                found = dict(event.stats)
                if 'hlo_op' in found or plane.name.startswith('/device:GPU'):
                    yield Kernel(event.name, str(found.get('hlo_op', '')), event.start_ns, event.duration_ns)


def classify(kernel: str, instruction: str, op_name: str) -> str:
    """Returns the kind of work of a kernel, by its name and by the HLO instruction that started it."""
    text = f'{kernel} {instruction}'.lower()
    if 'sdpa' in text or 'flash' in text or ('cudnn' in text and '/attention' in op_name):
        return 'cuDNN attention'
    if 'mosaic' in text or 'pallas' in text:
        return 'our kernels'
    if PRODUCTS.search(kernel.lower()) or 'gemm' in text:
        return 'products'
    if 'memcpy' in text or 'memset' in text or 'copy' in text:
        return 'copies'
    if 'transpose' in text:
        return 'transposes'
    if 'cross_entropy' in op_name:
        return 'cross-entropy'
    if 'jvp' not in op_name:
        return 'optimizer and sums of gradients'
    return 'reductions' if 'reduce' in text else 'elementwise fusions'


def summarize(kernels: list[Kernel], op_names: dict[str, str]) -> dict[str, Any]:
    """Returns milliseconds per step by kind of work and by part of the model, the longest kernels, and the idle
    share."""
    kinds, parts = collections.Counter(), collections.Counter()
    grouped: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for kernel in kernels:
        op_name = op_names.get(kernel.instruction, '')
        milliseconds = kernel.duration / 1e6 / STEPS
        kinds[classify(kernel.name, kernel.instruction, op_name)] += milliseconds
        scope = next((scope for scope in SCOPES if f'/{scope}' in op_name), 'other')
        parts[f'{scope} {"backward" if "transpose(" in op_name else "forward"}'] += milliseconds
        grouped[kernel.name, kernel.instruction].append(milliseconds)
    busy, end = 0.0, float('-inf')
    for kernel in sorted(kernels, key=lambda one: one.start):
        busy += max(0.0, kernel.start + kernel.duration - max(end, kernel.start))
        end = max(end, kernel.start + kernel.duration)
    span = end - min((one.start for one in kernels), default=end)
    longest = sorted(grouped.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        'milliseconds': {name: round(value, 3) for name, value in kinds.most_common()},
        'parts': {name: round(value, 3) for name, value in parts.most_common()},
        'busy_milliseconds': busy / 1e6 / STEPS,
        'idle_share': 1 - busy / span if span > 0 else None,
        'kernels_per_step': len(kernels) / STEPS,
        'longest': [
            {
                'kernel': name[:120],
                'instruction': instruction,
                'op_name': op_names.get(instruction, '')[-160:],
                'per_step': len(found) / STEPS,
                'milliseconds': round(sum(found), 4),
            }
            for (name, instruction), found in longest
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--context', type=int, default=2048, help='tokens per window')
    parser.add_argument('--tokens_per_step', type=int, default=65_536)
    parser.add_argument('--attention', default='softmax', help='a mechanism or a gin file')
    parser.add_argument('--gin_file', default='configs/models/small.gin', help='the model')
    parser.add_argument('--gin_param', action='append', default=[], help='a further setting')
    parser.add_argument('--save', required=True, help='a file for the results, JSON')
    options = parser.parse_args()
    params = tuple(options.gin_param)
    column = Column('lm', 'jax', 'lm', attention=options.attention, gin_file=options.gin_file, gin_params=params)
    step = LmStep(column, Batch(options.context, options.tokens_per_step))
    text = step.compile().as_text()
    op_names = {found[1]: found[2] for line in text.splitlines() if (found := INSTRUCTION.match(line))}
    step.run(2)
    begun = time.perf_counter()
    step.run(STEPS)
    seconds = (time.perf_counter() - begun) / STEPS
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step.run(STEPS)
        found = summarize(list(read_kernels(folder)), op_names)
    machine = {'device': jax.devices()[0].device_kind, 'jax': jax.__version__}
    settings = {'context': options.context, 'attention': options.attention, 'gin_params': params}
    result = {'benchmark': 'profile', 'machine': machine, **settings, 'seconds_per_step': seconds, **found}
    pathlib.Path(options.save).write_text(json.dumps(result, indent=1) + '\n')
    print(json.dumps({key: value for key, value in result.items() if key != 'longest'}, indent=1))


if __name__ == '__main__':
    main()
