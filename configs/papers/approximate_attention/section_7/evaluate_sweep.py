#!/usr/bin/env python3
"""Evaluates one run under every point of a sweep file: a checkpoint as other mechanisms, contexts or windows see it.

    python configs/papers/approximate_attention/section_7/evaluate_sweep.py RUN \
        --sweep_file configs/papers/approximate_attention/section_7/sweep.gin [--sweep_file …] [flags of lm evaluate]

One `lm evaluate` a point, whose result goes to RUN/evaluation_sweep/POINT.json; then prints a Markdown table. A point
with a result under the same flags is not evaluated again, so the same command continues what was interrupted; delete
the folder to measure a later checkpoint without --step. Ends with 1 if a point failed.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from lm.errors import ConfigError
from lm.sweep.points import Point, make_points
from lm.text import make_markdown_table


def evaluate(run: pathlib.Path, point: Point, flags: list[str]) -> dict | None:
    """The figures of a point, from its file or from `lm evaluate`; None: it failed, and its error was printed."""
    folder = run / 'evaluation_sweep'
    result, config, told = (folder / f'{point.name}{suffix}' for suffix in ('.json', '.gin', '.flags'))
    asked = {config: point.config, told: json.dumps(flags)}
    if not result.exists() or any(not path.exists() or path.read_text() != text for path, text in asked.items()):
        folder.mkdir(exist_ok=True)
        result.unlink(missing_ok=True)
        for path, text in asked.items():
            path.write_text(text)
        command = ['evaluate', '--run_dir', str(run), '--gin_file', str(config), '--json', *flags]
        done = subprocess.run([sys.executable, '-m', 'lm.cli', *command], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return None
        unfinished = result.with_suffix('.unfinished')
        unfinished.write_text(done.stdout)
        unfinished.rename(result)
    return json.loads(result.read_text())


def table(points: list[Point], results: list[dict | None]) -> str:
    """A Markdown row a point: what it sets, and what was measured."""
    keys = list(dict.fromkeys(key for point in points for key in point.settings))
    rows = []
    for point, result in zip(points, results, strict=True):
        measured = ['failed', '–']
        if result is not None:
            measured = [f'{result["perplexity"]:.3f}', f'{result["bits_per_byte"]:.4f}']
        rows.append([*(point.settings.get(key, '') for key in keys), *measured])
    splits = sorted({result['split'] for result in results if result})
    return make_markdown_table(
        rows, [*keys, f'{", ".join(splits)} perplexity'.strip(), 'bits per byte'], left=len(keys)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=pathlib.Path, help='a run of lm train, on a local disk')
    parser.add_argument('--sweep_file', action='append', required=True, metavar='FILE')
    arguments, flags = parser.parse_known_args()
    try:
        points = make_points([str(arguments.run / 'config.gin')], arguments.sweep_file)
    except ConfigError as error:
        print(f'evaluate_sweep: error: {error}', file=sys.stderr)
        return 2
    results = []
    for point in points:
        print(f'{point.index + 1} of {len(points)}: {point.name}', file=sys.stderr, flush=True)
        results.append(evaluate(arguments.run, point, flags))
    print(table(points, results))
    return 1 if None in results else 0


if __name__ == '__main__':
    sys.exit(main())
