"""Kernels taken out of a compiled program and compiled alone, to get their schedules.

libtpu writes schedules of everything that it compiles, or of nothing, and packs all code again to do so. For a whole
training step this takes three times the time of compilation (`small`, 94 → 360 s of processor time). For the kernels of
a step it takes a few seconds. libtpu reads its flags once, when it is loaded, so a separate process compiles.
"""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from lm.cost_model import schedules
from lm.cost_model.program import Array, Instruction
from lm.hardware import describe_devices, generation, smallest

CONFIG = ('custom_call_config', 'scoped_memory_configs', 'flag_configs')
"""The keys of a kernel's backend config that we pass back to the compiler."""
NAME = 'ffi_call'
"""The compiler's name of a kernel that JAX does not know."""
_NUMBER = re.compile(r'(bf|f|s|u)(\d+)')


@dataclasses.dataclass(frozen=True)
class LoneKernel:
    """The input from which a kernel is compiled.

    Attributes:
        config: its program and limits, JSON.
        arrays, results: dtype and shape of each.
        operands: for each operand, the index of its array. Some kernels read one array twice, and only one copy fits on
            chip.
        skips: whether its grid steps skip work (`lm.cost_model.schedules.SKIPPING`).
    """

    config: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[int, ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    skips: bool


def take_out(kernel: Instruction, names: Mapping[str, Instruction]) -> LoneKernel | None:
    """Returns the kernel without its program; None if that cannot be read. `names`: the instructions around it, by
    name."""
    found = re.search(r'backend_config=(\{.*\})', kernel.attributes)
    try:
        config = {key: value for key, value in json.loads(found[1] if found else '').items() if key in CONFIG}
        distinct = list(dict.fromkeys(kernel.operands))
        operands = [names[name].arrays[0] for name in kernel.operands]
        # Arrays that the compiler keeps on chip around the kernel need no copies inside.
        near = [n for n, array in enumerate(operands) if _on_chip(array)]
        config['custom_call_config']['input_memory_space_colors'] = [{'operand_index': n, 'color': 1} for n in near]
        near = [n for n, array in enumerate(kernel.arrays) if _on_chip(array)]
        config['custom_call_config']['output_memory_space_colors'] = [
            {'color': 1} | ({'shape_index': [n]} if len(kernel.arrays) > 1 else {}) for n in near
        ]
        return LoneKernel(
            json.dumps(config, sort_keys=True),
            tuple(_described(names[name].arrays[0]) for name in distinct),
            tuple(map(distinct.index, kernel.operands)),
            tuple(map(_described, kernel.arrays)),
            any(name in kernel.name for name in schedules.SKIPPING),
        )
    except (ValueError, LookupError):
        return None


def cycles(kernels: Iterable[LoneKernel], chip: str) -> dict[LoneKernel, float]:
    """Returns the cycles per grid step of each kernel on a generation such as 'v5e'; None for kernels that cannot be
    compiled.

    A kernel that this process has compiled before is not compiled again.
    """
    known = _known(chip)
    missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in known]
    if missing:
        known |= zip(missing, _compile(missing, chip), strict=True)
    return {kernel: count for kernel in kernels if (count := known[kernel]) is not None}


@functools.cache
def _known(chip: str) -> dict[LoneKernel, float | None]:
    return {}


def _compile(kernels: Sequence[LoneKernel], chip: str) -> list[float | None]:
    with tempfile.TemporaryDirectory(prefix='lm_schedules_') as dump:
        command = [sys.executable, '-m', 'lm.cost_model.lone_kernels', chip, dump]
        request = json.dumps([dataclasses.asdict(kernel) for kernel in kernels])
        done = subprocess.run(command, env=schedules.environment(dump), input=request, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if re.fullmatch(r'[\d.]+|null', line)]
    return found + [None] * (len(kernels) - len(found))  # one of the other kernels may have killed the process


def main(chip: str, dump: str) -> None:
    """Runs the other process: reads kernels as JSON, and prints a line with the cycles, or null, for each."""
    (device, *_) = describe_devices(smallest(generation(chip)))
    for kernel in json.load(sys.stdin):
        schedules.clear(dump)
        try:
            _lower(kernel, device).compile()
            print(schedules.read_schedule(dump, NAME, longest=kernel['skips']).cycles, flush=True)
        except Exception:  # The compiler raises many kinds; a kernel without a schedule counts by its declared cost.
            print('null', flush=True)


def _lower(kernel, device):
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype, shape in kernel['arrays']]
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in kernel['results']]
    call = jax.ffi.ffi_call(
        'tpu_custom_call', results, custom_call_api_version=1, legacy_backend_config=kernel['config']
    )
    return jax.jit(lambda *arrays: call(*(arrays[n] for n in kernel['operands']))).lower(*arrays)


def _on_chip(array: Array) -> bool:
    return 'S(1)' in array.layout


def _described(array: Array) -> tuple[str, tuple[int, ...]]:
    """Returns (dtype, shape) with JAX's name of XLA's type: bf16 → bfloat16, s32 → int32."""
    if array.dtype == 'pred':
        return 'bool', array.shape
    if not (found := _NUMBER.fullmatch(array.dtype)):
        raise ValueError(array.dtype)
    kind, bits = found.groups()
    return {'bf': 'bfloat', 'f': 'float', 's': 'int', 'u': 'uint'}[kind] + bits, array.shape


if __name__ == '__main__':
    main(*sys.argv[1:])
