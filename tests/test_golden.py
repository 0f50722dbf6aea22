"""Golden losses: 20 steps of a tiny model with each mechanism.

A change that should not change the mathematics must leave these losses as they are. After a change that should, look at
the new curves. Then record them with `python tests/test_golden.py [NAME …]` and say in the commit why they changed.

For a mechanism without golden losses, the test checks that it is deterministic and learns; the same command records
them.
"""

import json
import pathlib
import sys

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mechanisms_list import MECHANISMS, OTHERS
from tiny import train_step

from lm.model import ModelConfig
from lm.training.optimizer import OptimizerConfig

GOLDEN = pathlib.Path(__file__).parent / 'data' / 'golden_losses.json'


def losses(attention) -> list[float]:
    """Returns the losses of 20 steps on a text with long-range structure: each window repeats its first half."""
    model = ModelConfig(vocab_size=64, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=attention)
    step = train_step(model, OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=4), steps=20)
    state = jax.jit(step.init)(0)
    train = jax.jit(step.train)
    rng = np.random.default_rng(0)
    result = []
    for _ in range(20):
        half = rng.integers(0, 64, (1, 8, 33))
        state, metrics = train(state, jnp.asarray(np.concatenate([half, half[:, :, :32]], axis=2)))
        result.append(float(metrics['loss']))
    return result


def mark_some(names):
    """Returns the names; the second Python of the complete check runs some of them."""
    return [pytest.param(*case.values, marks=() if case.marks else pytest.mark.smoke) for case in grids.draw(names, 8)]


@pytest.mark.parametrize('name', mark_some(MECHANISMS))
def test_losses_are_the_golden_ones(name):
    golden, ours = json.loads(GOLDEN.read_text()), losses(MECHANISMS[name])
    if name not in golden:
        assert name in OTHERS, f'{name} has no golden losses: run python tests/test_golden.py {name}'
        assert ours == losses(MECHANISMS[name])
        assert ours[-1] < ours[0]
        return
    np.testing.assert_allclose(
        ours,
        golden[name],
        rtol=2e-4,
        err_msg='the mathematics changed; if that is meant, run python tests/test_golden.py and say why in the commit',
    )


def test_golden_losses_are_of_mechanisms():
    assert json.loads(GOLDEN.read_text()).keys() <= MECHANISMS.keys()


if __name__ == '__main__':
    chosen = sys.argv[1:] or MECHANISMS
    new = {name: [round(x, 6) for x in losses(MECHANISMS[name])] for name in chosen}
    kept = {name: values for name, values in json.loads(GOLDEN.read_text()).items() if name in MECHANISMS}
    GOLDEN.write_text(json.dumps(kept | new, indent=1) + '\n')
    sys.stdout.write(f'wrote {GOLDEN}\n')
