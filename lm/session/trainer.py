"""The loop of `lm train`: (batch → step → log → evaluate → save)*.

Steps are dispatched ahead of the host: the metrics of step n are fetched after step n + 1 has been dispatched.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import list_last
from lm.compilation.cache import CompileCache
from lm.data.batches import Batches
from lm.errors import Diverged, LmError, Preempted
from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.perplexity import Evaluator
from lm.evaluation.sets import SetsEvaluator, flat
from lm.runs.goodput import Goodput, describe
from lm.runs.lock import RunLock
from lm.runs.metrics_file import MetricsFile
from lm.runs.run_dir import RunDir
from lm.text import counted, duration, si
from lm.training.config import TrainConfig
from lm.training.preemption import Preemption
from lm.training.profiler import Profiler
from lm.training.progress import Progress, Throughput, divergence
from lm.training.step import State, TrainStep, weights
from lm.training.watchdog import Watchdog

GOODPUT_SECONDS = 60.0
"""How old the ledger in run.json may become between two saves."""


@dataclasses.dataclass
class Trainer:
    """One session of a run: from step `start`, of a restored or new state, to the last one.

    Attributes:
        text: the whole configuration as gin text, which checkpoints keep.
        state: after the newest step that was dispatched (see `lm.training.step`).
        advance: (state, batch) → (state, metrics): the compiled step, which takes the memory of the old state.
        redraw: (weights, which mechanisms, seed, steps done) → new buffers.
        peak_flops: of all devices together; None where no data sheet gives it.
    """

    config: TrainConfig
    text: str
    run_directory: RunDir
    lock: RunLock
    functions: TrainStep
    state: State
    start: int
    batches: Batches
    advance: Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]
    redraw: Callable[..., State]
    evaluator: Evaluator | SetsEvaluator | TaskEvaluator
    checkpointer: Checkpointer
    metrics_file: MetricsFile
    progress: Progress
    preemption: Preemption
    profiler: Profiler
    watchdog: Watchdog
    goodput: Goodput
    programs: CompileCache
    throughput: Throughput
    flops_per_token: float
    peak_flops: float | None
    pending: tuple[int, dict[str, jax.Array]] | None = None
    """The newest step and its metrics, while they are still on the devices."""
    bad_steps: int = 0
    """How many steps in a row, up to the newest that was logged, were not finite."""
    is_save_due: bool = False

    def run(self) -> State:
        """Trains to the last step. Returns the final state; raises Preempted (saved) or Diverged."""
        config = self.config
        self.record_goodput()
        with self.goodput.spent('step'):
            self.run_steps()
        self.progress.note(
            f'done: {counted(config.steps, "step")} in {duration(self.throughput.seconds)}, '
            f'{si(config.steps * config.tokens_per_step)} tokens; lm evaluate --run_dir {self.run_directory.path}'
        )
        self.progress.note(f'goodput {describe(self.record_goodput(finished=True))}')
        return self.state

    def run_steps(self) -> None:
        """The steps from `start` to the last one, with what is due between them."""
        config = self.config
        if self.is_save_due:
            self.save(self.start)  # of a branch: the run that it comes from may delete its own
        if self.start and self.is_evaluation_due(self.start) and not self.metrics_file.has_evaluation(self.start):
            # The session before was stopped in it, and has saved the step without its loss.
            self.checkpointer.add_loss(self.start, self.evaluate(self.start))
        batches = self.goodput.charging('data', self.batches.prefetch(self.start, config.steps))
        self.watchdog.step(self.start + 1)
        for step, batch in enumerate(batches, self.start + 1):
            if self.preemption.requested(step - 1):
                self.log_pending()
                self.stop(step - 1)
            self.profiler.at(step)
            if which := self.functions.redraws(step - 1):
                self.state['buffers'] = self.redraw(weights(self.state), which, config.seed, step - 1)
            self.state, metrics = self.advance(self.state, batch)
            self.checkpointer.check_for_errors()
            self.log_pending()
            self.pending = step, metrics
            self.watchdog.step(step + 1)
            self.is_save_due |= self.checkpointer.should_save(step)
            is_evaluating = self.is_evaluation_due(step)
            if self.is_save_due or is_evaluating:
                # What a checkpoint covers is on disk before the checkpoint is.
                self.log_pending()
            loss = self.evaluate(step) if is_evaluating else None
            is_wanted = self.is_save_due or (is_evaluating and self.checkpointer.is_among_best(loss))
            # While steps are not finite nothing new is learned, and a save would push a good checkpoint out.
            if step == config.steps or (is_wanted and not self.bad_steps):
                self.save(step, loss)
        self.complete_save(config.steps)

    def log_pending(self) -> None:
        """Fetches the metrics of the pending step, writes them, and stops a run that has diverged."""
        if self.pending is None:
            return
        (step, metrics), self.pending, config = self.pending, None, self.config
        metrics = jax.device_get(metrics)
        if step == self.start + 1:
            self.progress.note(f'first step after {self.goodput.describe_start()}')
        of_windows = [metrics.pop(name, None) for name in ('window_loss', 'window_targets')]
        by_source = self.batches.windows.by_source(step - 1, *of_windows)
        metrics = {name: value.item() for name, value in metrics.items()}
        self.bad_steps = metrics['in_a_row']
        if self.bad_steps >= config.max_nonfinite_steps:
            self.checkpointer.wait()
            what, saved = self.functions.name_of(metrics['first_bad']), self.checkpointer.latest_step()
            raise Diverged(divergence(step, self.bad_steps, what, self.batches.windows, config.skip_batches, saved))
        if step % config.log_every and step != config.steps:
            return
        tokens_per_second, seconds_left = self.throughput.tick(step)
        record = {
            'kind': 'train',
            'step': step,
            'loss': metrics['loss'],
            'learning_rate': metrics['learning_rate'],
            'grad_norm': metrics['grad_norm'],
            'tokens': step * config.tokens_per_step,
            'tokens_per_second': tokens_per_second,
            'mfu': self.flops_per_token * tokens_per_second / self.peak_flops if self.peak_flops else None,
            'seconds': self.throughput.seconds,
            'skipped_steps': metrics['skipped'],
            'data_wait_seconds': self.goodput.lap('data'),
            **by_source,
        }
        self.metrics_file.write(record)
        self.progress.step(record, seconds_left)
        if self.goodput.age > GOODPUT_SECONDS:
            self.record_goodput()

    def is_evaluation_due(self, step: int) -> bool:
        every = self.config.eval_every
        return step == self.config.steps or (every is not None and step % every == 0)

    def evaluate(self, step: int) -> float:
        """The loss of the evaluation split after `step`. Stops the run if the process is told to meanwhile; where the
        evaluation fails, the step is saved first."""
        try:
            with self.throughput.pause(), self.pause('evaluation'):
                result = self.evaluator(weights(self.state), step, lambda: self.preemption.requested(step))
        except Exception:
            if jax.process_count() == 1 and not self.bad_steps:  # other processes may have no error, and would not save
                with contextlib.suppress(LmError):  # the first error is the one to report
                    self.save(step)
            raise
        if result is None:
            self.stop(step)
        self.metrics_file.write({'kind': 'eval', **flat(result), 'seconds': self.throughput.seconds})
        self.progress.note(f'evaluation at step {step}: {self.evaluator.split} {self.evaluator.describe(result)}')
        return result['loss']

    def save(self, step: int, loss: float | None = None) -> None:
        """Starts to write a checkpoint; `loss` is that of an evaluation after `step`."""
        self.lock.check()
        self.metrics_file.flush()
        metadata = {
            'seconds': self.throughput.seconds,
            'step_seconds': self.goodput.total('step'),
            'config': self.text,
            'skipped_batches': self.batches.windows.skipped_before(step),
        }
        with self.pause('checkpoint'):
            self.checkpointer.save(step, self.state, metadata=metadata, metrics={} if loss is None else {'loss': loss})
            self.record_goodput()
            self.programs.publish()
        self.is_save_due = False

    def complete_save(self, step: int) -> None:
        """Waits until the save of `step` is complete. Raises LmError if it failed, whatever checkpoint.on_failed_save
        says: who is told that a run has ended may take its machine away."""
        with self.pause('checkpoint'):
            self.checkpointer.wait()
        if step not in (steps := self.checkpointer.all_steps()):
            raise LmError(
                f'step {step} could not be saved, the newest complete checkpoint is {list_last(steps[-1:])}; '
                'make room or repair the storage, then run the same command again'
            )

    def stop(self, step: int) -> NoReturn:
        """Saves and ends the session. Steps that were not finite are not saved but repeated."""
        saved = step
        if self.bad_steps:
            self.checkpointer.wait()
            saved = self.checkpointer.latest_step() or 0
        else:
            self.save(step)
            self.complete_save(step)
        what = 'which is saved' if saved == step else f'which was not finite; the next session goes on from {saved}'
        self.record_goodput()
        raise Preempted(f'stopped at step {step} of {self.config.steps}, {what}: run the same command again')

    @contextlib.contextmanager
    def pause(self, account: str) -> Iterator[None]:
        """What is no part of a step, but of another account of the goodput."""
        with self.goodput.spent(account), self.watchdog.paused():
            yield

    def record_goodput(self, finished: bool = False) -> dict[str, Any]:
        """Writes the ledger to run.json and returns it."""
        record = self.goodput.record(finished)
        if jax.process_index() == 0:
            self.run_directory.write_goodput(record)
        return record
