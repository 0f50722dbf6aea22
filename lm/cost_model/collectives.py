"""The communication between the devices of a compiled program, with loops counted (`lm.cost_model.program`)."""

import dataclasses
import math
import re

from lm.cost_model.program import HloProgram, Instruction

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication between the chips, or between slices, with its number of runs.

    Attributes:
        name: of its first instruction.
        computation: the computation of that instruction.
        kind: one of `COLLECTIVES`; between slices the compiler's word, such as 'ALL_REDUCE'.
        devices: the number of participants; between slices the number of slices.
        times: runs per step.
        bytes: of the whole array (the input of a reduction, the output of a gather) on one device, per run; between
            slices, of the part of an array that a device has reduced.
        sent: bytes that each device must send per run, by the bandwidth-optimal algorithm.
        shapes: of the result arrays.
    """

    name: str
    computation: str
    kind: str
    devices: int
    times: int
    bytes: float
    sent: float
    shapes: tuple[tuple[int, ...], ...]


def async_fusion(program: HloProgram, instruction: Instruction) -> tuple[str | None, bool]:
    """Returns the name of the collective that a fusion begins or ends, and whether it ends it; None: it has none.

    The TPU compiler spreads a collective over several fusions, and products run between the first and the last.
    """
    inside = [inner for inner, _ in program.within(instruction)]
    targets = {t[1] for i in inside if (t := re.search(r'custom_call_target="AsyncCollective(\w+)"', i.attributes))}
    chain = next((c for c in map(_chain, inside) if c), None)
    return chain if targets else None, 'Done' in targets


def collectives(program: HloProgram) -> list[Collective]:
    """Lists all collectives of one run of the program; the parts of a chain count as one collective."""
    result, seen = [], set()
    for computation, times in program.times.items():
        for outer, instruction, owner in program.sequence(computation):
            kind = instruction.opcode.removesuffix('-start')
            if kind not in COLLECTIVES:
                continue
            # Collectives of one shard_map share a channel. Only the number of a chain identifies its parts.
            key = (computation, kind, _chain(instruction) or instruction.name)
            if key in seen:
                continue
            seen.add(key)
            n, arrays = group_size(instruction.attributes), instruction.arrays
            if instruction.opcode.endswith('-start') and kind != 'all-reduce':
                arrays = [a for a in arrays if a.shape or a.dtype != 'u32']  # a permute has context values, too
                arrays = arrays[len(arrays) // 2 :]  # the results follow the operands
            size = sum(a.size for a in arrays) * (n if kind == 'reduce-scatter' else 1)
            if kind == 'all-reduce' and owner.startswith('all-reduce-scatter'):
                kind = 'reduce-scatter'  # the TPU compiler writes it as a fusion that keeps a slice
            share = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1.0}.get(kind, (n - 1) / n)
            shapes = tuple(tuple(a.shape) for a in arrays)
            result.append(Collective(outer.name, computation, kind, n, times, size, share * size, shapes))
    return result


def transfers(program: HloProgram, slices: int) -> list[Collective]:
    """Lists all transfers from a device to other slices in one run of the program."""
    shares = {'ALL_REDUCE': 2 * (slices - 1) / slices, 'REDUCE_SCATTER': (slices - 1) / slices}
    shares['ALL_GATHER'] = slices - 1
    result = []
    for computation, times in program.times.items():
        for i in program.computations[computation]:
            found = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
            if found and i.opcode == 'send':
                kind, size, shape = found[1], i.arrays[0].size, tuple(i.arrays[0].shape)
                sent = shares.get(kind, 1.0) * size
                result.append(Collective(i.name, computation, kind, slices, times, size, sent, (shape,)))
    return result


def _chain(collective: Instruction) -> str | None:
    """Returns the number that the parts of a collective share, if the compiler has cut it."""
    chain = re.search(r'chain_id="(\d+)"', collective.attributes)
    return chain and chain[1]


def group_size(attributes: str) -> int:
    """Returns the number of devices in a replica group, written in any of three notations."""
    if found := re.search(r'replica_groups=\{\{([\d,]*)\}', attributes):
        return len(found[1].split(','))
    if found := re.search(r'replica_groups=\[\d+,(\d+)\]<=', attributes):
        return int(found[1])
    if found := re.search(r'replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}', attributes):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    return 1 if 'source_target_pairs' not in attributes else 2


def rendezvous(instruction: Instruction) -> str | None:
    """Returns the name that a `send` shares with the `recv` of its result."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
    return found and found[1]
