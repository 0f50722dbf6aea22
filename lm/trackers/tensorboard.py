"""TensorBoard: RUN_DIR/tensorboard, by tensorboardX or by clu, which needs TensorFlow."""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
        from tensorboardX import SummaryWriter

        folder = os.fspath(run.path / FOLDER)
        # Later steps from an earlier start, which are repeated now, are not shown.
        return _TensorboardX(
            run.path / FOLDER, lambda resumed: SummaryWriter(folder, purge_step=run.start + 1 if resumed else None)
        )


class CluSummaries(Tracker):
    """The writer for `train.tensorboard`: clu, if its packages are installed (clu does not declare them)."""

    summaries = True
    setting = 'train.tensorboard'

    def open(self, run: RunFacts) -> TrackerWriter:
        if any(importlib.util.find_spec(name) is None for name in ('clu', 'tensorflow', 'tensorboard')):
            log.info('no TensorBoard summaries: install the extra [tensorboard]')
            return TrackerWriter()
        from clu import metric_writers

        return _EventFiles(run.path / FOLDER, lambda _: metric_writers.SummaryWriter(os.fspath(run.path / FOLDER)))


class _EventFiles(TrackerWriter):
    """Writes one event file per start; if there are many, the new file gets the contents of all.

    `open_writer` opens the file, given whether there are earlier ones.
    """

    def __init__(self, folder: epath.Path, open_writer: Callable[[bool], Any]):
        self._before = list(folder.glob('events.out.tfevents.*')) if folder.exists() else []
        self._writer = open_writer(bool(self._before))

    def begin(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        if len(self._before) < MOST_EVENT_FILES:
            return
        for step, numbers in history:
            self.write(step, numbers)
        self._writer.flush()
        for path in self._before:
            path.unlink(missing_ok=True)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._writer.write_scalars(step, numbers)

    def close(self) -> None:
        self._writer.close()


class _TensorboardX(_EventFiles):
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
