"""The script of Performer's Fig. 2: errors of random features by their number."""

import runpy
import sys

import numpy as np
import tiny

SCRIPT = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/figure_2/estimator_errors.py'))


def test_errors_fall_with_the_features_and_with_orthogonal_rows():
    qkv_3xLxD = SCRIPT['draw_tokens'](64, 8, 0.5)

    def errors(projection: str, n_features: int) -> np.ndarray:
        return SCRIPT['measure_errors'](qkv_3xLxD, 'trigonometric', projection, n_features, 20).mean(0)

    few, many, orthogonal = errors('iid', 64), errors('iid', 1024), errors('orthogonal', 64)
    np.testing.assert_allclose(few / many, 4, rtol=0.3)  # 16 times the features
    assert (orthogonal < few).all()


def test_the_errors_are_those_of_softmax_in_float64():
    qkv_3xLxD = SCRIPT['draw_tokens'](12, 4, 0.7)
    q, k, v = np.asarray(qkv_3xLxD, np.float64)
    weights = np.exp(q @ k.T / 2)
    np.testing.assert_allclose(SCRIPT['weigh_exactly'](qkv_3xLxD), weights, rtol=1e-5)
    expected = weights @ v / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(SCRIPT['average'](weights, v), expected, rtol=1e-5)


def test_the_command_draws_both_errors_and_names_a_wrong_projection(tmp_path, monkeypatch, capsys):
    flags = ['--length', '16', '--head_dim', '4', '--n_features', '8,16', '--draws', '2', '--out', str(tmp_path)]
    monkeypatch.setattr(sys, 'argv', ['estimator_errors.py', *flags])
    assert SCRIPT['main']() == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith('| matrix')]) == 4
    assert {path.name for path in tmp_path.glob('*.png')} == {
        'estimator_errors_matrix.png',
        'estimator_errors_output.png',
    }
    monkeypatch.setattr(sys, 'argv', ['estimator_errors.py', '--projections', 'orthogonl'])
    assert SCRIPT['main']() == 2
    assert '--projections orthogonl: must be of iid, orthogonal' in capsys.readouterr().err
