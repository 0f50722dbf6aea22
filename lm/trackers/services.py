"""Weights & Biases, and trackio, which has the same interface: a resumed run continues the same record."""

import hashlib
import importlib
import os
from collections.abc import Mapping

from lm.config.configurable import configurable, field
from lm.trackers.base import RunFacts, Tracker, TrackerWriter


@configurable('wandb', resume=True)
class Wandb(Tracker):
    """A tracker for https://wandb.ai; the key comes from the environment (WANDB_API_KEY), files go to RUN_DIR/wandb."""

    project: str = field(default='lm', help='of the account')
    entity: str | None = field(default=None, help='account or team; None: the default one')
    mode: str = field(default='online', choices=('online', 'offline'), help='offline: to be sent by `wandb sync`')

    def open(self, run: RunFacts) -> TrackerWriter:
        folder = os.fspath(run.path) if os.path.isdir(run.path) else None  # not in a bucket
        options = dict(entity=self.entity, mode=self.mode, id=_name(run), dir=folder)
        return _Service('wandb', project=self.project, name=run.name, config=dict(run.bindings), **options)


@configurable('trackio', resume=True)
class Trackio(Tracker):
    """A local and free tracker; `trackio show` draws the records in TRACKIO_DIR."""

    project: str = field(default='lm', help='one page of the dashboard')

    def open(self, run: RunFacts) -> TrackerWriter:
        return _Service('trackio', project=self.project, name=_name(run), config=dict(run.bindings))


def _name(run: RunFacts) -> str:
    """Returns the name of a record: of the same run again, on any machine that resumes it.

    A rewind begins a new record: services take no step below the newest one of a record.
    """
    identity = hashlib.sha256(os.fspath(run.path).encode()).hexdigest()[:12]
    return f'{run.name[:40]}-{identity}' + (f'-rewind{run.rewinds}' if run.rewinds else '')


class _Service(TrackerWriter):
    """A module with `init`, `log` and `finish`."""

    def __init__(self, module: str, **options: object):
        self._module = importlib.import_module(module)
        if not hasattr(self._module, 'init'):  # a folder of that name, which earlier runs have left here
            raise ImportError(f'{module} is not installed', name=module)
        self._run = self._module.init(resume='allow', **options)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
