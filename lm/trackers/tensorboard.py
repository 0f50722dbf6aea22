"""TensorBoard without TensorFlow."""

import os
from collections.abc import Mapping

from lm.config.configurable import configurable
from lm.trackers.base import RunFacts, Tracker, TrackerWriter


@configurable('tensorboard', resume=True)
class TensorBoard(Tracker):
    """Summaries in RUN_DIR/tensorboard, by tensorboardX."""

    summaries = True

    def open(self, run: RunFacts) -> TrackerWriter:
        return _Summaries(run)


class _Summaries(TrackerWriter):
    def __init__(self, run: RunFacts):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(os.fspath(run.path / 'tensorboard'))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
