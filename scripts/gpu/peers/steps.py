"""Whole training steps side by side: `lm`, a minimal JAX step, and PyTorch in nanoGPT's way.

A process per framework holds its compiled steps. The processes take turns on the device, one step's turn after the
other, so that all see the same minutes. On CPUs seconds are of processor time. MFU has one formula for all:
`ModelConfig.flops_per_token`.

    python -m scripts.gpu.peers.steps --context 1024 --save steps.json
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

INHERITED = os.environ.get('JAX_PLATFORMS')
os.environ['JAX_PLATFORMS'] = 'cpu'  # this process only counts FLOPs

from lm.bench.candidates import candidates  # noqa: E402
from lm.hardware import peak_flops  # noqa: E402
from scripts.gpu.peers.turns import Batch, Column, Shape, Worker  # noqa: E402

PADDED_VOCABULARY = 50_304
"""nanoGPT pads GPT-2's vocabulary to a multiple of 64."""


def list_columns(gin_file: str, gin_params: Sequence[str], shape: Shape) -> list[Column]:
    """Returns all columns for a model of `lm`."""
    folder, dots = 'configs/attention', (*gin_params, "model.remat = 'dots'")
    unrolled = (*dots, f'model.unroll = {shape.layers}')
    ours = {'framework': 'jax', 'kind': 'lm', 'gin_file': gin_file}
    nanogpt = dataclasses.replace(shape, vocabulary=PADDED_VOCABULARY)
    return [
        Column('lm_softmax', gin_params=unrolled, **ours),
        Column('nanogpt', 'torch', 'nanogpt', nanogpt, 'flash'),
        Column('jax_by_hand', 'jax', 'by_hand', shape),
        Column('lm_in_torch', 'torch', 'lm_in_torch', shape, 'flash'),
        Column('lm_polysketch', attention=f'{folder}/polysketch.gin', gin_params=unrolled, **ours),
        Column('lm_gated_linear', attention=f'{folder}/gated_linear.gin', gin_params=dots, **ours),
        Column('lm_gated_delta', attention=f'{folder}/gated_delta.gin', gin_params=dots, **ours),
        Column('lm_softmax_looped', gin_params=dots, **ours),
        Column('lm_in_torch_cudnn', 'torch', 'lm_in_torch', shape, 'cudnn'),
    ]


def count_flops(column: Column, gin_file: str, gin_params: Sequence[str], context: int) -> float:
    """Returns the floating-point operations per token."""
    attention = column.attention if column.kind == 'lm' else 'softmax'
    (experiment,) = candidates([attention], [gin_file], gin_params).values()
    model = experiment.model
    if column.kind == 'nanogpt':
        model = dataclasses.replace(model, vocab_size=PADDED_VOCABULARY, gated=False, hidden_dim=None)
    return model.flops_per_token(context)


