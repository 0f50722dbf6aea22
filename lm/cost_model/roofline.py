"""The least time that a compiled step can take: the slowest of arithmetic, memory and interconnect at their peaks.

The result is a bound and not a prediction: matrix products run at full rate, each operand of an instruction is read
once, and everything overlaps. The bound leaves out the vector units (softmax above all), products too narrow for the
matrix unit, latency, and waits for the input.
"""

import dataclasses
import math

from lm.cost_model.collectives import collectives, transfers
from lm.cost_model.program import HloProgram, Instruction
from lm.cost_model.traffic import hbm_bytes
from lm.hardware import Topology

SPLASH_PRODUCTS = {'splash_mha_fwd': 2, 'splash_mha_dkv': 4, 'splash_mha_dq': 3}
"""Kernel → products of queries × keys × head size in JAX's splash attention, whose kernels do not declare their cost.

The fused backward kernel is called dkv too, and computes one more product.
"""


@dataclasses.dataclass(frozen=True)
class CollectiveTotals:
    """Collectives of one kind in one step, with all their runs."""

    kind: str
    times_per_step: int
    gigabytes_sent_per_device: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The bound of one step; figures are per JAX device (a chip; on v7x one of its two cores).

    Attributes:
        hardware_teraflops: of all matrix products, including recomputation and the masked halves of blocks.
        hbm_gigabytes: moved between HBM and the core.
        collectives: by kind, the kind that sends most first.
        compute_seconds, hbm_seconds, ici_seconds: each alone, at the peak of the data sheet.
        bound_by: 'compute', 'HBM', 'ICI' or 'DCN', the largest of the four.
        notes: the parts that could not be counted.
        dcn_gigabytes: sent to other slices, over the data-centre network.
        dcn_seconds: of these alone; None if the speed of the network is not published.
    """

    hardware_teraflops: float
    hbm_gigabytes: float
    collectives: tuple[CollectiveTotals, ...]
    compute_seconds: float
    hbm_seconds: float
    ici_seconds: float
    bound_by: str
    notes: tuple[str, ...] = ()
    dcn_gigabytes: float = 0.0
    dcn_seconds: float | None = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.hbm_seconds, self.ici_seconds, self.dcn_seconds or 0.0)


def roofline(text: str, topology: Topology, softmax_flops: float = 0.0, least_flops: float = 0.0) -> Roofline:
    """Computes the bound of a compiled program.

    Args:
        text: `Compiled.as_text()`; '' if there is none: then only `least_flops` is known.
        topology: the devices of the program.
        softmax_flops: forward FLOPs per token of one layer of softmax attention, for its undeclared kernels.
        least_flops: FLOPs by the model's formula, per device; they count if the program cannot be counted completely.
    """
    program, chip = HloProgram(text), topology.chip
    flops, moved, unknown = program.flops(), hbm_bytes(program), set()
    for name, (times, kernel) in program.kernels().items():
        product = next((n for start, n in SPLASH_PRODUCTS.items() if name.startswith(start)), None)
        if product is None:
            unknown.add(name.partition('.')[0])
            continue
        flops += times * _splash_flops(kernel, product, softmax_flops)
    loops = len(program.unknown_loops)
    if loops or unknown or not text:
        flops = max(flops, least_flops)
    by_kind: dict[str, CollectiveTotals] = {}
    for c in collectives(program):
        old = by_kind.get(c.kind, CollectiveTotals(c.kind, 0, 0.0))
        by_kind[c.kind] = CollectiveTotals(
            c.kind, old.times_per_step + c.times, old.gigabytes_sent_per_device + c.times * c.sent / 1e9
        )
    sent = sum(e.gigabytes_sent_per_device for e in by_kind.values()) * 1e9
    between = sum(t.times * t.sent for t in transfers(program, topology.slices))
    dcn = 0.0
    if between:
        dcn = between / (chip.dcn_bytes / chip.devices) if chip.dcn_bytes else None
    seconds = {
        'compute': flops / (chip.flops / chip.devices),
        'HBM': moved / (chip.hbm_bytes / chip.devices),
        'ICI': sent / (topology.ici_bytes / chip.devices) if sent else 0.0,
        'DCN': dcn or 0.0,
    }
    notes = []
    if not text:
        notes.append('this jax cannot read what this libtpu compiled: only the arithmetic that the model needs counts')
    if loops:
        notes.append(
            f'the length of {loops} loops is decided at run time: their memory traffic counts one pass, and arithmetic '
            'is what the model needs; the prediction counts one pass of both'
        )
    notes += [f'kernel {name} does not declare its cost: its arithmetic is not counted' for name in sorted(unknown)]
    return Roofline(
        hardware_teraflops=flops / 1e12,
        hbm_gigabytes=moved / 1e9,
        collectives=tuple(sorted(by_kind.values(), key=lambda e: -e.gigabytes_sent_per_device)),
        compute_seconds=seconds['compute'],
        hbm_seconds=seconds['HBM'],
        ici_seconds=seconds['ICI'],
        bound_by=max(seconds, key=seconds.__getitem__),
        notes=tuple(notes),
        dcn_gigabytes=between / 1e9,
        dcn_seconds=dcn,
    )


def _splash_flops(kernel: Instruction, products: int, forward_flops: float) -> float:
    """Returns the FLOPs of one run of a splash kernel; its last result is [heads, tokens, size], per row of a batch."""
    *batch, _, tokens, _ = kernel.arrays[-1].shape
    fused = products == SPLASH_PRODUCTS['splash_mha_dkv'] and len(kernel.arrays) == 5  # has partial gradients of q
    return (products + fused) / 2 * forward_flops * math.prod(batch) * tokens
