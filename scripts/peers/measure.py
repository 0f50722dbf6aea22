"""Figures of one compiled call, forward and backward, per token and head."""

import base64
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from lm.compilation.compiler import compile_with_text
from lm.cost_model.kernel_cycles import KernelCycles
from lm.cost_model.program import HloProgram, Instruction
from lm.cost_model.step_time import costs
from lm.hardware import describe_devices, generation, smallest

LOOPS = re.compile(rb'\0(?:for|while)\0')
"""The names of loops in the program of a kernel, as its bytecode writes them."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """The costs of one call on one core; cycles per token and head.

    Attributes:
        kernels: static cycles inside hand-written kernels, without waits for memory.
        model: outside of them: the larger of bytes ÷ bandwidth and products ÷ peak, per instruction.
        estimate: outside of them, XLA's estimate where it is more than the model.
        temporaries_mib: HBM beside arguments and results.
        hbm_bytes: read and written per token and head, by kernels and around them.
        uncounted: kernels whose schedule cannot be read.
        looping: kernels with loops inside: their cycles count each loop once and are too few.
    """

    kernels: float
    model: float
    estimate: float
    temporaries_mib: float
    hbm_bytes: float
    uncounted: tuple[str, ...] = ()
    looping: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Kernels and what is around them, at XLA's estimate."""
        return self.kernels + self.estimate


def measure(compute: Callable[..., jax.Array], inputs: tuple[Any, ...], name: str, forward: bool = False) -> Figures:
    """Compiles a call for one core of a generation such as 'v5e', and reads its costs.

    Args:
        compute: arrays → outputs [1, L, H, D].
        inputs: the abstract arrays, the first of them [1, L, H, D].
        name: of the generation.
        forward: without the backward pass.
    """
    topology = smallest(generation(name))
    devices = describe_devices(topology)[:1]

    def step(inputs, gradient):
        if forward:
            return compute(*inputs)
        o, pull = jax.vjp(compute, *inputs)
        return o, pull(gradient)

    with pretend(devices), jax.set_mesh(Mesh(np.array(devices), ('data',))):
        found = compile_with_text(jax.jit(step).lower(inputs, jax.eval_shape(compute, *inputs)))
    program, chip = HloProgram(found.text), topology.chip
    all_costs = list(costs(program, topology, KernelCycles(program, topology)))
    kernels = [cost for cost in all_costs if cost.is_kernel]
    others = [cost for cost in all_costs if not cost.is_kernel]
    instructions = [i for body in program.computations.values() for i in body if i.is_kernel]
    _, length, heads, _ = inputs[0].shape

    def per_head(seconds: float) -> float:
        return round(seconds * chip.clock / (length * heads), 3)

    return Figures(
        kernels=per_head(sum(cost.kernel or 0.0 for cost in kernels)),
        model=per_head(sum(cost.seconds for cost in others)),
        estimate=per_head(sum(cost.upper_seconds for cost in others)),
        temporaries_mib=round(found.memory.temporaries / 2**20, 1) if found.memory else 0.0,
        hbm_bytes=round(sum(cost.bytes for cost in all_costs) / (length * heads), 1),
        uncounted=tuple(sorted({cost.name for cost in kernels if cost.kernel is None})),
        looping=tuple(sorted({i.name for i in instructions if has_loops(i)})),
    )


@contextlib.contextmanager
def pretend(devices: Sequence[Any]) -> Iterator[None]:
    """Answers a package that asks JAX where it runs as a machine with these devices would."""
    platform = mock.patch('jax.default_backend', return_value='tpu')
    with platform, mock.patch('jax.devices', return_value=list(devices)):
        yield


def has_loops(kernel: Instruction) -> bool:
    """Returns whether the program of a kernel has loops that its bundles show once."""
    body = re.search(r'"body":"([^"]+)"', kernel.attributes)
    return bool(body and LOOPS.search(base64.b64decode(body[1])))
