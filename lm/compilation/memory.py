"""The memory of a compiled program on one device."""

import dataclasses
import re
from typing import Any

import jax

_HBM = re.compile(r'Memory Space: default \(color=0\)\nTotal bytes: (\d+)')


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device's memory.

    Attributes:
        arguments, outputs: what it is given, and what it returns.
        aliased: of the outputs, what takes the place of arguments.
        temporaries: what it needs beside these.
        peak: all that it needs at once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int


def program_memory(compiled: Any, report: str = '') -> ProgramMemory | None:
    """Reads the memory figures of a compiled program; None: the compiler gives none.

    libtpu 0.0.42 tells JAX of a third more temporaries than it finds places for, so that steps which it takes seem to
    exceed the memory. Its own `report` (`lm.compilation.compiler`) has them right; a program without one, of a TPU that
    is there, has the peak, which leaves out what lies empty between buffers.

    A CPU's peak, as JAX has it, is without temporaries.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    given, peak = arguments + outputs - aliased, getattr(stats, 'peak_memory_in_bytes', 0)
    if found := _HBM.search(report):
        total = int(found[1])
    elif jax.default_backend() == 'tpu' and peak > given:
        total = peak
    else:
        total = max(peak, given + temporaries)
    return ProgramMemory(arguments, outputs, aliased, min(temporaries, total - given), total)
