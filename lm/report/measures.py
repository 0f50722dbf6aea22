"""Finds the figures and the status of a run."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lm.config.configurable import REGISTRY
from lm.config.names import may_change
from lm.errors import ConfigError
from lm.evaluation.conditioning import Conditioning
from lm.experiment import load_registry
from lm.report.published import Figure
from lm.report.scores import read_scores
from lm.runs import sweep_file
from lm.runs.records import Run
from lm.training.objectives import Distillation

OTHERS = {
    *('data.mixture', 'data.task', 'data.mask_documents', 'data.restart_positions'),
    *('evaluate.mask_documents', 'train.objective'),
}
"""Bindings whose change makes an evaluation measure something else."""
BEGINNING = {'data.begin_id', 'data.begin_windows', 'evaluate.begin_windows'}
"""Bindings whose change makes an evaluation state another conditioning."""


@dataclasses.dataclass(frozen=True)
class Measures:
    """Figures of runs.

    Attributes:
        split: which evaluations count; None: the split of training.
        conditioning: which evaluations of perplexity count; None: any (`choose_conditioning`).
    """

    split: str | None = None
    conditioning: Conditioning | None = None

    def find_newest(self, run: Run, context: int | None = None) -> dict[str, Any]:
        """Returns the newest evaluation of a run, at its own context length or `context`, windows disjoint; {} if none.

        A file of `lm evaluate` counts more than the periodic evaluation of the same step, unless it scored other data,
        or the weights in another model than the run's own. Of one step, an evaluation after the run's own tokens before
        texts counts most.
        """
        found = self._list_all(run, context)
        if self.conditioning is not None and is_conditioned(run):
            found = [r for r in found if 'task' in r or Conditioning.read(r) == self.conditioning]
        return max(reversed(found), key=_rank, default={})

    def list_conditionings(self, run: Run) -> list[Conditioning]:
        """Returns what the newest perplexities of a run are conditioned on, the run's own first; [] if it has none."""
        found = self._list_all(run, None) if is_conditioned(run) else []
        newest = max((r['step'] for r in found), default=0)
        texts = [r for r in reversed(found) if r['step'] == newest and 'task' not in r]
        ranked = sorted(texts, key=_rank, reverse=True)
        return list(dict.fromkeys(map(Conditioning.read, ranked)))

    def _list_all(self, run: Run, context: int | None) -> list[dict[str, Any]]:
        context = context or run.value('train.context_length')
        split = self.split or (run.last_evaluation or {}).get('split')
        return [
            r
            for r in [*run.evals, *run.evaluations]
            if r.get('split') == split
            and r.get('context_length') == context
            and r.get('window') in ('disjoint', None)
            and not _measures_something_else(run, r)
        ]

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

    def figure(self, run: Run, figure: Figure) -> float | None:
        """Returns a figure of a further text (`evaluate.sets`), or of a task of the harness, as the paper asks it.

        A score counts with the paper's shots. It may be of more questions than the paper asks.
        """
        if figure.set is not None:
            found = (self.find_newest(run).get('sets') or {}).get(figure.set, {})
            value = _finite(found.get(figure.measure))
            return value if value is None or figure.measure != 'accuracy' else 100 * value
        scores = [score for score in read_scores(run) if score.task == figure.task and score.shots == figure.shots]
        enough = [s for s in scores if s.limit is None or s.limit >= (figure.examples or math.inf)]
        value = _finite(enough[-1].metrics.get(figure.metric)) if enough else None
        return None if value is None else 100 * value


def choose_conditioning(runs: Sequence[Run], measures: Measures, allows_any: bool = False) -> Conditioning | None:
    """Returns the conditioning that the newest evaluations of all runs have in common.

    None: no run has a perplexity, or they have none in common and `allows_any`.

    Raises ConfigError if perplexities would be compared that are conditioned on different tokens.
    """
    known = [(run, found) for run in runs if (found := measures.list_conditionings(run))]
    if not known:
        return None
    run, own = known[0]
    for one in own:
        if all(one in found for _, found in known):
            return one
    if allows_any:
        return None
    other, theirs = next(((r, found) for r, found in known if own[0] not in found))
    raise ConfigError(
        f'{run.name} ({own[0]}) and {other.name} ({theirs[0]}): their perplexities are conditioned differently; score '
        'one like the other (lm evaluate with data.begin_id, evaluate.begin_windows), or pass --any_conditioning'
    )


def is_conditioned(run: Run) -> bool:
    """Returns whether tokens before a token predict it, as in all models but those that see both sides."""
    load_registry()
    objective = REGISTRY.get(run.objective.rpartition('/')[2])
    return not getattr(objective, 'looks_ahead', False)


def get_status(run: Run) -> str:
    """Returns 'done', 'diverged (43)', 'failed (44)', 'not finite', 'not finished', or 'imported' for no training."""
    if run.imported:
        return 'imported'
    failure = sweep_file.read_failure(run.directory.path.parent, run.name)
    failed = sweep_file.describe_status('failed', failure.get('exit_code')) if failure else ''
    if run.train and not math.isfinite(run.train[-1]['loss']):
        return failed or 'not finite'
    return 'done' if run.is_finished() else failed or 'not finished'


def name_loss(run: Run) -> str | None:
    """Names what a run with a teacher minimizes; None: it has no teacher."""
    load_registry()
    objective = REGISTRY.get(run.objective.rpartition('/')[2])
    if objective is None or not issubclass(objective, Distillation):
        return None
    return objective.name_loss({f.name: run.value(f'{run.objective}.{f.name}') for f in dataclasses.fields(objective)})


def measure_microseconds_per_token(run: Run) -> float | None:
    return 1e6 / run.tokens_per_second if run.tokens_per_second else None


def _rank(record: dict[str, Any]) -> tuple[int, bool]:
    return record['step'], BEGINNING.isdisjoint(record.get('overrides') or ())


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _measures_something_else(run: Run, record: dict[str, Any]) -> bool:
    """Returns whether an evaluation changed model, objective or document masks, or scored other data."""
    if record.get('data_sha256', run.info.get('data')) != run.info.get('data'):
        return True
    own = tuple(f'{name}.' for name in ('model', *run.mechanisms(), run.objective))
    names = {name for name in record.get('overrides') or () if not may_change(name)}
    return not names.isdisjoint(OTHERS) or any(name.startswith(own) for name in names)
