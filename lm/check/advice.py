"""What to change when a training step does not fit: changes that cost little first, each tried by compiling."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from lm.check.compiled_step import Check, check
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Topology
from lm.model import REMAT
from lm.training.step import count_parameters

MAX_FSDP = 64
"""Devices that share one copy of the state at most; beyond it a share is small beside everything else."""
BYTES_A_PARAMETER = 4
"""Of a parameter itself; the rule of the optimizer says what it keeps for it."""
LARGE_STATE = 1 / 3
"""Share of the HBM; gradients and their sum over microbatches take up to as much again."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """One set of changes, and the HBM of a device that the step then needs."""

    bindings: tuple[str, ...]
    needed_gib: float


@dataclasses.dataclass(frozen=True)
class Advice:
    """What was tried.

    Attributes:
        check: of the first changes that fit; None: none did.
        nearest: the least memory that was reached.
        tried: all, in order.
    """

    check: Check | None
    nearest: Tried | None
    tried: tuple[Tried, ...]


def advise(
    experiment: Experiment, topology: Topology, failed: Check, note: Callable[[str], None] = lambda text: None
) -> Advice:
    """The first of `candidates` that fits. A step that is too large is refused within seconds; one that fits takes as
    long as any compilation.

    Args:
        failed: the check of the experiment as it is.
        note: told of each trial.
    """
    tried: list[Tried] = []
    for bindings in candidates(experiment, topology):
        text = ', '.join(f'{name} = {value!r}' for name, value in bindings.items())
        try:
            found = check(experiment, topology, bindings)
        except ConfigError as error:
            note(f'{text}: {error}')
            continue
        tried.append(Tried(found.bindings, found.memory.needed_gib))
        note(f'{text}: {found.memory.needed_gib:.2f} GiB')
        if found.fits:
            return Advice(found, tried[-1], tuple(tried))
    nearest = min(tried, key=lambda t: t.needed_gib, default=None)
    return Advice(None, nearest, tuple(tried))


def candidates(experiment: Experiment, topology: Topology) -> Iterator[dict[str, Any]]:
    """Changes to try, those that recompute least first.

    Smaller microbatches recompute nothing; then each level of `model.remat`, with its microbatches; then all of it once
    more with the state shared by several devices, which costs communication. Where the state alone takes a good part of
    the memory, it is shared from the beginning: to recompute everything for its sake would cost more.
    """
    config, model, mesh = experiment.train, experiment.model, experiment.mesh
    levels = list(REMAT)[list(REMAT).index(model.remat) :]
    devices = topology.chips * topology.chip.devices
    shared = max(mesh.fsdp, max(n for n in range(1, min(devices, MAX_FSDP) + 1) if devices % n == 0))
    each = BYTES_A_PARAMETER + experiment.optimizer.rule.state_bytes()
    state_gib = each * sum(count_parameters(model).values()) / mesh.fsdp / 2**30
    sharing = [shared] if state_gib > LARGE_STATE * topology.chip.hbm_gib else [mesh.fsdp, shared]
    for fsdp in dict.fromkeys(sharing):
        for remat in levels:
            for parts in _microbatches(config.batch_size, config.microbatches, devices):
                values = {'train.microbatches': parts, 'model.remat': remat, 'mesh.fsdp': fsdp}
                given = (config.microbatches, model.remat, mesh.fsdp)
                changes = {k: v for (k, v), old in zip(values.items(), given, strict=True) if v != old}
                if changes:
                    yield changes


def _microbatches(windows: int, parts: int, devices: int) -> Iterator[int]:
    """`parts`, twice, four times that …, as long as each part divides by the devices."""
    while windows % parts == 0 and windows // parts % devices == 0 and windows // parts:
        yield parts
        parts *= 2
