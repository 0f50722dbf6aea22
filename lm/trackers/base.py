"""Trackers: a configuration that a gin file names, and the writer that it opens for one run.

A tracker never stops a run: an error is logged in one line, and the run goes on without the tracker.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from lm.config.configurable import Configurable
from lm.errors import Diverged, Preempted, WrongResults

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """A run as trackers see it; `start` is the step that it goes on from, `rewinds` how often it was rewound."""

    name: str
    path: epath.Path
    bindings: Mapping[str, str]
    start: int = 0
    rewinds: int = 0


class TrackerWriter:
    """The tracker of one run; a subclass overrides the methods that it needs."""

    def begin(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Receives the figures of each step that the run has logged so far; called once, before `write`."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Receives the figures of a step, such as 'train/loss'; each is finite."""

    def event(self, kind: str, step: int, message: str) -> None:
        """Receives the end of a run after `step`: 'done', 'preempted', 'diverged', 'wrong results' or 'failed'."""

    def close(self) -> None:
        """Ends the writer; no call follows."""


class Tracker(Configurable):
    """Base of the configurations (frozen dataclasses made by `@configurable`)."""

    summaries = False
    """It writes RUN_DIR/tensorboard, which has one writer."""
    setting = ''
    """The binding that selects it, if it is not train.trackers."""

    def open(self, run: RunFacts) -> TrackerWriter:
        """Opens the writer of a run. Raises any error, ImportError for a missing package."""
        raise TypeError(f'{type(self).__name__} opens nothing')


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns KIND/NAME → value for the finite numbers of a record of metrics.jsonl."""
    return {
        f'{record["kind"]}/{name}': float(value)
        for name, value in record.items()
        if name != 'step'
        and type(value) is not bool
        and isinstance(value, int | float | np.number)
        and math.isfinite(value)
    }


class Trackers(contextlib.AbstractContextManager['Trackers']):
    """All trackers of a run, as a context. Leaving the context reports how the run ended.

    Args:
        trackers: the trackers in the order of the configuration.
        enabled: False does nothing, because only one of several processes writes.
    """

    def __init__(self, trackers: Sequence[Tracker], run: RunFacts, enabled: bool = True):
        self.run, self._step = run, run.start
        self._writers: dict[str, TrackerWriter] = {}
        for i, tracker in enumerate(trackers if enabled else ()):
            name = tracker.setting or f'train.trackers[{i}] = @{tracker.gin_name}()'
            self._try(name, lambda name=name, tracker=tracker: self._writers.update({name: tracker.open(run)}))

    def begin(self, records: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Passes the records of metrics.jsonl when a run goes on. Only trackers that need the records read them."""
        self._each(lambda writer: writer.begin((record['step'], figures(record)) for record in records()))

    def write(self, record: Mapping[str, Any]) -> None:
        """Passes a record of metrics.jsonl."""
        self._step = record['step']
        self._each(lambda writer: writer.write(record['step'], figures(record)))

    def __exit__(self, kind, error, traceback) -> None:
        ends = {type(None): 'done', Preempted: 'preempted', KeyboardInterrupt: 'preempted', Diverged: 'diverged'}
        ends[WrongResults] = 'wrong results'
        event = next((name for cls, name in ends.items() if isinstance(error, cls)), 'failed')
        message = 'done' if error is None else ' '.join(str(error).split()) or type(error).__name__
        self._each(lambda writer: writer.event(event, self._step, message))
        self._each(lambda writer: writer.close())

    def _each(self, act: Callable[[TrackerWriter], None]) -> None:
        for name, writer in list(self._writers.items()):
            self._try(name, lambda writer=writer: act(writer))

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._writers.pop(name, None)
            remedy = f"; pip install '{error.name}'" if isinstance(error, ImportError) and error.name else ''
            what = ' '.join(str(error).split())[:200]
            log.warning('%s: %s: %s%s; the run goes on without it', name, type(error).__name__, what, remedy)
