"""`lm bench step`: training steps per second at constant tokens per step, over context lengths (PolySketchFormer, Table
4 and Figure 4).

It runs the step of `lm train`, with its shardings and donated state, on random tokens.
"""

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lm.bench import results, timing
from lm.bench.candidates import change_context, describe_settings, read_candidates, with_model
from lm.bench.forecast import forecast_steps
from lm.bench.options import StepOptions
from lm.experiment import Experiment
from lm.hardware import Target, peak_flops
from lm.plan import PlanCache, StepPlan, plan_step
from lm.pod.job import JobAddress, initialize_distributed
from lm.pod.mesh import MeshConfig, batch_sharding
from lm.text import format_count, format_digits
from lm.training.program import lower_step
from lm.training.step import Batch, State

CPU_CONTEXTS = (512, 1024, 2048)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
MICROBATCH_TOKENS = 16_384
FALLBACK = 'full'
"""The `model.remat` with which a step that does not fit is repeated, before it counts as out of memory."""


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One configuration at one context length.

    Attributes:
        windows: per step.
        microbatches: the parts of a step.
        remat: `model.remat`: the configured value, or `FALLBACK` if that did not fit.
        out_of_memory: True means that there are no figures.
        steps_per_second: the median over the repeats.
        slowest, fastest: steps per second of the repeats.
        mfu: of all devices; None if no data sheet gives their peak.
        host_milliseconds: the host's work per step. It starts a program that has the step's arguments and results but
            computes nothing, and fetches the metrics of the step before, as `lm train` does.
        temporary_mib, peak_mib: on one device.
        loss: of the first step on random tokens: within 3 % of the logarithm of a vocabulary of 32,000.
        speed_over_softmax: steps per second over the steps per second of softmax, in the same run.
    """

    mechanism: str
    context: int
    windows: int
    microbatches: int
    remat: str
    parameters: int
    out_of_memory: bool = True
    steps_per_second: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    host_milliseconds: float | None = None
    temporary_mib: float | None = None
    peak_mib: float | None = None
    loss: float | None = None
    speed_over_softmax: float | None = None

    @property
    def figure(self) -> results.ContextFigure | None:
        """The steps per second; None if the memory did not suffice."""
        if self.steps_per_second is None or self.slowest is None or self.fastest is None:
            return None
        return results.ContextFigure(self.context, self.steps_per_second, self.slowest, self.fastest)

    @property
    def speed(self) -> str:
        return 'OOM' if self.steps_per_second is None else format_digits(self.steps_per_second)

    @property
    def speeds(self) -> str | None:
        return (
            None if self.figure is None else f'{format_digits(self.figure.least)}–{format_digits(self.figure.greatest)}'
        )


class TimedStep:
    """The compiled step of one configuration at one context length; the contexts share `state`."""

    def __init__(self, plan: StepPlan, state: dict[str, Any], steps: int):
        """
        Args:
            plan: at the context length.
            state: holds the training state under 'state', or nothing yet.
            steps: of a call.
        """
        self.plan, self._state, self._steps, self._metrics = plan, state, steps, None
        self.loss: jax.Array | None = None
        program, vocab_size = plan.program, plan.experiment.model.vocab_size
        self.mesh = plan.mesh.arrange(jax.devices())
        lowered = lower_step(program, self.mesh)

        def draw() -> Batch:
            tokens = jax.random.randint(jax.random.key(1), program.batch_shape, 0, vocab_size)
            return program.complete(tokens.astype(program.batch_dtype))

        with jax.set_mesh(self.mesh):
            self.compiled, self.memory = timing.compile_if_fits(lowered)
            self._draw = jax.jit(draw, out_shardings=batch_sharding(self.mesh, axis=1))
        self._given: tuple[Any, ...] = ()

    def _init(self) -> State:
        program = self.plan.program
        return program.init_state(program.place_state(self.mesh), self.plan.experiment.train.seed)

    def __call__(self) -> jax.Array:
        """Runs the steps; returns the loss of the last one."""
        with jax.set_mesh(self.mesh):
            state = self._take_state()
            self._given = self._given or self._draw_given()
        assert self.compiled is not None, 'a step that does not fit is not run'
        for _ in range(self._steps):
            state, metrics = self.compiled(state, *self._given)
            self.loss = metrics['loss'] if self.loss is None else self.loss
        self._state['state'], self._metrics = state, metrics
        return metrics['loss']

    def _take_state(self) -> State:
        """Returns the shared state, which a step takes away; after a step that failed, a new one."""
        state = self._state.pop('state', None)
        return self._init() if state is None else state

    def _draw_given(self) -> tuple[Any, ...]:
        """Returns the tokens of a step, and the arrays that it never changes, if there are any."""
        fixed = self.plan.program.draw_fixed(self.mesh, self.plan.experiment.train.seed)
        return (self._draw(),) if fixed is None else (self._draw(), fixed)

    def host_seconds(self, steps: int = 200) -> float:
        """Measures the host's work per step (`StepRow.host_milliseconds`), the median of `steps`; needs a
        call before."""
        with jax.set_mesh(self.mesh):
            state = self._take_state()
        none = jax.device_get(self._metrics)
        nothing = jax.jit(lambda state, *given: (state, jax.tree.map(jnp.asarray, none)), donate_argnums=0)
        (state, metrics), found = nothing(state, *self._given), []
        for _ in range(steps):
            begun = time.perf_counter()
            before, (state, metrics) = metrics, nothing(state, *self._given)
            jax.device_get(before)
            found.append(time.perf_counter() - begun)
        self._state['state'] = state
        return statistics.median(found)


def bench_step(options: StepOptions, job: JobAddress) -> None:
    """Times the steps, prints a table, and writes and draws what the options ask for.

    With a topology, nothing runs: the steps are compiled for it, and their times are forecast.
    """
    if options.topology:
        return forecast_steps(options)
    output = results.Output(options.save, options.out)
    initialize_distributed(MeshConfig(), job)
    is_cpu = jax.default_backend() == 'cpu'
    options = with_model(options, is_cpu)
    found = read_candidates(options)
    contexts = sorted(set(options.contexts or (CPU_CONTEXTS if is_cpu else CONTEXTS)))
    tokens = options.tokens_per_step or jax.device_count() * math.lcm(*contexts)
    limit, steps = options.microbatch_tokens or MICROBATCH_TOKENS, options.steps or (1 if is_cpu else 3)
    printer, machine = results.Printer(), results.machine()
    printer.line(results.heading('lm bench step', machine))
    model = next(iter(found.values())).model
    dtype = model.resolve_dtype(jax.default_backend()).name
    printer.line(
        f'{format_count(model.n_layers, "layer")} of width {model.d_model}, {tokens:,} tokens per step, {dtype}'
    )
    rows = []
    # An accelerator's memory should hold one state. On a shared CPU, all candidates take turns.
    for group in [found] if is_cpu else [{name: experiment} for name, experiment in found.items()]:
        rows += measure(group, contexts, tokens, limit, steps, options.repeats)
    rows = results.add_speed_ratios(sorted(rows, key=lambda row: row.context), lambda row: row.steps_per_second)
    printer.table(rows, COLUMNS)
    settings = {
        'tokens_per_step': tokens,
        'steps': steps,
        'repeats': options.repeats,
        **describe_settings(options, found),
    }
    output.write('step', machine, settings, rows)
    for name in draw(rows, output.pictures, dtype) if output.pictures else ():
        printer.line(f'wrote {name}')


def measure(
    found: Mapping[str, Experiment], contexts: Sequence[int], tokens: int, limit: int, steps: int, repeats: int
) -> list[StepRow]:
    """Compiles the step of each candidate at each context, and times them in turns.

    Args:
        tokens: per step, over all devices.
        limit: the most tokens per device at a time, unless one sequence is longer.
        steps: the number of steps that are timed together.
    """
    target, cache = Target.of_devices(jax.devices()), PlanCache()
    plans = {
        (name, context): plan_step(change_context(experiment, context, tokens, limit, target), target, cache)
        for name, experiment in found.items()
        for context in contexts
    }
    states: dict[str, dict[str, Any]] = {name: {} for name in found}
    programs: dict[tuple[str, int], TimedStep] = {}
    for (name, context), plan in plans.items():
        program, model = TimedStep(plan, states[name], steps), plan.experiment.model
        if program.compiled is None and model.remat != FALLBACK:
            experiment = dataclasses.replace(plan.experiment, model=dataclasses.replace(model, remat=FALLBACK))
            program = TimedStep(plan_step(experiment, target, cache), states[name], steps)
        programs[name, context] = program
    calls: dict[tuple[str, int], Callable] = {k: p for k, p in programs.items() if p.compiled is not None}
    times = timing.in_turns(calls, repeats)
    return [_row(name, program, times.get((name, context)), steps) for (name, context), program in programs.items()]


def _row(name: str, program: TimedStep, times: timing.Times | None, steps: int) -> StepRow:
    config, model = program.plan.experiment.train, program.plan.experiment.model
    row = StepRow(
        mechanism=name,
        context=config.context_length,
        windows=config.batch_size,
        microbatches=config.microbatches,
        remat=model.remat,
        parameters=program.plan.parameters,
        temporary_mib=program.memory.get('temporary_mib'),
        peak_mib=program.memory.get('peak_mib'),
    )
    if times is None or program.loss is None:
        return row
    rate = steps / times.seconds
    peak = peak_flops(jax.devices()[0].device_kind)
    flops = program.plan.flops_per_token * config.tokens_per_step
    return dataclasses.replace(
        row,
        out_of_memory=False,
        steps_per_second=rate,
        slowest=steps / times.greatest,
        fastest=steps / times.least,
        tokens_per_second=rate * config.tokens_per_step,
        mfu=flops * rate / (peak * program.mesh.size) if peak else None,
        host_milliseconds=1e3 * program.host_seconds(),
        loss=float(program.loss),
    )


COLUMNS = {
    'context': ('context', '{:,}'.format),
    'mechanism': ('mechanism', str),
    'windows': ('windows', '{:,}'.format),
    'microbatches': ('microb.', '{:,}'.format),
    'remat': ('remat', str),
    'speed': ('steps/s', str),
    'speeds': ('slowest–fastest', str),
    'tokens_per_second': ('tokens/s', '{:,.0f}'.format),
    'mfu': ('MFU', '{:.1%}'.format),
    'host_milliseconds': ('host ms', '{:.2f}'.format),
    'temporary_mib': ('temp. MiB', '{:,.0f}'.format),
    'peak_mib': ('peak MiB', '{:,.0f}'.format),
    'speed_over_softmax': ('× softmax', '{:.2f}×'.format),
}


def draw(rows: Sequence[StepRow], out: pathlib.Path, dtype: str) -> list[str]:
    """Draws steps per second against context length, like PolySketchFormer's Figure 4, and time per token, like its
    Figure 1."""
    steps: dict[str, list[results.ContextFigure]] = {row.mechanism: [] for row in rows}
    times: dict[str, list[results.ContextFigure]] = {row.mechanism: [] for row in rows}
    for row in rows:
        if (found := row.figure) is not None:
            microseconds = 1e6 / (row.windows * row.context)  # per token at one step per second
            steps[row.mechanism].append(found)
            per_token = (microseconds / speed for speed in (found.value, found.greatest, found.least))
            times[row.mechanism].append(results.ContextFigure(row.context, *per_token))
    pictures = {'step_speed': (steps, 'training steps per second'), 'step_latency': (times, 'time per token (µs)')}
    return [
        file
        for name, (points, label) in pictures.items()
        for file in results.draw_contexts(out / name, points, label, dtype)
    ]
