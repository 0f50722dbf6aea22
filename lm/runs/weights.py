"""The weights of another run, read whole: of a teacher, or of the run that a new one begins with."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.finite import refuse_not_finite
from lm.errors import AbsentError
from lm.files import JsonObject
from lm.parameters import AVERAGE
from lm.runs.run_dir import RunDir

CHECKED = ('tokenizer', 'base')
"""The fingerprints that a reader and a checkpoint must share."""


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """A checkpoint of another run.

    Attributes:
        setting: the gin name that names the run, for messages.
        step: the checkpoint; None: the newest.
        fingerprints: of the run that reads it; those in `CHECKED` count here.
    """

    setting: str
    run_dir: str
    step: int | None
    fingerprints: Mapping[str, str]

    def fingerprint(self) -> str:
        """Returns a fingerprint of the weights. Raises AbsentError or MismatchError if there are none."""
        leaves = self._record['leaves']
        sums = ''.join(f'{name} {leaf["checksum"]}\n' for name, leaf in sorted(leaves.items()))
        return hashlib.sha256(sums.encode()).hexdigest()

    def read(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the weights; `abstract` has their shapes, types and shardings.

        Raises MismatchError if the checkpoint was trained with another tokenizer, does not fit the model, or is not
        finite.
        """
        name = find_weights(self._record['leaves'])
        with self._open() as saved:
            restored = saved.restore({name: abstract['params'], 'buffers': abstract['buffers']}, self.chosen)
        assert restored is not None, 'there is a record of this step'
        weights = {'params': restored[0][name], 'buffers': restored[0]['buffers']}
        refuse_not_finite(weights, f'{self.name}, step {restored.step}', 'name another run')
        return weights

    @functools.cached_property
    def chosen(self) -> int:
        """The step of the checkpoint, found once: a run that still trains saves newer ones."""
        with self._open() as saved:
            step = saved.latest_step() if self.step is None else self.step
        if step is None:
            raise AbsentError(f'{self.name}: holds no checkpoint; name a run of lm train or lm import')
        return step

    @functools.cached_property
    def _record(self) -> JsonObject:
        with self._open() as saved:
            return saved.read_record(self.chosen)

    @property
    def name(self) -> str:
        """The setting and the run, for messages."""
        return f'{self.setting} = {self.run_dir!r}'

    def open_run(self, fingerprints: Mapping[str, str] | None = None) -> Checkpointer:
        """Opens the checkpoints of the run for reading, and compares `fingerprints` with theirs."""
        return Checkpointer(RunDir(self.run_dir, found=True).checkpoints, fingerprints=fingerprints)

    def _open(self) -> Checkpointer:
        return self.open_run({name: value for name, value in self.fingerprints.items() if name in CHECKED})


def find_weights(leaves: Iterable[str]) -> str:
    """Returns the part of a state whose arrays are the model: the mean of the last weights where the run keeps one.

    `leaves` are the names of the arrays of a checkpoint.
    """
    return AVERAGE if any(name.startswith(f'{AVERAGE}.') for name in leaves) else 'params'