def start_workers(options: argparse.Namespace, frameworks: set[str]) -> dict[str, Worker]:
    """Starts a process per framework."""
    cache = os.environ.get('CACHE')
    shared = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.62'}
    shared['JAX_PLATFORMS'] = INHERITED or ''
    if cache:
        shared['JAX_COMPILATION_CACHE_DIR'] = os.environ.get('JAX_COMPILATION_CACHE_DIR', f'{cache}/jax')
        shared['TORCHINDUCTOR_CACHE_DIR'] = f'{cache}/inductor'
        shared['TRITON_CACHE_DIR'] = f'{cache}/triton_inductor'
    pythons = {'jax': sys.executable, 'torch': options.torch_python or sys.executable}
    return {name: Worker(pythons[name], f'scripts.gpu.peers.{name}_steps', shared) for name in sorted(frameworks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--context', type=int, required=True, help='tokens per window')
    parser.add_argument('--tokens_per_step', type=int, default=65_536)
    parser.add_argument('--microbatch_tokens', type=int, default=16_384)
    parser.add_argument('--gin_file', default='configs/models/small.gin', help='the model')
    parser.add_argument('--gin_param', action='append', default=[], help='sets one field of the model')
    parser.add_argument('--columns', help='names, with commas; default: the first seven')
    parser.add_argument('--seconds', type=float, default=25.0, help='the time for all turns')
    parser.add_argument('--rounds', type=int, default=7, help='the most turns of each step')
    parser.add_argument('--steps', type=int, default=2, help='timed steps per turn; one more comes before them')
    parser.add_argument('--limit', type=float, default=150.0, help='seconds after which a hanging run ends')
    parser.add_argument('--build_only', action='store_true', help='only fill the compilers’ caches')
    parser.add_argument('--torch_python', help='the interpreter that has PyTorch; default: this one')
    parser.add_argument('--save', required=True, help='a file for the results, JSON')
    options = parser.parse_args()
    model = candidates(['softmax'], [options.gin_file], options.gin_param)['softmax'].model
    heads = model.dims
    shape = Shape(model.n_layers, model.d_model, heads.n_heads, heads.head_dim, model.glu_dim, model.vocab_size)
    offered = [
        dataclasses.replace(column, microbatch_tokens=options.microbatch_tokens)
        for column in list_columns(options.gin_file, options.gin_param, shape)
    ]
    names = options.columns.split(',') if options.columns else [column.name for column in offered[:7]]
    if unknown := set(names) - {column.name for column in offered}:
        parser.error(f'--columns {min(unknown)}: there are {", ".join(column.name for column in offered)}')
    columns = {column.name: column for column in offered if column.name in names}
    run(options, columns)


def run(options: argparse.Namespace, columns: dict[str, Column]) -> None:
    """Builds all steps, measures them in turns, and writes the results after each round."""
    begun = time.perf_counter()
    batch = Batch(options.context, options.tokens_per_step)
    workers = start_workers(options, {column.framework for column in columns.values()})

    def stop() -> None:
        for worker in workers.values():
            worker.close()
        os._exit(3)  # the results of the rounds before are written

    watch = threading.Timer(options.limit, stop)
    watch.daemon = True
    watch.start()
    facts: dict[str, dict[str, Any]] = {}
    machine: dict[str, Any] = {}
    for name, worker in workers.items():
        own = [dataclasses.asdict(column) for column in columns.values() if column.framework == name]
        worker.send('machine')
        worker.send('build', columns=own, batch=dataclasses.asdict(batch), run=not options.build_only)
    for name, worker in workers.items():
        try:
            machine |= worker.receive()
            facts |= worker.receive()
        except RuntimeError as error:
            facts |= {c.name: {'error': str(error)} for c in columns.values() if c.framework == name}
    built = time.perf_counter() - begun
    seconds: dict[str, list[float]] = {name: [] for name in columns}
    losses: dict[str, float] = {}

    def write() -> None:
        rows = []
        for name, column in columns.items():
            row = {'column': name, 'context': options.context, **facts.get(name, {})}
            row['microbatch_tokens'] = batch.rows(column.microbatch_tokens) * batch.context
            rows.append(row | summarize(column, seconds[name], losses.get(name), machine.get('device', '')))
        base = next((row.get('tokens_per_second') for row in rows if row['column'] == 'nanogpt'), None)
        for row in rows:
            row['speed_over_nanogpt'] = row['tokens_per_second'] / base if base and row['tokens_per_second'] else None
        settings = {'tokens_per_step': batch.tokens, 'steps': options.steps, 'gin_file': options.gin_file}
        found = {'benchmark': 'peers', 'machine': machine, 'settings': settings, 'build_seconds': built, 'rows': rows}
        pathlib.Path(options.save).write_text(json.dumps(found, indent=1) + '\n')

    def summarize(column: Column, found: list[float], loss: float | None, device: str) -> dict[str, Any]:
        flops, peak = count_flops(column, options.gin_file, options.gin_param, options.context), peak_flops(device)
        rate = batch.tokens / statistics.median(found) if found else None
        return {
            'flops_per_token': flops,
            'loss': loss,
            'turns': len(found),
            'tokens_per_second': rate,
            'slowest': batch.tokens / max(found) if found else None,
            'fastest': batch.tokens / min(found) if found else None,
            'milliseconds': 1000 * statistics.median(found) if found else None,
            'fewest_milliseconds': 1000 * min(found) if found else None,
            'mfu': flops * rate / peak if rate and peak else None,
        }

    write()
    started, longest = time.perf_counter(), 0.0
    for i in range(0 if options.build_only else options.rounds):
        at = time.perf_counter()
        if i > 1 and at - started + longest > options.seconds:
            break
        for name, column in columns.items():
            if 'error' in facts.get(name, {'error': ''}):
                continue
            try:
                found = workers[column.framework].ask('measure', name=name, n=options.steps)
            except RuntimeError as error:
                facts[name]['error'] = str(error)
                continue
            seconds[name].append(found['seconds'])
            losses.setdefault(name, found['loss'])
        longest = max(longest, time.perf_counter() - at)
        write()
    for worker in workers.values():
        worker.close()
    for row in json.loads(pathlib.Path(options.save).read_text())['rows']:
        shown = {k: f'{v:,.4g}' if isinstance(v, float) else v for k, v in row.items() if v is not None}
        print(' '.join(f'{k}={v}' for k, v in shown.items()))


if __name__ == '__main__':
    main()
