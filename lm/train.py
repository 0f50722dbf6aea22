"""`lm train`: the loop, from top to bottom.

    plan → restore or initialise → compile → (batch → step → log → evaluate → save)* → final evaluation → close

Steps are dispatched ahead of the host: the figures of step n are fetched after step n + 1 has been dispatched. Resuming
is exact: the state holds everything, the data are a function of the step, and metrics.jsonl is cut back to the restored
step, so that an interrupted run leaves the files of an uninterrupted one.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from lm.checkpoint.checkpointer import Checkpointer
from lm.config.text import dump
from lm.data.batches import Batches, Windows
from lm.data.store import TokenStore
from lm.errors import ConfigError, Diverged, MismatchError, Preempted
from lm.evaluation.evaluator import make_evaluator
from lm.experiment import Experiment
from lm.hardware import peak_flops
from lm.runs.run_dir import RunDir
from lm.tasks import TaskStore
from lm.text import duration, si
from lm.training.config import MAY_CHANGE_ON_RESUME, MAY_CHANGE_ON_REWIND, TrainConfig
from lm.training.mesh import batch_sharding, initialize_distributed, make_mesh, place, replicated
from lm.training.preemption import Preemption
from lm.training.profiler import Profiler
from lm.training.progress import Progress, Throughput
from lm.training.step import State, TrainStep, count_parameters


def main(experiment: Experiment, arguments: Any) -> int:
    """The `lm train` command."""
    initialize_distributed(
        experiment.mesh, arguments.coordinator_address, arguments.process_count, arguments.process_id
    )
    train(experiment, arguments.run_dir, arguments.rewind_to)
    return 0


def train(experiment: Experiment, run_dir: str, rewind_to: int | None = None) -> dict[str, Any]:
    """Trains, or continues the run that lies in `run_dir`, from step `rewind_to` if that is given. Returns the final
    state (see `lm.training.step`).

    Raises ConfigError, MismatchError (data or checkpoint do not fit), Preempted (saved) or Diverged.
    """
    with contextlib.ExitStack() as stack:
        # Everything that can be wrong is found before anything is written.
        config = experiment.train
        preemption = stack.enter_context(Preemption())
        store = open_store(experiment)
        mesh = make_mesh(experiment.mesh)
        stack.enter_context(jax.set_mesh(mesh))
        batches = make_batches(experiment, store, mesh)
        task = experiment.data.task
        step = TrainStep(experiment.model, experiment.optimizer, config.steps, scored=task and task.scored)
        evaluator = make_evaluator(experiment.evaluate, experiment.data, config.context_length, step, mesh, store)
        leader = jax.process_index() == 0
        parameters = sum(count_parameters(experiment.model).values())
        if leader:
            print_plan(experiment, store, mesh, parameters)

        run = RunDir(run_dir)
        lock = stack.enter_context(run.lock())
        if rewind_to is not None and run.is_rewound(rewind_to, experiment):
            rewind_to = None
        rewinding = rewind_to is not None
        may_change = MAY_CHANGE_ON_RESUME + (MAY_CHANGE_ON_REWIND if rewinding else ())
        run.check_unchanged(experiment, may_change)
        checkpointer = stack.enter_context(
            Checkpointer(run.checkpoints, experiment.checkpoint, store.fingerprints, run.record_saved)
        )

        # Restore this run, else start from another one's parameters, else from the seed.
        abstract = place(jax.eval_shape(lambda: step.init(config.seed)), mesh)
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        restored = checkpointer.restore(abstract, rewind_to)
        if restored:
            batches.windows.resume(restored[1], restored[2].get('skipped_batches'))
        if rewinding:
            checkpointer.rewind(rewind_to)
        facts = {'parameters': parameters, **store.fingerprints}
        run.create_or_resume(experiment, facts, may_change, restored[1] if restored else 0, rewinding)
        if restored:
            state, start, saved = restored
        else:
            state = jax.jit(lambda: step.init(config.seed), out_shardings=shardings)()
            start, saved = 0, {}
            if config.init_from:
                state['params'] = parameters_from(config.init_from, experiment, abstract['params'], state['params'])
        metrics = stack.enter_context(run.metrics(resume_at=start, tensorboard=config.tensorboard))
        progress = Progress(config.steps, enabled=leader)
        profiler = stack.enter_context(Profiler(config.profile if leader else None, run.path / 'profile'))
        if restored:
            progress.note(f'resumed from step {start} of {run_dir}')

        compiled = lower(step, abstract, batches.shape, batches.dtype, mesh).compile()
        redraw = jax.jit(step.redraw, static_argnums=1, out_shardings=shardings['buffers'])
        throughput = Throughput(start, config.steps, config.tokens_per_step, saved.get('seconds', 0.0))
        flops = experiment.model.flops_per_token(config.context_length)
        peak = peak_flops(jax.devices()[0].device_kind)

        def log(n: int, figures: dict[str, jax.Array]) -> None:
            """Fetches the figures of step n (counted from 1), writes them, and stops a run that has diverged."""
            figures = {name: value.item() for name, value in jax.device_get(figures).items()}
            if figures['in_a_row'] >= config.max_nonfinite_steps:
                raise Diverged(
                    f'loss or gradient was not finite for {figures["in_a_row"]} steps in a row, up to step {n}; '
                    f'the newest checkpoint is step {checkpointer.latest_step()}: lower optimizer.peak_learning_rate, '
                    'or leave the batches out with train.skip_batches'
                )
            if n % config.log_every and n != config.steps:
                return
            rate, left = throughput.tick(n)
            record = {
                'kind': 'train',
                'step': n,
                'loss': figures['loss'],
                'learning_rate': figures['learning_rate'],
                'grad_norm': figures['grad_norm'],
                'tokens': n * config.tokens_per_step,
                'tokens_per_second': rate,
                'mfu': flops * rate / (peak * mesh.size) if peak else None,
                'seconds': throughput.seconds,
                'skipped_steps': figures['skipped'],
            }
            metrics.write(record)
            progress.step(record, left)

        def evaluate(n: int) -> float | None:
            """The loss of the evaluation split after step n; None when the process was told to stop meanwhile."""
            with throughput.pause():
                weights = {name: state[name] for name in ('params', 'buffers')}
                result = evaluator(weights, n, should_stop=lambda: preemption.requested(n))
            if result is None:
                return None
            metrics.write({'kind': 'eval', **result, 'seconds': throughput.seconds})
            progress.note(f'evaluation at step {n}: {evaluator.split} {evaluator.describe(result)}')
            return result['loss']

        def save(n: int, loss: float | None = None) -> None:
            lock.check()
            metrics.flush()
            evaluation = {} if loss is None else {'loss': loss}
            metadata = {
                'seconds': throughput.seconds,
                'config': dump(experiment),
                'skipped_batches': batches.windows.skipped_before(n),
            }
            checkpointer.save(n, state, metadata=metadata, metrics=evaluation)

        def stop(n: int) -> None:
            save(n)
            checkpointer.wait()
            raise Preempted(f'stopped at step {n} of {config.steps}, which is saved: run the same command again')

        def evaluation_due(n: int) -> bool:
            return n == config.steps or (config.eval_every is not None and n % config.eval_every == 0)

        if start and evaluation_due(start) and not metrics.has_evaluation(start) and evaluate(start) is None:
            stop(start)

        pending = None
        for n, batch in enumerate(batches.prefetch(start, config.steps), start + 1):
            if preemption.requested(n - 1):
                if pending:
                    log(*pending)
                stop(n - 1)
            profiler.at(n)
            if which := step.redraws(n - 1):
                weights = {name: state[name] for name in ('params', 'buffers')}
                state['buffers'] = redraw(weights, which, config.seed, n - 1)
            state, figures = compiled(state, batch)
            checkpointer.check_for_errors()
            if pending:
                log(*pending)
            pending = n, figures
            saving, evaluating = checkpointer.should_save(n), evaluation_due(n)
            if saving or evaluating:
                # What a checkpoint covers is on disk before the checkpoint is.
                log(*pending)
                pending = None
            loss = evaluate(n) if evaluating else None
            if evaluating and loss is None:
                stop(n)
            if saving or n == config.steps or (evaluating and checkpointer.is_among_best(loss)):
                save(n, loss)
        if pending:
            log(*pending)
        checkpointer.wait()
        progress.note(
            f'done: {config.steps} steps in {duration(throughput.seconds)}, '
            f'{si(config.steps * config.tokens_per_step)} tokens; lm evaluate --run_dir {run_dir}'
        )
    return state


def open_store(experiment: Experiment) -> TokenStore | TaskStore:
    """The token store, or the examples of a task, if their tokens fit the model."""
    store = experiment.data.open(experiment.train.context_length)
    pieces = store.vocab_size
    if pieces > experiment.model.vocab_size:
        what = f'the tokenizer of {store.path} has {pieces} pieces'
        if experiment.data.task:
            what = f'{store.path} has {pieces} tokens'
        raise MismatchError(
            f'model.vocab_size = {experiment.model.vocab_size}: {what}; set model.vocab_size = {pieces}'
        )
    return store


def lower(
    step: TrainStep, abstract: State, shape: tuple[int, ...], dtype: Any, mesh: jax.sharding.Mesh
) -> jax.stages.Lowered:
    """The training step as it runs: the state is updated in place, the batch [A, B, L] is split over all devices."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    batch = jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh, axis=1))
    return jax.jit(step.train, donate_argnums=0, out_shardings=(shardings, replicated(mesh))).lower(abstract, batch)


