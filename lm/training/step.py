"""The training state and the step that advances it: pure functions, shared by training, checking and benchmarks.

A state is a dict of arrays:
    params      nested dict, float32
    buffers     nested dict of non-trainable arrays (random projections)
    optimizer   the optax state
    step        int32, batches consumed
    skipped     int32, updates skipped because loss, gradient or learning rate were not finite
    in_a_row    int32, of these, how many since the last good one
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from lm import model as model_lib
from lm.ops.documents import Documents
from lm.ops.platform import SHARED_AXIS, batch_axes
from lm.ops.sequence import over_tokens
from lm.parameters import PARTS, declarations
from lm.training.objectives import Hiding, Unpack
from lm.training.objectives.next_token import next_token
from lm.training.optimizer import OptimizerConfig

State = dict[str, Any]


def weights(state: State) -> State:
    """What a model computes with, of a training state: params and buffers."""
    return {name: state[name] for name in ('params', 'buffers')}


class TrainStep:
    """The functions of one configuration: `init(seed)` makes a state, `train(state, batch)` advances it.

    `unpack` says what is read, what is asked for and which of that counts in the loss: tokens [B, L + 1] → ids, ids and
    bool, each [B, L] (`Task.unpack`, `Objective.unpack`); None: the next token, everywhere. `by_window`: the step tells
    the loss of each window too, as the metric `window_loss`, [A, B], and where not all targets count, how many do, as
    `window_targets`. `documents`: those of a window do not see each other.
    """

    def __init__(
        self,
        model: model_lib.ModelConfig,
        optimizer: OptimizerConfig,
        steps: int,
        unpack: Unpack | None = None,
        by_window: bool = False,
        documents: Documents | None = None,
    ):
        self.model, self.unpack, self.by_window, self.documents = model, unpack or next_token, by_window, documents
        self.schedule, self.z_loss = optimizer.learning_rate(steps), optimizer.z_loss
        abstract = nnx.eval_shape(lambda: model_lib.build(model, 0))
        self.graph, self._params, self._buffers = split(abstract)
        self.declared = declarations(abstract)
        self.transform = optimizer.build(steps, self.declared, model.widening)

    def init(self, seed: int) -> State:
        """The state before the first step, a function of the seed alone; jit it with the shardings of the mesh."""
        _, params, buffers = split(model_lib.build(self.model, seed))
        return self._state(params, buffers)

    def abstract(self) -> State:
        """The state as jax.ShapeDtypeStructs; quick, since the model is not built again."""
        return jax.eval_shape(self._state, self._params, self._buffers)

    def count_parameters(self) -> dict[str, int]:
        """Trainable parameters by part of the model (`lm.parameters.PARTS`)."""
        return count(self.declared, self._params)

    def _state(self, params: Any, buffers: Any) -> State:
        zero = jnp.zeros((), jnp.int32)
        return {
            'params': params,
            'buffers': buffers,
            'optimizer': self.transform.init(params),
            'step': zero,
            'skipped': zero,
            'in_a_row': zero,
        }

    def train(self, state: State, batch_AxBxL: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        """One optimizer step on a batch of A microbatches of windows of L = context_length + 1 tokens.

        An update is made only if loss, gradient (its norm too) and learning rate are finite. Else the state keeps its
        values, `skipped` and `in_a_row` grow, and the next batch gets its chance. A number of the state that an update
        would make infinite in spite of that keeps its value, alone: to wait with all of them until each is known would
        read and write the state twice.

        Returns:
            the new state, and scalars: loss (nats per token), grad_norm, learning_rate, skipped, in_a_row, and
            first_bad, which is what `name_of` knows the first array by that is not finite (-1: all are).
        """
        windows = (batch_AxBxL,)
        if isinstance(self.unpack, Hiding):
            windows += (self._numbers(state['step'], batch_AxBxL),)
        loss, gradients, by_window = self._gradients(state['params'], state['buffers'], *windows)
        squares = jax.tree.map(lambda x: optax.tree.norm(x, squared=True), gradients)
        norm = jnp.sqrt(optax.tree.sum(squares))
        updates, optimizer = self.transform.update(gradients, state['optimizer'], state['params'])
        proposal = {'params': optax.apply_updates(state['params'], updates), 'optimizer': optimizer}
        rate = jnp.asarray(self.schedule(state['step'] - state['skipped']))
        finite_N = jnp.isfinite(jnp.stack(list(_checked(loss, squares, norm, rate).values())))
        finite = finite_N.all()
        kept = {name: state[name] for name in proposal}
        bad = 1 - finite.astype(jnp.int32)
        new = jax.tree.map(lambda new, old: jnp.where(finite & jnp.isfinite(new), new, old), proposal, kept) | {
            'buffers': state['buffers'],
            'step': state['step'] + 1,
            'skipped': state['skipped'] + bad,
            'in_a_row': (state['in_a_row'] + 1) * bad,
        }
        metrics = {
            'loss': loss,
            'grad_norm': norm,
            'learning_rate': rate,
            'skipped': new['skipped'],
            'in_a_row': new['in_a_row'],
            'first_bad': jnp.where(finite, -1, jnp.argmin(finite_N)),
            **by_window,
        }
        return new, metrics

    def name_of(self, first_bad: int) -> str:
        """What the metric `first_bad` points at: 'loss', 'gradient of …', 'gradient norm' or 'learning rate'."""
        return list(_checked(None, self._params, None, None))[first_bad]

    def redraws(self, steps_done: int) -> tuple[int, ...]:
        """Which mechanisms of the pattern draw new random projections before the next step (`redraw_every`)."""
        periods = [attention.redraw_every for attention in self.model.pattern]
        return tuple(i for i, every in enumerate(periods) if every and steps_done and steps_done % every == 0)

    def redraw(self, weights: State, which: tuple[int, ...], seed: int, steps_done: jax.Array) -> Any:
        """The buffers with the projections of the mechanisms `which` replaced: a function of (seed, steps_done)."""
        model = nnx.merge(self.graph, weights['params'], weights['buffers'])
        model.redraw(which, jax.random.fold_in(model_lib.seed_key(seed), steps_done))
        return split(model)[2]

    def token_losses(
        self,
        weights: State,
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        documents: Documents | None = None,
    ) -> jax.Array:
        """Negative log-likelihood of each target, [B, L] float32; `weights` holds params and buffers.

        Of whole windows, which the mesh in context may split. With `documents` those of a window do not see each other.
        """

        def losses(params, buffers, *arrays):
            return nnx.merge(self.graph, params, buffers).token_losses(*arrays)

        return self._over_windows(losses, weights, documents, tokens_BxL, targets_BxL)

    def weighted_loss(
        self, weights: State, tokens_BxL: jax.Array, targets_BxL: jax.Array, share_BxL: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a step minimizes, the sum of the targets' losses times their shares, and `token_losses`, which has no
        gradient here."""

        def weighted(params, buffers, *arrays):
            return nnx.merge(self.graph, params, buffers).weighted_loss(*arrays, z_loss=self.z_loss)

        parts, nats_BxL = self._over_windows(weighted, weights, self.documents, tokens_BxL, targets_BxL, share_BxL)
        return parts.sum(), nats_BxL

    def judged(
        self, weights: State, tokens_BxL: jax.Array, targets_BxL: jax.Array, documents: Documents | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """What `token_losses` gives, and whether no token is more probable than the target, bool [B, L]."""

        def judge(params, buffers, tokens_BxL, targets_BxL, *rest):
            model = nnx.merge(self.graph, params, buffers)
            x_BxLxD = model.hidden(tokens_BxL, *rest)
            return model.losses(x_BxLxD, targets_BxL), model.most_probable(x_BxLxD) == targets_BxL

        return self._over_windows(judge, weights, documents, tokens_BxL, targets_BxL)

    def _over_windows(self, function: Callable, weights: State, documents: Documents | None, *arrays_BxL: jax.Array):
        """function(params, buffers, *arrays, positions, starts) of each device's tokens; the first array are these."""
        positions, starts_BxL = jnp.arange(arrays_BxL[0].shape[1]), None
        if documents is not None:
            positions, starts_BxL = documents.of(arrays_BxL[0])
        axes = (None, None, *[1] * len(arrays_BxL), positions.ndim - 1, None if starts_BxL is None else 1)
        of_parts = over_tokens(function, axes)
        return of_parts(weights['params'], weights['buffers'], *arrays_BxL, positions, starts_BxL)

    def _numbers(self, step, batch_AxBxL):
        """Of the examples of a step, [A, B]: they count through the run, whatever batches are left out."""
        shape = batch_AxBxL.shape[:2]
        rows = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        return step.astype(jnp.uint32) * math.prod(shape) + rows

    def _gradients(self, params, buffers, *windows):
        """Loss in plain nats, gradients (of the z-loss too) and what is told of single windows.

        The loss is the mean over the counted targets of the whole batch, wherever in it they stand: not the mean of the
        means of microbatches.
        """
        microbatches = windows[0].shape[0]
        counted_AxBxL = jax.vmap(self.unpack)(windows[0].astype(jnp.int32), *windows[1:])[2]
        count = None  # of targets that a microbatch has on average, on all devices
        if counted_AxBxL is not None:
            count = jnp.maximum(counted_AxBxL.sum(), 1) / microbatches
        # Devices that share nothing sum their gradients over the microbatches, in float32, before they add them, once a
        # step: the partitioner would add them in each microbatch.
        axes = tuple(name for name in batch_axes() if name != SHARED_AXIS) if microbatches > 1 else ()
        parts = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)  # of a microbatch

        def of_windows(nats_BxL, counted_BxL):
            if counted_BxL is None:
                return {'window_loss': nats_BxL.mean(axis=1)}
            targets_B = counted_BxL.sum(axis=1)
            nats_B = nats_BxL.sum(axis=1, where=counted_BxL)
            return {'window_loss': nats_B / jnp.maximum(targets_B, 1), 'window_targets': targets_B}

        def objective(params, buffers, count, batch_BxL, *numbers_B):
            batch_BxL = batch_BxL.astype(jnp.int32)
            inputs_BxL, targets_BxL, counted_BxL = self.unpack(batch_BxL, *numbers_B)
            if counted_BxL is None:
                share_BxL = jnp.full(targets_BxL.shape, 1 / (targets_BxL.size * parts), jnp.float32)
            else:
                share_BxL = jnp.where(counted_BxL, 1 / count, 0.0)
            weights = {'params': params, 'buffers': buffers}
            loss, nats_BxL = self.weighted_loss(weights, inputs_BxL, targets_BxL, share_BxL)
            by_window = of_windows(nats_BxL, counted_BxL) if self.by_window else {}
            nats = nats_BxL.mean() / parts if counted_BxL is None else nats_BxL.sum(where=counted_BxL) / count
            return loss, (nats, by_window)

        grad = jax.grad(objective, has_aux=True)
        if microbatches == 1:
            gradients, (mean, by_window) = grad(params, buffers, count, *(x[0] for x in windows))
            return mean, gradients, jax.tree.map(lambda x: x[None], by_window)

        def accumulated(params, buffers, count, *windows):
            def accumulate(total, window):
                gradients, (mean, by_window) = grad(params, buffers, count, *window)
                return jax.tree.map(jnp.add, total, (mean, gradients)), by_window

            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            total, by_window = jax.lax.scan(accumulate, zero, windows)
            return (jax.lax.psum(total, axes) if axes else total), by_window

        if axes:
            # Kernels are refused wherever the compiler is left to split something, be it by one.
            names = set(axes) | {name for name, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1}
            whole, rows = PartitionSpec(), PartitionSpec(None, axes)
            accumulated = jax.shard_map(
                accumulated,
                in_specs=(whole, whole, whole, *[rows] * len(windows)),
                out_specs=(whole, rows),
                axis_names=names,
                check_vma=False,
            )
        total, by_window = accumulated(params, buffers, count, *windows)
        return *jax.tree.map(lambda x: x / microbatches, total), by_window


