"""Checkpoints: asynchronous, atomic, checksummed, and never silently wrong.

Orbax writes (`lm.checkpoint.writer`); `lm.checkpoint.snapshot` describes what lies on disk and reads it. Two habits of
Orbax are dealt with: it returns flipped bits of array data silently, and its manager counts a failed asynchronous save
as done.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from lm.checkpoint.clock import SaveClock
from lm.checkpoint.config import CheckpointConfig
from lm.checkpoint.finite import describe_not_finite, find_not_finite
from lm.checkpoint.folder import agree_on_steps, check_step, remove_failed, remove_unfinished, set_aside
from lm.checkpoint.log_filter import WriteErrorFilter
from lm.checkpoint.losses import Losses
from lm.checkpoint.shared_memory import SharedMemory
from lm.checkpoint.snapshot import (
    Damaged,
    Snapshot,
    describe_arrays,
    describe_error,
    find_committed_steps,
    find_steps,
    flatten,
    list_last,
    make_record,
    refuse_damage,
)
from lm.errors import Diverged, LmError, MismatchError, WrongResults
from lm.files import is_remote, settle

if TYPE_CHECKING:
    from lm.checkpoint.writer import Writer

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A state that was read, its step, and the metadata that were given to `save` or `keep`."""

    state: Any
    step: int
    metadata: dict[str, Any]


