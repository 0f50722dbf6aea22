"""`lm bench step --topology`: a forecast of the time of a training step, by parts, on an absent TPU."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lm.bench import results
from lm.bench.candidates import BASELINE, change_context, describe_settings, read_candidates, with_model
from lm.bench.options import StepOptions
from lm.cost_model.forecast import forecast_step
from lm.cost_model.step_time import PARTS, StepTime
from lm.experiment import Experiment
from lm.hardware import Target, Topology, generation, smallest
from lm.pod.mesh import MeshConfig
from lm.text import shorten

CONTEXTS = (2048, 8192, 32_768)
MICROBATCH_TOKENS = 32_768


@dataclasses.dataclass(frozen=True)
class ForecastRow:
    """One configuration at one context length on one device of a generation, with the fields of `Forecast`.

    Attributes:
        speed_over_softmax: the speed divided by softmax's speed, at the same context in the same table.
    """

    generation: str
    mechanism: str
    context: int
    windows: int
    microbatches: int
    remat: str
    peak_gib: float
    time: StepTime | None = None
    mfu: float | None = None
    speed_over_softmax: float | None = None

    @property
    def milliseconds(self) -> float | None:
        return self.time and 1e3 * self.time.seconds


def forecast_steps(options: StepOptions) -> None:
    """Compiles the steps for the chips of `options.topology`, each for one device, and prints a table per chip."""
    output = results.Output(options.save, options.out)
    jax.config.update('jax_platforms', 'cpu')  # nothing runs on devices here, and an accelerator may be busy
    options = with_model(options, on_cpu=False)
    found, chips = read_candidates(options), [generation(name) for name in options.topology or ()]
    contexts = sorted(set(options.contexts or CONTEXTS))
    tokens = options.tokens_per_step or contexts[-1]
    limit = options.microbatch_tokens or MICROBATCH_TOKENS
    printer, machine = results.Printer(), results.machine()
    printer.line(results.heading('lm bench step', machine, ('jax', 'jaxlib', 'libtpu')))
    printer.line(f'compiled, not run: {tokens:,} tokens per step on one device; ms (ms of recomputation)')
    settings = {
        'tokens_per_step': tokens,
        'topologies': list(options.topology or ()),
        **describe_settings(options, found),
    }
    rows = []
    for chip in chips:
        topology = smallest(chip)
        made: list[ForecastRow] = []
        for context in contexts:
            for name, experiment in found.items():
                printer.progress(f'compiling {chip.name}, {context:,}, {name}')
                made.append(make_row(name, experiment, context, tokens, limit, topology))
                made = results.add_speed_ratios(made, lambda row: row.time and 1 / row.time.seconds)
                content = [asdict(row) for row in rows + made]  # compilation takes minutes, so each result is kept
                output.write('step', machine, settings, content)
        printer.progress()
        show(made, printer)
        rows += made
    for name in draw(rows, output.pictures) if output.pictures else ():
        printer.line(f'wrote {name}')


def make_row(
    name: str, experiment: Experiment, context: int, tokens: int, limit: int, topology: Topology
) -> ForecastRow:
    """Forecasts the step of a candidate on one device of `topology`.

    Args:
        tokens: tokens per step.
        limit: the most tokens to process together, unless one sequence is longer.
    """
    experiment = dataclasses.replace(experiment, mesh=MeshConfig())
    experiment = change_context(experiment, context, tokens, limit, Target('tpu', (1,)))
    return ForecastRow(
        generation=topology.chip.name,
        mechanism=name,
        context=context,
        windows=experiment.train.batch_size,
        microbatches=experiment.train.microbatches,
        **vars(forecast_step(experiment, topology)),
    )


def asdict(row: ForecastRow) -> dict[str, Any]:
    return dataclasses.asdict(row) | {'milliseconds': row.milliseconds}


def show(rows: Sequence[ForecastRow], printer: results.Printer) -> None:
    """Prints a table of parts by configurations, for one generation."""
    titles = {str(i): f'{row.mechanism} {shorten(row.context)}' for i, row in enumerate(rows)}

    def line(title: str, value: Callable[[ForecastRow, StepTime], str | None]) -> dict[str, Any]:
        cells = {str(i): value(row, row.time) if row.time else None for i, row in enumerate(rows)}
        return {'part': title, **cells}

    def part(name: str) -> Callable[[ForecastRow, StepTime], str]:
        return lambda _, time: next(
            (_format_pair(p.seconds, p.recomputed_seconds) for p in time.parts if p.part == name), '–'
        )

    present = {p.part for row in rows if row.time for p in row.time.parts}
    lines = [line('step', lambda _, time: _format_pair(time.seconds, time.recomputed_seconds))]
    lines += [line(f'  {name}', part(name)) for name in dict.fromkeys(PARTS.values()) if name in present]
    lines += [
        line('HBM, GB', lambda _, time: f'{time.hbm_gigabytes:.0f}'),
        line('MFU', lambda row, _: f'{row.mfu:.1%}'),
        line('memory, GiB', lambda row, _: f'{row.peak_gib:.2f}'),
        line('remat', lambda row, _: row.remat),
    ]
    if any(row.speed_over_softmax for row in rows):
        lines.append(line(f'× {BASELINE}', lambda row, _: _format_ratio(row)))
    printer.line('')
    columns = {'part': (rows[0].generation, str)} | {key: (title, str) for key, title in titles.items()}
    printer.table(lines, columns)
    for name in sorted({name for row in rows if row.time for name in row.time.unknown_kernels}):
        printer.line(f'{name}: its schedule is not known; it counts by what it moves and declares')


def _format_ratio(row: ForecastRow) -> str | None:
    """Formats the speed over softmax; None if softmax did not fit."""
    ratio = 1.0 if row.mechanism == BASELINE else row.speed_over_softmax
    return None if ratio is None else f'{ratio:.2f}'


def _format_pair(seconds: float, recomputed: float) -> str:
    text = f'{1e3 * seconds:,.1f}' if seconds < 0.1 else f'{1e3 * seconds:,.0f}'
    return f'{text} ({1e3 * recomputed:.0f})' if recomputed > 0.0005 else text


def draw(rows: Sequence[ForecastRow], out: pathlib.Path) -> list[str]:
    """Draws one stacked bar per configuration, and one picture per generation and context length."""
    from lm import plots

    files = []
    for chip, context in dict.fromkeys((row.generation, row.context) for row in rows if row.time):
        chosen = [r for r in rows if (r.generation, r.context) == (chip, context) and r.time]
        times = [row.time for row in chosen if row.time]
        pieces = {
            name: np.array([sum(1e3 * p.seconds for p in time.parts if p.part == name) for time in times])
            for name in dict.fromkeys(PARTS.values())
        }
        path = out / f'step_time_{chip}_{context}'
        title = f'one {chip}, {context:,} tokens, modelled'
        plots.draw_bars(path, [row.mechanism for row in chosen], pieces, 'time of a step (ms)', title=title)
        files += [f'{path}.png', f'{path}.pdf']
    return files
