"""The measures of routers: how evenly the tokens of a step choose their experts.

Two arrays count the choices in all layers with experts, in the order of the stacks, their layers and their experts:

    router_load     the share of the tokens that chose an expert
    router_score    the mean score of an expert

Both are means over tokens, so that the shares of microbatches and devices add up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.model.config import ModelConfig
from lm.model.feed_forward.base import Routing

LOAD, SCORE = 'router_load', 'router_score'


def join_routings(routings: Sequence[Routing | None]) -> dict[str, jax.Array]:
    """Returns the measures of all stacks, whose layers are the first axis of each `Routing`; empty without routers."""
    found = [routing for routing in routings if routing is not None]
    if not found:
        return {}
    load_N, score_N = (jnp.concatenate([array.reshape(-1) for array in arrays]) for arrays in zip(*found, strict=True))
    return {LOAD: load_N, SCORE: score_N}


def make_measures(config: ModelConfig) -> dict[str, jax.Array]:
    """Returns zeros with the names and shapes of the measures; empty without routers."""
    size = sum(config.find_feed_forward(layer).count_experts() for layer in range(config.n_layers))
    return {LOAD: jnp.zeros(size), SCORE: jnp.zeros(size)} if size else {}


def read_measures(config: ModelConfig, metrics: Mapping[str, object]) -> dict[str, Any]:
    """Returns what the metrics of a step say about the routers, for metrics.jsonl; empty without routers.

    The balance loss is Σ_e f_e P_e over all tokens of the step, without its coefficient, as a mean over the layers: 1
    where all experts get equally much (`lm.model.feed_forward.experts`). The loads belong to the layer whose busiest
    expert gets the most tokens.
    """
    if LOAD not in metrics:
        return {}
    layers = [layer for stack in range(len(config.stacks)) for layer in config.list_layers(stack)]
    counts = [config.find_feed_forward(layer).count_experts() for layer in layers]
    cuts = np.cumsum(counts)[:-1]
    loads, scores = (np.split(np.asarray(metrics[name], np.float64), cuts) for name in (LOAD, SCORE))
    found = {layer: pair for layer, *pair in zip(layers, loads, scores, strict=True) if len(pair[0])}
    # The loads of a layer have the sum top_k, and f_e is E times a load divided by it.
    losses = [len(load) * load @ score / load.sum() for load, score in found.values()]
    worst = max(sorted(found), key=lambda layer: found[layer][0].max())
    load_E = found[worst][0]
    return {
        'balance_loss': float(np.mean(losses)),
        'expert_load_max': float(load_E.max()),
        'expert_load_layer': worst,
        'expert_load': load_E.tolist(),
        'idle_experts': sum(int((load == 0).sum()) for load, _ in found.values()),
    }
