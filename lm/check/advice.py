"""Changes that make a training step fast: each is compiled.

Among the changes that leave some memory free, the fastest by prediction wins.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from lm.cost_model.compiled_step import Check, apply_bindings, check
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Topology
from lm.model import REMAT
from lm.model.functions import count_parameters

MAX_FSDP = 64
"""The most devices that share one copy of the state; with more, each device's part is small beside everything else."""
BYTES_A_PARAMETER = 4
"""The bytes of a parameter itself, without the optimizer's state for it."""
BUDGET_SECONDS = 300.0
"""How long faster changes are looked for after one that fits: each takes as long to compile as the step itself."""
LARGE_STATE = 1 / 3
"""A fraction of the HBM; gradients and their sum over microbatches take up to as much again."""
MICROBATCHES, REMAT_LEVEL, FSDP = 'train.microbatches', 'model.remat', 'mesh.fsdp'
UNROLL = 'model.unroll'

BEYOND = {'none': {'dots', 'dense', 'attention', 'full'}, 'dots': {'dense', 'attention', 'full'}}
BEYOND |= {'dense': {'full'}, 'attention': {'full'}, 'full': set()}
"""Level of `model.remat` → the levels that recompute the same and more."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """One set of changes, the HBM that the step then needs per device, and its predicted time.

    Attributes:
        bindings: as gin; empty: the configuration as it is.
        seconds: per step; None: it does not fit, or cannot be predicted.
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
        check: the fastest changes that fit with the margin; else the changes that fit and need least memory; None: none
            fit.
        nearest: the least memory that was reached.
        tried: all, in order.
        left_out: the number of changes that were not tried, because the time was over.
    """

    check: Check | None
    nearest: Tried | None
    tried: tuple[Tried, ...]
    left_out: int = 0


def advise(
    experiment: Experiment,
    topology: Topology,
    configured: Check,
    note: Callable[[str], None] = lambda text: None,
    everything: bool = False,
    budget_seconds: float = BUDGET_SECONDS,
) -> Advice:
    """Finds the fastest of `list_candidates` that fits.

    The compiler refuses a step that is too large within seconds; a step that fits takes a full compilation. If a change
    fits, changes that recompute more are not tried. A step without a loop over the layers takes several times as long
    to compile. So changes are tried with a loop, which may suffice alone, unless `everything` is. The fastest is then
    tried without one.

    Args:
        configured: the check of the experiment as it is.
        note: called with a line on each trial.
        everything: also changes that recompute less than the configuration, which is then one of the candidates.
        budget_seconds: no more changes are tried so long after one fitted.
    """
    changes: list[dict[str, Any]] = [{}] if everything else []
    checks = [configured] if everything else []

    deadline = time.monotonic() + budget_seconds if everything and configured.has_headroom else math.inf

    def attempt(bindings: dict[str, Any], label: str) -> bool:
        """Checks a step with these changes; returns whether it fits with the margin."""
        text = f'{label}: {", ".join(f"{name} = {value!r}" for name, value in bindings.items())}'
        try:
            found = check(experiment, topology, bindings)
        except ConfigError as error:
            note(f'{text}: {error}')
            return False
        changes.append(bindings)
        checks.append(found)
        note(f'{text}: {found.memory.needed_gib:.2f} GiB{_describe_fit(found)}')
        return found.has_headroom

    def looped(bindings: dict[str, Any]) -> dict[str, Any]:
        return {UNROLL: 1} if not everything and _is_unrolled(experiment, bindings) else {}

    given = _read_values(experiment)
    fitting = [given] if everything and configured.has_headroom else []
    candidates = list(list_candidates(experiment, topology, everything))
    left_out = 0
    if not everything and _is_unrolled(experiment, {}) and attempt({UNROLL: 1}, 'with a loop over the layers'):
        fitting.append(given)
    for i, bindings in enumerate(candidates, 1):
        values = given | bindings
        if any(_is_slower(values, other) for other in fitting):
            continue
        if time.monotonic() >= deadline:
            left_out += 1
        elif attempt(looped(bindings) | bindings, f'try {i} of {len(candidates)}'):
            fitting.append(values)
            deadline = min(deadline, time.monotonic() + budget_seconds)
    if (chosen := _find_fastest(checks)) is not None:
        best = {name: value for name, value in changes[chosen].items() if name != UNROLL}
        if best and UNROLL in changes[chosen]:
            attempt(best, 'without a loop over the layers')
        elif everything and not _is_unrolled(experiment, best):
            attempt(best | {UNROLL: experiment.model.n_layers}, 'without a loop over the layers')

    tried = tuple(
        Tried(c.bindings, c.memory.needed_gib, _predict_seconds(c) if c.fits else None, c.has_headroom) for c in checks
    )
    nearest = min(tried, key=lambda t: t.needed_gib, default=None)
    if (chosen := _find_fastest(checks)) is not None:
        return Advice(checks[chosen], nearest, tried, left_out)
    tight = [c for c in checks if c.fits]
    return Advice(min(tight, key=lambda c: c.memory.needed_gib, default=None), nearest, tried, left_out)


def _is_unrolled(experiment: Experiment, bindings: dict[str, Any]) -> bool:
    """Tells whether a step with these changes has no loop over the layers."""
    changed = apply_bindings(experiment, bindings)
    return changed.model.resolve_unroll('tpu', changed.mesh.fsdp > 1) >= changed.model.n_layers


def _describe_fit(found: Check) -> str:
    """Returns the words of a note about a step that fits; nothing for one that does not."""
    seconds = _predict_seconds(found)
    predicted = '' if seconds is None else f', {seconds:.3g} s per step predicted'
    return f', fits{"" if found.has_headroom else " with too little to spare"}{predicted}' if found.fits else ''


def _find_fastest(checks: list[Check]) -> int | None:
    """Returns the index of the check with the shortest step that fits with the margin; None: none fits with it."""
    roomy = [i for i, c in enumerate(checks) if c.has_headroom]
    # Of equal ones that with fewer changes: a step without a loop needs none.
    return min(
        roomy, key=lambda i: (_predict_seconds(checks[i]) or 0.0, f'{UNROLL} = 1' in checks[i].bindings), default=None
    )


def list_candidates(
    experiment: Experiment, topology: Topology, everything: bool = False
) -> Iterator[dict[str, object]]:
    """Returns changes to try, those that recompute least first.

    Smaller microbatches recompute nothing. Then follows each level of `model.remat`, with its microbatches. Then all of
    this comes again with the state shared by several devices, which costs communication. If the state alone takes a
    large part of the memory, it is shared from the beginning: recomputation would cost more.
    """
    config, model, mesh = experiment.train, experiment.model, experiment.mesh
    levels = list(REMAT)[0 if everything else list(REMAT).index(model.remat) :]
    windows_at_once = topology.chips * topology.chip.devices // mesh.sequence
    near = windows_at_once // topology.slices
    shared = max(mesh.fsdp, max(n for n in range(1, min(near, MAX_FSDP) + 1) if near % n == 0))
    arrays = 2 if experiment.optimizer.average_steps else 1
    each = arrays * BYTES_A_PARAMETER + experiment.optimizer.rule.state_bytes()
    state_gib = each * sum(count_parameters(model).values()) / mesh.fsdp / 2**30
    sharing = [shared] if state_gib > LARGE_STATE * topology.chip.limits.hbm_gib else [mesh.fsdp, shared]
    given = _read_values(experiment)
    for fsdp in dict.fromkeys(sharing):
        for remat in levels:
            for parts in _microbatches(config.batch_size, 1 if everything else config.microbatches, windows_at_once):
                values = {MICROBATCHES: parts, REMAT_LEVEL: remat, FSDP: fsdp}
                if changes := {k: v for k, v in values.items() if v != given[k]}:
                    yield changes


def _read_values(experiment: Experiment) -> dict[str, object]:
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
    """Yields `parts`, twice, four times … this number, while each part divides by the windows that are computed at
    once."""
    while windows % parts == 0 and windows // parts % at_once == 0 and windows // parts:
        yield parts
        parts *= 2