def _checked(loss: Any, squares: Any, norm: Any, rate: Any) -> dict[str, Any]:
    """Name → what must be finite in a step, causes before their effects; of gradients the sums of their squares."""
    leaves = jax.tree_util.tree_leaves_with_path(squares)
    named = {f'gradient of {jax.tree_util.keystr(path, simple=True, separator="/")}': leaf for path, leaf in leaves}
    return {'loss': loss, **named, 'gradient norm': norm, 'learning rate': rate}


def split(model: model_lib.Transformer) -> tuple[Any, dict, dict]:
    """(graph definition, parameters, buffers) of a model, the arrays as nested dicts."""
    graph, params, buffers = nnx.split(model, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def count_parameters(model: model_lib.ModelConfig) -> dict[str, int]:
    """Trainable parameters by part of the model (`lm.parameters.PARTS`)."""
    abstract = nnx.eval_shape(lambda: model_lib.build(model, 0))
    return count(declarations(abstract), split(abstract)[1])


def count(declared: dict, params: dict) -> dict[str, int]:
    """Numbers in `params` by the part of the model that `declared`, a dict like it, says they are of."""
    counts = dict.fromkeys(PARTS, 0)
    for told, leaf in zip(jax.tree.leaves(declared), jax.tree.leaves(params), strict=True):
        counts[told.part] += leaf.size
    return counts
