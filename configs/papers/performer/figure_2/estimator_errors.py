#!/usr/bin/env python3
"""Measures how far random features are from softmax attention, by their number (Fig. 2).

    python configs/papers/performer/figure_2/estimator_errors.py [--length 4096] [--head_dim 16] [--out runs/figure_2]

Queries and keys are normal with a standard deviation of `--size`, values standard normal, and scores are divided by
the root of the head size. The paper names none of this, and errors grow steeply with the size. An error is the norm of
a difference over the norm of the exact value. One error is of the matrix of the exponentials of scores (§2.3), the
other of the output, which is divided by the sums of weights. Bands are a standard deviation over draws of projections.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lm.attention.maps.projections import PROJECTIONS
from lm.attention.maps.random_features import SOFTMAX_FEATURES, Projection
from lm.plots import Curve, draw_lines
from lm.text import make_markdown_table

ESTIMATORS = ('trigonometric', 'positive')
"""The estimator of the paper, and the one of its successor."""
ERRORS = ('matrix', 'output')


def draw_tokens(length: int, head_dim: int, size: float) -> jax.Array:
    """Returns queries, keys and values, [3, L, D]; `size`: the standard deviation of queries and keys."""
    return jax.random.normal(jax.random.key(0), (3, length, head_dim)) * jnp.array([size, size, 1])[:, None, None]


def weigh_exactly(qkv_3xLxD: jax.Array) -> jax.Array:
    """Returns the exponentials of all scores, [L, L]."""
    return jnp.exp(qkv_3xLxD[0] @ qkv_3xLxD[1].T * qkv_3xLxD.shape[-1] ** -0.5)


def estimate(qkv_3xLxD: jax.Array, name: str, projection_RxD: jax.Array) -> jax.Array:
    """Returns what random features make of them, [L, L]."""
    feature_map = SOFTMAX_FEATURES[name](scale=qkv_3xLxD.shape[-1] ** -0.5, rescale=False)
    q_LxM, k_LxM = (
        feature_map(Projection(projection_RxD), x_LxD[:, None], queries)[:, 0]
        for x_LxD, queries in ((qkv_3xLxD[0], True), (qkv_3xLxD[1], False))
    )
    return q_LxM @ k_LxM.T


def average(weight_LxL: jax.Array, v_LxD: jax.Array) -> jax.Array:
    """Returns the output of attention with these weights, [L, D]."""
    return weight_LxL @ v_LxD / weight_LxL.sum(-1, keepdims=True)


def measure_errors(qkv_3xLxD: jax.Array, name: str, projection: str, n_features: int, draws: int) -> np.ndarray:
    """Returns the relative errors of the matrix and of the output, [draws, 2]."""
    rows = n_features // SOFTMAX_FEATURES[name].per_row

    @jax.jit
    def compare(key):
        exact_LxL = weigh_exactly(qkv_3xLxD)
        found_LxL = estimate(qkv_3xLxD, name, PROJECTIONS[projection](key, rows, qkv_3xLxD.shape[-1]))
        pairs = (found_LxL, exact_LxL), tuple(average(weight, qkv_3xLxD[2]) for weight in (found_LxL, exact_LxL))
        return jnp.stack([jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact) for found, exact in pairs])

    return np.stack([np.asarray(compare(key)) for key in jax.random.split(jax.random.key(1), draws)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--length', type=int, default=4096, help='tokens; default: 4096, as in the paper')
    parser.add_argument('--head_dim', type=int, default=16, help='default: 16, as in the paper')
    parser.add_argument('--size', type=float, default=0.5, help='of queries and keys; default: 0.5')
    parser.add_argument('--n_features', default='16,32,64,128,256', metavar='M,…', help='default: 16,32,64,128,256')
    parser.add_argument('--draws', type=int, default=10, help='of the projections; default: 10, as in the paper')
    parser.add_argument('--projections', default='iid,orthogonal', help=f'of {",".join(PROJECTIONS)}')
    parser.add_argument('--out', default='.', help='the folder of the two pictures')
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.n_features.split(',')]
    projections = arguments.projections.split(',')
    if unknown := set(projections) - set(PROJECTIONS):
        print(f'estimator_errors: --projections {min(unknown)}: must be of {", ".join(PROJECTIONS)}', file=sys.stderr)
        return 2
    qkv_3xLxD = draw_tokens(arguments.length, arguments.head_dim, arguments.size)
    rows, curves = [], {error: [] for error in ERRORS}
    for name in ESTIMATORS:
        for projection in projections:
            errors_MxNx2 = np.stack([measure_errors(qkv_3xLxD, name, projection, m, arguments.draws) for m in counts])
            means_Mx2, spread_Mx2 = errors_MxNx2.mean(1), errors_MxNx2.std(1)
            for i, error in enumerate(ERRORS):
                mean_M, spread_M = means_Mx2[:, i], spread_Mx2[:, i]
                label = f'{name}, {projection}'
                band = mean_M - spread_M, mean_M + spread_M
                curves[error].append(Curve(label, len(curves[error]), np.array(counts), mean_M, *band))
                cells = (f'{m:.3f} ± {s:.3f}' for m, s in zip(mean_M, spread_M, strict=True))
                rows.append([f'{error}: {label}', *cells])
    print(make_markdown_table(sorted(rows), ['relative error by M', *map(str, counts)]))
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    for error in ERRORS:
        label, path = f'relative error of the {error}', folder / f'estimator_errors_{error}'
        draw_lines(path, curves[error], 'features M', label, x_scale='log', y_scale='log', markers=True, ticks=counts)
        print(f'drawn in {path}.png and {path}.pdf')
    return 0


if __name__ == '__main__':
    sys.exit(main())
