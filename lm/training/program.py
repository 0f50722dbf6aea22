"""The training step as a program: what `lm train` runs is what `lm check` and `lm bench step` compile."""

import concurrent.futures
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.training.config import TrainConfig
from lm.training.mesh import batch_sharding, place, replicated
from lm.training.step import State, TrainStep


def abstract_state(functions: TrainStep, mesh: Mesh) -> State:
    """The training state as jax.ShapeDtypeStructs that say where each array lies."""
    return place(jax.eval_shape(lambda: functions.init(0)), mesh, functions.declared)


def shardings_of(abstract: Any) -> Any:
    """Where each array lies, in the structure of `abstract`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(functions: TrainStep, abstract: State, seed: int) -> State:
    """The state before the first step, made where it shall lie."""
    return jax.jit(lambda: functions.init(seed), out_shardings=shardings_of(abstract))()


def lower_step(
    functions: TrainStep, abstract: State, config: TrainConfig, dtype: np.dtype, mesh: Mesh
) -> jax.stages.Lowered:
    """The step for batches of tokens [A, B, L + 1] of `dtype`, split over all devices; compile it under the mesh.

    The state is updated in place: the one that is passed in is gone.
    """
    batch = jax.ShapeDtypeStruct(config.batch_shape, dtype, sharding=batch_sharding(mesh, axis=1))
    results = shardings_of(abstract), replicated(mesh)
    return jax.jit(functions.train, donate_argnums=0, out_shardings=results).lower(abstract, batch)


def compile_step_aside(
    functions: TrainStep, abstract: State, config: TrainConfig, dtype: np.dtype, mesh: Mesh
) -> 'concurrent.futures.Future[jax.stages.Compiled]':
    """The compiled step (see `lower_step`), made by a thread while this one does something else."""

    def work() -> jax.stages.Compiled:
        with jax.set_mesh(mesh):
            return lower_step(functions, abstract, config, dtype, mesh).compile()

    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='compile')
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future
