#!/usr/bin/env python
"""Times the operations of `lm.ops` beside flash-linear-attention's Triton kernels and PyTorch's softmax attention.

    python -m scripts.gpu.peers.operations --operations gated_linear,retention --save result.json

A process of JAX and a process of PyTorch take turns on one GPU, in random order. Both get the same random arrays, in
bfloat16, and compute the output and the gradients of all arguments. Queries and keys are not normalized in the call.
Before the times, a smaller call compares outputs and gradients with the formulas in float32. After the times, three
calls of each are traced, which gives the time of each kernel.

`--warm N` only compiles: one process compiles for JAX, and N processes fill Triton's cache.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

from scripts.gpu.peers.operation_case import ARRAYS, OperationCase
from scripts.gpu.peers.turns import Worker

JAX, TORCH = 'scripts.gpu.peers.operations_jax', 'scripts.gpu.peers.operations_torch'
JAX_MEMORY = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
TURN = 40.0
"""Milliseconds of a turn, at least, so that the host's part does not count."""
MOST_CALLS = 40


def list_cases(options: argparse.Namespace) -> list[OperationCase]:
    """Returns the calls to time."""
    sizes = {'tokens': options.tokens, 'heads': options.heads, 'size': options.size}
    return [
        OperationCase(operation, window, backward=backward, **sizes)
        for operation in options.operations
        for backward in (True, False)
        for window in (options.windows if backward else options.forward_windows)
    ]


