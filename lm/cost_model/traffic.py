"""Bytes between HBM and the core of a compiled program: the reads and writes of each instruction, with all its runs.

Buffers count in their layout, with the padding of tiles. Buffers in on-chip memory cost nothing, and neither does a
second read of the same operand by one instruction.
"""

from collections.abc import Iterable, Iterator

from lm.cost_model.program import HloProgram, Instruction

FREE = {
    'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'while', 'conditional', 'call', 'after-all',
    'partition-id', 'replica-id', 'opt-barrier', 'domain',
}  # fmt: skip
"""Instructions that move no bytes."""
FREE_TARGETS = ('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'Sharding', 'SPMD')
"""Custom calls that move no bytes."""
CUTS = ('dynamic-slice', 'slice', 'gather')

Names = dict[str, Instruction]


def hbm_bytes(program: HloProgram) -> float:
    """Returns the bytes read and written per run of the program on one device."""
    total = 0.0
    for computation, times in program.times.items():
        names = program.by_name[computation]
        total += times * sum(traffic(instruction, names, program) for instruction in names.values())
    return total


def traffic(instruction: Instruction, names: Names, program: HloProgram) -> float:
    """Returns the bytes of one run of `instruction`; `names` are the instructions of its computation."""
    opcode, arrays = instruction.opcode, instruction.arrays
    if opcode == 'call-update' and len(arrays) == 2 and arrays[0].elements == arrays[1].elements:
        return arrays[0].hbm + arrays[1].hbm  # SparseCores copy the operand to another layout
    if opcode in FREE or opcode.endswith(('-done', '-update')):
        return 0.0
    if opcode == 'custom-call' and any(target in instruction.attributes for target in FREE_TARGETS):
        return 0.0
    if opcode == 'send':
        return arrays[0].hbm  # the operand; the result is the same buffer
    if opcode == 'slice-start':
        source, target = arrays[0], arrays[1]
        return target.hbm + (target.size if source.hbm else 0.0)
    if opcode.endswith('-start'):
        return sum(a.hbm for a in arrays)  # operands and results
    if opcode == 'fusion' and instruction.attribute('calls') in program.computations:
        return _read(instruction, names, program) + _written(instruction, program)
    written = sum(a.hbm for a in arrays)
    read = [names[name].arrays for name in instruction.operands if name in names]
    if opcode in CUTS:
        return written + (arrays[0].size if any(a.hbm for a in read[0]) else 0.0)
    if opcode == 'dynamic-update-slice':
        return sum(a.size + a.hbm for a in read[1]) if written else 0.0
    return written + sum(a.hbm for arrays in read for a in arrays)


def _read(fusion: Instruction, names: Names, program: HloProgram) -> float:
    """Returns the bytes of a fusion's operands; a sliced operand counts its slices, an operand updated in place counts
    nothing."""
    total = 0.0
    for number, operand in enumerate(fusion.operands):
        size = sum(a.hbm for a in names[operand].arrays) if operand in names else 0.0
        cut = _cut(program, fusion.attribute('calls'), number) if size else None
        total += size if cut is None else min(size, cut)
    return total


def _cut(program: HloProgram, computation: str, number: int) -> float | None:
    """Returns the bytes of parameter `number` that a fused computation reads; None: all. Fusions inside it
    count too."""
    inside = program.by_name[computation].values()
    parameter = next((i for i in inside if i.opcode == 'parameter' and int(i.arguments) == number), None)
    if parameter is None or parameter.is_root:
        return None
    total = 0.0
    for use, via in _through_bitcasts(parameter.name, inside):
        places = [i for i, operand in enumerate(use.operands) if operand == via]
        if use.opcode == 'fusion' and (called := use.attribute('calls')) in program.computations:
            parts = [_cut(program, called, place) for place in places]
        elif places == [0] and use.opcode in CUTS:
            parts = [use.arrays[0].size]
        elif places == [0] and use.opcode == 'dynamic-update-slice':
            parts = [0.0]
        else:
            return None
        for part in parts:
            if part is None:
                return None
            total += part
    return total


def _through_bitcasts(name: str, inside: Iterable[Instruction]) -> Iterator[tuple[Instruction, str]]:
    """Yields (use, the name that it uses) of a value. Uses of its bitcasts count; a bitcast that is a result
    is a use."""
    for use in inside:
        if name in use.operands:
            if use.opcode == 'bitcast' and not use.is_root:
                yield from _through_bitcasts(use.name, inside)
            else:
                yield use, name


def _written(fusion: Instruction, program: HloProgram) -> float:
    """Returns the bytes of a fusion's results; for an operand updated in place, the bytes of the updates."""
    computation = fusion.attribute('calls')
    root = _root(program, computation)
    results = root.operands if root.opcode == 'tuple' else [root.name]
    total = 0.0
    for array, name in zip(fusion.arrays, results, strict=False):
        updates, _ = _updates(program, computation, name) or (0.0, 0)
        total += min(array.hbm, updates) if updates else array.hbm
    return total


def _updates(program: HloProgram, computation: str, name: str) -> tuple[float, int] | None:
    """Returns (bytes, number) if value `name` is parameter `number` with updates of so many bytes; None: it is not."""
    inside = program.by_name[computation]
    value = inside[name]
    if value.opcode == 'parameter':
        return 0.0, int(value.arguments)
    if value.opcode in ('bitcast', 'copy'):
        return _updates(program, computation, value.operands[0])
    if value.opcode == 'dynamic-update-slice':
        size, whole = inside[value.operands[1]].arrays[0].size, value.operands[0]
    elif value.opcode == 'fusion' and (called := value.attribute('calls')) in program.computations:
        found = _updates(program, called, _root(program, called).name)
        if found is None:
            return None
        size, whole = found[0], value.operands[found[1]]
    else:
        return None
    below = _updates(program, computation, whole)
    return below and (below[0] + size, below[1])


def _root(program: HloProgram, computation: str) -> Instruction:
    return next(i for i in program.computations[computation] if i.is_root)
