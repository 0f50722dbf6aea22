"""Replay: groups of devices compute the gradients of the same windows, and their bits must agree.

A chip that computes wrongly gives numbers that look like others. One such fault in a hundred makes a number that is
not finite (arXiv 2605.04213), and no check of values sees the rest. Equal programs on equal inputs give equal bits, so
other chips are the reference (`TrainStep.replay`).

A replay sees wrong products and sums in the forward and backward pass of a group, its damaged parameters, and windows
that arrive damaged. It does not see faults between two replays, in the sum over the groups, or in the optimizer. A
single group repeats its own work, and sees only faults that come and go.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.pod.mesh import group_devices, replicated
from lm.pod.votes import Difference, compare_rows
from lm.training.program import StepProgram
from lm.training.step import Fixed, State


class Replay:
    """The replay of one configuration on one mesh; the program is compiled at its first use.

    Args:
        mesh: the devices, with the axes of `lm.pod.mesh`.
        fixed: the arrays that the step never changes; None: there are none.
    """

    def __init__(self, program: StepProgram, mesh: Mesh, fixed: Fixed | None = None):
        self.program, self.mesh, self.fixed = program, mesh, fixed
        self.groups = group_devices(mesh)
        self._jitted = jax.jit(program.step.replay, out_shardings=replicated(mesh))

    def lower(self) -> jax.stages.Lowered:
        """Traces the program for the devices of the mesh, which need not exist here."""
        program = self.program
        batch = program.place_batch(self.mesh)
        turn = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return self._jitted.lower(program.place_state(self.mesh), batch, turn, program.place_fixed(self.mesh))

    def compute(self, state: State, batch: jax.Array, turn: int) -> np.ndarray:
        """Returns the checksums [groups, arrays] of one replay (`TrainStep.replay`)."""
        with jax.set_mesh(self.mesh):
            return np.asarray(jax.device_get(self._jitted(state, batch, np.int32(turn), self.fixed)))

    def check(self, state: State, batch: jax.Array, turn: int) -> Difference | None:
        """Compares the groups; a single group is compared with itself. All processes call it together.

        If they differ, everything is computed twice more. So a fault that came once is told from a fault that stays,
        and the right bits get more votes.
        """
        runs = [self.compute(state, batch, turn) for _ in range(2 if len(self.groups) == 1 else 1)]
        if not compare_rows(np.stack(runs))[2].any():
            return None
        first = len(runs)
        runs += [self.compute(state, batch, turn) for _ in range(2)]
        wrong, is_certain, differs_N = compare_rows(np.stack(runs))
        return Difference(
            what='gradients of the same windows',
            arrays=[name for name, differs in zip(self.names, differs_N, strict=True) if differs],
            groups=[self.groups[group] for group in sorted(wrong)],
            is_certain=is_certain,
            stays=bool(compare_rows(np.stack(runs[first:]))[2].any()),
        )

    @property
    def names(self) -> list[str]:
        """The names of the arrays that are compared."""
        return self.program.step.name_replayed()


def lower_replay(program: StepProgram, mesh: Mesh) -> jax.stages.Lowered:
    """Traces a replay for the devices of a mesh, which need not exist here."""
    return Replay(program, mesh).lower()


def describe_replay(every: int | None, groups: int | None, size: int) -> dict[str, Any]:
    """Describes what replays see, for the plan of a run; {} without replays.

    Args:
        every: `train.replay_every`.
        groups: the groups of devices; None: not known.
        size: the devices of a group.
    """
    if every is None:
        return {}
    if groups == 1:
        return {'replay': f'every {every:,} steps on one group, which sees only faults that come and go'}
    names = 'a chip' if size == 1 else f'a group of {size} chips'
    how = {None: '', 2: ', one of two unless the fault came once'}.get(groups, ' by the others’ votes')
    return {'replay': f'every {every:,} steps, names {names}{how}'}
