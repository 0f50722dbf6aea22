"""`lm train`: a run, from top to bottom.

    set_up: plan → restore or initialise → compile → write config.gin and run.json, open metrics.jsonl
    Trainer.run: (batch → step → log → evaluate → save)* → close

Steps are dispatched ahead of the host: the metrics of step n are fetched after step n + 1 has been dispatched. Resuming
is exact: the state holds everything, the data are a function of the step, and metrics.jsonl is cut back to the restored
step, so that an interrupted run leaves the files of an uninterrupted one.
"""

import contextlib
import time

import jax

from lm.checkpoint.checkpointer import Checkpointer
from lm.compilation.cache import CompileCache
from lm.config.text import dump
from lm.evaluation.evaluator import make_evaluator
from lm.experiment import Experiment, check_experiment, training_step
from lm.hardware import peak_flops
from lm.runs.branch import find_branch
from lm.runs.goodput import Goodput, read_process_start
from lm.runs.initial import InitialParameters
from lm.runs.process_zero import check_same
from lm.runs.run_dir import RunDir
from lm.session.trainer import Trainer
from lm.training.heartbeat import Peers
from lm.training.inputs import make_batches, open_store
from lm.training.mesh import JobAddress, describe_mesh, initialize_distributed, make_mesh, meet
from lm.training.preemption import Preemption
from lm.training.profiler import Profiler
from lm.training.program import abstract_state, compile_step_aside, init_state, shardings_of
from lm.training.progress import Progress, Throughput, plan_rows, print_rows
from lm.training.step import State, weights
from lm.training.watchdog import Watchdog


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
) -> Trainer:
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
    branch = find_branch(run, branch_from, step, rewind_to)
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
