"""The memory of a compiled program on one device."""

import contextlib
import ctypes
import dataclasses
import glob
import re

import jax

from lm.output import TPU_DEVICES

_HBM = re.compile(r'Memory Space: default \(color=0\)\nTotal bytes: (\d+)')
ACCELERATORS = (*TPU_DEVICES, '/dev/nvidia[0-9]*', '/dev/kfd')
"""Device files of TPUs and GPUs."""
MALLOC_OPTIONS = {'M_MMAP_MAX': (-4, 0), 'M_TRIM_THRESHOLD': (-1, 2**31 - 1)}
"""Numbers and values of `mallopt`: large blocks lie in the heap. Its end shrinks only where 2 GiB of it are free."""


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


def keep_freed_memory() -> None:
    """Lets programs on CPUs take the memory of the call before; call it before JAX looks for devices.

    The GNU C library would give the temporaries of each call back to the system. The next call would then wait until
    the system has cleared as many pages. The heap is the main thread's, so programs run in the thread that calls them.
    Nothing changes on machines with accelerators, unless JAX_PLATFORMS is cpu.
    """
    if jax.config.values['jax_platforms'] != 'cpu' and any(map(glob.glob, ACCELERATORS)):
        return
    with contextlib.suppress(OSError, AttributeError):  # other libraries have no such function
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC_OPTIONS.values():
            mallopt(option, value)
        jax.config.update('jax_cpu_enable_async_dispatch', False)