class Checkpointer(contextlib.AbstractContextManager['Checkpointer']):
    """Saves and restores the state of one run. All processes of a run call every method together.

    Reading changes nothing on disk; unfinished leftovers are removed, and damaged or abandoned steps renamed, before
    the first save. Use it as a context manager: leaving it waits for the last save.

    Args:
        directory: local path or gs:// address.
        config: when to save and what to keep.
        fingerprints: name → value that a checkpoint depends on (data, tokenizer, …); compared by name on restore.
        on_saved: called with each step that has become complete on disk, in all processes.
        measure: describes the evaluation; losses of another measure do not compete for checkpoint.keep_best.
        memory: keeps every `checkpoint.memory_every`-th state in memory too; None: nothing does.

    Attributes:
        stored: the newest step in the directory up to the step that was restored; a state from memory may be newer.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        config: CheckpointConfig | None = None,
        fingerprints: Mapping[str, str] | None = None,
        on_saved: Callable[[int], None] | None = None,
        measure: str = '',
        memory: SharedMemory | None = None,
    ):
        path = epath.Path(directory)
        self.directory = path if is_remote(path) else path.expanduser().absolute()
        self.config = config or CheckpointConfig()
        self.fingerprints = dict(fingerprints or {})
        self._on_saved = on_saved
        self._memory = memory
        self.stored: int | None = None
        self._log_filter = WriteErrorFilter()
        self._lazy_manager: 'Writer | None' = None
        self._pending: int | None = None
        self._restored: int | None = None
        self._ours: set[int] = set()
        self._damaged: set[int] = set()
        self._losses = Losses(measure)
        self._clock = SaveClock(self.config.save_every_minutes)

    def should_save(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step`, by number or by time. All processes ask once per step."""
        every = (self.config.save_every_steps, self.config.keep_every)
        due = any(n is not None and step % n == 0 for n in every)
        return self._clock.is_due(step) or due

    def should_keep(self, step: int) -> bool:
        """Returns whether the state after `step` is to be kept in memory."""
        return self._memory is not None and step % (self.config.memory_every or step + 1) == 0

    def keep(self, step: int, state: object, metadata: dict) -> None:
        """Keeps `state` in the memory of the hosts, and returns when it has left the devices. Of steps for which
        `should_keep` is true, `save` keeps the state as well."""
        if self._memory:
            arrays = flatten(state)
            self._memory.write(arrays, make_record(step, describe_arrays(arrays), self.fingerprints, {}, metadata))

    def is_among_best(self, loss: float) -> bool:
        """Returns whether a checkpoint with this evaluation loss would be one of the `keep_best`."""
        if not self.config.keep_best:
            return False
        self._manager()  # which reads the losses of the steps that are there
        answer = self._losses.is_among_best(loss, self.config.keep_best)
        return bool(multihost_utils.broadcast_one_to_all(np.int32(answer))) if jax.process_count() > 1 else answer

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: dict | None = None,
        force: bool = False,
    ) -> bool:
        """Starts to write `state`, a pytree of arrays, and returns when they have left the devices: the caller may
        donate them at once. The step counts only once everything is on disk.

        Args:
            metrics: of an evaluation; `loss` counts for checkpoint.keep_best.
            metadata: a small JSON object that `restore` returns.
            force: write even a step that this object has saved or restored already.

        Returns:
            False when the step was there already.

        Raises:
            LmError: this save or the one before it failed, and checkpoint.on_failed_save is 'stop'.
        """
        self.wait()
        arrays = {name: jax.numpy.asarray(x) for name, x in flatten(state).items()}
        try:
            manager = self._manager()
            if step in manager.all_steps():
                if step in self._ours and not force:
                    return False
                manager.delete(step)
            measured = self._losses.add_measure(metrics or {})
            record = make_record(step, describe_arrays(arrays), self.fingerprints, measured, metadata or {})
            if metrics and 'loss' in metrics:
                self._losses.add(step, metrics['loss'])
            self._ours.add(step)
            if self._memory and self.should_keep(step):
                self._memory.write(arrays, record)
            manager.write(step, arrays, record)
            self._pending = step  # not before: a Ctrl-C may leave a save that has not begun
        except Exception as error:
            # The other processes cannot learn of it in the middle of a save: only a single process can go on.
            self._failed(step, error, is_fatal=jax.process_count() > 1)
            return False
        finally:
            self._clock.reset(step)
        return True

    def add_loss(self, step: int, loss: float) -> None:
        """Has a step that is there count for checkpoint.keep_best as if it had been saved with this evaluation loss."""
        self.wait()
        self._losses.add(step, loss)
        if jax.process_index() == 0:
            try:
                Snapshot(self.directory, step).add_metrics(self._losses.add_measure({'loss': loss}))
            except (Damaged, LmError, OSError) as error:
                log.warning(
                    'checkpoint step %d: its evaluation loss could not be noted: %s', step, describe_error(error)
                )

    def check_for_errors(self) -> None:
        """Raises LmError if a save failed in the background (or warns: checkpoint.on_failed_save). Cheap."""
        if self._pending is not None and not self._manager().is_saving_in_progress():
            self.wait()

    def close(self) -> None:
        """Waits like `wait`, then frees everything. A process must not end before this has returned."""
        try:
            self.wait()
        finally:
            if self._lazy_manager is not None:
                self._lazy_manager.close()
                self._lazy_manager = None
            self._log_filter.stop()

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.close()
            self._release_memory(error)
        except Exception as second:
            if error is None:
                raise
            log.warning('%s', second)  # the first error is the one to report

    def restore(self, abstract_state: object, step: int | None = None, *, partial: bool = False) -> Restored | None:
        """Reads the newest sound checkpoint, or exactly `step`. A newer or equal state in memory is preferred to the
        newest checkpoint.

        Args:
            abstract_state: arrays or jax.ShapeDtypeStructs with the shardings that the result shall have, on any
                number of devices. Its top-level keys may be a subset of those saved.
            partial: leave out of the result what the checkpoint lacks, and ignore what it has besides (nested dicts
                only); shapes and dtypes must still agree.

        Returns:
            the checkpoint, or None when there is no checkpoint at all.

        Raises:
            ConfigError: there are checkpoints, and none of `step`.
            MismatchError: the checkpoint belongs to something else (fingerprints, names, shapes, dtypes); or there
                are checkpoints and none is sound; or `step` is damaged; or there is none where `step` is given.
        """
        self.wait()
        known = agree_on_steps(self.directory)
        check_step(step, known, self.directory)
        tried: set[int] = set()
        held = self._memory.find_steps() if self._memory and step is None else []
        while True:
            left = {step} if step is not None else set(known) - tried
            if held and held[0] >= max(left, default=0):
                if found := self._restore_from_memory(abstract_state, held.pop(0), max(left, default=None)):
                    return found
                continue
            if not left:
                break
            candidate = max(left)
            try:
                snapshot = Snapshot(self.directory, candidate)
                state, record = snapshot.restore(abstract_state, self.fingerprints, partial)
            except Damaged as damage:
                if step is not None:
                    raise MismatchError(f'checkpoint step {step} is damaged: {damage}; choose another step') from None
                log.warning('checkpoint step %d is damaged, trying another one: %s', candidate, damage)
                self._damaged.add(candidate)
                tried.add(candidate)
                # A run that goes on may have deleted it while it was read, and has newer ones then.
                known = sorted({*tried, *agree_on_steps(self.directory)})
            else:
                self._restored = self.stored = candidate
                self._ours.add(candidate)
                return Restored(state, candidate, record['metadata'])
        if known:
            raise MismatchError(
                f'{self.directory}: no checkpoint is sound (tried {list_last(known)}); '
                'restore a copy of the directory, or start again in a new run directory'
            )
        return None

    def rewind(self, step: int) -> None:
        """Moves the checkpoints after `step` aside, so that a run that is stopped now goes on from `step`."""
        self._restored = step
        if self._memory:
            self._memory.delete()
        self._tidy()

    def verify(self, step: int) -> None:
        """Reads everything of one step, array by array. Raises MismatchError if it is damaged or not finite."""
        not_finite = None
        with refuse_damage(step):
            snapshot = Snapshot(self.directory, step)
            record = snapshot.record()
            for name, leaf in record['leaves'].items():
                target = jax.ShapeDtypeStruct(leaf['shape'], jax.numpy.dtype(leaf['dtype']))
                not_finite = not_finite or find_not_finite(snapshot.read({name: target}, record))
        if not_finite:
            raise MismatchError(f'checkpoint step {step}: {describe_not_finite(not_finite)}; choose another step')

    def all_steps(self) -> list[int]:
        """Returns the steps that are complete on disk, ascending. They may still turn out to be damaged."""
        return find_committed_steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the newest of `all_steps`."""
        return max(self.all_steps(), default=None)

    def read_record(self, step: int) -> dict:
        """Returns the JSON record of a step (`lm.checkpoint.snapshot`). Raises MismatchError if it is damaged."""
        with refuse_damage(step):
            return Snapshot(self.directory, step).record()

    def _restore_from_memory(self, abstract_state: object, step: int, stored: int | None) -> Restored | None:
        """Returns the state of `step` from memory; None, after a warning, if it is damaged."""
        assert self._memory is not None
        try:
            state, record = self._memory.restore(abstract_state, step, self.fingerprints)
        except Damaged as damage:
            log.warning('the state of step %d in memory is not used: %s', step, damage)
            return None
        self._restored, self.stored = step, stored
        return Restored(state, step, record['metadata'])

    def _release_memory(self, error: BaseException | None) -> None:
        """Gives the memory back unless it may be needed: after a failure, where it holds more than the directory."""
        if self._memory is None:
            return
        is_doubtful = isinstance(error, Diverged | WrongResults)
        if is_doubtful or (self.latest_step() or -1) >= self._memory.newest():
            self._memory.delete()

    def _manager(self) -> 'Writer':
        if self._lazy_manager is None:
            from lm.checkpoint.writer import Writer  # Orbax takes half a second to import: the first step need not wait

            self._log_filter.start()
            self._tidy()
            config = self.config
            self._lazy_manager = Writer(
                self.directory, config.keep_last, config.keep_every, config.keep_best, self._losses
            )
            for step in self._lazy_manager.all_steps() if self.config.keep_best else ():
                with contextlib.suppress(MismatchError):
                    self._losses.read(step, self.read_record(step)['metrics'])
        return self._lazy_manager

    def _tidy(self) -> None:
        """Process 0 removes unfinished saves, and moves aside steps that are damaged or newer than what was restored:
        else they would block saves of the same number, or be taken for the newest after a restart."""
        if jax.process_index() == 0:
            remove_unfinished(self.directory)
            for step in find_steps(self.directory):
                if step in self._damaged:
                    set_aside(self.directory, step, 'damaged')
                elif self._restored is not None and step > self._restored:
                    set_aside(self.directory, step, 'abandoned')
        self._damaged.clear()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices('lm.checkpoint.tidy')

    def wait(self) -> None:
        """Blocks until the running save, if any, is complete on disk; raises LmError if it failed."""
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        try:
            self._manager().wait_until_finished()
            if jax.process_index() == 0 and not is_remote(self.directory):
                settle(self.directory / str(step))  # Orbax leaves its small files to the system
        except Exception as error:
            self._failed(step, error)
        else:
            if self._on_saved:
                self._on_saved(step)

    def _failed(self, step: int, error: Exception, is_fatal: bool = False) -> None:
        self._log_filter.keep()
        self._losses.forget(step)
        self._ours.discard(step)
        if self._lazy_manager is not None:
            self._lazy_manager.reload()  # it counts the failed step, and has forgotten those that it was to replace
        if jax.process_index() == 0:
            remove_failed(self.directory, step)
        message = (
            f'checkpoint step {step} could not be written to {self.directory} ({describe_error(error)}); '
            f'the newest complete one is {list_last(self.all_steps()[-1:])}; '
            'make room or repair the storage, then run it again'
        )
        if is_fatal or self.config.on_failed_save == 'stop':
            raise LmError(message) from error
        log.warning('%s', message)
