"""`lm check`: what a run will need, before it is paid for: parameters, arithmetic, and the training step compiled for a
TPU slice that is not there: its memory, its exchanges between chips, and the least time that it can take.

The step is the one that `lm train` runs: same function, shardings, donated state, batch and kernels; only the devices
are described ones. Compiling takes a minute or two for a large model on a laptop.
"""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from lm.attention.softmax import Softmax
from lm.compiled.roofline import Roofline, roofline
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Topology, parse
from lm.runs.records import to_json
from lm.training.mesh import data_shards, make_mesh
from lm.training.program import abstract_state, lower_step
from lm.training.step import TrainStep, count_parameters

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What follows from the configuration alone.

    Attributes:
        parameters: trainable ones by part of the model.
        flops_per_token: of the MFU: forward and backward, nothing recomputed.
    """

    parameters: dict[str, int]
    parameters_total: int
    windows_per_step: int
    tokens_per_window: int
    tokens_per_step: int
    steps: int
    tokens_total: int
    flops_per_token: float
    flops_total: float


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one JAX device (a chip; on v7x half of one), GiB. A compiler that refuses a step says only `needed_gib`.

    Attributes:
        limit_gib: what a program may use.
        needed_gib: at the peak.
        arguments_gib: parameters, optimizer state and batch.
        outputs_gib: the new state.
        aliased_gib: of the outputs, what takes the place of the arguments.
        temporaries_gib: gradients, and what the forward pass keeps for the backward pass.
    """

    limit_gib: float
    needed_gib: float
    arguments_gib: float | None = None
    outputs_gib: float | None = None
    aliased_gib: float | None = None
    temporaries_gib: float | None = None


@dataclasses.dataclass(frozen=True)
class Speed:
    """The run at the bound of the roofline: nothing is faster than this."""

    seconds_per_step: float
    steps_per_second: float
    tokens_per_second: float
    mfu: float
    run_hours: float
    run_chip_hours: float


@dataclasses.dataclass(frozen=True)
class Check:
    """The step of one configuration on one topology.

    Attributes:
        bindings: what was changed in the configuration, as gin; empty: nothing.
        roofline, speed: None when the compiler refused the step.
        compile_seconds: on this machine.
        advice: what to change, when it does not fit (see `lm.check.advice`).
    """

    topology: str
    chips: int
    devices: int
    bindings: tuple[str, ...]
    fits: bool
    memory: Memory
    roofline: Roofline | None
    speed: Speed | None
    compile_seconds: float
    advice: Any = None


# --------------------------------------------------------------------------------------------------------------- check


def plan(experiment: Experiment) -> Plan:
    """What needs no compilation."""
    model, config = experiment.model, experiment.train
    parts = count_parameters(model)
    total = config.steps * config.tokens_per_step
    flops = model.flops_per_token(config.context_length)
    return Plan(
        parameters=parts,
        parameters_total=sum(parts.values()),
        windows_per_step=config.batch_size,
        tokens_per_window=config.context_length,
        tokens_per_step=config.tokens_per_step,
        steps=config.steps,
        tokens_total=total,
        flops_per_token=flops,
        flops_total=flops * total,
    )


def check(experiment: Experiment, topology: str | Topology, bindings: Mapping[str, Any] | None = None) -> Check:
    """Compiles the training step for `topology` and reads its costs.

    Args:
        experiment: the configuration.
        topology: such as 'v5e:4x8'.
        bindings: changes to try, by gin name: {'model.remat': 'dots'}.

    Raises:
        ConfigError: an unknown topology, libtpu is missing, the batch or `mesh.fsdp` does not divide by the devices, or
            the compiler refuses the step for another reason than memory.
    """
    topology = parse(topology) if isinstance(topology, str) else topology
    bindings = dict(bindings or {})
    experiment = changed(experiment, bindings)
    mesh = make_mesh(experiment.mesh, topology.devices)
    experiment.train.check_divides(data_shards(mesh))
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        compiled, needed = _compile(experiment, mesh, topology)
    found = dict(
        topology=topology.name,
        chips=topology.chips,
        devices=mesh.size,
        bindings=tuple(f'{name} = {value!r}' for name, value in bindings.items()),
        compile_seconds=time.perf_counter() - start,
    )
    limit = topology.chip.hbm_gib
    if compiled is None:
        return Check(**found, fits=False, memory=Memory(limit, needed), roofline=None, speed=None)
    memory = _memory(compiled, limit)
    softmax = [a for a in experiment.model.pattern if isinstance(a, Softmax)]
    dims, length = experiment.model.dims, experiment.train.context_length
    forward = sum(a.flops_per_token(dims, length) for a in softmax) / max(1, len(softmax))
    least = experiment.model.flops_per_token(length) * experiment.train.tokens_per_step / mesh.size
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # libtpu is newer than jaxlib; seen with v7x
        text = ''
    bound = roofline(text, topology, forward, least)
    fits = memory.needed_gib <= limit
    return Check(**found, fits=fits, memory=memory, roofline=bound, speed=_speed(experiment, bound, topology))


