"""The loop of `lm train`: (batch → step → log → evaluate → save)*.

Steps are dispatched ahead of the host: the metrics of step n are fetched after step n + 1 has been dispatched.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import list_last
from lm.compilation.cache import CompileCache
from lm.data.batches import Batches
from lm.errors import Diverged, LmError, Preempted, WrongResults
from lm.evaluation.evaluator import AnyEvaluator
from lm.evaluation.sets import flatten_result
from lm.model.functions import select_final, select_weights
from lm.pod.preemption import Preemption
from lm.pod.votes import Difference, find_hosts
from lm.pod.watchdog import Watchdog
from lm.runs.goodput import Goodput, describe
from lm.runs.lock import RunLock
from lm.runs.metrics_file import MetricsFile
from lm.runs.run_dir import RunDir
from lm.text import format_count, format_duration, format_si
from lm.training.config import TrainConfig
from lm.training.profiler import Profiler
from lm.training.progress import Progress, Throughput, describe_divergence
from lm.training.replay import Replay
from lm.training.step import State, TrainStep

GOODPUT_SECONDS = 60.0
"""The largest age of the ledger in run.json between two saves."""


@dataclasses.dataclass
class Computation:
    """The parts that compute.

    Attributes:
        advance: (state, batch) → (state, metrics): the compiled step, which takes the memory of the old state.
        redraw: (weights, which mechanisms, seed, steps done) → new buffers.
        replay: compares what the chips compute, before each `train.replay_every`-th step; None: never.
        compare_copies: compares the copies of a state that devices hold, before each save; None: never.
        others: the arrays of the weights that no state has: the base under adapters.
    """

    step: TrainStep
    batches: Batches
    advance: Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]
    redraw: Callable[..., Any]
    evaluator: AnyEvaluator
    replay: Replay | None = None
    compare_copies: Callable[[State], Difference | None] | None = None
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Records:
    """The files and reports of a session.

    Attributes:
        text: the whole configuration as gin text; checkpoints keep it.
        peak_flops: of all devices together; None if no data sheet gives it.
    """

    run: RunDir
    text: str
    metrics_file: MetricsFile
    progress: Progress
    throughput: Throughput
    flops_per_token: float
    peak_flops: float | None


@dataclasses.dataclass
class Services:
    """The parts that watch over a session and measure it."""

    lock: RunLock
    preemption: Preemption
    profiler: Profiler
    watchdog: Watchdog
    goodput: Goodput
    programs: CompileCache


@dataclasses.dataclass
class Trainer:
    """One session of a run: from step `start`, with a restored or new state, to the last step.

    Attributes:
        state: the state after the newest dispatched step (see `lm.training.step`).
        pending: the newest step and its metrics, while they are still on the devices.
        bad_steps: the number of consecutive steps, up to the newest logged one, that were not finite.
        kept: how often, up to there, a parameter kept its value because its update was not finite.
    """

    config: TrainConfig
    computation: Computation
    checkpointer: Checkpointer
    records: Records
    services: Services
    state: State
    start: int
    pending: tuple[int, dict[str, jax.Array]] | None = None
    bad_steps: int = 0
    kept: int = 0
    is_save_due: bool = False

    def run(self) -> State:
        """Trains to the last step. Returns the final state; raises Preempted (saved), or Diverged, also where
        the last steps were not finite."""
        config, note = self.config, self.records.progress.note
        self.record_goodput()
        with self.services.goodput.charge('step'):
            self.run_steps()
        if bad := int(jax.device_get(self.state['in_a_row'])):  # as saved: the same command ends in the same way
            last = f'the last {format_count(bad, "step")} of {config.steps} were not finite '
            last += 'and changed nothing, or only some arrays'
            how = f'step {config.steps} is saved and has the weights of step {config.steps - bad}'
            raise Diverged(f'{last}; {how}: use these, or train anew with a lower optimizer.peak_learning_rate')
        path = shlex.quote(str(self.records.run.path))
        note(
            f'done: {format_count(config.steps, "step")} in {format_duration(self.records.throughput.seconds)}, '
            f'{format_si(config.steps * config.tokens_per_step)} tokens; lm evaluate --run_dir {path}'
        )
        note(f'goodput {describe(self.record_goodput(finished=True))}')
        return self.state

    def run_steps(self) -> None:
        """Runs the steps from `start` to the last one, with the work that is due between them."""
        config, computation, services, checkpointer = self.config, self.computation, self.services, self.checkpointer
        if self.is_save_due:
            self.save(self.start)  # the parent of a branch may delete this step
        is_evaluated = self.records.metrics_file.has_evaluation(self.start)
        if self.start and self.is_evaluation_due(self.start) and not is_evaluated:
            # The previous session was stopped in this evaluation. It saved the step without its loss.
            checkpointer.add_loss(self.start, self.evaluate(self.start))
        batches = services.goodput.charge_items('data', computation.batches.prefetch(self.start, config.steps))
        services.watchdog.step(self.start + 1)
        for step, batch in enumerate(batches, self.start + 1):
            if services.preemption.is_requested(step - 1):
                self.log_pending()
                self.stop(step - 1)
            services.profiler.begin_step(step)
            if which := computation.step.functions.choose_redrawn(step - 1):
                weights = select_weights(self.state) | computation.others
                self.state['buffers'] = computation.redraw(weights, which, config.seed, step - 1)
            if computation.replay and config.replay_every and step % config.replay_every == 0:
                self.replay(computation.replay, step, batch)
            self.state, metrics = computation.advance(self.state, batch)
            checkpointer.check_for_errors()
            services.lock.check()
            self.log_pending()
            self.pending = step, metrics
            services.watchdog.step(step + 1)
            self.is_save_due |= checkpointer.should_save(step)
            is_evaluating = self.is_evaluation_due(step)
            is_kept = checkpointer.should_keep(step)
            if self.is_save_due or is_evaluating or is_kept:
                # Metrics that a checkpoint covers are on disk before the checkpoint is.
                self.log_pending()
            loss = self.evaluate(step) if is_evaluating else None
            is_wanted = self.is_save_due or (loss is not None and checkpointer.is_among_best(loss))
            # While steps are not finite the model learns nothing new, and a save would replace a good checkpoint.
            if step == config.steps or (is_wanted and not self.bad_steps):
                self.save(step, loss)
            elif is_kept and not self.bad_steps:
                self.keep(step)
        self.complete_save(config.steps)

    def replay(self, replay: Replay, step: int, batch: jax.Array) -> None:
        """Compares what the chips compute on a part of the batch of `step`. Raises WrongResults if they disagree."""
        with self.pause('replay'):
            found = replay.check(self.state, batch, step // (self.config.replay_every or 1))
        if found:
            self.log_pending()
            self.refuse(found, step)

    def refuse(self, found: Difference, step: int) -> NoReturn:
        """Ends a run whose chips disagree, before `step` is taken or saved. Nothing more is saved."""
        hosts = find_hosts(found.groups)
        self.checkpointer.wait()
        self.records.run.record_difference(found.record(step, hosts))
        self.record_goodput()
        saved = self.checkpointer.latest_step()
        remedy = (
            'nothing is saved yet'
            if saved is None
            else f'the newest checkpoint, step {saved}, stays, and later '
            'steps are thrown away; if it is doubtful, --rewind_to an earlier one'
        )
        raise WrongResults(
            f'step {step}: {found.describe(hosts)}; {remedy}; run the same command again on another machine',
            hosts.keys(),
        )

    def log_pending(self) -> None:
        """Fetches the metrics of the pending step, writes them, and stops a run that has diverged."""
        if self.pending is None:
            return
        (step, metrics), self.pending, config = self.pending, None, self.config
        records, goodput, windows = self.records, self.services.goodput, self.computation.batches.windows
        metrics = jax.device_get(metrics)
        if step == self.start + 1:
            records.progress.note(f'first step after {goodput.describe_start()}')
        losses, targets = metrics.pop('window_loss', None), metrics.pop('window_targets', None)
        by_source = {} if losses is None else windows.by_source(step - 1, losses, targets)
        metrics = {name: value.tolist() for name, value in metrics.items()}
        measures, summary = self.computation.step.read_measures(metrics)
        self.bad_steps = metrics['in_a_row']
        self.kept += int(metrics['kept'])
        if self.bad_steps >= config.max_nonfinite_steps:
            self.checkpointer.wait()
            what, saved = self.computation.step.name_first_bad(metrics['first_bad']), self.checkpointer.latest_step()
            raise Diverged(describe_divergence(step, self.bad_steps, what, windows, config.skip_batches, saved))
        if step % config.log_every and step != config.steps:
            return
        tokens_per_second, seconds_left = records.throughput.tick(step)
        peak = records.peak_flops
        record = {
            'kind': 'train',
            'step': step,
            'loss': metrics['loss'],
            'learning_rate': metrics['learning_rate'],
            'grad_norm': metrics['grad_norm'],
            'tokens': step * config.tokens_per_step,
            'tokens_per_second': tokens_per_second,
            'mfu': records.flops_per_token * tokens_per_second / peak if peak else None,
            'seconds': records.throughput.seconds,
            'skipped_steps': metrics['skipped'],
            **({'kept_numbers': self.kept} if self.kept else {}),
            'data_wait_seconds': goodput.read_lap('data'),
            **measures,
            **by_source,
        }
        records.metrics_file.write(record)
        records.progress.step(record, seconds_left, summary)
        if goodput.age > GOODPUT_SECONDS:
            self.record_goodput()

    def is_evaluation_due(self, step: int) -> bool:
        """Tells whether to evaluate the weights after `step`."""
        every = self.config.eval_every
        return step == self.config.steps or (every is not None and step % every == 0)

    def evaluate(self, step: int) -> float:
        """Returns the loss of the evaluation split after `step`.

        Stops the run if the process is asked to. If the evaluation fails, the step is saved first.
        """
        records, evaluator, services = self.records, self.computation.evaluator, self.services

        def should_stop() -> bool:
            services.watchdog.beat()
            return services.preemption.is_requested(step)

        try:
            with records.throughput.pause(), self.pause('evaluation'):
                result = evaluator(select_final(self.state) | self.computation.others, step, should_stop)
        except Exception:
            if jax.process_count() == 1 and not self.bad_steps:  # other processes may have no error, and would not save
                with contextlib.suppress(LmError):  # the first error is the one to report
                    self.save(step)
            raise
        if result is None:
            self.stop(step)
        records.metrics_file.write({'kind': 'eval', **flatten_result(result), 'seconds': records.throughput.seconds})
        records.progress.note(f'evaluation at step {step}: {evaluator.split} {evaluator.describe(result)}')
        return result['loss']

    def save(self, step: int, loss: float | None = None) -> None:
        """Starts to write a checkpoint; `loss` comes from an evaluation after `step`.

        Raises WrongResults if copies of the state differ.
        """
        metadata = self.prepare_save(step)
        metrics = {} if loss is None else {'loss': loss}
        with self.pause('checkpoint'):
            self.checkpointer.save(step, self.state, metadata=metadata, metrics=metrics)
            self.record_goodput()
            self.services.programs.publish()
        self.is_save_due = False

    def keep(self, step: int) -> None:
        """Keeps the state in the memory of the hosts. Raises WrongResults if copies of it differ."""
        metadata = self.prepare_save(step)
        with self.pause('checkpoint'):
            self.checkpointer.keep(step, self.state, metadata)

    def prepare_save(self, step: int) -> dict[str, object]:
        """Makes all metrics permanent, compares the copies of the state, and returns the metadata of a checkpoint."""
        self.services.lock.check()
        self.records.metrics_file.flush()
        if (compare := self.computation.compare_copies) and (found := compare(self.state)):
            self.refuse(found, step)
        return {
            'seconds': self.records.throughput.seconds,
            'step_seconds': self.services.goodput.total('step'),
            'config': self.records.text,
            'skipped_batches': self.computation.batches.windows.skipped_before(step),
            **self.records.metrics_file.seal(),
            **({'kept_numbers': self.kept} if self.kept else {}),
        }

    def complete_save(self, step: int) -> None:
        """Waits until the save of `step` is complete.

        Raises LmError if it failed, for any value of checkpoint.on_failed_save: a caller that sees the end of a run may
        give its machine back.
        """
        with self.pause('checkpoint'):
            self.checkpointer.wait()
        if step not in (steps := self.checkpointer.all_steps()):
            raise LmError(
                f'step {step} could not be saved, the newest complete checkpoint is {list_last(steps[-1:])}; '
                'make room or repair the storage, then run the same command again'
            )

    def stop(self, step: int) -> NoReturn:
        """Saves and ends the session. Steps that were not finite are repeated later, and not saved."""
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
        """Charges the time of its block, which is not part of a step, to another account of the goodput, and watches
        over it."""
        with self.services.goodput.charge(account), self.services.watchdog.watch(account):
            yield

    def record_goodput(self, finished: bool = False) -> dict[str, object]:
        """Writes the ledger to run.json and returns it."""
        record = self.services.goodput.record(finished)
        if jax.process_index() == 0:
            self.records.run.write_goodput(record)
        return record
