"""The training state and the step that advances it: pure functions, shared by training, checking and benchmarks.

A state is a dict of arrays:
      params      nested dict, float32
      buffers     nested dict of non-trainable arrays (random projections)
      optimizer   the optax state
      average     the mean of the last parameters, like params; only with `optimizer.average_steps`
      step        int32, batches consumed
      skipped     int32, updates skipped because loss, gradient or learning rate were not finite
      in_a_row    int32, bad steps since the last good one: skipped, or without a finite update of some array

Beside it a step may read arrays that it never changes (`TrainStep.fixed`):
      teacher     the weights of the teacher
      base        the parameters under adapters
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from lm.checkpoint.checksum import checksum
from lm.model import routers
from lm.model.adapters import AdaptedFunctions, find_base
from lm.model.functions import ModelFunctions, Weights, select_weights
from lm.ops.documents import Documents
from lm.ops.platform import DATA_AXES, SHARED_AXIS, batch_axes
from lm.parameters import AVERAGE
from lm.training.objectives import Distillation, Hiding, Pair, Unpack
from lm.training.objectives.next_token import next_token
from lm.training.optimizer import OptimizerConfig

State = dict[str, Any]
Fixed = dict[str, Any]
Batch = jax.Array | dict[str, jax.Array]
"""The tokens of a step, [microbatches, windows, context_length + 1], or these with what a teacher says of them."""
GRADIENT, UPDATE = 'gradient of ', 'update of '
"""How the names begin of what is not finite in a bad step; an array's path follows."""


@dataclasses.dataclass(frozen=True)
class Teaching:
    """The teacher of a step, and how the student is compared with it.

    Attributes:
        objective: the comparison.
        functions: the functions of the teacher, which computes in the type of the student.
    """

    objective: Distillation
    functions: ModelFunctions

    @functools.cached_property
    def abstract(self) -> Weights:
        """The teacher's weights in a step as jax.ShapeDtypeStructs: in the type of its products."""
        return jax.eval_shape(self.cast, self.functions.abstract)

    def cast(self, weights: Weights) -> Weights:
        """Returns the weights as a step takes them; buffers keep their type."""
        return weights | {'params': optax.tree.cast(weights['params'], self.functions.dtype)}


