"""LLoPS sketches fitted to a kernel beat random sketches, on made-up vectors and on a run."""

import json
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from lm.attention.llops import Llops
from lm.errors import ConfigError

SCRIPT = tiny.ROOT / 'configs/papers/llops/table_3_sketches/fit_llops.py'
MADE = runpy.run_path(str(SCRIPT))
fit = MADE['fit']


def structured(n=512, d=32):
    """Returns layer-normalized queries and keys with decreasing variance per direction, as trained models have."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(d, d)) * (0.6 ** np.arange(d))[:, None]
    x = rng.normal(size=(2, n, d)) @ directions + 0.3 * rng.normal(size=d)
    x -= x.mean(-1, keepdims=True)
    return jnp.asarray(x / x.std(-1, keepdims=True), jnp.float32)


@pytest.mark.parametrize(
    ('config', 'share'),
    [
        (Llops(degree=2, nonnegative=False, n_features=64), 0.1),
        (Llops(degree=3, nonnegative=False, n_features=64), 0.15),
        (Llops(degree=4, n_features=64), 0.2),
    ],
    ids=str,
)
def test_fitted_sketches_beat_random_ones(config, share):
    """Table 3 on made-up vectors: the relative error falls to a small fraction of the random sketch's error."""
    start, made = config.init_factors(jax.random.key(0), 32), (config.sketch(), config.kernel)
    result = fit(*made, start, *structured(), steps=300, learning_rate=2e-2, batch_size=128)
    assert result.after['relative'] < share * result.before['relative']
    assert result.q_parameters.shape == (config.n_factors, 1, 32, 64)
    again = fit(*made, result[:2], *structured(), steps=3)
    assert again.before == pytest.approx(result.after, rel=1e-3)


def test_a_network_is_fitted_like_a_sketch():
    network = MADE['NetworkFeatures']()
    start = network.start(jax.random.key(0), 32, 48)
    result = fit(network, lambda s: s**2, start, *structured(), steps=300, learning_rate=3e-3, batch_size=128)
    assert result.after['relative'] < 0.5 * result.before['relative']


def test_the_errors_are_equation_21():
    """RMAE = E |(qᵀk)^p - ⟨φ(q), φ(k)⟩| / |(qᵀk)^p|, here of degree 3, in NumPy."""
    config = Llops(degree=3, nonnegative=False, n_features=16)
    q, k = structured(n=24)
    factors = config.init_factors(jax.random.key(1), 32)
    found = MADE['errors'](config.sketch(), config.kernel, factors, q, k)
    exact = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T
    features = [
        np.prod(np.einsum('nd,fdm->fnm', np.asarray(x, np.float64), f[:, 0]), 0)
        for x, f in zip((q, k), factors, strict=True)
    ]
    expected = np.mean(np.abs((exact**3 - features[0] @ features[1].T) / exact**3))
    assert float(found['rmae']) == pytest.approx(expected, rel=1e-3)


def test_the_table_stands_beside_the_papers():
    rows = [{'layer': layer, 'random_rmae': 0.5, 'network_rmae': 0.2, 'fitted_rmae': 0.1} for layer in (0, 8, 15)]
    text = MADE['table_3'](rows, 3)
    assert '| ours: fitted (LLoPS) | 0.100 | 0.100 | 0.100 | 0.100 |' in text
    assert '| paper: LLoPS | 0.018 | 0.040 | 0.058 |' in text
    assert 'paper' not in MADE['table_3'](rows, 4)


def test_fit_of_another_kernel():
    """The kernel is 1 + s + s²/2 at small scores: an affine sketch fits it better than a sketch of squares alone."""
    q, k = (x / 6 for x in structured())
    kernel = lambda s: 1 + s + s**2 / 2  # noqa: E731
    errors = []
    for affine in (True, False):
        config = Llops(degree=2, nonnegative=False, n_features=48, affine=affine)
        start = config.init_factors(jax.random.key(0), q.shape[1])
        errors.append(fit(config.sketch(), kernel, start, q, k, steps=200).after)
    assert errors[0]['relative'] < 0.3 * errors[1]['relative']
    with pytest.raises(ConfigError, match=r'loss = .mse.'):
        fit(config.sketch(), kernel, start, q, k, loss='mse')
    with pytest.raises(ConfigError, match=r'samples of shapes'):
        fit(config.sketch(), kernel, start, q, k[:, :5])


@pytest.mark.slow  # a whole act of several runs; its parts have tests of their own
def test_fit_to_the_queries_and_keys_of_a_trained_run(reference_run, tmp_path):
    flags = ['--degree', '2', '--n_features', '96', '--samples', '512', '--steps', '1000']
    command = [sys.executable, str(SCRIPT), str(reference_run[0]), *flags, '--json', str(tmp_path / 'rows.json')]
    done = subprocess.run(command, env=tiny.environment(), cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / 'rows.json').read_text())
    assert [row['layer'] for row in rows] == [0, 1]
    # The samples for eq. 6 are new to the fit.
    assert all(row['fitted_frobenius'] < 0.1 * row['random_frobenius'] for row in rows), done.stdout
    assert f'{rows[0]["fitted_frobenius"]:.4f}' in done.stdout
