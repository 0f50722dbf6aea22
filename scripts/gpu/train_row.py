#!/usr/bin/env python
"""Trains the points of sweeps on one GPU, several at a time, and writes each result as soon as it is there.

    train_row.py --gin_file GIN_FILE --sweep_file SWEEP_FILE --out results.jsonl --cache FOLDER --jobs 4

Each line of the results has the settings of a point, its loss by position and while training, and its seconds. It also
has what the biases of the norms and the factors of far weights became. Points that are in the file are not trained
again. A process trains one point after another, so that it starts JAX once.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import pathlib
import sys
import tarfile
import tempfile
import time
from typing import Any, NamedTuple


class Task(NamedTuple):
    """One point to train: `index` is the point's number in its sweep."""

    gin_files: list[str]
    gin_params: list[str]
    sweep_file: str
    cache: str
    seed: int
    index: int

    @property
    def key(self) -> tuple[str, int, int]:
        return pathlib.Path(self.sweep_file).stem, self.seed, self.index


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gin_file', action='append', required=True, help='the experiment')
    parser.add_argument('--gin_param', action='append', default=[], help='on top of the files')
    parser.add_argument('--sweep_file', action='append', required=True, help='the points; several files: one by one')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0], help='values of train.seed')
    parser.add_argument('--points', type=int, nargs='*', help='only these points of each sweep, from 0')
    parser.add_argument('--store', help='a .tar.xz with a folder that becomes data.path')
    parser.add_argument('--cache', required=True, help='a folder for the store, compiled programs and runs')
    parser.add_argument('--out', required=True, help='the file of results, JSON lines')
    parser.add_argument('--jobs', type=int, default=4, help='processes side by side')
    given = parser.parse_args(arguments)
    cache = pathlib.Path(given.cache).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    params = list(given.gin_param)
    if given.store:
        params.append(f'data.path = {str(unpack(pathlib.Path(given.store), cache))!r}')
    out = pathlib.Path(given.out)
    done = read_done(out)
    context = multiprocessing.get_context('spawn')
    with context.Pool(1) as pool:  # this process never starts JAX
        counts = {name: pool.apply(count_points, (given.gin_file, name, params)) for name in given.sweep_file}
    tasks = [
        Task(given.gin_file, params, name, str(cache), seed, index)
        for seed in given.seeds
        for name in given.sweep_file
        for index in range(counts[name])
        if given.points is None or index in given.points
    ]
    tasks = [task for task in tasks if task.key not in done]
    failed = 0
    with out.open('a') as file, context.Pool(min(given.jobs, max(1, len(tasks))), set_up) as pool:
        for row in pool.imap_unordered(train_point, tasks):
            file.write(json.dumps(row) + '\n')
            file.flush()
            failed += 'error' in row
            print(row['name'], row['seed'], row.get('perplexity'), row.get('error', ''), flush=True)
    return int(failed > 0)


def unpack(archive: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
    """Unpacks a store once, whichever process comes first, and returns its folder."""
    name = archive.name.partition('.')[0]
    with (cache / f'{name}.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / name).exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter='data')
                (content,) = pathlib.Path(folder).iterdir()
                content.rename(cache / name)
    return cache / name


def set_up() -> None:
    """Lets several processes share a GPU, and hides their tables of progress."""
    os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115


def make_points(gin_files: list[str], sweep_file: str, params: list[str]) -> list[Any]:
    from lm.sweep.points import make_points

    return make_points(gin_files, [sweep_file], ['train.tensorboard = False', *params])


def count_points(gin_files: list[str], sweep_file: str, params: list[str]) -> int:
    return len(make_points(gin_files, sweep_file, params))


def read_done(out: pathlib.Path) -> set[tuple[str, int, int]]:
    """Returns sweep, seed and index of the results in the file."""
    lines = out.read_text().splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith('}')]
    return {(row['sweep'], row['seed'], row['index']) for row in rows if 'error' not in row}


def train_point(task: Task) -> dict[str, Any]:
    """Trains one point, and returns its settings and results; an error becomes a part of the result."""
    params = [*task.gin_params, f'train.seed = {task.seed}']
    point = make_points(task.gin_files, task.sweep_file, params)[task.index]
    sweep, seed, index = task.key
    row: dict[str, Any] = {'sweep': sweep, 'seed': seed, 'index': index, 'name': point.name}
    begun = time.time()
    with tempfile.TemporaryDirectory(dir=task.cache) as folder:
        try:
            import jax

            from lm.session.train import train

            state = train(point.experiment, f'{folder}/run', compile_cache=f'{task.cache}/compiled_{os.getpid()}')
            row |= {'device': jax.devices()[0].device_kind, **read_metrics(pathlib.Path(folder, 'run/metrics.jsonl'))}
            row['parameters'] = read_small(state)
        except Exception as error:
            row['error'] = f'{type(error).__name__}: {error}'[:300]
    return row | {'seconds': round(time.time() - begun, 1)}


def read_metrics(path: pathlib.Path) -> dict[str, Any]:
    """Returns the last evaluation, and at most 50 training losses."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line for line in lines if line['kind'] == 'train']
    evaluation = next(line for line in reversed(lines) if line['kind'] == 'eval')
    names = ('loss', 'perplexity', 'bits_per_byte', 'loss_by_position', 'tokens')
    found = {name: evaluation[name] for name in names if name in evaluation}
    every = max(1, len(losses) // 50)
    return found | {'train_losses': {line['step']: round(line['loss'], 4) for line in losses[::every]}}


def read_small(state: Any) -> dict[str, Any]:
    """Returns what balances near and far weights: per layer, products of the norms' mean biases and the factors."""
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_leaves_with_path(state['params'])
    named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
    found: dict[str, Any] = {}
    for name, leaf in named.items():
        if name.endswith(('q_norm/bias', 'sketch_norms/0/bias')):
            other = name.replace('q_norm', 'k_norm').replace('sketch_norms/0', 'sketch_norms/1')
            q, k = (np.asarray(named.get(key, leaf), np.float64) for key in (name, other))
            found[name] = (q * k).sum(-1).round(3).tolist()
        if name.endswith('log_far_factor'):
            found[name] = np.asarray(leaf, np.float64).round(3).tolist()
    return found


if __name__ == '__main__':
    sys.exit(main())
