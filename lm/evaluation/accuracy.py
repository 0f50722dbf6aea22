"""Accuracy on a task: the share of its evaluation examples, or of their answers, that the model gets right."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lm.errors import ConfigError
from lm.tasks.base import Task
from lm.text import perplexity
from lm.training.mesh import batch_sharding, replicated, shared_rows
from lm.training.step import TrainStep


def check_task(task: Task, split: str, context_length: int, window: str) -> None:
    """Raises ConfigError for sliding windows, which examples do not have, and what `Task.examples` refuses."""
    if window != 'disjoint':
        raise ConfigError(f"evaluate.window = '{window}': examples of a task are scored whole; set 'disjoint'")
    task.examples(split, [0], context_length)


class TaskEvaluator:
    """Scores all examples of a split with the weights of a model; compiled once.

    An answer is right when no other token is more probable; the right answers before it are in sight.
    """

    def __init__(
        self,
        functions: TrainStep,
        mesh: Mesh,
        task: Task,
        split: str,
        context_length: int,
        window: str,
        batch_size: int,
    ):
        """Raises what `check_task` raises."""
        check_task(task, split, context_length, window)
        self.task, self.split, self.mesh, self.context_length = task, split, mesh, context_length
        self.batch_size = shared_rows(batch_size, mesh)
        self._sharding = batch_sharding(mesh)

        def score(weights, tokens_BxN):
            model = nnx.merge(functions.graph, weights['params'], weights['buffers'])
            logits_BxLxV, targets_BxL = model(tokens_BxN[:, :-1]), tokens_BxN[:, 1:]
            scored_BxL = task.scored(tokens_BxN)
            nats_BxL = -jnp.take_along_axis(jax.nn.log_softmax(logits_BxLxV), targets_BxL[..., None], axis=-1)[..., 0]
            right_BxL = (logits_BxLxV.argmax(-1) == targets_BxL) & scored_BxL
            return jnp.sum(nats_BxL, axis=1, where=scored_BxL), right_BxL.sum(axis=1), scored_BxL.sum(axis=1)

        self._score = jax.jit(score, out_shardings=replicated(mesh))

    def __call__(self, weights: Any, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict | None:
        """The result as a dict of plain numbers, or None when `should_stop` said so. `loss` is per answer."""
        count = self.task.count(self.split)
        nats = answers = right = whole = 0
        for first in range(0, count, self.batch_size):
            index = np.arange(first, first + self.batch_size) % count  # the last batch is filled up with other examples
            real = min(self.batch_size, count - first)
            tokens = self.task.examples(self.split, index, self.context_length)
            with jax.set_mesh(self.mesh):
                array = jax.make_array_from_callback(tokens.shape, self._sharding, tokens.__getitem__)
                nats_B, right_B, scored_B = (np.asarray(x)[:real] for x in self._score(weights, array))
            nats += float(nats_B.astype(np.float64).sum())
            answers += int(scored_B.sum())
            right += int(right_B.sum())
            whole += int((right_B == scored_B).sum())
            if should_stop():
                return None
        return {
            'task': self.task.gin_name,
            'accuracy': whole / count if self.task.whole_answers else right / answers,
            'accuracy_per_answer': right / answers,
            'accuracy_per_example': whole / count,
            'examples': count,
            'answers': answers,
            'sum_nats': nats,
            'loss': nats / answers,
            'perplexity': perplexity(nats / answers),
            'split': self.split,
            'context_length': self.context_length,
            'step': step,
        }

    def describe(self, result: dict) -> str:
        """The result in one line."""
        unit = f'{result["examples"]:,} examples' if self.task.whole_answers else f'{result["answers"]:,} answers'
        return f'accuracy {100 * result["accuracy"]:.2f} % of {unit}  loss {result["loss"]:.4f}'
