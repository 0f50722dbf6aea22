"""How long a compiled step takes, part by part: a model of one core, not a measurement.

An instruction takes its bytes ÷ HBM bandwidth, or its products ÷ the rate of the matrix units, whichever is longer. A
kernel takes the cycles of its static schedule, where they are known and more. One instruction follows another. A copy
to on-chip memory counts with the instruction that reads it. A collective beside other work costs only the time that the
work does not hide. The same holds for transfers to other slices, where the speed of that network is known.

The model leaves out vector units outside of kernels, products narrower than the matrix unit, latency and waits. XLA's
own estimate of an instruction has the first two. The larger of both, summed, is an upper figure beside the prediction.

Scopes (`jax.named_scope`) that the model puts around its parts tell the parts apart.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

from lm.cost_model.collectives import COLLECTIVES, async_fusion, collectives, rendezvous, transfers
from lm.cost_model.kernel_cycles import KernelCycles
from lm.cost_model.program import HloProgram, Instruction
from lm.cost_model.traffic import traffic
from lm.hardware import Topology

PARTS = {
    'attention': 'attention core',
    'sketches': 'sketch networks',
    'rotary': 'rotary',
    'qkv': 'qkv, output',
    'attention_out': 'qkv, output',
    'glu': 'FFN',
    'qk_norms': 'norms',
    'norms': 'norms',
    'layout': 'layouts, layer scan',
    'cross_entropy': 'cross-entropy',
    'embedding': 'embedding',
    'optimizer': 'optimizer',
    'collectives': 'collectives',
    'other': 'other',
}
"""Scope → part of a step, in the order of a table. Other code recognizes the last four parts, and layouts."""

MOVES = {
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'copy', 'copy-start', 'copy-done', 'transpose',
    'reshape', 'slice', 'slice-start', 'slice-done', 'dynamic-slice', 'dynamic-update-slice', 'concatenate', 'pad',
    'broadcast', 'call-update', 'reverse', 'convert', 'bitcast-convert', 'reduce-precision', 'fusion', 'iota',
    'opt-barrier',
}  # fmt: skip
"""Opcodes of fusions that compute no number."""
ON_CHIP = re.compile(r'S\([1-9]')


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one instruction, with all its runs in a step.

    Attributes:
        part: a value of `PARTS`.
        recomputed: whether it belongs to a forward pass that the backward pass repeats.
        seconds: the largest of its limits; for a collective, the time that other work does not hide.
        upper_seconds: the same, or XLA's estimate where that is more; a kernel has no estimate.
        bytes: of HBM.
        flops: of matrix products.
        is_kernel: whether it is written by hand.
        kernel: seconds of its static schedule; None: no kernel, or not known.
    """

    name: str
    part: str
    recomputed: bool
    times: int
    seconds: float
    upper_seconds: float
    bytes: float
    flops: float
    is_kernel: bool
    kernel: float | None


@dataclasses.dataclass(frozen=True)
class PartTime:
    """The summed costs of one part on one device. Seconds in HBM, products and kernels each count alone."""

    part: str
    seconds: float
    upper_seconds: float
    recomputed_seconds: float
    hbm_gigabytes: float
    hbm_seconds: float
    product_seconds: float
    kernel_seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The model of one step on one device.

    Attributes:
        parts: the parts that take any time, in the order of `PARTS`.
        unknown_kernels: kernels whose cycles are not known; they count by their traffic and their declared products.
    """

    parts: tuple[PartTime, ...]
    unknown_kernels: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def upper_seconds(self) -> float:
        """The seconds with XLA's estimates of instructions, where these are longer."""
        return sum(part.upper_seconds for part in self.parts)

    @property
    def hbm_gigabytes(self) -> float:
        return sum(part.hbm_gigabytes for part in self.parts)

    @property
    def recomputed_seconds(self) -> float:
        return sum(part.recomputed_seconds for part in self.parts)


def step_time(program: HloProgram, topology: Topology, cycles: KernelCycles | None) -> StepTime:
    """Models one run of `program` on one device of `topology`; `cycles` has the cycles of its kernels."""
    chip, totals, unknown = topology.chip, collections.defaultdict(lambda: [0.0] * 7), set()
    for cost in costs(program, topology, cycles):
        hbm, products = cost.bytes / chip.hbm_bytes * chip.devices, cost.flops / chip.flops * chip.devices
        again = cost.seconds * cost.recomputed
        numbers = (cost.seconds, cost.upper_seconds, again, cost.bytes / 1e9, hbm, products, cost.kernel or 0.0)
        totals[cost.part] = [a + b for a, b in zip(totals[cost.part], numbers, strict=True)]
        if cost.is_kernel and cost.kernel is None:
            unknown.add(cost.name.partition('.')[0])
    parts = [PartTime(part, *totals[part]) for part in dict.fromkeys(PARTS.values()) if any(totals[part])]
    return StepTime(tuple(parts), tuple(sorted(unknown)))


def costs(program: HloProgram, topology: Topology, cycles: KernelCycles | None) -> Iterator[Cost]:
    """Lists every instruction of the program that takes time."""
    for computation, times in program.times.items():
        yield from _Computation(program, topology, cycles, computation, times).costs()


