"""Finds the figures and the status of a run."""

import dataclasses
import math
from typing import Any

from lm.config.configurable import REGISTRY
from lm.config.names import may_change
from lm.experiment import load_registry
from lm.runs import sweep_file
from lm.runs.records import Run
from lm.training.objectives import Distillation

OTHERS = {
    *('data.mixture', 'data.task', 'data.mask_documents', 'data.restart_positions'),
    *('evaluate.mask_documents', 'train.objective'),
}
"""Bindings whose change makes an evaluation measure something else."""


@dataclasses.dataclass(frozen=True)
class Measures:
    """Figures of runs.

    Attributes:
        split: which evaluations count; None: the split of training.
    """

    split: str | None = None

    def find_newest(self, run: Run, context: int | None = None) -> dict[str, Any]:
        """Returns the newest evaluation of a run, at its own context length or `context`, windows disjoint; {} if none.

        A file of `lm evaluate` counts more than the periodic evaluation of the same step, unless it scored other data,
        or the weights in another model than the run's own.
        """
        context = context or run.value('train.context_length')
        split = self.split or (run.last_evaluation or {}).get('split')
        found = [
            r
            for r in [*run.evals, *run.evaluations]
            if r.get('split') == split
            and r.get('context_length') == context
            and r.get('window') in ('disjoint', None)
            and not _measures_something_else(run, r)
        ]
        return max(reversed(found), key=lambda r: r['step'], default={})

    def covers_part_only(self, run: Run) -> bool:
        """Returns whether the newest evaluation is a periodic one of the first train.eval_tokens alone."""
        measured = self.find_newest(run)
        is_periodic = any(measured is record for record in run.evals)
        return is_periodic and bool(run.value('train.eval_tokens')) and 'word_perplexity' not in measured

    def perplexity(self, run: Run, context: int | None = None) -> float | None:
        """Returns the perplexity per token of a run on text; None for a task, and where it is not finite."""
        measured = self.find_newest(run, context)
        return None if 'task' in measured else _finite(measured.get('perplexity'))

    def accuracy(self, run: Run) -> float | None:
        """Returns the accuracy in percent."""
        accuracy = _finite(self.find_newest(run).get('accuracy'))
        return None if accuracy is None else 100 * accuracy


def get_status(run: Run) -> str:
    """Returns 'done', 'diverged (43)', 'failed (44)', 'not finite', 'not finished', or 'imported' for no training."""
    if run.imported:
        return 'imported'
    failure = sweep_file.read_failure(run.directory.path.parent, run.name)
    if run.train and not math.isfinite(run.train[-1]['loss']):
        return sweep_file.describe_status('failed', failure.get('exit_code')) if failure else 'not finite'
    if run.is_finished():
        return 'done'
    return sweep_file.describe_status('failed', failure.get('exit_code')) if failure else 'not finished'


def name_loss(run: Run) -> str | None:
    """Names what a run with a teacher minimizes; None: it has no teacher."""
    load_registry()
    name = str(run.value('train.objective', '')).strip('@()')
    objective = REGISTRY.get(name.rpartition('/')[2])
    if objective is None or not issubclass(objective, Distillation):
        return None
    return objective.name_loss({f.name: run.value(f'{name}.{f.name}') for f in dataclasses.fields(objective)})


def measure_microseconds_per_token(run: Run) -> float | None:
    return 1e6 / run.tokens_per_second if run.tokens_per_second else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _measures_something_else(run: Run, record: dict[str, Any]) -> bool:
    """Returns whether an evaluation changed the model, the objective or the document masks, or scored other data.

    The store may have moved.
    """
    if record.get('data_sha256', run.info.get('data')) != run.info.get('data'):
        return True
    own = tuple(f'{name}.' for name in ('model', *run.mechanisms(), run.value('train.objective', '').strip('@()')))
    names = {name for name in record.get('overrides') or () if not may_change(name)}
    return not names.isdisjoint(OTHERS) or any(name.startswith(own) for name in names)
