"""A job: the address of its processes, and how they meet."""

import contextlib
import dataclasses
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax

from lm.compilation.memory import keep_freed_memory
from lm.errors import ConfigError
from lm.output import leave_out_lines
from lm.pod.mesh import MeshConfig
from lm.signals import end_process

TPU_VARIABLES = ('TPU_WORKER_ID', 'TPU_WORKER_HOSTNAMES')
"""Set on every worker of a slice."""


@dataclasses.dataclass(frozen=True)
class JobAddress:
    """The 'host:port' at which process 0 of a job listens, and the number of this process, from 0."""

    coordinator: str | None = None
    process_count: int | None = None
    process_id: int | None = None


def initialize_distributed(config: MeshConfig, job: JobAddress, *, meets: bool = True) -> None:
    """Joins the processes of the job. On Cloud TPU everything is detected; elsewhere the whole address is needed.

    With `meets`, the processes then exchange their devices, within `mesh.join_seconds`; otherwise call `meet` later.

    Raises ConfigError if the number of processes is not `mesh.processes`: a worker that trains alone is the commonest
    way to lose a day on a pod.
    """
    keep_freed_memory()
    # JAX's handler of SIGTERM only notes the signal, while this process may wait for others that are gone.
    # `lm.pod.preemption` has it installed once all processes have met.
    jax.config.update('jax_enable_preemption_service', False)
    given = job.coordinator, job.process_count, job.process_id
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise ConfigError('--coordinator_address, --process_count and --process_id: give all three or none')
        if _platforms() == 'cpu':
            jax.config.update('jax_cpu_collectives_implementation', 'gloo')
            leave_out_lines(b'[Gloo] ')  # one line per connection
    if job.coordinator is not None or _on_cloud_tpu():
        with _all_within(config.join_seconds):
            # `lm.pod.heartbeat` and `_all_within` act before JAX does, which aborts.
            jax.distributed.initialize(
                job.coordinator,
                job.process_count,
                job.process_id,
                heartbeat_timeout_seconds=int(config.heartbeat_seconds) + 30,
                initialization_timeout=int(config.join_seconds) + 30,
            )
    _, count = joined()
    if config.processes is not None and count != config.processes:
        raise ConfigError(
            f'mesh.processes = {config.processes}: but {count} process(es) joined; '
            'start the same command on every worker of the pod, or correct the number'
        )
    if meets:
        meet(config)


def _platforms() -> str | None:
    """Returns the platforms that JAX may use by its settings, which type checkers do not know."""
    return jax.config.values['jax_platforms']


def joined() -> tuple[int, int]:
    """Returns (index of this process, number of processes), also before they have met."""
    from jax._src.distributed import global_state

    return (0, 1) if global_state.client is None else (global_state.process_id, global_state.num_processes)


def meet(config: MeshConfig) -> None:
    """Asks for the devices for the first time; with several processes, this waits for all answers."""
    if joined()[1] > 1:
        with _all_within(config.join_seconds):
            jax.process_count()


@contextlib.contextmanager
def _all_within(seconds: float) -> Iterator[None]:
    """Ends the process with 42 unless the others let it leave this block within so many seconds."""
    message = (
        f'lm: the other processes have not joined within {seconds:g} s (mesh.join_seconds): '
        'run the same command again on all of them'
    )
    timer = threading.Timer(seconds, end_process, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _on_cloud_tpu() -> bool:
    """Tells whether jax.distributed would detect the workers of a TPU by itself.

    JAX has no public function for this. If the private one has changed, the variables decide that Cloud TPU documents
    for the workers of a slice.
    """
    if (_platforms() or 'tpu').split(',')[0] not in ('tpu', ''):
        return False
    clusters = list(_tpu_clusters())
    if clusters:
        return any(cluster.is_env_present() for cluster in clusters)
    return all(os.environ.get(name) for name in TPU_VARIABLES)


def _tpu_clusters() -> Iterator[Any]:
    """Yields the classes in JAX that detect the workers of a slice, as far as they exist."""
    try:
        module = importlib.import_module('jax._src.clusters.cloud_tpu_cluster')
    except ImportError:
        return
    for name in ('GceTpuCluster', 'GkeTpuCluster'):
        cluster = getattr(module, name, None)
        if hasattr(cluster, 'is_env_present'):
            yield cluster