class _Computation:
    """A sequence of instructions that runs `times` per step."""

    def __init__(self, program, topology, cycles, name, times):
        self.program, self.chip, self.cycles, self.times = program, topology.chip, cycles, times
        self.name, self.names = name, program.by_name[name]
        self.link = topology.ici_bytes / topology.chip.devices
        self.slices, self.far_link = topology.slices, topology.chip.dcn_bytes / topology.chip.devices
        self.users = collections.defaultdict(list)
        for i in self.names.values():
            for operand in i.operands:
                self.users[operand].append(i)

    def costs(self) -> Iterator[Cost]:
        moved = collections.defaultdict(float)
        for i in self.names.values():
            if size := traffic(i, self.names, self.program):
                moved[self._payer(i)] += size
        sent = {c.name: c.sent for c in collectives(self.program) if c.computation == self.name}
        far = {t.name: t.sent for t in transfers(self.program, self.slices) if t.computation == self.name}
        clock, link_free, far_free, ends, arrives = 0.0, 0.0, 0.0, {}, {}
        for i in self.names.values():
            if i.opcode in ('while', 'conditional', 'call'):
                continue
            waits, (chain, is_end) = 0.0, async_fusion(self.program, i)
            if i.name in sent:
                took = sent[i.name] / self.link if self.link else 0.0
                link_free = max(clock, link_free) + took
                if i.opcode.endswith('-start'):
                    ends[i.name] = link_free
                elif chain is not None:
                    ends[chain] = link_free
                else:
                    waits = link_free - clock
            elif i.opcode.endswith('-done') and i.operands[0] in ends:
                waits = max(0.0, ends[i.operands[0]] - clock)
            elif chain is not None and is_end:
                waits = max(0.0, ends[chain] - clock)
            elif i.name in far and self.far_link:
                far_free = max(clock, far_free) + far[i.name] / self.far_link
                arrives[rendezvous(i)] = far_free
            elif i.opcode == 'recv-done' and i.operands[0] in self.names:
                waits = max(0.0, arrives.get(rendezvous(self.names[i.operands[0]]), 0.0) - clock)
            cost = self._cost(i, moved.get(i.name, 0.0), waits)
            clock += cost.seconds / self.times
            if cost.upper_seconds:
                yield cost

    def _cost(self, i: Instruction, size: float, waits: float) -> Cost:
        n, program, chip = self.times, self.program, self.chip
        flops = program.flops_of(i, self.name)
        cycles = self.cycles.of(i) if self.cycles and i.is_kernel else None
        kernel = None if cycles is None else cycles / chip.clock
        seconds = max(size / chip.hbm_bytes * chip.devices, flops / chip.flops * chip.devices, kernel or 0.0, waits)
        path = self._path(i)
        return Cost(
            name=i.name,
            part=PARTS[self._scope(i, path, seconds == waits > 0)],
            recomputed='rematted_computation' in path,
            times=n,
            seconds=n * seconds,
            upper_seconds=n * max(seconds, 0.0 if i.is_kernel else i.estimated_cycles / chip.clock),
            bytes=n * size,
            flops=n * flops,
            is_kernel=i.is_kernel,
            kernel=None if kernel is None else n * kernel,
        )

    def _payer(self, i: Instruction) -> str:
        """Returns the instruction that an asynchronous copy serves: the reader on chip, or the writer to HBM."""
        if i.opcode not in ('copy-start', 'slice-start'):
            return i.name
        done = next((use for use in self.users[i.name] if use.opcode.endswith('-done')), None)
        if done is not None and ON_CHIP.search(done.result):
            name, seen = done.name, 0
            while (uses := self.users[name]) and seen < 8:
                if uses[0].opcode not in ('bitcast', 'get-tuple-element') and 'ConcatBitcast' not in uses[0].attributes:
                    return uses[0].name if uses[0].opcode not in ('tuple', 'while') else i.name
                name, seen = uses[0].name, seen + 1
            return i.name
        source = self.names.get(i.operands[0])
        while source is not None and source.opcode in ('bitcast', 'get-tuple-element'):
            source = self.names.get(source.operands[0])
        return i.name if source is None or source.opcode in ('parameter', 'while') else source.name

    def _path(self, i: Instruction) -> str:
        """Returns the scopes of an instruction.

        A fusion has the scopes of its products, else its own scopes, else the scopes of the largest instruction in it
        that has any.
        """
        inside = [inner for inner, _ in self.program.within(i)]
        products = [inner for inner in inside if inner.opcode in ('dot', 'convolution') and scopes(inner.path)]
        own = [i] if scopes(i.path) else []
        telling = products or own or [inner for inner in inside if scopes(inner.path)]
        largest = max(telling, key=lambda inner: sum(a.elements for a in inner.arrays), default=None)
        return i.path if largest is None else largest.path

    def _scope(self, i: Instruction, path: str, is_waiting: bool) -> str:
        inside = [inner for inner, _ in self.program.within(i)]
        # Products in one fusion with a collective hide it, unless it takes longer.
        kinds = {inner.opcode.removesuffix('-start') for inner in inside}
        if is_waiting or (kinds & {*COLLECTIVES, 'send', 'recv'} and not kinds & {'dot', 'convolution'}):
            return 'collectives'
        computing = [inner for inner in inside if sum(a.elements for a in inner.arrays) > 1]
        if all(inner.opcode in MOVES for inner in computing):
            return 'layout'
        if found := scopes(path):
            return found[-1]
        return 'other' if 'jvp' in path else 'optimizer'


def scopes(path: str) -> list[str]:
    """Returns the scopes in an `op_name`, such as 'jit(train)/transpose(jvp(embedding))/mul', outermost first."""
    return [word for word in re.findall(r'\w+', path) if word in PARTS]
