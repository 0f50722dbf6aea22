"""`lm train`: a run, from top to bottom.

    open_session: plan → lock → restore or initialise → compile → write config.gin and run.json, open metrics.jsonl
    Trainer.run: (batch → step → log → evaluate → save)* → close

Steps are dispatched ahead of the host: the metrics of step n are fetched after step n + 1 has been dispatched. Resuming
is exact: the state holds everything, and the data are a function of the step. metrics.jsonl is cut back to the restored
step. So an interrupted run leaves the files of an uninterrupted one.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping

import jax

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.shared_memory import SharedMemory
from lm.compilation.cache import CompileCache
from lm.compilation.memory import keep_freed_memory
from lm.data.batches import Batches
from lm.evaluation.evaluator import make_evaluator
from lm.experiment import Experiment
from lm.hardware import Target, peak_flops
from lm.plan import RunPlan, make_plan
from lm.pod.heartbeat import Peers
from lm.pod.job import JobAddress, initialize_distributed, meet
from lm.pod.mesh import batch_sharding
from lm.pod.preemption import Preemption
from lm.pod.watchdog import Watchdog
from lm.runs.branch import Branch
from lm.runs.goodput import Goodput, read_process_start
from lm.runs.lock import RunLock
from lm.runs.metrics_file import find_change, read_lines
from lm.runs.run_dir import RunDir
from lm.session.start import (
    Request,
    Start,
    cast_fixed,
    find_origin,
    give_fixed,
    print_plan,
    read_fixed,
    restore_or_init,
    settle_begun,
    write_start,
)
from lm.session.trainer import Computation, Records, Services, Trainer
from lm.training.copies import compare_copies
from lm.training.inputs import choose_reader
from lm.training.profiler import Profiler
from lm.training.program import compile_in_background, get_shardings
from lm.training.progress import Progress, Throughput
from lm.training.replay import Replay
from lm.training.step import State, complete


def train_in_job(
    experiment: Experiment,
    run_dir: str,
    job: JobAddress,
    *,
    rewind_to: int | None = None,
    compile_cache: str | None = None,
    branch_from: str | None = None,
    step: int | None = None,
) -> None:
    """Joins the processes of the job, watches over them, and calls `train` with the same arguments."""
    initialize_distributed(experiment.mesh, job, meets=False)
    with Peers(experiment.mesh.heartbeat_seconds):
        meet(experiment.mesh)
        train(experiment, run_dir, rewind_to, compile_cache, read_process_start(), branch_from, step)


def train(
    experiment: Experiment,
    run_dir: str,
    rewind_to: int | None = None,
    compile_cache: str | None = None,
    begun: float | None = None,
    branch_from: str | None = None,
    step: int | None = None,
) -> State:
    """Trains, or continues the run in `run_dir`. Returns the final state (see `lm.training.step`).

    Args:
        rewind_to: the step whose checkpoint it goes on from; default: the newest.
        compile_cache: the folder of compiled programs; 'none': no folder; default: in the run directory.
        begun: the start of this session, in seconds since the epoch; default: now.
        branch_from, step: a new run begins from this checkpoint of another run (`lm.runs.branch`).

    Raises ConfigError, MismatchError (data or checkpoint do not fit), Preempted (saved), Diverged or
    WrongResults.
    """
    with open_session(experiment, Request(run_dir, rewind_to, branch_from, step), compile_cache, begun) as trainer:
        return trainer.run()


@contextlib.contextmanager
def open_session(
    experiment: Experiment, request: Request, compile_cache: str | None = None, begun: float | None = None
) -> Iterator[Trainer]:
    """Prepares everything for the next step of a run, and closes it at the end; arguments as in `train`."""
    keep_freed_memory()  # for `lm.train`, too: no command has called it
    run = RunDir(request.run_dir)
    goodput = Goodput(run.read_goodput(), time.time() if begun is None else begun)
    with contextlib.ExitStack() as stack:
        folder = None if compile_cache == 'none' else compile_cache or run.path / 'compiled'
        programs, preemption = stack.enter_context(CompileCache(folder)), stack.enter_context(Preemption())
        # All errors are found before any file is written: only then does the corrected command work.
        experiment = settle_begun(experiment, run, request.branch_from)
        watchdog = stack.enter_context(Watchdog(experiment.train.hang_minutes))
        plan = make_plan(experiment, Target.of_devices(jax.devices()))
        mesh = plan.mesh.arrange(jax.devices())
        stack.enter_context(jax.set_mesh(mesh))
        evaluator = make_evaluator(plan.evaluation, plan.functions, mesh)
        if jax.process_index() == 0:
            print_plan(plan, mesh)
        lock = stack.enter_context(run.lock())
        kept = plan.fingerprints, run.record_saved, evaluator.measure
        find_fault = functools.partial(find_fault_of_kept, run, experiment.train.steps)
        memory = SharedMemory(run.path, run.read_id(), find_fault) if experiment.checkpoint.memory_every else None
        checkpointer = stack.enter_context(Checkpointer(run.checkpoints, experiment.checkpoint, *kept, memory))
        branch, rewind_to = find_origin(run, request, plan)
        source = stack.enter_context(branch.checkpointer(kept[0])) if branch else checkpointer
        if is_new := source.latest_step() is None:
            plan.check_initial()

        step, abstract = plan.program.step, plan.program.place_state(mesh)
        tracing, compiling = compile_in_background(plan.program, mesh)
        with goodput.charge('initialize' if is_new else 'restore'):
            fixed = read_fixed(plan, mesh, is_new)
        start = restore_or_init(plan, abstract, source, branch.step if branch else rewind_to, goodput, fixed)
        with goodput.charge('trace'):
            tracing.exception()  # the next line raises its error
        with goodput.charge('compile'):
            given = cast_fixed(plan, fixed)
            advance = give_fixed(compiling.result(), given)
            del fixed
        copies = compare_copies if experiment.checkpoint.compare_copies else None
        replay = Replay(plan.program, mesh, given) if experiment.train.replay_every else None
        redraw = jax.jit(plan.functions.redraw, static_argnums=(1, 2), out_shardings=get_shardings(abstract['buffers']))
        reader, sharding = plan.taught or choose_reader(experiment.train, plan.store), batch_sharding(mesh, axis=1)
        batches = Batches(reader, plan.split, start.windows, experiment.train.microbatches, sharding)

        if rewind_to is not None:
            checkpointer.rewind(start.step)
        write_start(run, plan, branch, start, rewind_to is not None)
        if memory:
            memory.run = run.read_id()
        else:  # a later session must not find states from before this one
            SharedMemory(run.path, '').delete()
        programs.publish()
        records = stack.enter_context(open_records(run, plan, start, branch, mesh.size, lock))
        profiled = experiment.train.profile if jax.process_index() == 0 else None
        profiler = stack.enter_context(Profiler(profiled, run.path / 'profile'))
        stack.callback(watchdog.begin, 'end')
        yield Trainer(
            config=experiment.train,
            computation=Computation(step, batches, advance, redraw, evaluator, replay, copies, complete(given)),
            checkpointer=checkpointer,
            records=records,
            services=Services(lock, preemption, profiler, watchdog, goodput, programs),
            state=start.state,
            start=start.step,
            kept=(start.saved or {}).get('kept_numbers', 0),
            # The last step must be in the directory in the end.
            is_save_due=bool(branch) or (start.is_from_memory and start.step == experiment.train.steps),
        )


def find_fault_of_kept(run: RunDir, steps: int, step: int, metadata: Mapping[str, object]) -> str | None:
    """Says why a state in memory is none that a run of so many steps has kept; None: it may be one.

    Before a state is kept, metrics.jsonl is sealed and on the disk. So a state of this run never seals other lines.
    """
    if step > steps:
        return f'the run has {steps} steps'
    if 'metrics_lines' not in metadata:
        return 'it does not seal the lines of metrics.jsonl'
    change = find_change(read_lines(run.metrics_file), {step: metadata})
    return change and f'it belongs to another history, for in metrics.jsonl {change}'


@contextlib.contextmanager
def open_records(
    run: RunDir, plan: RunPlan, start: Start, branch: Branch | None, devices: int, lock: RunLock
) -> Iterator[Records]:
    """Opens metrics.jsonl and the trackers of a run that goes on from `start`; `branch` has it from another run."""
    config, leads = plan.experiment.train, jax.process_index() == 0
    progress = Progress(config.steps, enabled=leads)
    peak, seconds = peak_flops(jax.devices()[0].device_kind), 0.0
    with (
        run.track(config.trackers, plan.text, leads, config.tensorboard, start.step) as trackers,
        run.metrics(start.step, trackers, lock) as metrics_file,
    ):
        if start.saved is not None:
            seconds = start.saved.get('seconds', 0.0)
            metrics_file.warn_of_change(start.step, start.saved)
            place = 'the memory of the hosts' if start.is_from_memory else branch.parent.path if branch else run.path
            progress.note(f'resumed from step {start.step} of {place}')
        yield Records(
            run=run,
            text=plan.text,
            metrics_file=metrics_file,
            progress=progress,
            throughput=Throughput(start.step, config.steps, config.tokens_per_step, seconds),
            flops_per_token=plan.flops_per_token,
            peak_flops=peak and peak * devices,
        )
