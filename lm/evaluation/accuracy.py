"""Accuracy on a task: the fraction of its evaluation examples, or of their answers, that the model gets right."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lm.evaluation.plan import TaskPlan
from lm.model.functions import ModelFunctions, Weights
from lm.pod.mesh import batch_sharding, replicated, round_up_rows
from lm.tasks.base import Slice
from lm.text import format_count, perplexity


@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts of examples, answers, right answers and examples without a mistake, and the nats of the answers.

    Tallies can be added.
    """

    examples: int = 0
    answers: int = 0
    right: int = 0
    whole: int = 0
    nats: float = 0.0

    def __add__(self, other: 'Tally') -> 'Tally':
        return Tally(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def compute_figures(self, whole_answers: bool) -> dict[str, float]:
        """Returns the accuracies; `whole_answers` chooses the task's accuracy among them."""
        answers, examples = self.right / self.answers, self.whole / self.examples
        accuracy = examples if whole_answers else answers
        return {'accuracy': accuracy, 'accuracy_per_answer': answers, 'accuracy_per_example': examples}


class TaskEvaluator:
    """Scores all examples of a split with the weights of a model; compiles once per context length.

    An answer is right if no other token is more probable. The model sees the right answers before it, or none where its
    tokens see later ones.
    """

    def __init__(
        self, functions: ModelFunctions, mesh: Mesh, plan: TaskPlan, refuse: Callable[..., None] | None = None
    ):
        """`refuse` raises an error for losses that are not finite (`lm.evaluation.finite`); None: they are reported."""
        self.refuse = refuse
        self.task, self.split, self.context_length = plan.task, plan.split, plan.context_length
        self.unpack = unpack = plan.task.choose_unpacking(bool(functions.config.looks_ahead))
        self.mesh, self.batch_size = mesh, round_up_rows(plan.batch_size, mesh)
        self._sharding = batch_sharding(mesh)

        def score(weights, tokens_BxN):
            model = functions.merge(weights)
            inputs_BxL, targets_BxL, scored_BxL = unpack(tokens_BxN)
            logits_BxLxV = model(inputs_BxL)
            nats_BxL = -jnp.take_along_axis(jax.nn.log_softmax(logits_BxLxV), targets_BxL[..., None], axis=-1)[..., 0]
            right_BxL = (logits_BxLxV.argmax(-1) == targets_BxL) & scored_BxL
            return jnp.sum(nats_BxL, axis=1, where=scored_BxL), right_BxL.sum(axis=1), scored_BxL.sum(axis=1)

        self._score = jax.jit(score, out_shardings=replicated(mesh))

    @property
    def measure(self) -> str:
        """The name of the loss: losses of the same task are comparable if this name is the same."""
        return f'{self.split}, {self.context_length}'

    def __call__(self, weights: Weights, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict | None:
        """Returns the result as a dict of plain numbers, or None when `should_stop` returned True. `loss` is per
        answer."""
        tallies = {}
        for name, part in self.task.slices(self.split, self.context_length).items():
            tally = self._tally(weights, part, should_stop)
            if tally is None:
                return None
            tallies[name] = tally
        total = sum(tallies.values(), Tally())
        result = {
            'task': self.task.gin_name,
            **total.compute_figures(self.task.whole_answers),
            'examples': total.examples,
            'answers': total.answers,
            'sum_nats': total.nats,
            'loss': total.nats / total.answers,
            'perplexity': perplexity(total.nats / total.answers),
            'split': self.split,
            'context_length': self.context_length,
            'step': step,
        }
        whole = self.task.whole_answers
        parts = {name: tally.compute_figures(whole)['accuracy'] for name, tally in tallies.items() if name}
        return result | ({'accuracy_by_slice': parts} if parts else {})

    def _tally(self, weights: Weights, part: Slice, should_stop: Callable[[], bool]) -> Tally | None:
        """Scores the examples of a slice; returns None when `should_stop` returned True."""
        total, count = Tally(), len(part.index_N)
        for first in range(0, count, self.batch_size):
            at = np.arange(first, first + self.batch_size) % count  # other examples fill up the last batch
            real = min(self.batch_size, count - first)
            tokens = self.task.examples(self.split, part.index_N[at], part.context_length)
            with jax.set_mesh(self.mesh):
                array = jax.make_array_from_callback(tokens.shape, self._sharding, tokens.__getitem__)
                nats_B, right_B, scored_B = (np.asarray(x)[:real] for x in self._score(weights, array))
            if self.refuse and not np.isfinite(nats_B).all():
                inputs_BxL = np.asarray(self.unpack(jnp.asarray(tokens))[0])
                self.refuse(inputs_BxL[np.isfinite(nats_B).argmin()], f'the loss of {self.split!r}')
            whole = int((right_B == scored_B).sum())
            total += Tally(real, int(scored_B.sum()), int(right_B.sum()), whole, float(nats_B.astype(np.float64).sum()))
            if should_stop():
                return None
        return total

    def describe(self, result: dict) -> str:
        """Describes the result in one line, and each slice in a further line. Tasks with several answers get both
        accuracies."""
        of_answers = f'{100 * result["accuracy_per_answer"]:.2f} % of {format_count(result["answers"], "answer")}'
        shares = of_answers
        if self.task.whole_answers:
            shares = f'{100 * result["accuracy"]:.2f} % of {format_count(result["examples"], "example")}'
            shares += f', {of_answers}' if result['answers'] > result['examples'] else ''
        parts = [f'\n  {name}: {100 * share:.2f} %' for name, share in result.get('accuracy_by_slice', {}).items()]
        return f'accuracy {shares}  loss {result["loss"]:.4f}{"".join(parts)}'
