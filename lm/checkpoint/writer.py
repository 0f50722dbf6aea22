"""Orbax as the writer of checkpoints. Only this file and `object_storage` know it; imported with the first save."""

from collections.abc import Mapping

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from lm.checkpoint.losses import Losses
from lm.checkpoint.multiprocess import SaveBarrier
from lm.checkpoint.object_storage import S3, teach_s3


class Writer(ocp.CheckpointManager):
    """Orbax's manager of the steps in a folder, which writes in the background and deletes what need not stay.

    Args:
        directory: local path, or an address gs://… or s3://….
        keep_last, keep_every, keep_best: which steps stay (`lm.checkpoint.config.CheckpointConfig`).
        losses: for `keep_best`; what the caller changes in it later counts.
    """

    def __init__(self, directory: epath.Path, keep_last: int, keep_every: int | None, keep_best: int, losses: Losses):
        if str(directory).startswith(S3):
            teach_s3()
        policies = [LatestN(keep_last), _Best(keep_best, losses)]
        if keep_every:
            policies.append(EveryNSteps(keep_every))
        self._barrier = _make_barrier()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(policies),
            # Folders at once: who writes into one that was never made would wait for it for minutes.
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=self._barrier, create_directories_asynchronously=not self._barrier
            ),
            lightweight_initialize=True,  # a damaged file of an old step must not stop a new one
            save_root_metadata=False,
        )
        super().__init__(directory, options=options)

    def write(self, step: int, arrays: Mapping[str, jax.Array], record: dict) -> None:
        """Starts to write a step: its arrays by flat names, and its record (`lm.checkpoint.snapshot`)."""
        if self._barrier:
            self._barrier.begin()
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(dict(arrays)), metadata=ocp.args.JsonSave(record))
        self.save(step, args=items, force=True)

    def reached_preemption(self, step: int) -> bool:
        """Never: Orbax's polling would disturb the count of `lm.pod.preemption`, which has the same service."""
        return False


def _make_barrier() -> SaveBarrier | None:
    """Returns the barrier of this job's processes, if it has several."""
    from jax._src.distributed import global_state

    if jax.process_count() == 1:
        return None
    return SaveBarrier(global_state.client, jax.process_index(), jax.process_count())


class _Best:
    """Orbax preservation policy: the `n` steps of lowest loss stay."""

    def __init__(self, n: int, losses: Losses):
        self.n, self.losses = n, losses

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [info.step for info in checkpoints]
        best = self.losses.best(steps, self.n)
        return [step in best for step in steps]
