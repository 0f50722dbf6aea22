"""The evaluator of a plan, which measures the weights of a run."""

import functools
from collections.abc import Callable

from jax.sharding import Mesh

from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.masked import MaskedEvaluator, make_hidden_scoring_program
from lm.evaluation.perplexity import Evaluator, make_scoring_program
from lm.evaluation.plan import EvaluationPlan, ScoredText, TaskPlan
from lm.evaluation.sets import SetsEvaluator
from lm.model.functions import ModelFunctions

AnyEvaluator = Evaluator | SetsEvaluator | TaskEvaluator


def make_evaluator(
    plan: EvaluationPlan, functions: ModelFunctions, mesh: Mesh, refuse: Callable[..., None] | None = None
) -> AnyEvaluator:
    """Makes the evaluator of a plan: perplexity of texts, accuracy on hidden tokens or on a task.

    `refuse` raises an error for losses that are not finite (`lm.evaluation.finite`); None: they are reported.
    """
    if isinstance(plan, TaskPlan):
        return TaskEvaluator(functions, mesh, plan, refuse)
    config = plan.settings.config
    program = make_scoring_program(functions, mesh, plan.documents, config.chunk, config.accuracy, plan.begin)
    make_hidden = functools.cache(lambda hiding: make_hidden_scoring_program(functions, mesh, hiding))

    def evaluate(text: ScoredText) -> Evaluator:
        if text.hiding is None:
            return Evaluator(program, mesh, text, plan, refuse)
        return MaskedEvaluator(make_hidden(text.hiding), mesh, text, plan, refuse)

    parts = {name: evaluate(text) for name, text in plan.parts.items()}
    if list(parts) == [''] and not plan.others:
        return parts['']
    return SetsEvaluator(plan.store, parts, {name: evaluate(text) for name, text in plan.others.items()})
