#!/usr/bin/env python3
"""Measures how the error of Performer grows with the layers of a softmax model whose weights it takes (Fig. 11).

    python configs/papers/performer/figure_11/errors_by_layer.py runs/deep [--n_features 64,256,1024] [--draws 5]

The first n layers of a model are a model of n layers, so one run shows every depth. Behind each layer the script
compares the hidden vectors of the softmax model and of Performer on windows of the evaluation split. The error is the
norm of their difference over the norm of the former. There are two curves for each number of random features: all
layers up to this one are Performer's, or this layer alone is. Their difference has come through earlier layers. Bands
go from the lowest to the highest of the draws of the projections.
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lm
from lm.attention.maps.random_features import SOFTMAX_FEATURES
from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.errors import ConfigError, LmError
from lm.inference.loaded_run import LoadedRun
from lm.model import Transformer
from lm.model.block import Block
from lm.model.functions import ModelFunctions
from lm.plots import Curve, draw_lines
from lm.text import make_markdown_table

compute = nnx.jit(Block.__call__)


def replace_attention(run: LoadedRun, attention: Performer, seed: int) -> Transformer:
    """Returns the model of a run with another mechanism and the run's parameters; `seed` is of the projections."""
    model = dataclasses.replace(run.experiment.model, attention=attention)
    functions = ModelFunctions(model, run.functions.dtype)
    return functions.merge({'params': run.weights['params'], 'buffers': functions.init(seed)['buffers']})


def measure_errors(exact: Transformer, approximate: Transformer, tokens_BxL: jax.Array) -> np.ndarray:
    """Returns the relative errors behind each layer [2, layers]: with all layers replaced so far, and with it alone."""
    found = []
    for (softmax, x_BxLxD, rotation), (performer, y_BxLxD, _) in zip(
        exact.layers(tokens_BxL), approximate.layers(tokens_BxL), strict=True
    ):
        expected = compute(softmax, x_BxLxD, rotation)
        outputs = [compute(performer, inputs, rotation) for inputs in (y_BxLxD, x_BxLxD)]
        found.append([float(jnp.linalg.norm(o - expected) / jnp.linalg.norm(expected)) for o in outputs])
    return np.array(found).T


def read_windows(run: LoadedRun, windows: int) -> jax.Array:
    """Returns the first windows of the evaluation split, [B, L]."""
    length, split = run.experiment.train.context_length, run.experiment.data.eval_split
    windows = min(windows, (run.splits.tokens(split) - 1) // length)
    return jnp.asarray(run.splits.read_many(split, np.arange(windows) * length, length)[:, :length], jnp.int32)


def check_softmax(run: LoadedRun) -> None:
    """Raises ConfigError unless every layer of the run is softmax, plain as Performer approximates it."""
    if set(run.experiment.model.pattern) != {Softmax()}:
        raise ConfigError('model.attention: Performer approximates plain softmax; name a run with @softmax()')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='a run directory, of softmax')
    parser.add_argument('--features', choices=tuple(SOFTMAX_FEATURES), default='positive', help='the random features')
    parser.add_argument('--n_features', default='64,256,1024', metavar='M,…', help='default: 64,256,1024')
    parser.add_argument('--draws', type=int, default=5, help='of the projections; default: 5')
    parser.add_argument('--windows', type=int, default=8, help='of the evaluation split; default: 8')
    parser.add_argument('--out', default='errors_by_layer', help='the picture, without suffix')
    arguments = parser.parse_args()
    rows, curves = [], []
    try:
        run = lm.load(arguments.run)
        check_softmax(run)
        tokens_BxL = read_windows(run, arguments.windows)
        for n_features in map(int, arguments.n_features.split(',')):
            attention = Performer(features=arguments.features, n_features=n_features)
            models = (replace_attention(run, attention, seed) for seed in range(arguments.draws))
            errors_Dx2xN = np.stack([measure_errors(run.model, model, tokens_BxL) for model in models])
            for i, name in enumerate((f'M = {n_features:,}', f'M = {n_features:,}, alone')):
                errors = errors_Dx2xN[:, i]
                layers = np.arange(1, errors.shape[1] + 1)
                curves.append(Curve(name, len(curves), layers, errors.mean(0), errors.min(0), errors.max(0)))
                rows.append([name, *(f'{m:.3f} ± {s:.3f}' for m, s in zip(errors.mean(0), errors.std(0), strict=True))])
    except LmError as error:
        print(f'errors_by_layer: {error}', file=sys.stderr)
        return error.exit_code
    print(make_markdown_table(rows, ['error behind layer', *map(str, range(1, run.experiment.model.n_layers + 1))]))
    draw_lines(arguments.out, curves, 'layers', 'relative error of the output', markers=True)
    print(f'drawn in {arguments.out}.png and {arguments.out}.pdf')
    return 0


if __name__ == '__main__':
    sys.exit(main())
