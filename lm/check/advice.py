"""Changes that make a training step fast. Each is tried by compiling; the fastest by prediction wins among those that
leave some memory free."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from lm.cost_model.compiled_step import Check, check
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Topology
from lm.model import REMAT
from lm.model.functions import count_parameters

MAX_FSDP = 64
"""Devices that share one copy of the state at most; beyond it a share is small beside everything else."""
BYTES_A_PARAMETER = 4
"""Bytes of a parameter itself, without the state that the rule of the optimizer keeps for it."""
LARGE_STATE = 1 / 3
"""Share of the HBM; gradients and their sum over microbatches take up to as much again."""
MICROBATCHES, REMAT_LEVEL, FSDP = 'train.microbatches', 'model.remat', 'mesh.fsdp'
UNROLL = 'model.unroll'

BEYOND = {'none': {'dots', 'dense', 'attention', 'full'}, 'dots': {'dense', 'attention', 'full'}}
BEYOND |= {'dense': {'full'}, 'attention': {'full'}, 'full': set()}
"""Level of `model.remat` → those that recompute all that it does, and more."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """One set of changes, the HBM of a device that the step then needs, and its predicted time.

    Attributes:
        bindings: as gin; empty: the configuration as it is.
        seconds: of a step; None: it does not fit, or cannot be predicted.
        has_headroom: whether it fits with the margin.
    """

    bindings: tuple[str, ...]
    needed_gib: float
    seconds: float | None = None
    has_headroom: bool = False


@dataclasses.dataclass(frozen=True)
class Advice:
    """The changes that were tried.

    Attributes:
        check: of the fastest changes that fit with the margin; else of those that fit and need least; None: none do.
        nearest: the least memory that was reached.
        tried: all, in order.
    """

    check: Check | None
    nearest: Tried | None
    tried: tuple[Tried, ...]


def advise(
    experiment: Experiment,
    topology: Topology,
    configured: Check,
    note: Callable[[str], None] = lambda text: None,
    everything: bool = False,
) -> Advice:
    """Finds the fastest of `list_candidates` that fits. A step that is too large is refused within seconds; one that
    fits takes as long as any compilation. Changes that recompute more than others that fit are not tried.

    With `everything` the fastest is then tried without a loop over the layers: faster, in more memory, and several
    times as long to compile, so that nothing else is tried that way.

    Args:
        configured: the check of the experiment as it is.
        note: called with a line on each trial.
        everything: also changes that recompute less than the configuration, which is one of the candidates itself.
    """
    changes: list[dict[str, Any]] = [{}] if everything else []
    checks = [configured] if everything else []

    def attempt(bindings: dict[str, Any]) -> bool:
        """Checks a step with these changes; returns whether it fits with the margin."""
        text = ', '.join(f'{name} = {value!r}' for name, value in bindings.items())
        try:
            found = check(experiment, topology, bindings)
        except ConfigError as error:
            note(f'{text}: {error}')
            return False
        changes.append(bindings)
        checks.append(found)
        note(f'{text}: {found.memory.needed_gib:.2f} GiB')
        return found.has_headroom

    given = _read_values(experiment)
    fitting = [given] if everything and configured.has_headroom else []
    for bindings in list_candidates(experiment, topology, everything):
        values = given | bindings
        if not any(_is_slower(values, other) for other in fitting) and attempt(bindings):
            fitting.append(values)
    is_looped = experiment.model.unroll < experiment.model.n_layers
    if everything and is_looped and (chosen := _find_fastest(checks)) is not None:
        attempt(changes[chosen] | {UNROLL: experiment.model.n_layers})

    tried = tuple(Tried(c.bindings, c.memory.needed_gib, _predict_seconds(c), c.has_headroom) for c in checks)
    nearest = min(tried, key=lambda t: t.needed_gib, default=None)
    if (chosen := _find_fastest(checks)) is not None:
        return Advice(checks[chosen], nearest, tried)
    tight = [c for c in checks if c.fits]
    return Advice(min(tight, key=lambda c: c.memory.needed_gib, default=None), nearest, tried)


def _find_fastest(checks: list[Check]) -> int | None:
    """The index of the check with the shortest step among those that fit with the margin; None: none fits so."""
    roomy = [i for i, c in enumerate(checks) if c.has_headroom]
    return min(roomy, key=lambda i: _predict_seconds(checks[i]) or 0.0, default=None)


def list_candidates(experiment: Experiment, topology: Topology, everything: bool = False) -> Iterator[dict[str, Any]]:
    """Changes to try, those that recompute least first.

    Smaller microbatches recompute nothing; then each level of `model.remat`, with its microbatches; then all of it once
    more with the state shared by several devices, which costs communication. Where the state alone takes a good part of
    the memory, it is shared from the beginning: to recompute everything for its sake would cost more.
    """
    config, model, mesh = experiment.train, experiment.model, experiment.mesh
    levels = list(REMAT)[0 if everything else list(REMAT).index(model.remat) :]
    windows_at_once = topology.chips * topology.chip.devices // mesh.sequence
    near = windows_at_once // topology.slices
    shared = max(mesh.fsdp, max(n for n in range(1, min(near, MAX_FSDP) + 1) if near % n == 0))
    each = BYTES_A_PARAMETER + experiment.optimizer.rule.state_bytes()
    state_gib = each * sum(count_parameters(model).values()) / mesh.fsdp / 2**30
    sharing = [shared] if state_gib > LARGE_STATE * topology.chip.limits.hbm_gib else [mesh.fsdp, shared]
    given = _read_values(experiment)
    for fsdp in dict.fromkeys(sharing):
        for remat in levels:
            for parts in _microbatches(config.batch_size, 1 if everything else config.microbatches, windows_at_once):
                values = {MICROBATCHES: parts, REMAT_LEVEL: remat, FSDP: fsdp}
                if changes := {k: v for k, v in values.items() if v != given[k]}:
                    yield changes


def _read_values(experiment: Experiment) -> dict[str, Any]:
    return {
        MICROBATCHES: experiment.train.microbatches,
        REMAT_LEVEL: experiment.model.remat,
        FSDP: experiment.mesh.fsdp,
    }


def _is_slower(values: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tells whether a step with `values` does all the work of a step with `other`, and more."""
    remat, less = values[REMAT_LEVEL], other[REMAT_LEVEL]
    more_remat = remat == less or remat in BEYOND[less]
    return more_remat and values[MICROBATCHES] >= other[MICROBATCHES] and values[FSDP] >= other[FSDP]


def _predict_seconds(found: Check) -> float | None:
    speed = found.predicted or found.speed
    return speed and speed.seconds_per_step


def _microbatches(windows: int, parts: int, at_once: int) -> Iterator[int]:
    """`parts`, twice, four times that …, as long as each part divides by the windows that are computed at once."""
    while windows % parts == 0 and windows // parts % at_once == 0 and windows // parts:
        yield parts
        parts *= 2