class TrainStep:
    """The step of one configuration: `init(seed)` makes a state, `train(state, batch)` advances it.

    Attributes:
        unpack: tokens [B, L + 1] → inputs, targets, and the targets that count in the loss, each [B, L].
        by_window: the step also returns the metric `window_loss` [A, B]; if some targets do not count, it returns
            `window_targets`, their number per window.
        documents: the documents of a window do not see each other; None: a window is one document.
        teaching: the teacher; None: the tokens alone say what is right.
        adapted: the functions, if they are of a model with adapters.
    """

    def __init__(
        self,
        functions: ModelFunctions,
        optimizer: OptimizerConfig,
        steps: int,
        unpack: Unpack | None = None,
        by_window: bool = False,
        documents: Documents | None = None,
        teaching: Teaching | None = None,
    ):
        """`unpack` None: every token predicts the next one (`Task.unpack` and `Objective.unpack` give others)."""
        self.functions = functions
        self.adapted = functions if isinstance(functions, AdaptedFunctions) else None
        self.unpack: Unpack = unpack or next_token
        self.by_window, self.documents, self.teaching = by_window, documents, teaching
        self.optimizer, self.schedule, self.z_loss = optimizer, optimizer.build_schedule(steps), optimizer.z_loss
        self.frozen = optimizer.choose_frozen(functions.declared)
        if teaching:
            lists = self.frozen, teaching.objective.choose_frozen(functions, teaching.functions)
            self.frozen = jax.tree.map(operator.or_, *lists)
        self.has_frozen = any(jax.tree.leaves(self.frozen))
        self.transform = optimizer.build(steps, functions.declared, functions.widening, self.frozen)

    def init(self, seed: int) -> State:
        """Makes the state before the first step, a function of the seed; jit it with the shardings of the mesh."""
        return self._extend(self.functions.init(seed))

    @functools.cached_property
    def abstract(self) -> State:
        """The state as jax.ShapeDtypeStructs; quick, since the model is not built again."""
        return jax.eval_shape(self._extend, self.functions.abstract)

    @functools.cached_property
    def fixed(self) -> Fixed:
        """The arrays that a step reads and never changes, as jax.ShapeDtypeStructs."""
        return self.cast_fixed(jax.eval_shape, {name: one.abstract for name, one in self.find_fixed().items()})

    @property
    def _computed(self) -> Teaching | None:
        """The teacher, if the step computes it: its predictions are not cached."""
        return None if self.teaching is None or self.teaching.objective.is_cached else self.teaching

    def find_fixed(self) -> dict[str, ModelFunctions]:
        """Returns the functions of the models that the fixed arrays belong to, by the names of the arrays."""
        teacher = {'teacher': self._computed.functions} if self._computed else {}
        return teacher | ({'base': find_base(self.functions)} if self.adapted else {})

    def cast_fixed(self, call: Callable[..., Any], weights: Mapping[str, Weights]) -> Fixed:
        """Returns the fixed arrays in the types of a step.

        Args:
            call: calls a function with arguments, as jax.eval_shape does.
            weights: of the models of `find_fixed`.
        """
        found = {'teacher': call(self._computed.cast, weights['teacher'])} if self._computed else {}
        return found | ({'base': call(self.adapted.cast, weights['base']['params'])} if self.adapted else {})

    def _extend(self, weights: Weights) -> State:
        zero = jnp.zeros((), jnp.int32)
        average = {AVERAGE: jax.tree.map(jnp.copy, weights['params'])} if self.optimizer.average_steps else {}
        return {
            **weights,
            **average,
            'optimizer': self.transform.init(weights['params']),
            'step': zero,
            'skipped': zero,
            'in_a_row': zero,
        }

    def train(self, state: State, batch_AxBxL: Batch, fixed: Fixed | None = None) -> tuple[State, dict[str, jax.Array]]:
        """Takes one optimizer step on a batch of A microbatches of windows of L = context_length + 1 tokens.

        `batch_AxBxL` may be a dict of `tokens` and what the token store has of the teacher, each [A, B, …].
        `fixed` has the arrays that the step never changes, if there are any (`TrainStep.fixed`).

        An update is made only if loss, gradient (its norm too) and learning rate are finite. Otherwise the state keeps
        its values, `skipped` and `in_a_row` grow, and the next batch follows. If an update would make a number infinite
        all the same, this number alone keeps its value, and `kept` counts it if it is a parameter. An array of
        parameters that keeps all its numbers in this way makes a bad step too, and only `in_a_row` grows: the other
        arrays are updated. Checking all numbers before the update would read and write the state twice.

        Returns:
            the new state, and scalars: loss (nats per token), grad_norm, learning_rate, skipped, in_a_row,
                kept: the parameters that kept their value because their update was not finite (0 in a skipped step),
                first_bad: the number of the first array that is not finite, for `name_first_bad` (-1: all are finite).
                The comparison with a teacher adds its own (`Distillation.compare`). Without a teacher, models with
                experts add the measures of their routers (`lm.model.routers`).
        """
        loss, gradients, others = self._gradients(_join(state, fixed), batch_AxBxL, state['step'])
        squares = jax.tree.map(lambda x: optax.tree.norm(x, squared=True), gradients)
        norm = jnp.sqrt(optax.tree.sum(squares))
        updates, optimizer = self.transform.update(gradients, state['optimizer'], state['params'])
        proposal = {'params': optax.apply_updates(state['params'], updates), 'optimizer': optimizer}
        if self.optimizer.average_steps:
            done = state['step'] - state['skipped'] + 1
            proposal[AVERAGE] = self.optimizer.average(state[AVERAGE], proposal['params'], done)
        rate = jnp.asarray(self.schedule(state['step'] - state['skipped']))
        finite_N = jnp.isfinite(jnp.stack(list(_checked(loss, squares, norm, rate).values())))
        finite = finite_N.all()
        lost_P, whole_P = _count_lost(proposal['params'])
        bad_N = jnp.concatenate([~finite_N, finite & whole_P])
        kept = {name: state[name] for name in proposal}
        bad = 1 - finite.astype(jnp.int32)
        new = jax.tree.map(lambda new, old: jnp.where(finite & jnp.isfinite(new), new, old), proposal, kept) | {
            'buffers': state['buffers'],
            'step': state['step'] + 1,
            'skipped': state['skipped'] + bad,
            'in_a_row': (state['in_a_row'] + 1) * bad_N.any(),
        }
        metrics = {
            'loss': loss,
            'grad_norm': norm,
            'learning_rate': rate,
            'skipped': new['skipped'],
            'in_a_row': new['in_a_row'],
            'kept': jnp.where(finite, lost_P.sum(), 0.0),
            'first_bad': jnp.where(bad_N.any(), jnp.argmax(bad_N), -1),
            **others,
        }
        return new, metrics

    def weighted_loss(
        self, weights: Weights, tokens_BxL: jax.Array, targets_BxL: jax.Array, share_BxL: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns (the loss to minimize, the nats of each target, the measures of routers): see
        `ModelFunctions.weighted_loss`."""
        arrays = tokens_BxL, targets_BxL, share_BxL
        return self.functions.weighted_loss(weights, *arrays, self.documents, self.z_loss)

    def read_measures(self, metrics: Mapping[str, object]) -> tuple[dict[str, float], str | None]:
        """Returns what the metrics of a step say about routers, or else about student and teacher, for metrics.jsonl
        and the progress."""
        if self.teaching:
            return self.teaching.objective.read_measures(metrics)
        return routers.read_measures(self.functions.config, metrics), None

    def _make_measures(self) -> dict[str, jax.Array]:
        """Returns zeros with the names and shapes of the further measures of a step."""
        if self.teaching:
            return self.teaching.objective.make_measures(self.functions)
        return routers.make_measures(self.functions.config)

    def name_first_bad(self, first_bad: int) -> str:
        """Returns the name of the array that the metric `first_bad` stands for: 'loss', 'gradient of …', 'gradient
        norm', 'learning rate', 'update of …'."""
        checked = list(_checked(None, self.functions.abstract['params'], None, None))
        return [*checked, *(UPDATE + name.removeprefix(GRADIENT) for name in checked[1:-2])][first_bad]

    def replay(self, state: State, batch_AxBxL: Batch, turn: jax.Array, fixed: Fixed | None = None) -> jax.Array:
        """Has every group of devices compute the gradients of the same windows, one group's part of a microbatch.

        A group is the devices with one position on the axis `data`: together they have one copy of the parameters.
        Groups get the same windows, in the same order, and run the same program, so their bits must be the same. They
        sum nothing over the groups, because such a sum would hide which group is wrong.

        Args:
            state: as in `train`; it stays as it is.
            turn: chooses microbatch and group, so that equal turns replay equal windows.

        Returns:
            checksums [groups, arrays] of the arrays that `name_replayed` lists, uint32.
        """
        mesh, axis = jax.sharding.get_abstract_mesh(), DATA_AXES[0]
        groups = mesh.shape[axis]
        grad = jax.grad(self._make_objective(groups), has_aux=True)

        def compute(given: Weights, turn: jax.Array, windows: _Windows) -> jax.Array:
            part = jax.lax.axis_index(axis) == turn % groups

            def take(x: jax.Array) -> jax.Array:
                row = x[turn // groups % x.shape[0]]
                row = row if jnp.issubdtype(row.dtype, jnp.floating) else row.astype(jnp.uint32)
                return jax.lax.psum(jnp.where(part, row, np.zeros((), row.dtype)), axis) if groups > 1 else row

            rows = jax.tree.map(take, windows)
            counted = rows.unpack(self.unpack)[2]
            count = None if counted is None else jnp.maximum(counted.sum(), 1)
            gradients, ((nats, _), _) = grad(given['params'], given, count, rows)
            return jnp.stack([checksum(x) for x in (nats, *jax.tree.leaves(gradients))])[None]

        # Kernels are refused while the compiler may split an axis, even by one.
        names = {axis} | {name for name, size in mesh.shape.items() if size == 1}
        windows = self._number_windows(state['step'], batch_AxBxL)
        whole, rows = PartitionSpec(), PartitionSpec(None, axis)
        return jax.shard_map(
            compute,
            in_specs=(whole, whole, rows),
            out_specs=PartitionSpec(axis),
            axis_names=names,
            check_vma=False,
        )(_join(state, fixed), turn, windows)

    def name_replayed(self) -> list[str]:
        """Lists the arrays whose checksums `replay` returns."""
        return list(_checked(None, self.functions.abstract['params'], None, None))[:-2]

    def _number_windows(self, step: jax.Array, batch: Batch) -> '_Windows':
        """Returns the windows; with an objective that hides tokens also the number of each example."""
        arrays = dict(batch) if isinstance(batch, Mapping) else {'tokens': batch}
        tokens_AxBxL = arrays.pop('tokens')
        numbers = [self._number_examples(step, tokens_AxBxL)] if isinstance(self.unpack, Hiding) else []
        return _Windows(tokens_AxBxL, numbers, arrays)

    def _number_examples(self, step: jax.Array, batch_AxBxL: jax.Array) -> jax.Array:
        """Numbers the examples of a step, [A, B]. The numbers continue through the run, whichever batches are
        left out."""
        shape = batch_AxBxL.shape[:2]
        rows = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        return step.astype(jnp.uint32) * math.prod(shape) + rows

    def _compare(
        self,
        given: Weights,
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        share_BxL: jax.Array,
        taught: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns (the loss to minimize, the nats of each target, further measures): of routers, or with a teacher of
        the comparison with it."""
        weights = {name: arrays for name, arrays in given.items() if name != 'teacher'}
        if self.teaching is None:
            return self.weighted_loss(weights, tokens_BxL, targets_BxL, share_BxL)
        windows = self.documents, tokens_BxL, targets_BxL
        if self._computed:
            pair = Pair(self.functions, weights, self._computed.functions, given['teacher'])
            found = self.teaching.objective.compare(pair, *windows)
        else:
            found = self.teaching.objective.compare_with_cached(self.functions, weights, *windows, taught)
        nats_BxL, others = jax.lax.stop_gradient(found)
        measures = {name: jnp.tensordot(share_BxL, array, 2) for name, array in others.items()}
        return (found[0] * share_BxL).sum(), nats_BxL, measures

    def _make_objective(self, parts: int) -> Callable[..., Any]:
        """Returns a function (params, given, count, windows of a microbatch, numbers of the examples) → (loss, others).

        Args:
            parts: the function sees one of so many parts of a microbatch, and its loss is this share of the mean.
        """

        def summarize_windows(nats_BxL, counted_BxL):
            if counted_BxL is None:
                return {'window_loss': nats_BxL.mean(axis=1)}
            targets_B = counted_BxL.sum(axis=1)
            nats_B = nats_BxL.sum(axis=1, where=counted_BxL)
            return {'window_loss': nats_B / jnp.maximum(targets_B, 1), 'window_targets': targets_B}

        def objective(params, given, count, windows):
            if self.has_frozen:
                # The gradient of a frozen array is not computed.
                stop = lambda x, frozen: jax.lax.stop_gradient(x) if frozen else x  # noqa: E731
                params = jax.tree.map(stop, params, self.frozen)
            given = given | {'params': params}
            inputs_BxL, targets_BxL, counted_BxL = windows.unpack(self.unpack)
            if counted_BxL is None:
                share_BxL = jnp.full(targets_BxL.shape, 1 / (targets_BxL.size * parts), jnp.float32)
            else:
                share_BxL = jnp.where(counted_BxL, 1 / count, 0.0)
            loss, nats_BxL, measures = self._compare(given, inputs_BxL, targets_BxL, share_BxL, windows.taught)
            by_window = summarize_windows(nats_BxL, counted_BxL) if self.by_window else {}
            nats = nats_BxL.mean() / parts if counted_BxL is None else nats_BxL.sum(where=counted_BxL) / count
            return loss, ((nats, measures), by_window)

        return objective

    def _gradients(self, given: Weights, batch: Batch, step: jax.Array) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Returns (loss in nats without z-loss, gradients with it, other metrics).

        The loss is the mean over the counted targets of the whole batch, and not the mean of the means of microbatches.
        """
        windows = self._number_windows(step, batch)
        microbatches = windows.tokens.shape[0]
        counted_AxBxL = jax.vmap(lambda each: each.unpack(self.unpack))(windows)[2]
        count = None  # the mean number of targets per microbatch, over all devices
        if counted_AxBxL is not None:
            count = jnp.maximum(counted_AxBxL.sum(), 1) / microbatches
        # Devices that share nothing sum their gradients over the microbatches in float32, and add these sums once per
        # step. The partitioner would add them in each microbatch.
        axes = tuple(name for name in batch_axes() if name != SHARED_AXIS) if microbatches > 1 else ()
        parts = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)  # the parts of a microbatch

        grad = jax.grad(self._make_objective(parts), has_aux=True)
        if microbatches == 1:
            gradients, ((loss, measures), by_window) = grad(
                given['params'], given, count, jax.tree.map(lambda x: x[0], windows)
            )
            return loss, gradients, measures | jax.tree.map(lambda x: x[None], by_window)

        def accumulated(given, count, windows):
            def accumulate(total, window):
                gradients, (means, by_window) = grad(given['params'], given, count, window)
                return jax.tree.map(jnp.add, total, (means, gradients)), by_window

            zero = ((jnp.zeros(()), self._make_measures()), jax.tree.map(jnp.zeros_like, given['params']))
            total, by_window = jax.lax.scan(accumulate, zero, windows)
            return (jax.lax.psum(total, axes) if axes else total), by_window

        if axes:
            # Kernels are refused while the compiler may split an axis, even by one.
            names = set(axes) | {name for name, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1}
            whole, rows = PartitionSpec(), PartitionSpec(None, axes)
            accumulated = jax.shard_map(
                accumulated,
                in_specs=(whole, whole, rows),
                out_specs=(whole, rows),
                axis_names=names,
                check_vma=False,
            )
        total, by_window = accumulated(given, count, windows)
        (loss, measures), gradients = jax.tree.map(lambda x: x / microbatches, total)
        return loss, gradients, measures | by_window


class _Windows(NamedTuple):
    """Windows of tokens, what belongs to each, and what is taught for them; of a batch or of one microbatch.

    Attributes:
        tokens: [A, B, L + 1] or [B, L + 1].
        numbers: the numbers of the examples [A, B], if tokens are hidden.
        taught: arrays [A, B, L, …] by name.
    """

    tokens: jax.Array
    numbers: list[jax.Array]
    taught: dict[str, jax.Array]

    def unpack(self, unpack: Unpack) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns inputs, targets, and the targets that count, of one microbatch."""
        return unpack(self.tokens.astype(jnp.int32), *self.numbers)


def _join(state: State, fixed: Fixed | None) -> Weights:
    """Returns the arrays that a gradient is computed from, besides the windows."""
    return {**select_weights(state), **(fixed or {})}


def complete(fixed: Fixed | None) -> Weights:
    """Returns what the weights of a state lack: the base under adapters, if there are any."""
    return {name: arrays for name, arrays in (fixed or {}).items() if name == 'base'}


def _count_lost(params: object) -> tuple[jax.Array, jax.Array]:
    """Returns (the numbers of each array that are not finite, float32 [arrays]; whether all numbers of it are)."""
    lost = [~jnp.isfinite(x) for x in jax.tree.leaves(params)]
    # Of each entry of the first axis: a stack of large layers has more numbers than 32 bits count.
    lost_P = jnp.stack([x.sum(range(1, x.ndim), dtype=jnp.uint32).astype(jnp.float32).sum() for x in lost])
    return lost_P, jnp.stack([x.all() for x in lost])


def _checked(loss: object, squares: object, norm: object, rate: object) -> dict[str, Any]:
    """Returns name → the value that must be finite in a step, causes before effects; for gradients it is the sum of
    squares."""
    leaves = jax.tree_util.tree_leaves_with_path(squares)
    named = {f'{GRADIENT}{jax.tree_util.keystr(path, simple=True, separator="/")}': leaf for path, leaf in leaves}
    return {'loss': loss, **named, 'gradient norm': norm, 'learning rate': rate}
