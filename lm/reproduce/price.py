"""`lm reproduce --price`: the needs of a table, before anything runs, row by row and in total.

Hours and memory agree with `lm check`: the step of each run is compiled for the slice. The folder of the table keeps
what was compiled, since a table of a hundred runs compiles for hours.
"""

import hashlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from lm.config.text import dump
from lm.cost_model.compiled_step import Check, check, compute_budget
from lm.errors import ConfigError, writing
from lm.experiment import Experiment
from lm.files import write_atomically
from lm.hardware import Topology
from lm.plan import PlanCache, plan_step
from lm.report.paper import name_column
from lm.reproduce.descriptions import Description, load_corpora, load_scales
from lm.reproduce.runs import SEED, TableChoice, TableRun, list_runs
from lm.runs.config_diff import parse_bindings
from lm.runs.records import read_json, to_json
from lm.text import format_count, format_digits, format_si, print_table

NAME = 'price.json'
BYTES_PER_TOKEN_IN_STORE = 2
SECONDS_PER_GIGABYTE = 190.7
"""Processor time of `lm prepare` for 1 GB of text with 32,000 pieces (docs/lab/data.md)."""


class RunPrice(NamedTuple):
    """The needs of one run.

    Attributes:
        fits: None without a topology.
        hours: predicted, or on a processor core estimated from FLOPs; None: the step does not fit.
        least_hours: no machine is faster than this; None without a topology.
        chip_hours: None without a topology.
    """

    run: TableRun
    flops: float
    fits: bool | None = None
    hours: float | None = None
    least_hours: float | None = None
    chip_hours: float | None = None
    needed_gib: float | None = None

    @property
    def is_expected(self) -> bool:
        """Tells whether it fits, or the paper has no number there either."""
        return self.fits is not False or any(isinstance(cell.printed, str) for cell in self.run.cells)


def print_price(
    description: Description,
    choice: TableChoice,
    root: str,
    topology: Topology | None,
    price_per_chip_hour: float | None = None,
) -> None:
    """Prints the needs of each run that is asked for, and their sum.

    Args:
        root: the folder of the table, which keeps what was compiled.
        topology: the slice of TPUs; None: a processor core of the kind in scales.toml.

    Raises ConfigError, after everything was printed, where a run does not fit that fits in the paper.
    """
    jax.config.update('jax_platforms', 'cpu')
    runs = list_runs(description, choice, root)
    for line in description.commands.get(choice.scale, ()):
        print(f'not priced, a command of this machine: {line}')
    prices = price_runs(runs, choice, epath.Path(root), topology)
    if prices:
        print_prices(description, prices, topology)
        for line in sum_up(prices, topology, price_per_chip_hour):
            print(line)
    for line in describe_data(choice, runs):
        print(line)
    if failing := [price for price in prices if not price.is_expected]:
        names = ', '.join(price.run.point.name for price in failing)
        raise ConfigError(f'--topology {topology and topology.name}: does not fit: {names}; take a larger topology')


def price_runs(
    runs: Sequence[TableRun], choice: TableChoice, root: epath.Path, topology: Topology | None
) -> list[RunPrice]:
    """Returns the needs of each run. With a topology, a run takes a minute or two, unless `root` has its figures."""
    known, cache = read_json(root / NAME) or {}, PlanCache()
    prices = []
    for i, run in enumerate(runs):
        experiment = run.point.experiment
        flops = compute_budget(plan_step(experiment, cache=cache)).flops_total
        if topology is None:
            prices.append(RunPrice(run, flops, hours=estimate_hours(flops, choice)))
            continue
        key = identify(experiment, topology)
        if key not in known:
            print(f'compiling {i + 1} of {len(runs)}: {run.point.name} …', file=sys.stderr, flush=True)
            known[key] = summarize(check(experiment, topology))
            with writing(root / NAME):
                root.mkdir(parents=True, exist_ok=True)
                write_atomically(root / NAME, to_json(known) + '\n')
        prices.append(RunPrice(run, flops, **known[key]))
    return prices


def identify(experiment: Experiment, topology: Topology) -> str:
    """Returns a hash of all that a compiled step depends on."""
    bindings = {name: text for name, text in parse_bindings(dump(experiment)).items() if name != SEED}
    bindings |= {'mesh.processes': 'None'}  # how many machines share the slice
    versions = [f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'libtpu')]
    return hashlib.sha256(repr([bindings, topology.name, versions]).encode()).hexdigest()


