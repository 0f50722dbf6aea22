"""The checkpoints with the lowest evaluation losses (`checkpoint.keep_best`)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


class Losses:
    """Step → evaluation loss, of the steps that have one.

    Args:
        measure: describes the evaluations of this session. A resumed run may have other evaluations; losses of
            different measures are not compared.
    """

    def __init__(self, measure: str = ''):
        self.measure = measure
        self._found: dict[int, tuple[str, float]] = {}

    def add(self, step: int, loss: float) -> None:
        """Adds the loss of an evaluation of this session. A loss that is not finite does not count."""
        if math.isfinite(loss):
            self._found[step] = self.measure, float(loss)

    def read(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the loss in the record of a step, if any; without a measure beside it, it counts as of this one."""
        if isinstance(loss := metrics.get('loss'), float):
            self._found[step] = metrics.get('measure', self.measure), loss

    def forget(self, step: int) -> None:
        self._found.pop(step, None)

    def add_measure(self, metrics: Mapping[str, object]) -> dict[str, Any]:
        """Returns the metrics of an evaluation as a record holds them: a loss has its measure beside it."""
        return {**metrics, 'measure': self.measure} if self.measure and 'loss' in metrics else dict(metrics)

    def is_among_best(self, loss: float, count: int) -> bool:
        """Returns whether fewer than `count` steps have a lower loss."""
        others = [other for measure, other in self._found.values() if measure == self.measure]
        return math.isfinite(loss) and sum(other < loss for other in others) < count

    def best(self, steps: Iterable[int], count: int) -> set[int]:
        """Returns the `count` steps with the lowest losses of each measure. Of equal losses the earlier step wins."""
        found: dict[str, list[tuple[float, int]]] = {}
        for step in steps:
            if step in self._found:
                measure, loss = self._found[step]
                found.setdefault(measure, []).append((loss, step))
        return {step for losses in found.values() for _, step in sorted(losses)[:count]}
