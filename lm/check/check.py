"""`lm check`: the needs of a run before it costs money: parameters, arithmetic, and the compiled training step.

The step is compiled for an absent TPU slice.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from lm.check.advice import BUDGET_SECONDS, advise
from lm.check.gradients import check_gradients, describe_faults
from lm.check.reach import refuse_waste
from lm.check.tables import print_budget, print_check, print_gradients
from lm.cost_model.compiled_step import Check, check, compute_budget
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Topology, check_libtpu, parse
from lm.plan import PlanCache, plan_step, validate
from lm.runs.records import to_json


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """The options of `run_check`.

    Attributes:
        topologies: the slices to compile for, such as 'v5e:4x8'.
        if_possible: leave out the slices that this machine cannot describe; refuse what machines would be paid for in
            vain.
        advice: try changes if a step does not fit.
        best: try changes even if a step fits.
        advice_seconds: no more changes are tried so long after one fitted.
        price_per_chip_hour: in any currency; None: no prices are printed.
        gradients: compare the gradients of a tiny model with differences of its loss.
        as_json: print JSON instead of tables.
    """

    topologies: tuple[str, ...] = ()
    if_possible: bool = False
    advice: bool = True
    best: bool = False
    advice_seconds: float = BUDGET_SECONDS
    price_per_chip_hour: float | None = None
    gradients: bool = False
    as_json: bool = False


def run_check(experiment: Experiment, options: CheckOptions, begun: bool = False) -> None:
    """Prints the needs of the run of `experiment`. `begun`: it goes on from a checkpoint of its own.

    Raises the errors of `validate`, and ConfigError, after everything was printed, if a gradient is wrong or zero, or
    if the step does not fit.
    """
    # Nothing runs on devices here, and an accelerator of this machine may be busy.
    jax.config.update('jax_platforms', 'cpu')
    if options.if_possible:
        refuse_waste(experiment)
    topologies = list(find_slices(options.topologies, options.if_possible))
    price = options.price_per_chip_hour
    cache = PlanCache()
    for line in validate(experiment, cache=cache, begun=begun):
        note(f'not checked: {line}')
    plan = plan_step(experiment, cache=cache)
    planned = compute_budget(plan)
    if not options.as_json:
        print_budget(planned, plan)
    gradients = None
    if options.gradients:
        note('comparing the gradients of a tiny model with differences of its loss …')
        gradients = check_gradients(experiment)
        if not options.as_json:
            print_gradients(gradients)
    checks = []
    for topology in topologies:
        note(f'compiling the training step for {topology.name} …')
        found = check(experiment, topology)
        if options.best or (not found.fits and options.advice):
            given = experiment, topology, found, note, options.best, options.advice_seconds
            found = dataclasses.replace(found, advice=advise(*given))
        if not options.as_json:
            print_check(found, planned, price)
        checks.append(found)
    if options.as_json:
        priced = [add_price(dataclasses.asdict(found), price) for found in checks]
        shown = {'gradients': dataclasses.asdict(gradients)} if gradients else {}
        print(to_json({'plan': dataclasses.asdict(planned), **shown, 'checks': priced}))
    if gradients and gradients.faults:
        raise ConfigError(describe_faults(gradients))
    if failed := [found for found in checks if not found.fits]:
        raise ConfigError(failure(failed[0]))


def add_price(found: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Adds `run_price` beside every `run_chip_hours` of a check as a dict, and returns it; None adds nothing."""
    if price is not None:
        for run in filter(None, (found['speed'], found['predicted'])):
            run['run_price'] = price * run['run_chip_hours']
        if found['advice'] and found['advice']['check']:
            add_price(found['advice']['check'], price)
    return found


def find_slices(names: Sequence[str], if_possible: bool) -> Iterator[Topology]:
    """Yields the slices to compile for; `if_possible`: a slice that this machine cannot describe is noted instead."""
    for name in names:
        try:
            topology = parse(name)
            if if_possible:
                check_libtpu(topology)
        except ConfigError as error:
            if not if_possible:
                raise
            note(f'not compiled: {error}')
        else:
            yield topology


def failure(found: Check) -> str:
    """Returns one line with the missing resource and the remedy."""
    memory = found.memory
    line = (
        f'{found.topology}: a step needs {memory.needed_gib:.2f} GiB of HBM, and a program may use {memory.limit_gib}'
    )
    if found.advice is None:
        return f'{line}; try train.microbatches, model.remat, mesh.fsdp or a larger topology'
    if found.advice.check is None:
        return f'{line}; no change of microbatches, remat and fsdp makes it fit: take a larger topology'
    return f'{line}; add ' + ' '.join(f'--gin_param "{binding}"' for binding in found.advice.check.bindings)


def note(text: str) -> None:
    """Prints a line of progress for people who watch."""
    print(text, file=sys.stderr, flush=True)
