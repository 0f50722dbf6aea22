"""Reads the scores that `lm evaluate --tasks` has written of a run."""

import dataclasses
from collections.abc import Mapping

from lm.runs.records import Run, read_json


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a task.

    Attributes:
        context_length: of the model, in tokens.
        limit: how many questions were asked; None: all.
        shots: examples in front of each question; None: not recorded.
        metrics: metric → value from 0 to 1, or perplexities.
    """

    task: str
    context_length: int | None
    limit: int | None
    shots: int | None
    metrics: Mapping[str, float]


def read_scores(run: Run) -> list[Score]:
    """Returns the scores of a run in its own configuration, from the oldest step to the newest."""
    folder = run.directory.evaluations / 'harness'
    records = [read_json(path) for path in sorted(folder.glob('*.json'))] if folder.exists() else []
    whole = [r for r in records if isinstance(r, dict) and isinstance(r.get('results'), dict)]
    own = [record for record in whole if not record.get('overrides')]
    found = []
    for record in sorted(own, key=lambda record: record.get('step', 0)):
        shots = record.get('n-shot') or {}
        for task, metrics in record['results'].items():
            # The harness gives -1 where a task has no examples of a length.
            numbers = {
                metric.partition(',')[0]: float(value)
                for metric, value in metrics.items()
                if isinstance(value, int | float) and value >= 0 and '_stderr' not in metric
            }
            found.append(Score(task, record.get('context_length'), record.get('limit'), shots.get(task), numbers))
    return found
