"""The training step as a program: what `lm train` runs is what `lm check` and `lm bench step` compile."""

import math
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.compilation.compiler import CompiledProgram, compile_with_text
from lm.errors import ConfigError
from lm.hardware import Topology
from lm.training.config import TrainConfig
from lm.training.mesh import batch_sharding, place, replicated
from lm.training.step import State, TrainStep


def abstract_state(step: TrainStep, mesh: Mesh) -> State:
    """The training state as jax.ShapeDtypeStructs that say where each array lies."""
    return place(step.abstract(), mesh, step.functions.declared)


def shardings_of(abstract: Any) -> Any:
    """Where each array lies, in the structure of `abstract`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(step: TrainStep, abstract: State, seed: int) -> State:
    """The state before the first step, made where it shall lie."""
    return jax.jit(lambda: step.init(seed), out_shardings=shardings_of(abstract))()


def lower_step(
    step: TrainStep, abstract: State, config: TrainConfig, dtype: np.dtype, mesh: Mesh
) -> jax.stages.Lowered:
    """The step for batches of tokens [A, B, L + 1] of `dtype`, split over all devices; compile it under the mesh.

    The state is updated in place: the one that is passed in is gone.
    """
    batch = jax.ShapeDtypeStruct(config.batch_shape, dtype, sharding=batch_sharding(mesh, axis=1))
    results = shardings_of(abstract), replicated(mesh)
    return jax.jit(step.train, donate_argnums=0, out_shardings=results).lower(abstract, batch)


def compile_step_aside(
    step: TrainStep, abstract: State, config: TrainConfig, dtype: np.dtype, mesh: Mesh
) -> tuple[Future[jax.stages.Lowered], Future[jax.stages.Compiled]]:
    """The step (see `lower_step`) traced, and compiled, by a thread while this one does something else.

    The result of the second raises what the first does, and ConfigError where the step does not fit the memory of the
    devices: no repetition mends that.
    """

    def trace() -> jax.stages.Lowered:
        with jax.set_mesh(mesh):
            return lower_step(step, abstract, config, dtype, mesh)

    def work() -> jax.stages.Compiled:
        lowered = tracing.result()
        with jax.set_mesh(mesh):
            try:
                return lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if (needed := out_of_memory(str(error))) is None:
                    raise
                raise ConfigError(
                    f'the training step needs {needed:.2f} GiB of HBM, more than a {jax.devices()[0].device_kind} has: '
                    'add what lm check --topology SLICE says for the same configuration (train.microbatches, '
                    'model.remat, mesh.fsdp), or take a larger slice'
                ) from error

    pool = ThreadPoolExecutor(1, thread_name_prefix='compile')
    tracing, compiling = pool.submit(trace), pool.submit(work)
    pool.shutdown(wait=False)
    return tracing, compiling


def compile_described(
    step: TrainStep, config: TrainConfig, dtype: np.dtype, mesh: Mesh, topology: Topology
) -> CompiledProgram | float:
    """The step (see `lower_step`) compiled for the described devices of `topology`, or the GiB of HBM that it needs
    where one has less.

    Raises:
        ConfigError: the compiler refuses it for another reason.
    """
    try:
        return compile_with_text(lower_step(step, abstract_state(step, mesh), config, dtype, mesh))
    except jax.errors.JaxRuntimeError as error:
        if (needed := out_of_memory(str(error))) is not None:
            return needed
        line = next(iter(str(error).splitlines()), '')
        raise ConfigError(f'--topology {topology.name}: the compiler refuses the training step: {line}') from error


def out_of_memory(message: str) -> float | None:
    """GiB of HBM that a program needs, from the compiler's refusal of it; None: it was refused for another reason."""
    if 'RESOURCE_EXHAUSTED' not in message or 'hbm' not in message.lower():
        return None
    found = re.search(r'\(([\d.]+)([KMGT]?)\) exceeds|Used ([\d.]+)([KMGT]?) of', message)
    if not found:
        return math.inf
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return float(number) * 1024.0 ** ('KMGT'.index(unit) - 2 if unit else -3)
