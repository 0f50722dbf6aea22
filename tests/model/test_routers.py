"""The measures of routers in metrics.jsonl: a collapsed router is seen, and models without experts have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import train_step

from lm.model import ModelConfig, routers
from lm.model.feed_forward import DenseLayer
from lm.model.feed_forward.experts import Experts
from lm.model.functions import ModelFunctions
from lm.training.optimizer import OptimizerConfig

TINY = dict(vocab_size=61, n_layers=5, d_model=16, n_heads=2, head_dim=8, hidden_dim=16)
FOUR, TWO = Experts(n_experts=4, hidden_dim=8), Experts(n_experts=2, hidden_dim=8, top_k=1, normalize=False)
MIXED = ModelConfig(**TINY, feed_forward=(DenseLayer(), FOUR, TWO))
"""Its layers 1 and 4 have four experts, and layer 2 has two. Layers 3 and 4 have stacks of their own."""
EVEN = [0.5] * 4


def measure(loads: dict[int, list[float]], scores: dict[int, list[float]]) -> dict:
    """Returns the measures of the layers 1, 2 and 4, which the stacks hold in this order."""
    joined = {routers.LOAD: loads, routers.SCORE: scores}
    metrics = {name: [x for layer in (1, 2, 4) for x in found[layer]] for name, found in joined.items()}
    return routers.read_measures(MIXED, metrics)


def test_even_routers_have_a_balance_loss_of_1():
    quarter, half = [0.25] * 4, [0.5] * 2
    found = measure({1: EVEN, 2: half, 4: EVEN}, {1: quarter, 2: half, 4: quarter})
    assert found['balance_loss'] == pytest.approx(1.0)
    assert (found['expert_load_max'], found['idle_experts']) == (0.5, 0)


def test_a_collapsed_router_is_seen():
    """All tokens of layer 4 choose the same two of four experts, with nearly all of the score."""
    scores = {1: [0.25] * 4, 2: [0.5] * 2, 4: [0.49, 0.01, 0.01, 0.49]}
    found = measure({1: EVEN, 2: [0.5, 0.5], 4: [1.0, 0.0, 0.0, 1.0]}, scores)
    assert (found['expert_load_max'], found['expert_load_layer']) == (1.0, 4)
    assert found['expert_load'] == [1.0, 0.0, 0.0, 1.0]
    assert found['idle_experts'] == 2
    assert found['balance_loss'] == pytest.approx((1 + 1 + 2 * 0.98) / 3)


@pytest.mark.parametrize('microbatches', [1, 2])
def test_a_step_measures_routers_alone(microbatches):
    """Models without experts have no further metric, so their step is as it was."""
    batch = jnp.zeros((microbatches, 2, 9), jnp.uint16)

    def list_metrics(model):
        step = train_step(model, OptimizerConfig(warmup_steps=1), steps=3)
        return {name: x.shape for name, x in jax.eval_shape(step.train, step.abstract, batch)[1].items()}

    dense, mixed = list_metrics(ModelConfig(**TINY)), list_metrics(MIXED)
    shapes = {routers.LOAD: (10,), routers.SCORE: (10,)}
    assert {name: shape for name, shape in mixed.items() if name not in dense} == shapes
    assert {name: x.shape for name, x in routers.make_measures(MIXED).items()} == shapes
    assert routers.make_measures(ModelConfig(**TINY)) == routers.read_measures(ModelConfig(**TINY), {}) == {}


def test_measures_lie_in_the_order_of_the_stacks():
    """The loads of a layer have the sum of its choices per token."""
    functions = ModelFunctions(ModelConfig(**TINY | {'n_layers': 3}, feed_forward=MIXED.feed_forward), jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 9))
    measure = jax.jit(lambda *arrays: functions.weighted_loss(functions.init(0), *arrays)[2])
    loads = np.split(np.asarray(measure(tokens[:, :-1], tokens[:, 1:], jnp.ones((2, 8)))[routers.LOAD]), [4])
    np.testing.assert_allclose([load.sum() for load in loads], [2, 1], rtol=1e-6)
