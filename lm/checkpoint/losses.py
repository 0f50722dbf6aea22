"""Which checkpoints have the lowest evaluation losses (`checkpoint.keep_best`)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


class Losses:
    """Step → evaluation loss, of the steps that have one.

    Args:
        measure: what the losses of this session are of. A run may be resumed with other settings of its evaluations;
            losses before and after that are neither better nor worse than one another.
    """

    def __init__(self, measure: str = ''):
        self.measure = measure
        self._found: dict[int, tuple[str, float]] = {}

    def add(self, step: int, loss: float) -> None:
        """That of an evaluation of this session; one that is not finite does not count."""
        if math.isfinite(loss):
            self._found[step] = self.measure, float(loss)

    def read(self, step: int, metrics: Mapping[str, Any]) -> None:
        """That of the record of a step, if it has one; those of older versions say no measure and count as this."""
        if isinstance(loss := metrics.get('loss'), float):
            self._found[step] = metrics.get('measure', self.measure), loss

    def forget(self, step: int) -> None:
        self._found.pop(step, None)

    def add_measure(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What a record says of an evaluation: its metrics, and of a loss the measure."""
        return {**metrics, 'measure': self.measure} if self.measure and 'loss' in metrics else dict(metrics)

    def is_among_best(self, loss: float, count: int) -> bool:
        """Whether fewer than `count` steps have a lower loss."""
        others = [other for measure, other in self._found.values() if measure == self.measure]
        return math.isfinite(loss) and sum(other < loss for other in others) < count

    def best(self, steps: Iterable[int], count: int) -> set[int]:
        """Of these steps the `count` with the lowest losses of each measure; of equal ones the earlier."""
        found: dict[str, list[tuple[float, int]]] = {}
        for step in steps:
            if step in self._found:
                measure, loss = self._found[step]
                found.setdefault(measure, []).append((loss, step))
        return {step for losses in found.values() for _, step in sorted(losses)[:count]}
