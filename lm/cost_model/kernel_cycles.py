"""The time of the kernels of a compiled program: cycles of their schedules times steps of their grids."""

import collections
import math
import re

from lm.cost_model import lone_kernels
from lm.cost_model.program import HloProgram, Instruction
from lm.cost_model.schedules import ALL_PAIRS, causal_share, read_grid
from lm.hardware import Topology


class KernelCycles:
    """The cycles of the hand-written kernels of one program; a kernel counts if it can be compiled alone."""

    def __init__(self, program: HloProgram, topology: Topology):
        """Compiles each kernel that is new to this process, in another process; takes seconds per kernel."""
        chip = topology.chip
        steps, taken = {}, {}
        for computation in program.times:
            for i in program.computations[computation]:
                if not i.is_kernel:
                    continue
                # The program may contain equal kernels under different names.
                lone = lone_kernels.take_out(i, program.by_name[computation])
                runs = grid_steps(i, chip.cores // chip.devices)
                if lone is not None and runs is not None:
                    taken[i.name], steps[i.name] = lone, runs
        cycles = lone_kernels.cycles(taken.values(), chip.name)
        self._cycles = {name: cycles[lone] * steps[name] for name, lone in taken.items() if lone in cycles}

    def of(self, kernel: Instruction) -> float | None:
        """Returns the cycles of one run of a kernel on a device; None: not known."""
        return self._cycles.get(kernel.name)


def grid_steps(kernel: Instruction, cores: int = 1) -> float | None:
    """Returns the working steps of a kernel's grid, per core of a device with so many cores; None: the grid cannot be
    read."""
    body = re.search(r'"body":"([^"]+)"', kernel.attributes)
    grid = read_grid(body[1]) if body else None
    if grid is None:
        return None
    steps = float(grid.steps_of_a_core(cores))
    if any(name in kernel.name for name in ALL_PAIRS):
        heads, length, _ = kernel.arrays[-1].shape[-3:]
        pairs = [length // block[-2] for block in grid.blocks[:2]]
        # The grid has an axis for query heads too. Gradients of keys have as many heads, or fewer that queries share.
        # The grid of a sliding window is already narrowed to the pairs that count.
        others = collections.Counter(grid.steps) - collections.Counter(pairs)
        query_heads = math.prod(others.elements())
        if math.prod(grid.steps) == math.prod(pairs) * query_heads and query_heads % heads == 0:
            steps *= causal_share(*pairs)
    return steps