def summarize(found: Check) -> dict[str, Any]:
    """Returns the figures of a check that a price has."""
    run = found.predicted or found.speed if found.fits else None
    return {
        'fits': found.fits,
        'hours': run and run.run_hours,
        'least_hours': found.speed and found.speed.run_hours if found.fits else None,
        'chip_hours': run and run.run_chip_hours,
        'needed_gib': found.memory.needed_gib,
    }


def estimate_hours(flops: float, choice: TableChoice) -> float | None:
    """Returns hours of one processor core, from the measured rate of the scale; None: it has none."""
    scale = load_scales().get(choice.scale, {})
    if 'flops_per_second' not in scale:
        return None
    return (flops / scale['flops_per_second'] + scale['seconds_to_start']) / 3600


def print_prices(description: Description, prices: Sequence[RunPrice], topology: Topology | None) -> None:
    """Prints the runs, one per line."""
    where = topology.name if topology else 'one processor core'
    title, rows = f'{description.title}: {format_count(len(prices), "run")} on {where}', []
    for price in prices:
        run = price.run
        fits = {None: '–', True: 'yes', False: 'no'}[price.fits]
        column = '' if run.column is None else name_column(run.column)
        figures = (price.needed_gib, price.hours, price.chip_hours)
        gib, hours, chips = ('–' if figure is None else format_digits(figure) for figure in figures)
        rows.append((run.row.label, column, str(run.seed), format_si(price.flops), gib, fits, hours, chips))
    headings = ('row', 'column', 'seed', 'FLOPs', 'GiB', 'fits', 'hours', 'chip-hours')
    print_table(headings, rows, left=('row',), title=title)


def sum_up(prices: Sequence[RunPrice], topology: Topology | None, price_per_chip_hour: float | None) -> list[str]:
    """Returns the total of the rows above it. It says how many rows it leaves out."""
    counted = [price for price in prices if price.hours is not None]
    hours = sum(price.hours for price in counted if price.hours is not None)
    counts = f'{len(counted)} of {format_count(len(prices), "run")}'
    total = f'total of {counts}: {format_digits(hours)} hours, one after another'
    if topology is None:
        return [f'{total}, of one processor core, estimated from the measured rate in configs/papers/scales.toml']
    chips = sum(price.chip_hours for price in counted if price.chip_hours is not None)
    least = sum(price.least_hours for price in counted if price.least_hours is not None)
    total += f' (at least {format_digits(least)}), {format_digits(chips)} chip-hours'
    if price_per_chip_hour is not None:
        total += f', {price_per_chip_hour * chips:,.2f} at {price_per_chip_hour:g} each'
    left_out = [price.run.point.name for price in prices if price.hours is None]
    return [total, *([f'left out, as they do not fit: {", ".join(left_out)}'] if left_out else [])]


def describe_data(choice: TableChoice, runs: Sequence[TableRun]) -> list[str]:
    """Returns the size of each store, and the time of its preparation."""
    paths = {run.original.experiment.data.path: None for run in runs if not run.point.experiment.data.task}
    lines = ['data: drawn by the training, no store'] if any(run.point.experiment.data.task for run in runs) else []
    if paths and choice.scale in load_scales():
        return [*lines, 'data: a store of a few MB, prepared in under a minute']
    for path in filter(None, paths):
        corpus = load_corpora().get(epath.Path(path).name)
        if corpus is None:
            lines.append(f'store and preparation of {path}: configs/papers/corpora.toml has no size of this corpus')
            continue
        tokens = corpus['text_bytes'] / corpus['bytes_per_token']
        hours = corpus['text_bytes'] / 1e9 * SECONDS_PER_GIGABYTE / 3600
        lines += [
            f'store: about {format_si(tokens)} tokens, {BYTES_PER_TOKEN_IN_STORE * tokens / 1e9:.3g} GB, from '
            f'{corpus["text_bytes"] / 1e9:.3g} GB of text ({corpus["source"]})',
            f'preparation: about {format_digits(hours)} hours of one processor core; --processes and --shard share it',
        ]
    return lines
