"""`lm check`: what a run will need, before it is paid for: parameters, arithmetic, and the training step compiled for a
TPU slice that is not there."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from lm.check.advice import advise
from lm.check.base import has_begun
from lm.check.tables import print_budget, print_check
from lm.cost_model.compiled_step import Check, budget, check
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Topology, check_libtpu, parse
from lm.plan import validate
from lm.runs.records import to_json


def main(experiment: Experiment, arguments: Any) -> int:
    """The `lm check` command. No experiment: there is nothing to check, which has been said. Raises what `validate`
    raises, and ConfigError, after everything was printed, if the step does not fit."""
    if experiment is None:
        return 0
    # Nothing is run; an accelerator of this machine may be busy.
    jax.config.update('jax_platforms', 'cpu')
    topologies = list(slices(arguments.topology, arguments.if_possible))
    show = print_nothing if arguments.json else None
    for line in validate(experiment, begun=has_begun(experiment, arguments)):
        note(f'not checked: {line}')
    planned = budget(experiment)
    (show or print_budget)(planned, experiment)
    checks = []
    for topology in topologies:
        note(f'compiling the training step for {topology.name} …')
        found = check(experiment, topology)
        if arguments.best or (not found.fits and arguments.advice):
            found = dataclasses.replace(found, advice=advise(experiment, topology, found, note, arguments.best))
        (show or print_check)(found, planned, arguments.price_per_chip_hour)
        checks.append(found)
    if arguments.json:
        found = [priced(dataclasses.asdict(c), arguments.price_per_chip_hour) for c in checks]
        print(to_json({'plan': dataclasses.asdict(planned), 'checks': found}))
    if failed := [c for c in checks if not c.fits]:
        raise ConfigError(failure(failed[0]))
    return 0


def priced(found: dict[str, Any], price: float | None) -> dict[str, Any]:
    """A check as a dict, and in it `run_price` beside every `run_chip_hours`; None: it is left as it is."""
    if price is not None:
        for run in filter(None, (found['speed'], found['predicted'])):
            run['run_price'] = price * run['run_chip_hours']
        if found['advice'] and found['advice']['check']:
            priced(found['advice']['check'], price)
    return found


def slices(names: Sequence[str], if_possible: bool) -> Iterator[Topology]:
    """The slices to compile for; `if_possible`: only those that this machine can describe, with a note for others."""
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
    """One line: what is missing, and what to do about it."""
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
    """Progress, for people who watch."""
    print(text, file=sys.stderr, flush=True)


def print_nothing(*_: Any) -> None:
    """In place of the tables, with --json."""
