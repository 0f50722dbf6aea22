"""Comparable times: candidates take turns in random order, and the figure is the median.

On a machine that other work shares, a rate changes from minute to minute. The ratio of two candidates that took turns
changes little.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

from lm.compilation.memory import program_memory
from lm.errors import LmError, is_out_of_memory
from lm.hardware import read_host_memory

LEAST_SECONDS = 0.01
"""Shorter calls of an accelerator are timed several at a time, so that the host's part does not count."""

Key = TypeVar('Key', bound=Hashable)


class OutOfMemory(LmError):
    """A candidate needs more memory than there is."""


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of one candidate.

    Attributes:
        seconds: median of a call, by the clock.
        least: the shortest.
        cpu_seconds: median of a call, on all cores of this process together; for an accelerator, the host's part.
        repeats: the number of timed calls.
        greatest: the longest.
    """

    seconds: float
    least: float
    cpu_seconds: float
    repeats: int
    greatest: float


def in_turns(
    calls: Mapping[Key, Callable[[], Any]], repeats: int, say: Callable[[str], None] = lambda text: None
) -> dict[Key, Times | None]:
    """Times each call `repeats` times; every round has a new random order.

    Args:
        calls: do the work and return arrays to wait for; the first call of each is not timed.
        say: called with reports of progress.

    Returns:
        the times of each call; None if memory did not suffice.
    """
    counts: dict[Key, int] = {}
    for i, (key, call) in enumerate(calls.items(), 1):
        say(f'first call {i} of {len(calls)}')
        try:
            jax.block_until_ready(call())
            start = time.perf_counter()
            if jax.default_backend() != 'cpu':
                jax.block_until_ready(call())
            seconds = time.perf_counter() - start
            # All processes must make the same calls.
            alone = jax.default_backend() == 'cpu' or jax.process_count() > 1
            counts[key] = 1 if alone else max(1, round(LEAST_SECONDS / max(seconds, 1e-6)))
        except Exception as error:
            _raise_others(error)
    draw, found = random.Random(0), {key: [] for key in counts}
    for i in range(repeats):
        say(f'round {i + 1} of {repeats}')
        for key in draw.sample(list(found), len(found)):
            n = counts[key]
            start, cpu = time.perf_counter(), time.process_time()
            try:
                for _ in range(n):
                    result = calls[key]()
                jax.block_until_ready(result)
            except Exception as error:  # fragmentation can take memory that the first call still had
                _raise_others(error)
                del found[key]
                continue
            found[key].append(((time.perf_counter() - start) / n, (time.process_time() - cpu) / n))
    return {key: _times(found[key]) if key in found else None for key in calls}


def _raise_others(error: Exception) -> None:
    """Raises an error that does not say that the memory did not suffice."""
    if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
        raise error


def all_in_turns(calls: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, Times]:
    """Times like `in_turns`, but raises OutOfMemory if one of the calls does not fit."""
    found = {key: times for key, times in in_turns(calls, repeats).items() if times is not None}
    if missing := calls.keys() - found.keys():
        raise OutOfMemory(f'{", ".join(map(str, missing))}: the memory of this machine does not suffice')
    return found


def _times(found: list[tuple[float, float]]) -> Times:
    seconds, cpu = zip(*found, strict=True)
    return Times(statistics.median(seconds), min(seconds), statistics.median(cpu), len(found), max(seconds))


def compile_if_fits(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, dict[str, float]]:
    """Returns (the compiled program, or None if it needs too much memory; MiB of each kind on one device)."""
    try:
        compiled = lowered.compile()
    except Exception as error:
        _raise_others(error)
        return None, {}
    memory = memory_mib(compiled)
    # No compiler refuses a CPU's program: the system would end the process.
    if jax.default_backend() == 'cpu' and memory.get('peak_mib', 0.0) > available_mib():
        return None, memory
    return compiled, memory


def memory_mib(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns the temporary and the peak memory of a compiled program on one device."""
    found = program_memory(compiled)
    return {} if found is None else {'temporary_mib': found.temporaries / 2**20, 'peak_mib': found.peak / 2**20}


def available_mib() -> float:
    """Returns the memory of the host that programs can still take."""
    found = read_host_memory('MemAvailable')
    return float('inf') if found is None else found / 2**20
