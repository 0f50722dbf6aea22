"""The weights of another run, read whole: of a teacher, or of the run that a new one begins with."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from lm.checkpoint.checkpointer import Checkpointer
from lm.errors import AbsentError
from lm.runs.run_dir import RunDir

MEAN = 'average'
"""The arrays of a checkpoint that the run is judged by, if it has them."""


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """A checkpoint of another run.

    Attributes:
        setting: the gin name that names the run, for messages.
        run_dir: the run.
        step: the checkpoint; None: the newest.
        fingerprints: of the data of the run that reads it; only the tokenizer counts here.
    """

    setting: str
    run_dir: str
    step: int | None
    fingerprints: Mapping[str, str]

    def fingerprint(self) -> str:
        """Returns a fingerprint of the weights. Raises AbsentError or MismatchError if there are none."""
        with self._open() as saved:
            step = saved.latest_step() if self.step is None else self.step
            if step is None:
                raise AbsentError(
                    f'{self.setting} = {self.run_dir!r}: holds no checkpoint; name a run of lm train or lm import'
                )
            leaves = saved.read_record(step)['leaves']
        sums = ''.join(f'{name} {leaf["checksum"]}\n' for name, leaf in sorted(leaves.items()))
        return hashlib.sha256(sums.encode()).hexdigest()

    def read(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the weights; `abstract` has their shapes, types and shardings.

        Raises MismatchError if the checkpoint was trained with another tokenizer or does not fit the model.
        """
        with self._open() as saved:
            step = saved.latest_step() if self.step is None else self.step
            assert step is not None, '`fingerprint` has found a checkpoint'
            has_mean = any(name.startswith(f'{MEAN}.') for name in saved.read_record(step)['leaves'])
            name = MEAN if has_mean else 'params'
            restored = saved.restore({name: abstract['params'], 'buffers': abstract['buffers']}, step)
        assert restored is not None, '`fingerprint` has found a checkpoint'
        return {'params': restored[0][name], 'buffers': restored[0]['buffers']}

    def _open(self) -> Checkpointer:
        tokenizer = {name: value for name, value in self.fingerprints.items() if name == 'tokenizer'}
        return Checkpointer(RunDir(self.run_dir).checkpoints, fingerprints=tokenizer)
