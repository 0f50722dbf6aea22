#!/usr/bin/env python3
"""Measures how well LLoPS sketches approximate a polynomial kernel on the queries and keys of a run (LLoPS Table 3).

    python configs/papers/llops/table_3_sketches/fit_llops.py runs/polynomial --degree 2 [--n_features 256] \
        [--layers 0 8 15] [--nonnegative] [--json FILE]

The run should have been trained with polynomial attention. The script samples queries and keys of the layers on
validation text. It sketches them by random projections, the start of the fit, by fitted projections (LLoPS, eq. 6
and §4.3), and by a fitted network of two layers. For degree 2 the random projections are PolySketchFormer's. It
measures the errors on samples that the fit has not seen, and prints two Markdown tables. The second is Table 3, with
the paper's below ours.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lm
from lm.attention.base import AttentionModule
from lm.attention.llops import Llops
from lm.errors import ConfigError, LmError
from lm.ops.linear_attention import FeatureMap
from lm.report.published import load_tables
from lm.text import make_markdown_table

LOSSES = ('frobenius', 'relative', 'rmae')


class Fit(NamedTuple):
    """Fitted parameters of the map, for queries and for keys, and the `errors` on the samples before and after."""

    q_parameters: Any
    k_parameters: Any
    before: dict[str, float]
    after: dict[str, float]


def fit(
    feature_map: FeatureMap,
    kernel: Callable[[jax.Array], jax.Array],
    start: tuple[Any, Any],
    q_NxD: jax.Array,
    k_NxD: jax.Array,
    *,
    steps: int = 2000,
    learning_rate: float = 1e-2,
    batch_size: int = 256,
    loss: str = 'frobenius',
    seed: int = 0,
) -> Fit:
    """Minimises the error of ⟨φ_Q(q), φ_K(k)⟩ against kernel(q·k) over all pairs of samples, with Adam.

    Args:
        feature_map: φ.
        kernel: of the inner product, element-wise.
        start: the parameters of φ for queries and for keys, to start from.
        q_NxD: sampled queries, after layer normalization where there is one.
        k_NxD: sampled keys.
        steps: of the optimizer, each on `batch_size` queries times as many keys.
        learning_rate: at the start, falling to 0 along a cosine.
        batch_size: queries (and keys) drawn for a step.
        loss: which of the `errors` to minimise; with 'rmae' no pair may be orthogonal.
        seed: of the batches.

    Raises:
        ConfigError: unknown loss, or samples that are not two matrices of one width.
    """
    if loss not in LOSSES:
        raise ConfigError(f'loss = {loss!r}: must be one of {", ".join(LOSSES)}')
    if q_NxD.ndim != 2 or k_NxD.ndim != 2 or q_NxD.shape[1] != k_NxD.shape[1]:
        raise ConfigError(f'samples of shapes {q_NxD.shape} and {k_NxD.shape}: must be matrices of one width')
    batch_key = jax.random.split(jax.random.key(seed))[1]
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps), b2=0.99)

    def evaluate(parameters, q, k):
        return errors(feature_map, kernel, parameters, q, k)

    @jax.jit
    def run(parameters):
        def step(carry, key):
            parameters, state = carry
            q, k = (
                jax.random.choice(each, x, (min(batch_size, len(x)),), replace=False)
                for each, x in zip(jax.random.split(key), (q_NxD, k_NxD), strict=True)
            )
            gradient = jax.grad(lambda p: evaluate(p, q, k)[loss])(parameters)
            update, state = optimizer.update(gradient, state)
            return (optax.apply_updates(parameters, update), state), None

        carry = (parameters, optimizer.init(parameters))
        (parameters, _), _ = jax.lax.scan(step, carry, jax.random.split(batch_key, steps))
        return parameters

    fitted = run(start)
    before, after = (
        {name: float(value) for name, value in jax.jit(evaluate)(p, q_NxD, k_NxD).items()} for p in (start, fitted)
    )
    return Fit(fitted[0], fitted[1], before, after)


class NetworkFeatures:
    """φ(x) = W₂ gelu(W₁ x + b), the paper's baseline of a network of two layers for queries and for keys."""

    def __call__(self, parameters: dict[str, jax.Array], x: jax.Array, queries: bool) -> jax.Array:
        return jax.nn.gelu(x @ parameters['first'] + parameters['bias']) @ parameters['second']

    def start(self, key: jax.Array, size: int, n_features: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Draws the parameters for queries and for keys. The hidden layer is as wide as the features."""
        init = jax.nn.initializers.lecun_normal()

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            first, second = jax.random.split(key)
            matrices = {'first': init(first, (size, n_features)), 'second': init(second, (n_features, n_features))}
            return matrices | {'bias': jnp.zeros(n_features)}

        q_key, k_key = jax.random.split(key)
        return draw(q_key), draw(k_key)


def samples(
    layers: Iterable[tuple[AttentionModule, jax.Array, jax.Array]], count: int, seed: int = 0
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns queries and keys of every layer as its kernel sees them: `count` positions and heads drawn from a batch.

    Args:
        layers: what `Transformer.attention_inputs` yields.
        count: of each, where the batch has as many.
        seed: of the draws.

    Returns:
        for each layer ([count, head_dim], [count, head_dim]) float32, after the mechanism's layer normalization where
        it has one.
    """
    key = jax.random.key(seed)

    def draw(key, x_BxLxNxC):
        rows = x_BxLxNxC.reshape(-1, x_BxLxNxC.shape[-1]).astype(jnp.float32)
        return jax.random.choice(key, rows, (min(count, len(rows)),), replace=False)

    found = []
    for i, (module, *inputs) in enumerate(layers):
        pair = module.normalize(*inputs)
        found.append(tuple(draw(jax.random.fold_in(key, 2 * i + j), x) for j, x in enumerate(pair)))
    return found


def errors(
    feature_map: FeatureMap,
    kernel: Callable[[jax.Array], jax.Array],
    parameters: tuple[Any, Any],
    q_NxD: jax.Array,
    k_MxD: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the errors of the features over all pairs.

    'frobenius' is eq. 6 over the norm of the kernel. 'relative' is the sum of the absolute errors over the sum of the
    kernel. 'rmae' is eq. 21; pairs with a kernel near zero dominate it.
    """
    exact_NxM = kernel(q_NxD @ k_MxD.T)
    x_NxF, y_MxF = (feature_map(p, x, i == 0) for i, (p, x) in enumerate(zip(parameters, (q_NxD, k_MxD), strict=True)))
    error_NxM = x_NxF @ y_MxF.T - exact_NxM
    return {
        'frobenius': jnp.sum(error_NxM**2) / jnp.sum(exact_NxM**2),
        'relative': jnp.sum(jnp.abs(error_NxM)) / jnp.sum(jnp.abs(exact_NxM)),
        'rmae': jnp.mean(jnp.abs(error_NxM / exact_NxM)),
    }


def measure(config: Llops, arguments: argparse.Namespace) -> list[dict]:
    """Returns a row per layer: errors of the random sketch, the fitted one and the network on unseen samples.

    Raises ConfigError if the run lacks a layer.
    """
    run = lm.load(arguments.run)
    length, split = run.experiment.train.context_length, run.experiment.data.eval_split
    n = min(arguments.windows, (run.splits.tokens(split) - 1) // length)
    tokens = jnp.asarray(run.splits.read_many(split, np.arange(n) * length, length), jnp.int32)
    model = run.functions.merge(run.weights)
    rows = []
    layers = samples(model.attention_inputs(tokens), 2 * arguments.samples, arguments.seed)
    sketch, kernel = config.sketch(), config.kernel
    if missing := sorted({*(arguments.layers or ())} - {*range(len(layers))}):
        raise ConfigError(f'--layers {missing[0]}: {arguments.run} has {len(layers)} layers, 0 to {len(layers) - 1}')
    for layer, (q_NxD, k_NxD) in enumerate(layers):
        if arguments.layers and layer not in arguments.layers:
            continue
        half = len(q_NxD) // 2
        random = config.init_factors(jax.random.split(jax.random.key(arguments.seed))[0], q_NxD.shape[1])
        options = dict(steps=arguments.steps, loss=arguments.loss, seed=arguments.seed)
        fitted = fit(sketch, kernel, random, q_NxD[:half], k_NxD[:half], **options)
        network = NetworkFeatures()
        start = network.start(jax.random.key(arguments.seed), q_NxD.shape[1], arguments.n_features)
        trained = fit(network, kernel, start, q_NxD[:half], k_NxD[:half], **options | {'learning_rate': 1e-3})
        row = {'layer': layer}
        for name, features, factors in (
            ('random', sketch, random),
            ('fitted', sketch, fitted[:2]),
            ('network', network, trained[:2]),
        ):
            found = errors(features, kernel, factors, q_NxD[half:], k_NxD[half:])
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
    return make_markdown_table(cells, headings)


def table_3(rows: list[dict], degree: int) -> str:
    """Returns Table 3: the mean of |error / kernel| (eq. 21) by method and layer, the paper's rows below ours."""
    cells = []
    for label, name in (('random (PSF)', 'random'), ('network (NN)', 'network'), ('fitted (LLoPS)', 'fitted')):
        values = [row[f'{name}_rmae'] for row in rows]
        cells.append([f'ours: {label}', *(f'{value:.3f}' for value in [*values, np.mean(values)])])
    printed = load_tables()['sketches']
    lines = [make_markdown_table(cells, ['RMAE', *(f'layer {row["layer"]}' for row in rows), 'mean'])]
    theirs = [row for row in printed.rows if row.group == f'p = {degree}']
    if theirs:
        cells = [[f'paper: {row.label}', *(f'{value:.3f}' for value in row.values)] for row in theirs]
        lines += ['', make_markdown_table(cells, [f'{printed.source}', *(column.label for column in printed.columns)])]
    return '\n'.join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='a run directory')
    parser.add_argument('--degree', type=int, default=2)
    parser.add_argument('--n_features', type=int, default=256)
    parser.add_argument('--layers', type=int, nargs='+', metavar='N', help='from 0; default: all; the paper: 0 8 15')
    parser.add_argument('--nonnegative', action='store_true', help='squares of products of degree / 2 projections')
    parser.add_argument(
        '--samples', type=int, default=2048, help='queries and keys per layer, for fitting and for testing'
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
    print()
    print(table_3(rows, arguments.degree))
    if arguments.json:
        with open(arguments.json, 'w') as file:
            json.dump(rows, file, indent=2)
    return 0


if __name__ == '__main__':
    sys.exit(main())
