"""Golden losses: 20 steps of a tiny model with each mechanism.

A change that is not meant to change the mathematics must leave them as they are. One that is meant to: look at the new
curves, then write them down with `python tests/test_golden.py` and say in the commit why they changed.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mechanisms_list import MECHANISMS

from lm.model import ModelConfig
from lm.training.optimizer import OptimizerConfig
from lm.training.step import TrainStep

GOLDEN = pathlib.Path(__file__).parent / 'data' / 'golden_losses.json'


def losses(attention) -> list[float]:
    """The losses of 20 steps on a text with long-range structure: each window repeats its first half."""
    model = ModelConfig(vocab_size=64, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=attention)
    step = TrainStep(model, OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=4), steps=20)
    state = jax.jit(step.init)(0)
    train = jax.jit(step.train)
    rng = np.random.default_rng(0)
    result = []
    for _ in range(20):
        half = rng.integers(0, 64, (1, 8, 33))
        state, metrics = train(state, jnp.asarray(np.concatenate([half, half[:, :, :32]], axis=2)))
        result.append(float(metrics['loss']))
    return result


@pytest.mark.smoke
@pytest.mark.parametrize('name', MECHANISMS)
def test_losses_are_the_golden_ones(name):
    golden = json.loads(GOLDEN.read_text())
    assert name in golden, f'{name} has no golden losses: run python tests/test_golden.py'
    ours = losses(MECHANISMS[name])
    np.testing.assert_allclose(
        ours,
        golden[name],
        rtol=2e-4,
        err_msg='the mathematics changed; if that is meant, run python tests/test_golden.py and say why in the commit',
    )


if __name__ == '__main__':
    new = {name: [round(x, 6) for x in losses(attention)] for name, attention in MECHANISMS.items()}
    GOLDEN.write_text(json.dumps(new, indent=1) + '\n')
    sys.stdout.write(f'wrote {GOLDEN}\n')
