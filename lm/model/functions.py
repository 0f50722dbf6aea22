"""The functions of a model: pure functions of its weights, for training, evaluation, generation and export.

Weights are a dict of two nested dicts of arrays: `params` (float32, trained) and `buffers` (random projections). Where
adapters are trained (`lm.model.adapters`), there is also `base`.

B batch, L length of a window, V vocabulary, D model width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.model.config import ModelConfig
from lm.model.transformer import Transformer, build, make_seed_key
from lm.ops.documents import Documents
from lm.ops.sequence import over_tokens
from lm.parameters import AVERAGE, PARTS, declarations

Weights = dict[str, Any]


class Scored(NamedTuple):
    """The scores of the targets of windows, each [B, L].

    Attributes:
        nats: negative log-likelihoods, float32.
        correct: True where no token is more probable than the target; None: not computed.
        counted: True where the target counts; None: all count.
    """

    nats: jax.Array
    correct: jax.Array | None = None
    counted: jax.Array | None = None


class ModelFunctions:
    """The functions of one model that computes in one type.

    Attributes:
        dtype: the type of products and activations.
        widening: the width of the model over the width that the learning rate is given for.
        graph: the structure of the model without its arrays.
        declared: the declaration of each parameter, a nested dict like `params` (`lm.parameters.declarations`).
        abstract: the weights as jax.ShapeDtypeStructs.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.config, self.dtype, self.widening = config, jnp.dtype(dtype), config.widening
        model = nnx.eval_shape(lambda: build(config, 0, self.dtype))
        self.graph, params, buffers = split(model)
        self.declared = declarations(model)
        self.abstract: Weights = {'params': params, 'buffers': buffers}

    def init(self, seed: int) -> Weights:
        """Draws the initial weights, a function of the seed alone; jit it with the shardings of the mesh."""
        _, params, buffers = split(build(self.config, seed, self.dtype))
        return {'params': params, 'buffers': buffers}

    def merge(self, weights: Mapping[str, object]) -> Transformer:
        """Returns the model with these weights."""
        return nnx.merge(self.graph, *self.list_arrays(weights))

    def list_arrays(self, weights: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the arrays of the weights in the order in which `graph` takes them."""
        return weights['params'], weights['buffers']

    def count_parameters(self) -> dict[str, int]:
        """Counts the trainable parameters by part of the model (`lm.parameters.PARTS`)."""
        return count_by_part(self.declared, self.abstract['params'])

    def choose_redrawn(self, steps_done: int) -> tuple[int, ...]:
        """Returns the stacks (`ModelConfig.stacks`) that draw new random projections before the next step
        (`redraw_every`)."""
        periods = [attention.redraw_every for attention in self.config.stacks]
        return tuple(i for i, every in enumerate(periods) if every and steps_done and steps_done % every == 0)

    def redraw(self, weights: Mapping[str, object], which: tuple[int, ...], seed: int, steps_done: jax.Array) -> Any:
        """Returns the buffers with new projections of the stacks `which`: a function of (seed, steps_done)."""
        model = self.merge(weights)
        model.redraw(which, jax.random.fold_in(make_seed_key(seed), steps_done))
        return split(model)[2]

    def weighted_loss(
        self,
        weights: Mapping[str, Any],
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        share_BxL: jax.Array,
        documents: Documents | None = None,
        z_loss: float = 0.0,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns (sum of the targets' weighted losses with the z-loss, nats of each target without a gradient, and the
        measures of routers, if there are any: `lm.model.routers`)."""

        def weighted(model: Transformer, *arrays: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
            return model.weighted_loss(*arrays, z_loss=z_loss)

        arrays = tokens_BxL, targets_BxL, share_BxL
        parts, nats_BxL, measures = over_windows(weighted, [(self, weights)], documents, *arrays)
        return parts.sum(), nats_BxL, jax.tree.map(lambda x: x.sum(axis=(0, 1)), measures)

    def score_targets(
        self,
        weights: Mapping[str, object],
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        documents: Documents | None = None,
        accuracy: bool = False,
    ) -> Scored:
        """Scores each target, with `accuracy` also whether no other token beats it.

        The windows are whole; the mesh in context may split them. With `documents` the tokens of a window do not see
        other documents.
        """

        def score(model: Transformer, tokens_BxL: jax.Array, targets_BxL: jax.Array, *rest: Any) -> Scored:
            x_BxLxD = model.hidden(tokens_BxL, *rest)
            correct_BxL = model.most_probable(x_BxLxD) == targets_BxL if accuracy else None
            return Scored(model.losses(x_BxLxD, targets_BxL), correct_BxL)

        return over_windows(score, [(self, weights)], documents, tokens_BxL, targets_BxL)


def over_windows(
    function: Callable,
    models: Sequence[tuple[ModelFunctions, Mapping[str, object]]],
    documents: Documents | None,
    *arrays_BxL: jax.Array,
) -> Any:
    """Calls function(*models, *arrays, positions, starts) on each device's tokens.

    Args:
        function: takes a `Transformer` for each model and the tokens of one part; returns arrays [B, L, …], or with 1
            for B and L: the shares of the parts, to be summed.
        models: the functions of each model, with its weights.
        documents: the documents of a window do not see each other; None: a window is one document.
        arrays_BxL: the tokens, then what belongs to them.
    """
    graphs = [functions.graph for functions, _ in models]

    def on_part(weights: list[Any], *arguments: Any) -> Any:
        return function(*(nnx.merge(graph, *each) for graph, each in zip(graphs, weights, strict=True)), *arguments)

    positions, starts_BxL = jnp.arange(arrays_BxL[0].shape[1]), None
    if documents is not None:
        positions, starts_BxL = documents.of(arrays_BxL[0])
    axes = (None, *[1] * len(arrays_BxL), positions.ndim - 1, None if starts_BxL is None else 1)
    weights = [functions.list_arrays(each) for functions, each in models]
    return over_tokens(on_part, axes)(weights, *arrays_BxL, positions, starts_BxL)


def split(model: Transformer) -> tuple[Any, dict, dict]:
    """Returns (graph definition, parameters, buffers) of a model; the arrays are nested dicts."""
    graph, params, buffers = nnx.split(model, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def select_weights(state: Mapping[str, object]) -> Weights:
    """Returns the weights in a training state."""
    return {name: state[name] for name in ('params', 'buffers')}


def select_final(state: Mapping[str, object]) -> Weights:
    """Returns the weights in a training state that the run is judged by: the mean of the last ones, if there is
    one."""
    return {'params': state.get(AVERAGE, state['params']), 'buffers': state['buffers']}


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Counts the trainable parameters by part of the model (`lm.parameters.PARTS`)."""
    return ModelFunctions(config, jnp.float32).count_parameters()


def count_by_part(declared: dict, params: dict) -> dict[str, int]:
    """Counts the numbers in `params` by part of the model; `declared` has a declaration for each array."""
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for declaration, leaf in zip(jax.tree.leaves(declared), jax.tree.leaves(params), strict=True):
        counts[declaration.part] += leaf.size
    return counts