def check_divides(config: TrainConfig, devices: int) -> None:
    """Raises ConfigError unless the windows of a microbatch can be split over the devices."""
    rows = config.batch_size // config.microbatches
    if rows % devices:
        raise ConfigError(
            f'train.tokens_per_step = {config.tokens_per_step}: a microbatch has {rows} windows of '
            f'{config.context_length} tokens, which {devices} devices cannot share equally; '
            'change tokens_per_step, context_length or microbatches'
        )


def make_batches(experiment: Experiment, store: TokenStore | TaskStore, mesh: jax.sharding.Mesh) -> Batches:
    """The batches of the run, if they can be split over the devices."""
    config = experiment.train
    check_divides(config, mesh.size)
    split = experiment.data.train_split
    windows = Windows(store.tokens(split), config.context_length, config.batch_size, config.seed, config.skip_batches)
    return Batches(store, split, windows, config.microbatches, batch_sharding(mesh, axis=1))


def parameters_from(run_dir: str, experiment: Experiment, abstract: dict, initial: dict) -> dict:
    """`initial` with every parameter that the newest checkpoint of another run has under the same name."""
    with Checkpointer(RunDir(run_dir).checkpoints, experiment.checkpoint, {}) as other:
        restored = other.restore({'params': abstract}, partial=True)
    if restored is None:
        raise MismatchError(f'train.init_from = {run_dir!r}: holds no checkpoint; name a run directory')

    def merge(old, new):
        return {k: merge(v, new[k]) if k in new else v for k, v in old.items()} if isinstance(old, dict) else new

    return merge(initial, restored[0]['params'])


