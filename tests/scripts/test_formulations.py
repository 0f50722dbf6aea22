"""Other ways to compute polysketch, which our operation is compared with."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from lm.attention import HeadDims
from lm.bench import attention
from lm.bench.candidates import candidates

sys.path.insert(0, str(tiny.ROOT))
from scripts.kernels import formulations

SKETCH = ['polysketch.block = 16', "polysketch.sketch = 'gaussian'", 'polysketch.sketch_size = 4']


@pytest.mark.parametrize('given', [False, True])
@pytest.mark.parametrize('name', formulations.FORMULATIONS)
def test_outputs_and_gradients_are_the_same(name, given):
    (experiment,), dims, computed = candidates(['polysketch'], [], SKETCH).values(), HeadDims(2, 2, 8), []
    for compute in (None, formulations.FORMULATIONS[name]):
        layer = attention.build(experiment, dims, given, compute)
        arrays = attention._inputs(64, layer, dims, jnp.float32)
        program = attention._program(layer.function, 'forward+backward', (2, 32))
        computed.append(jax.jit(program)(layer.weights, *arrays))
    for ours, other in zip(*map(jax.tree.leaves, computed), strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-3, atol=2e-4)


def test_all_ways_are_timed(tmp_path, capsys):
    flags = ['--contexts', '32', '--tokens', '64', '--heads', '2', '--head_dim', '8', '--repeats', '1']
    flags += [word for binding in SKETCH for word in ('--gin_param', binding)]
    assert formulations.main([*flags, '--save', str(tmp_path / 'f.json')]) == 0
    assert 'loop' in capsys.readouterr().out
    rows = json.loads((tmp_path / 'f.json').read_text())['rows']
    assert [row['mechanism'] for row in rows] == ['polysketch', *formulations.FORMULATIONS]
    assert all(row['milliseconds'] > 0 for row in rows)
