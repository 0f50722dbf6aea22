#!/usr/bin/env python3
"""How well LLoPS sketches approximate a polynomial kernel on the queries and keys of a trained run (LLoPS Table 3).

    python configs/papers/llops/table_3_sketches/fit_llops.py runs/polynomial --degree 2 [--n_features 256] \
        [--nonnegative] [--json FILE]

The run should have been trained with polynomial attention. Its queries and keys on validation text, sampled from every
layer, are sketched by random projections (the start of the fit; for degree 2 these are PolySketchFormer's) and by
fitted ones. Errors are measured on samples that the fit has not seen. Prints a Markdown table.
"""

import argparse
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from lm import cli
from lm.attention.llops import Llops
from lm.attention.maps.fit import errors, fit, samples
from lm.errors import LmError
from lm.inference.loaded_run import load_run
from lm.text import markdown_table


def measure(config: Llops, arguments: argparse.Namespace) -> list[dict]:
    """One row a layer: relative errors of the random and of the fitted sketch on unseen samples."""
    flags = cli.parse(['generate', '--run_dir', arguments.run])
    experiment = cli.from_run(flags, [])
    run = load_run(experiment, arguments.run)
    length, split = experiment.train.context_length, experiment.data.eval_split
    n = min(arguments.windows, (run.store.tokens(split) - 1) // length)
    tokens = jnp.asarray(run.store.read_many(split, np.arange(n) * length, length), jnp.int32)
    model = run.functions.merge(run.weights)
    rows = []
    layers = samples(model.attention_inputs(tokens), 2 * arguments.samples, arguments.seed)
    sketch, kernel = config.sketch(), config.kernel
    for layer, (q_NxD, k_NxD) in enumerate(layers):
        half = len(q_NxD) // 2
        random = config.init_factors(jax.random.split(jax.random.key(arguments.seed))[0], q_NxD.shape[1])
        options = dict(steps=arguments.steps, loss=arguments.loss, seed=arguments.seed)
        fitted = fit(sketch, kernel, random, q_NxD[:half], k_NxD[:half], **options)
        row = {'layer': layer}
        for name, factors in (('random', random), ('fitted', fitted[:2])):
            found = errors(sketch, kernel, factors, q_NxD[half:], k_NxD[half:])
            row |= {f'{name}_{kind}': float(value) for kind, value in found.items()}
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    kinds = ('relative', 'frobenius')
    headings = ['layer', *(f'{kind}: {which}' for kind in kinds for which in ('random', 'fitted', 'fitted / random'))]
    mean = {'layer': 'mean'} | {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key != 'layer'}
    cells = []
    for row in [*rows, mean]:
        cells.append([str(row['layer'])])
        for kind in kinds:
            random, fitted = row[f'random_{kind}'], row[f'fitted_{kind}']
            cells[-1] += [f'{random:.4f}', f'{fitted:.4f}', f'{fitted / random:.3f}']
    return markdown_table(cells, headings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='a run directory')
    parser.add_argument('--degree', type=int, default=2)
    parser.add_argument('--n_features', type=int, default=256)
    parser.add_argument('--nonnegative', action='store_true', help='squares of products of degree / 2 projections')
    parser.add_argument(
        '--samples', type=int, default=2048, help='queries and keys a layer, for fitting and for testing'
    )
    parser.add_argument('--windows', type=int, default=8, help='of validation text, from which they are drawn')
    parser.add_argument('--steps', type=int, default=2000, help='of the fit')
    parser.add_argument('--loss', default='frobenius', help='frobenius, relative or rmae')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', metavar='FILE', help='write the rows to a file as well')
    arguments = parser.parse_args()
    try:
        config = Llops(degree=arguments.degree, n_features=arguments.n_features, nonnegative=arguments.nonnegative)
        rows = measure(config, arguments)
    except LmError as error:
        print(f'fit_llops: {error}', file=sys.stderr)
        return error.exit_code
    print(table(rows))
    if arguments.json:
        with open(arguments.json, 'w') as file:
            json.dump(rows, file, indent=2)
    return 0


if __name__ == '__main__':
    sys.exit(main())
