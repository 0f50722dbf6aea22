"""Trains the points of a sweep on one GPU, several at a time, and writes each result as soon as it is there.

    scripts/gpu/recipes.py --sweep_file configs/sweeps/training_options.gin --out OUT --store STORE.tar.xz --cache CACHE

Each line of the results has the settings of a point, its perplexity, its losses while training, and its seconds. Points
in the file are not trained again. A process trains one point after another, so it starts JAX once.
"""

import argparse
import dataclasses
import fcntl
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from train_row import read_metrics, unpack

GIN = 'configs/papers/study/options/options.gin'
Job = tuple[int, int | None]
"""The number of a point, and its seed; None: the seed of the file."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sweep_file', required=True, help='the points')
    parser.add_argument('--out', required=True, help='the file of results, JSON lines')
    parser.add_argument('--cache', required=True, help='a folder for the store, compiled programs and runs')
    parser.add_argument('--store', help='a .tar.xz with the folder quickstart; None: data/quickstart is there')
    parser.add_argument('--jobs', type=int, default=6, help='processes side by side')
    parser.add_argument('--points', type=int, help='only so many points')
    parser.add_argument('--seeds', type=int, nargs='*', default=[], help='values of train.seed; default: of the file')
    parser.add_argument('--steps', type=int, help='train each point for so many steps only, as a trial')
    parser.add_argument('--gin_param', action='append', default=[], help='on top of the files')
    given = parser.parse_args(arguments)
    cache = pathlib.Path(given.cache).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    params = [*given.gin_param]
    if given.store:
        params.append(f'data.path = {str(unpack(pathlib.Path(given.store), cache))!r}')
    out = pathlib.Path(given.out).absolute()
    jobs = list_jobs(given, params, read_done(out))[: given.points]
    tasks = [(given.sweep_file, params, str(cache), str(out), job, given.steps) for job in jobs]
    with multiprocessing.get_context('spawn').Pool(min(given.jobs, max(1, len(tasks))), set_up) as pool:
        for _ in pool.imap_unordered(train_alike, tasks):
            pass
    failed = {job for group in jobs for job in group} - read_done(out)
    if failed:
        print(f'{len(failed)} points have no result; the file says why', file=sys.stderr)
    return 1 if failed else 0


def set_up() -> None:
    """Lets several processes share a GPU, with products in float32, as on the CPUs of docs/results.md."""
    os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    os.environ['JAX_DEFAULT_MATMUL_PRECISION'] = 'float32'
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115


def make_points(sweep_file: str, params: list[str]) -> list[Any]:
    """Returns the points of the sweep on the baseline of options, in float32."""
    from lm.sweep.points import make_points

    return make_points([GIN], [sweep_file], ["model.dtype = 'float32'", 'train.tensorboard = False', *params])


def list_jobs(given: argparse.Namespace, params: list[str], done: set[Job]) -> list[list[Job]]:
    """Returns the points and seeds to train. Those that differ in the seed alone stand together: they share a program.

    A process of its own reads the points, because this one shall not start JAX.
    """
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        settings = pool.apply(read_settings, (given.sweep_file, params))
    alike: dict[str, list[Job]] = {}
    for index, others in enumerate(settings):
        alike.setdefault(others, []).extend((index, seed) for seed in given.seeds or [None])
    return [left for jobs in alike.values() if (left := [job for job in jobs if job not in done])]


def read_settings(sweep_file: str, params: list[str]) -> list[str]:
    """Returns the settings of each point but for its seed."""
    points = make_points(sweep_file, params)
    return [str({name: value for name, value in point.settings.items() if name != 'train.seed'}) for point in points]


def read_done(out: pathlib.Path) -> set[Job]:
    """Returns (index, seed) of the results in the file."""
    rows = [json.loads(line) for line in out.read_text().splitlines() if line.endswith('}')] if out.exists() else []
    return {(row['index'], row['seed']) for row in rows if 'error' not in row}


def train_alike(task: tuple[str, list[str], str, str, list[Job], int | None]) -> None:
    """Trains points with one program, and adds a line to the results after each of them."""
    sweep_file, params, cache, out, jobs, steps = task
    for job in jobs:
        row = train_point(sweep_file, params, cache, job, steps)
        with open(out, 'a') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(row) + '\n')
        print(row.get('perplexity'), row['settings'], row.get('error', ''), file=sys.stderr, flush=True)


def train_point(sweep_file: str, params: list[str], cache: str, job: Job, steps: int | None) -> dict[str, Any]:
    """Trains one point, and returns its settings and results; an error becomes a part of the result."""
    index, seed = job
    seeded = [] if seed is None else [f'train.seed = {seed}']
    point = make_points(sweep_file, [*params, *seeded])[index]
    experiment = point.experiment
    if steps is not None:  # the sweep may set both, so that no binding can
        train, optimizer = experiment.train, experiment.optimizer
        short = {
            'train': dataclasses.replace(train, steps=steps),
            'optimizer': dataclasses.replace(optimizer, warmup_steps=min(steps - 1, optimizer.warmup_steps)),
        }
        experiment = dataclasses.replace(experiment, **short)
    row: dict[str, Any] = {
        'index': index,
        'name': point.name,
        'seed': seed,
        'settings': point.settings | dict.fromkeys(seeded, ''),
    }
    begun = time.time()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            import jax

            from lm.session.train import train

            train(experiment, f'{folder}/run', compile_cache=f'{cache}/compiled_recipes_{os.getpid()}')
            metrics = read_metrics(pathlib.Path(folder, 'run/metrics.jsonl'))
            row |= {'device': jax.devices()[0].device_kind, **metrics}
        except Exception as error:
            row['error'] = f'{type(error).__name__}: {error}'[:300]
    return row | {'seconds': round(time.time() - begun, 1)}


if __name__ == '__main__':
    sys.exit(main())