def print_plan(experiment: Experiment, store: TokenStore | TaskStore, mesh: jax.sharding.Mesh, parameters: int) -> None:
    """What is about to happen, before anything is spent on it."""
    config, model = experiment.train, experiment.model
    total = config.steps * config.tokens_per_step
    epochs = total / store.tokens(experiment.data.train_split)
    kind = jax.devices()[0].device_kind
    mechanisms = ', '.join(attention.gin_name for attention in model.pattern)
    print(
        f'parameters       {parameters:,} ({model.n_layers} layers of width {model.d_model}, {mechanisms})\n'
        f'tokens per step  {config.tokens_per_step:,} ({config.batch_size} windows of {config.context_length}, '
        f'{config.microbatches} microbatch{"es" if config.microbatches > 1 else ""})\n'
        f'tokens in total  {total:,} ({config.steps:,} steps, {epochs:.3g} epochs of {store.path})\n'
        f'FLOPs per token  {si(model.flops_per_token(config.context_length))}\n'
        f'devices          {mesh.size} × {kind} (data {mesh.shape["data"]}, fsdp {mesh.shape["fsdp"]}), '
        f'{jax.process_count()} process{"es" if jax.process_count() > 1 else ""}, '
        f'{jnp.dtype(model.compute_dtype).name} compute',
        flush=True,
    )
