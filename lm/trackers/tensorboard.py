"""TensorBoard: RUN_DIR/tensorboard, by tensorboardX or by clu, which needs TensorFlow."""

import abc
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping

from etils import epath

from lm.config.configurable import configurable
from lm.trackers.base import RunFacts, Tracker, TrackerWriter

FOLDER = 'tensorboard'
"""The folder in a run directory."""
MOST_EVENT_FILES = 100
"""The most event files: TensorBoard opens each of them. More are merged into one."""

log = logging.getLogger(__name__)


@configurable('tensorboard', resume=True)
class TensorBoard(Tracker):
    """Summaries in RUN_DIR/tensorboard, by tensorboardX."""

    summaries = True

    def open(self, run: RunFacts) -> TrackerWriter:
        return _TensorboardX(run.path / FOLDER, run.start)


class CluSummaries(Tracker):
    """The writer for `train.tensorboard`: clu, if its packages are installed (clu does not declare them)."""

    summaries = True
    setting = 'train.tensorboard'

    def open(self, run: RunFacts) -> TrackerWriter:
        if any(importlib.util.find_spec(name) is None for name in ('clu', 'tensorflow', 'tensorboard')):
            log.info('no TensorBoard summaries: install the extra [tensorboard]')
            return TrackerWriter()
        return _Clu(run.path / FOLDER)


class _EventFiles(TrackerWriter):
    """Writes one event file per start; if there are many, the new file gets the contents of all."""

    def __init__(self, folder: epath.Path):
        self._before = list(folder.glob('events.out.tfevents.*')) if folder.exists() else []

    def begin(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        if len(self._before) < MOST_EVENT_FILES:
            return
        for step, numbers in history:
            self.write(step, numbers)
        self.flush()
        for path in self._before:
            path.unlink(missing_ok=True)

    @abc.abstractmethod
    def flush(self) -> None:
        """Writes everything to the file."""


class _TensorboardX(_EventFiles):
    def __init__(self, folder: epath.Path, start: int):
        super().__init__(folder)
        from tensorboardX import SummaryWriter

        # Later steps from an earlier start, which are repeated now, are not shown.
        self._writer = SummaryWriter(os.fspath(folder), purge_step=start + 1 if self._before else None)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Clu(_EventFiles):
    def __init__(self, folder: epath.Path):
        super().__init__(folder)
        from clu import metric_writers

        self._writer = metric_writers.SummaryWriter(os.fspath(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._writer.write_scalars(step, numbers)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