def changed(experiment: Experiment, bindings: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of `section.field`."""
    for name, value in bindings.items():
        section, _, field = name.partition('.')
        new = dataclasses.replace(getattr(experiment, section), **{field: value})
        experiment = dataclasses.replace(experiment, **{section: new})
    return experiment


def _compile(experiment: Experiment, mesh: jax.sharding.Mesh, topology: Topology) -> tuple[Any, float]:
    """(the compiled step, 0), or (None, the GiB that it would need)."""
    config, task = experiment.train, experiment.data.task
    functions = TrainStep(experiment.model, experiment.optimizer, config.steps, scored=task and task.scored)
    dtype = experiment.data.dtype(experiment.model.vocab_size)
    try:
        return lower_step(functions, abstract_state(functions, mesh), config, dtype, mesh).compile(), 0.0
    except jax.errors.JaxRuntimeError as error:
        needed = out_of_memory(str(error))
        if needed is None:
            line = next(iter(str(error).splitlines()), '')
            raise ConfigError(f'--topology {topology.name}: the compiler refuses the training step: {line}') from error
        return None, needed


def out_of_memory(message: str) -> float | None:
    """GiB of HBM that a program needs, from the compiler's refusal of it; None: it was refused for another reason."""
    if 'RESOURCE_EXHAUSTED' not in message or 'hbm' not in message.lower():
        return None
    found = re.search(r'\(([\d.]+)([KMGT]?)\) exceeds|Used ([\d.]+)([KMGT]?) of', message)
    if not found:
        return math.inf
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return float(number) * 1024.0 ** ('KMGT'.index(unit) - 2 if unit else -3)


def _memory(compiled: Any, limit: float) -> Memory:
    stats = compiled.memory_analysis()
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    peak = max(getattr(stats, 'peak_memory_in_bytes', 0), arguments + outputs - aliased + temporaries)
    return Memory(limit, peak / GIB, arguments / GIB, outputs / GIB, aliased / GIB, temporaries / GIB)


def _speed(experiment: Experiment, bound: Roofline, topology: Topology) -> Speed:
    config, seconds = experiment.train, bound.seconds
    tokens = config.tokens_per_step / seconds
    flops = experiment.model.flops_per_token(config.context_length)
    hours = config.steps * seconds / 3600
    return Speed(
        seconds_per_step=seconds,
        steps_per_second=1 / seconds,
        tokens_per_second=tokens,
        mfu=flops * tokens / (topology.chip.flops * topology.chips),
        run_hours=hours,
        run_chip_hours=hours * topology.chips,
    )


# ------------------------------------------------------------------------------------------------------------- command


def main(experiment: Experiment, arguments: Any) -> int:
    """The `lm check` command. Raises ConfigError, after everything was printed, if the step does not fit."""
    from lm.check.advice import advise
    from lm.check.tables import print_check, print_plan

    # Nothing is run; an accelerator of this machine may be busy.
    jax.config.update('jax_platforms', 'cpu')
    topologies = [parse(name) for name in arguments.topology]
    show = print_nothing if arguments.json else None
    planned = plan(experiment)
    (show or print_plan)(planned, experiment)
    checks = []
    for topology in topologies:
        note(f'compiling the training step for {topology.name} …')
        found = check(experiment, topology)
        if not found.fits and arguments.advice:
            found = dataclasses.replace(found, advice=advise(experiment, topology, found, note))
        (show or print_check)(found, planned)
        checks.append(found)
    if arguments.json:
        print(to_json({'plan': dataclasses.asdict(planned), 'checks': [dataclasses.asdict(c) for c in checks]}))
    if failed := [c for c in checks if not c.fits]:
        raise ConfigError(failure(failed[0]))
    return 0


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
