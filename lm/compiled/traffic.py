"""Bytes between HBM and the core of a compiled program: what each instruction must read and write, as often as it runs.

Buffers count as they are laid out, padding of the tiles included; those in on-chip memory cost nothing, nor does a
second read of the same operand by one instruction.
"""

from lm.compiled.program import HloProgram, Instruction

FREE = {
    'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'while', 'conditional', 'call', 'after-all',
    'partition-id', 'replica-id', 'opt-barrier', 'domain',
}  # fmt: skip
"""Instructions that move nothing."""
FREE_TARGETS = ('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'Sharding', 'SPMD')
"""Custom calls that move nothing."""
CUTS = ('dynamic-slice', 'slice', 'gather')

Names = dict[str, Instruction]


def hbm_bytes(program: HloProgram) -> float:
    """Read and written per run of the program on one device."""
    total = 0.0
    for computation, times in program.times.items():
        names = program.by_name[computation]
        total += times * sum(traffic(instruction, names, program) for instruction in names.values())
    return total


def traffic(instruction: Instruction, names: Names, program: HloProgram) -> float:
    """Bytes of one run of `instruction`; `names` are the instructions of its computation."""
    opcode, arrays = instruction.opcode, instruction.arrays
    if opcode in FREE or opcode.endswith(('-done', '-update')):
        return 0.0
    if opcode == 'custom-call' and any(target in instruction.attributes for target in FREE_TARGETS):
        return 0.0
    if opcode == 'slice-start':
        source, target = arrays[0], arrays[1]
        return target.hbm + (target.size if source.hbm else 0.0)
    if opcode.endswith('-start'):
        return sum(a.hbm for a in arrays)  # operands and results
    if opcode == 'fusion' and (called := instruction.attribute('calls')) in program.computations:
        return _read(instruction, names, program.by_name[called]) + _written(instruction, program.by_name[called])
    written = sum(a.hbm for a in arrays)
    read = [names[name].arrays for name in instruction.operands if name in names]
    if opcode in CUTS:
        return written + (arrays[0].size if any(a.hbm for a in read[0]) else 0.0)
    if opcode == 'dynamic-update-slice':
        return 2 * sum(a.size for a in read[1]) if written else 0.0
    return written + sum(a.hbm for arrays in read for a in arrays)


def _read(fusion: Instruction, names: Names, inside: Names) -> float:
    """Operands of a fusion: of one that it slices, the slices; of one that it updates in place, nothing."""
    users: dict[str, list[Instruction]] = {}
    for instruction in inside.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)
    parameters = {int(i.arguments): i.name for i in inside.values() if i.opcode == 'parameter'}
    total = 0.0
    for number, operand in enumerate(fusion.operands):
        size = sum(a.hbm for a in names[operand].arrays) if operand in names else 0.0
        if not size or number not in parameters:
            continue
        uses = _through_bitcasts(parameters[number], users)
        first = [use for use, via in uses if use.operands[0] == via]
        cut = [use for use in first if use.opcode in CUTS]
        kept = [use for use in first if use.opcode == 'dynamic-update-slice']
        if uses and len(cut) + len(kept) == len(uses):
            size = min(size, sum(use.arrays[0].size for use in cut))
        total += size
    return total


def _written(fusion: Instruction, inside: Names) -> float:
    """Results of a fusion; of one that is updated in place, the update."""
    root = next(i for i in inside.values() if i.is_root)
    results = root.operands if root.opcode == 'tuple' else [root.name]
    total = 0.0
    for array, name in zip(fusion.arrays, results, strict=False):
        source, size = inside.get(name), array.hbm
        while source is not None and source.opcode in ('bitcast', 'copy'):
            source = inside.get(source.operands[0])
        if size and source is not None and source.opcode == 'dynamic-update-slice':
            size = min(size, inside[source.operands[1]].arrays[0].size)
        total += size
    return total


def _through_bitcasts(name: str, users: dict[str, list[Instruction]]) -> list[tuple[Instruction, str]]:
    """(use, the name that it uses) of a value, looking through bitcasts."""
    result = []
    for use in users.get(name, ()):
        result += _through_bitcasts(use.name, users) if use.opcode == 'bitcast' else [(use, name)]
    return result
