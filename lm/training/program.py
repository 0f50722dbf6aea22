"""The training step as a program: `lm check` and `lm bench step` compile the same step as `lm train`."""

import dataclasses
import math
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.compilation.compiler import CompiledProgram, compile_with_text
from lm.errors import ConfigError
from lm.hardware import Topology
from lm.ops.platform import target_platform
from lm.pod.mesh import batch_sharding, place, replicated
from lm.training.step import Batch, Fixed, State, TrainStep

CALLED_ONCE = {'xla_backend_optimization_level': 1}
"""For a program on CPUs that is called once: LLVM takes half as long, and random draws have the same bits."""


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The program of a training step, for any devices.

    Attributes:
        batch_shape: of the tokens of a step: microbatches, windows of a microbatch, context_length + 1.
        batch_dtype: of the tokens.
    """

    step: TrainStep
    batch_shape: tuple[int, int, int]
    batch_dtype: np.dtype

    def place_state(self, mesh: Mesh) -> State:
        """Returns the training state as jax.ShapeDtypeStructs with the sharding of each array."""
        return place(self.step.abstract, mesh, self.step.functions.declared)

    def place_batch(self, mesh: Mesh) -> Batch:
        """Returns the batch of a step as `place_state` returns the state."""
        sharding = batch_sharding(mesh, axis=1)
        tokens = jax.ShapeDtypeStruct(self.batch_shape, self.batch_dtype, sharding=sharding)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self.complete, tokens),
        )

    def complete(self, tokens_AxBxL: jax.Array) -> Batch:
        """Returns a batch of these tokens for which every prediction of the teacher is as probable as the others, where
        only the work of a step counts."""
        if self.step.teaching is None or not self.step.teaching.objective.is_cached:
            return tokens_AxBxL
        return {'tokens': tokens_AxBxL, **self.step.teaching.objective.make_taught(tokens_AxBxL[..., 1:])}

    def place_fixed(self, mesh: Mesh) -> Fixed | None:
        """Returns the fixed arrays of the step as `place_state` returns the state; None if there are none."""
        models = self.step.find_fixed()
        return {name: place(self.step.fixed[name], mesh, one.declared) for name, one in models.items()} or None

    def draw_fixed(self, mesh: Mesh, seed: int) -> Fixed | None:
        """Makes untrained weights in place of the fixed ones, where only the work of a step counts; None: there are
        none."""
        abstract, models = self.place_fixed(mesh), self.step.find_fixed()
        if abstract is None:
            return None

        def draw() -> Fixed:
            weights = {name: one.init(seed) for name, one in models.items()}
            return self.step.cast_fixed(lambda cast, one: cast(one), weights)

        return jax.jit(draw, out_shardings=get_shardings(abstract))()

    def init_state(self, abstract: State, seed: int) -> State:
        """Makes the state before the first step, with the shardings in `abstract` (from `place_state`)."""
        options = CALLED_ONCE if target_platform() == 'cpu' else None
        return jax.jit(lambda: self.step.init(seed), out_shardings=get_shardings(abstract), compiler_options=options)()


def get_shardings(abstract: object) -> Any:
    """Returns the sharding of each array, in the structure of `abstract`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def lower_step(program: StepProgram, mesh: Mesh) -> jax.stages.Lowered:
    """Traces the step, whose state and batch are split over all devices. Compile the result under the mesh.

    The step donates its state: the old state is gone after the call. The fixed arrays stay.
    """
    abstract, fixed = program.place_state(mesh), program.place_fixed(mesh)
    batch = program.place_batch(mesh)
    results = get_shardings(abstract), replicated(mesh)
    with jax.set_mesh(mesh):
        jitted = jax.jit(program.step.train, donate_argnums=0, out_shardings=results)
        return jitted.lower(abstract, batch) if fixed is None else jitted.lower(abstract, batch, fixed)


def compile_in_background(
    program: StepProgram, mesh: Mesh
) -> tuple[Future[jax.stages.Lowered], Future[jax.stages.Compiled]]:
    """Traces and compiles the step (see `lower_step`) in a thread, while this one does something else.

    Returns:
        (the traced step, the compiled one). The latter raises the errors of the former, and ConfigError if the step
        does not fit the memory of the devices: no repetition mends that.
    """

    def compile_lowered() -> jax.stages.Compiled:
        lowered = tracing.result()
        with jax.set_mesh(mesh):
            try:
                return lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if (needed := find_memory_needed(str(error))) is None:
                    raise
                raise ConfigError(
                    f'the training step needs {needed:.2f} GiB of HBM, more than a {jax.devices()[0].device_kind} has: '
                    'add what lm check --topology SLICE says for the same configuration (train.microbatches, '
                    'model.remat, mesh.fsdp), or take a larger slice'
                ) from error

    pool = ThreadPoolExecutor(1, thread_name_prefix='compile')
    tracing = pool.submit(lower_step, program, mesh)
    compiling = pool.submit(compile_lowered)
    pool.shutdown(wait=False)
    return tracing, compiling


class StepTooLarge(ConfigError):
    """A compiler refuses a step, which needs so many GiB of memory: more than a device has."""

    def __init__(self, needed_gib: float):
        super().__init__(f'the training step needs {needed_gib:.2f} GiB of HBM, more than a device has')
        self.needed_gib = needed_gib


def compile_described(
    program: StepProgram,
    mesh: Mesh,
    topology: Topology,
    lower: Callable[[StepProgram, Mesh], jax.stages.Lowered] | None = None,
) -> CompiledProgram:
    """Compiles the step, or what else `lower` traces, for the described devices of `topology`.

    Raises:
        StepTooLarge: it needs more memory than a device has.
        ConfigError: the compiler refuses it for another reason.
    """
    try:
        with jax.set_mesh(mesh):
            return compile_with_text((lower or lower_step)(program, mesh))
    except jax.errors.JaxRuntimeError as error:
        if (needed := find_memory_needed(str(error))) is not None:
            raise StepTooLarge(needed) from error
        line = next(iter(str(error).splitlines()), '')
        raise ConfigError(f'--topology {topology.name}: the compiler refuses the training step: {line}') from error


def find_memory_needed(message: str) -> float | None:
    """Returns the GiB of HBM that a program needs, from the compiler's refusal; None: it was refused for another
    reason."""
    if 'RESOURCE_EXHAUSTED' not in message or 'hbm' not in message.lower():
        return None
    found = re.search(r'\(([\d.]+)([KMGT]?)\) exceeds|Used ([\d.]+)([KMGT]?) of', message)
    if not found:
        return math.inf
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return float(number) * 1024.0 ** ('KMGT'.index(unit) - 2 if unit else -3)