def warm(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles for both libraries; returns what each process needed."""
    cases = [dataclasses.asdict(case) for case in list_cases(options)]
    workers = {'jax': Worker(sys.executable, JAX, JAX_MEMORY)}
    for part in range(options.warm):
        part_of = {'TUNED_PART': f'{part}/{options.warm}', 'FLA_CACHE_RESULTS': '0'}
        workers[f'torch {part}'] = Worker(options.peer_python, TORCH, part_of)
    for worker in workers.values():
        worker.send('prepare', cases=cases)
    found: dict[str, Any] = {}
    for name, worker in workers.items():
        try:
            found[name] = worker.receive()
        except RuntimeError as error:
            found[name] = {'error': str(error)}
        worker.close()
    return found


class Measurement:
    """A measurement whose result grows and is saved after each stage.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.cases = options, list_cases(options)
        self.result: dict[str, Any] = {'errors': {}, 'seconds': {}}
        # The tuner measures here, alone on the GPU; only the compiled programs come from the cache.
        self.workers = {
            'lm': Worker(sys.executable, JAX, JAX_MEMORY),
            'torch': Worker(options.peer_python, TORCH, {'FLA_CACHE_RESULTS': '0'}),
        }
        self._start = time.perf_counter()

    def run(self) -> None:
        """Measures everything."""
        try:
            self._prepare()
            for stage in (self._compare, self._time, self._trace):
                stage()
                self._save(stage.__name__.strip('_'))
        finally:
            for worker in self.workers.values():
                worker.close()

    def _ask(self, side: str, do: str, **arguments: Any) -> Any:
        """Returns the reply, or None; the result then has the error."""
        try:
            return self.workers['lm' if side == 'lm' else 'torch'].ask(do, **arguments)
        except RuntimeError as error:
            self.result['errors'][f'{do} {arguments.get("key", "")} {side}'] = str(error)
            return None

    def _save(self, stage: str) -> None:
        self.result['seconds'][stage] = round(time.perf_counter() - self._start, 1)
        self.options.save.write_text(json.dumps(self.result, indent=1))

    def _prepare(self) -> None:
        cases = [dataclasses.asdict(case) for case in self.cases]
        self.result['machine'] = {side: self._ask(side, 'tell_machine') for side in self.workers}
        self.result['prepare'] = {}
        for side in self.workers:
            self.result['prepare'][side] = self._ask(side, 'prepare', cases=cases) or {}
            self._save(f'prepare {side}')

    def _sides(self, case: OperationCase) -> dict[str, str]:
        """Returns library → the key of its call, for all that were prepared."""
        prepared = self.result['prepare']
        found = {} if 'error' in prepared['lm'].get(case.key, {'error': ''}) else {'lm': case.key}
        for key, said in prepared['torch'].items():
            if key.startswith(f'{case.key} ') and 'error' not in said:
                found[key.removeprefix(f'{case.key} ')] = key
        return found

    def _compare(self) -> None:
        """Compares values in short windows with the formulas: the norm of the difference over the norm."""
        self.result['values'] = {}
        for case in {c.operation: c for c in self.cases if c.backward}.values():
            # Sketches count from the second exact block on.
            window = min(2048 if case.operation == 'polysketch' else 512, case.window)
            small = dataclasses.replace(case, window=window, tokens=2 * window)
            fields, peers = dataclasses.asdict(small), (set(self._sides(case)) - {'lm'})
            with tempfile.TemporaryDirectory() as folder:
                paths = {name: f'{folder}/{i}.npz' for i, name in enumerate(('exact', 'lm', *sorted(peers)))}
                self._ask('lm', 'compute', case=fields, path=paths['exact'], reference=True)
                self._ask('lm', 'compute', case=fields, path=paths['lm'])
                for peer in peers:
                    self._ask(peer, 'compute', case=fields, path=paths[peer], peer=peer)
                found = {name: dict(np.load(path)) for name, path in paths.items() if pathlib.Path(path).exists()}
            exact = found.pop('exact', {})
            self.result['values'][case.operation] = {
                side: {name: _relative(arrays[name], exact[name]) for name in exact} for side, arrays in found.items()
            }

    def _time(self) -> None:
        """Lets all calls take turns."""
        calls = {(case, side): key for case in self.cases for side, key in self._sides(case).items()}
        counts, times = {}, {}
        for (case, side), key in calls.items():
            first = self._ask(side, 'measure', key=key, calls=2)
            if first is not None:
                counts[case, side] = max(1, min(MOST_CALLS, math.ceil(TURN / max(first, 1e-3))))
                times[case, side] = []
        order = random.Random(0)
        for _ in range(self.options.turns):
            for case, side in order.sample(list(counts), len(counts)):
                found = self._ask(side, 'measure', key=calls[case, side], calls=counts[case, side])
                if found is not None:
                    times[case, side].append(found)
        self.result['rows'] = [
            {
                **dataclasses.asdict(case),
                'passes': case.passes,
                'library': side,
                'implementation': self.result['prepare']['lm'][case.key]['implementation'] if side == 'lm' else side,
                'milliseconds': round(statistics.median(found), 4),
                'least': round(min(found), 4),
                'greatest': round(max(found), 4),
                'turns': len(found),
                'calls': counts[case, side],
            }
            for (case, side), found in times.items()
            if found
        ]

    def _trace(self) -> None:
        """Records the kernels of both passes in the window that stands in the middle."""
        self.result['kernels'] = {}
        windows = self.options.windows
        for case in self.cases:
            if case.backward and case.window == windows[len(windows) // 2]:
                for side, key in self._sides(case).items():
                    self.result['kernels'][f'{case.key} {side}'] = (self._ask(side, 'trace', key=key) or [])[:25]


def _relative(found: np.ndarray, exact: np.ndarray) -> float | None:
    if not exact.any():
        return None
    return float(f'{np.linalg.norm(found - exact) / np.linalg.norm(exact):.3g}')


def parse() -> argparse.Namespace:
    """Reads the command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(',') if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--operations', type=lambda text: text.split(','), required=True, help=', '.join(ARRAYS))
    parser.add_argument('--windows', type=numbers, default=[2048, 8192, 32_768, 65_536], help='of both passes')
    parser.add_argument('--forward_windows', type=numbers, default=[8192], help='of the forward pass alone')
    parser.add_argument('--tokens', type=int, default=65_536, help='per call')
    parser.add_argument('--heads', type=int, default=12)
    parser.add_argument('--size', type=int, default=64, help='of queries, keys and values')
    parser.add_argument('--turns', type=int, default=9)
    parser.add_argument('--warm', type=int, default=0, help='compile only, with so many processes for Triton')
    parser.add_argument('--peer_python', default=sys.executable, help='the interpreter that has PyTorch')
    parser.add_argument('--save', type=pathlib.Path, required=True)
    options = parser.parse_args()
    if unknown := set(options.operations) - set(ARRAYS):
        parser.error(f'--operations {min(unknown)}: must be of {", ".join(ARRAYS)}')
    return options


def main() -> int:
    """Returns 1 where `lm` could not be timed at all."""
    options = parse()
    if options.warm:
        options.save.write_text(json.dumps(warm(options), indent=1))
        return 0
    measurement = Measurement(options)
    measurement.run()
    return 0 if any(row['library'] == 'lm' for row in measurement.result['rows']) else 1


if __name__ == '__main__':
    sys.exit(main())
