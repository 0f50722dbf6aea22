"""Settings of `lm`'s step that could help, each timed in turns with all others, within a time box.

The settings stand best first. All share one training state, and differ in their programs alone.

    python -m scripts.gpu.peers.settings --context 2048 --save settings.json
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import time
from typing import Any

if cache := os.environ.get('CACHE'):
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', f'{cache}/jax')

import jax

from lm.hardware import peak_flops
from scripts.gpu.peers.jax_steps import build_all
from scripts.gpu.peers.turns import Batch, Column, describe

GRAPHS = 'FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION'


def list_settings(gin_file: str, layers: int) -> list[Column]:
    """Returns the settings, what promises most first."""

    def setting(name: str, remat: str = 'dots', unroll: int = layers, tokens: int = 16_384, **options: Any) -> Column:
        params = f"model.remat = '{remat}'", f'model.unroll = {unroll}'
        return Column(name, 'jax', 'lm', gin_file=gin_file, gin_params=params, microbatch_tokens=tokens, **options)

    def flag(name: str, value: Any) -> dict[str, Any]:
        return {'compiler_options': {f'xla_gpu_{name}': value}}

    return [
        setting('loop', unroll=1),
        setting('unrolled'),
        setting('32768', tokens=32_768),
        setting('none', 'none'),
        setting('none 32768', 'none', tokens=32_768),
        setting('65536', tokens=65_536),
        setting('graphs of everything', **flag('enable_command_buffer', GRAPHS)),
        setting('logits in one piece', logit_bytes=2**32),
        setting('no Triton products', **flag('enable_triton_gemm', False)),
        setting('cuBLASLt', **flag('enable_cublaslt', True)),
        setting('no graphs', **flag('enable_command_buffer', '')),
        setting('latency hiding', **flag('enable_latency_hiding_scheduler', True)),
        setting('dense', 'dense'),
        setting('attention', 'attention'),
        setting('all products by Triton', **flag('triton_gemm_any', True)),
        setting('full', 'full'),
        setting('loop full', 'full', unroll=1),
        setting('no autotuning', **flag('autotune_level', 0)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--context', type=int, default=2048, help='tokens per window')
    parser.add_argument('--tokens_per_step', type=int, default=65_536)
    parser.add_argument('--gin_file', default='configs/models/small.gin', help='the model')
    parser.add_argument('--layers', type=int, default=12, help='layers per iteration of an unrolled loop')
    parser.add_argument('--count', type=int, help='only so many of the settings, best first')
    parser.add_argument('--seconds', type=float, default=20.0, help='the time for all turns')
    parser.add_argument('--build_seconds', type=float, default=60.0, help='settings that begin to compile later wait')
    parser.add_argument('--rounds', type=int, default=5, help='the most turns of each setting')
    parser.add_argument('--build_only', action='store_true', help='only fill the compiler’s cache')
    parser.add_argument('--save', required=True, help='a file for the results, JSON')
    options = parser.parse_args()
    columns = list_settings(options.gin_file, options.layers)[: options.count]
    batch, begun = Batch(options.context, options.tokens_per_step), time.perf_counter()
    steps, facts, seconds = {}, {}, {column.name: [] for column in columns}
    device = jax.devices()[0].device_kind

    def write() -> None:
        rows = []
        for column in columns:
            found, peak = seconds[column.name], peak_flops(device)
            rate = batch.tokens / statistics.median(found) if found else None
            flops = steps[column.name].plan.flops_per_token if column.name in steps else None
            row = {'setting': column.name, 'turns': len(found), 'tokens_per_second': rate}
            row |= {'slowest': batch.tokens / max(found), 'fastest': batch.tokens / min(found)} if found else {}
            row['mfu'] = flops * rate / peak if flops and rate and peak else None
            rows.append(dataclasses.asdict(column) | row | facts.get(column.name, {'error': 'not compiled in time'}))
        machine = {'device': device, 'jax': jax.__version__}
        found = {'benchmark': 'settings', 'machine': machine, 'context': batch.context, 'rows': rows}
        pathlib.Path(options.save).write_text(json.dumps(found, indent=1) + '\n')

    for i in range(0, len(columns), 6):
        if i and time.perf_counter() - begun > options.build_seconds:
            break
        for name, built in build_all(columns[i : i + 6], batch).items():
            facts[name] = built.facts
            if built.step is not None:
                steps[name] = built.step
        write()
    started, longest, state = time.perf_counter(), 0.0, None
    for i in range(0 if options.build_only else options.rounds):
        at = time.perf_counter()
        if i > 1 and at - started + longest > options.seconds:
            break
        for name, step in list(steps.items()):
            if 'error' in facts[name] or time.perf_counter() - started > options.seconds:
                continue
            try:
                step.start(state)
                step.run(1)
                before = time.perf_counter()
                step.run(2)
                seconds[name].append((time.perf_counter() - before) / 2)
                state = step.take_state()
            except Exception as error:
                facts[name]['error'], state = describe(error), None
        longest = max(longest, time.perf_counter() - at)
        write()
    for column in columns:
        found = seconds[column.name]
        rate = f'{batch.tokens / statistics.median(found):,.0f} tokens/s' if found else 'no figure'
        print(f'{column.name}: {rate} {facts.get(column.name, "")}')


if __name__ == '__main__':
    main()
