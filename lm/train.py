"""`lm train`: a run, from top to bottom.

    set_up: plan → restore or initialise → compile → write config.gin and run.json, open metrics.jsonl
    Trainer.run: (batch → step → log → evaluate → save)* → close

Steps are dispatched ahead of the host: the metrics of step n are fetched after step n + 1 has been dispatched. Resuming
is exact: the state holds everything, the data are a function of the step, and metrics.jsonl is cut back to the restored
step, so that an interrupted run leaves the files of an uninterrupted one.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from lm import make_callable
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import some
from lm.compilation.cache import CompileCache
from lm.config.text import dump
from lm.data.batches import Batches
from lm.errors import Diverged, LmError, Preempted
from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.evaluator import make_evaluator
from lm.evaluation.perplexity import Evaluator
from lm.evaluation.sets import SetsEvaluator, flat
from lm.experiment import Experiment, check_experiment, training_step
from lm.hardware import peak_flops
from lm.runs.branch import branch_of
from lm.runs.goodput import Goodput, describe, process_start
from lm.runs.initial import InitialParameters
from lm.runs.lock import RunLock
from lm.runs.metrics_file import MetricsFile
from lm.runs.process_zero import check_same
from lm.runs.run_dir import RunDir
from lm.text import counted, duration, si
from lm.training.config import TrainConfig
from lm.training.heartbeat import Peers
from lm.training.inputs import make_batches, open_store
from lm.training.mesh import describe_mesh, initialize_distributed, make_mesh, meet
from lm.training.preemption import Preemption
from lm.training.profiler import Profiler
from lm.training.program import abstract_state, compile_step_aside, init_state, shardings_of
from lm.training.progress import Progress, Throughput, divergence, plan_rows, print_rows
from lm.training.step import State, TrainStep, weights
from lm.training.watchdog import Watchdog

GOODPUT_SECONDS = 60.0
"""How old the ledger in run.json may become between two saves."""


def main(experiment: Experiment, arguments: Any) -> int:
    """The `lm train` command."""
    job = arguments.coordinator_address, arguments.process_count, arguments.process_id
    initialize_distributed(experiment.mesh, *job, meets=False)
    with Peers(experiment.mesh.heartbeat_seconds):
        meet(experiment.mesh)
        flags = {name: getattr(arguments, name, None) for name in ('rewind_to', 'compile_cache', 'branch_from', 'step')}
        train(experiment, arguments.run_dir, **flags, begun=process_start())
    return 0


def train(
    experiment: Experiment,
    run_dir: str,
    rewind_to: int | None = None,
    compile_cache: str | None = None,
    begun: float | None = None,
    branch_from: str | None = None,
    step: int | None = None,
) -> State:
    """Trains, or continues the run that lies in `run_dir`. Returns the final state (see `lm.training.step`).

    Args:
        rewind_to: the step whose checkpoint it goes on from; default: the newest.
        compile_cache: folder in which compiled programs are kept; 'none': nowhere; default: in the run directory.
        begun: since when this session of the run counts, in seconds since the epoch; default: now.
        branch_from, step: a run that is new begins from this checkpoint of another one (`lm.runs.branch`).

    Raises ConfigError, MismatchError (data or checkpoint do not fit), Preempted (saved) or Diverged.
    """
    check_experiment(experiment)
    with contextlib.ExitStack() as stack:
        goodput = Goodput(RunDir(run_dir).read_goodput(), time.time() if begun is None else begun)
        folder = None if compile_cache == 'none' else compile_cache or RunDir(run_dir).path / 'compiled'
        programs = stack.enter_context(CompileCache(folder))
        return set_up(experiment, run_dir, stack, goodput, programs, rewind_to, branch_from, step).run()


def set_up(
    experiment: Experiment,
    run_dir: str,
    stack: contextlib.ExitStack,
    goodput: Goodput,
    programs: CompileCache,
    rewind_to: int | None = None,
    branch_from: str | None = None,
    step: int | None = None,
) -> 'Trainer':
    """Everything that a run needs, ready for its next step. What is open is closed by `stack`."""
    # Everything that can be wrong is found before anything is written: only so does the corrected command still work.
    config, model, data = experiment.train, experiment.model, experiment.data
    preemption = stack.enter_context(Preemption())
    store = open_store(data, config, model)
    mesh = make_mesh(experiment.mesh)
    stack.enter_context(jax.set_mesh(mesh))
    batches = make_batches(data, config, store, mesh)
    functions = training_step(experiment, store)
    evaluator = make_evaluator(experiment.evaluate, data, config, functions, mesh, store, config.eval_tokens)
    parameters = sum(functions.count_parameters().values())
    is_leader = jax.process_index() == 0
    if is_leader:
        rows = plan_rows(model, config, parameters, batches.windows.describe(config.steps, store.path))
        print_rows(rows | {'devices': describe_mesh(mesh, experiment.mesh, model.compute_dtype)})
    run = RunDir(run_dir)
    lock = stack.enter_context(run.lock())
    check_same({'--rewind_to': rewind_to, '--branch_from': branch_from, '--step': step})
    rewinds = rewind_to is not None and not run.is_rewound(rewind_to, experiment)
    if is_leader and rewind_to is not None and not rewinds:
        print(f'--rewind_to {rewind_to}: done before by this configuration; going on from the newest', flush=True)
    branch = branch_of(run, branch_from, step, rewind_to)
    if branch:
        branch.check(experiment)
    run.check_unchanged(experiment, rewinds)
    checkpointer = stack.enter_context(
        Checkpointer(run.checkpoints, experiment.checkpoint, store.fingerprints, run.record_saved, evaluator.measure)
    )

    # Restore this run, else its branching point, else start from another one's parameters, else from the seed.
    abstract = abstract_state(functions, mesh)
    source = stack.enter_context(branch.checkpointer(store.fingerprints)) if branch else checkpointer
    initial = InitialParameters(config.init_from, store.fingerprints, store.path) if config.init_from else None
    if (is_new := source.latest_step() is None) and initial:
        initial.check(abstract['params'])  # before anything is compiled
    tracing, compiling = compile_step_aside(functions, abstract, config, batches.dtype, mesh)
    with goodput.spent('initialize' if is_new else 'restore'):
        restored = source.restore(abstract, branch.step if branch else rewind_to if rewinds else None)
        if restored:
            state, start, saved = restored
            batches.windows.resume(start, saved.get('skipped_batches'))
        else:
            state, start, saved = init_state(functions, abstract, config.seed), 0, {'step_seconds': 0.0}
            if initial:
                taken, line = initial.take(weights(state), weights(abstract))
                state |= taken
                if is_leader:
                    print(line, flush=True)
    goodput.resumed(saved.get('step_seconds'))
    with goodput.spent('trace'):
        tracing.exception()  # which the next line raises, if there is one
    with goodput.spent('compile'):
        advance = compiling.result()
    redraw = jax.jit(functions.redraw, static_argnums=(1, 2), out_shardings=shardings_of(abstract['buffers']))

    if rewinds:
        checkpointer.rewind(start)
    facts = {'parameters': parameters, **store.fingerprints}
    run.create_or_resume(experiment, facts | ({'branch': branch.record(experiment)} if branch else {}), start, rewinds)
    if branch:
        branch.copy_metrics()
    programs.publish()
    progress = Progress(config.steps, enabled=is_leader)
    trackers = stack.enter_context(run.track(config.trackers, dump(experiment), is_leader, config.tensorboard, start))
    metrics_file = stack.enter_context(run.metrics(start, trackers))
    profiler = stack.enter_context(Profiler(config.profile if is_leader else None, run.path / 'profile'))
    if restored:
        progress.note(f'resumed from step {start} of {branch.parent.path if branch else run_dir}')
    peak = peak_flops(jax.devices()[0].device_kind)
    return Trainer(
        config=config,
        text=dump(experiment),
        run_directory=run,
        lock=lock,
        functions=functions,
        state=state,
        start=start,
        batches=batches,
        advance=advance,
        redraw=redraw,
        evaluator=evaluator,
        checkpointer=checkpointer,
        metrics_file=metrics_file,
        progress=progress,
        preemption=preemption,
        profiler=profiler,
        watchdog=stack.enter_context(Watchdog(config.hang_minutes)),
        goodput=goodput,
        programs=programs,
        throughput=Throughput(start, config.steps, config.tokens_per_step, saved.get('seconds', 0.0)),
        flops_per_token=model.flops_per_token(config.context_length),
        peak_flops=peak and peak * mesh.size,
        is_save_due=bool(branch),
    )


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
            self.progress.note(f'first step after {self.goodput.this_start()}')
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
                f'step {step} could not be saved, the newest complete checkpoint is {some(steps[-1:])}; '
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


call = train
make_callable(__name__)
