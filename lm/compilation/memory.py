"""The memory of a compiled program on one device."""

import dataclasses
import re

import jax

_HBM = re.compile(r'Memory Space: default \(color=0\)\nTotal bytes: (\d+)')


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device's memory.

    Attributes:
        arguments, outputs: the inputs and the results.
        aliased: the outputs that replace arguments in place.
        temporaries: the further memory.
        peak: the most memory at one time.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int


def program_memory(compiled: jax.stages.Compiled, report: str = '') -> ProgramMemory | None:
    """Reads the memory figures of a compiled program; None if the compiler gives none.

    libtpu 0.0.42 reports a third more temporaries to JAX than it allocates, so steps that fit seem not to fit. Its
    `report` (`lm.compilation.compiler`) is right. Without a report, as on a real TPU, the peak counts. It leaves out
    the gaps between buffers.

    The peak of a CPU program in JAX's figures leaves out temporaries.
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
