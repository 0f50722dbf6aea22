"""Devices: how many processes there are, the mesh that they form, and where each array lies on it.

Axes: `data` replicates the parameters, `fsdp` shards them and the optimizer state; the batch is split over both. Where
there is an axis `sequence`, each window is split over it.
"""

import contextlib
import dataclasses
import importlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError, end_process
from lm.hardware import Device, Target, group_by_slice
from lm.ops.platform import DATA_AXES, SEQUENCE_AXIS, SHARED_AXIS, data_shards
from lm.output import leave_out_lines
from lm.parameters import shared_axis
from lm.text import format_count

TPU_VARIABLES = ('TPU_WORKER_ID', 'TPU_WORKER_HOSTNAMES')
"""Set on every worker of a slice."""
MIN_SHARDED_SIZE = 2**14
"""Arrays with fewer elements are replicated: their all-gather would cost more latency than their memory is worth."""


@configurable('mesh', resume=True)
class MeshConfig(Configurable):
    """The use of the devices."""

    fsdp: int = field(default=1, minimum=1, help='devices that share one copy of parameters and optimizer state')
    sequence: int = field(default=1, minimum=1, help='devices that share a window: each has a part of its tokens')
    processes: int | None = field(default=None, minimum=1, help='refuse to start with any other number of processes')
    slices: int | None = field(
        default=None,
        minimum=1,
        help='refuse to start on any other number of slices; CPU devices, which are of none, form so many',
    )
    heartbeat_seconds: float = field(
        default=60.0, above=0, maximum=86_400, help='a process that is silent for so long ends the job with 42'
    )
    join_seconds: float = field(
        default=300.0,
        above=0,
        maximum=86_400,
        help='what a process waits for the others when the job starts, before it ends with 42',
    )

    def plan(self, target: Target) -> 'MeshShape':
        """Plans the mesh for devices that need not exist here. Unknown properties of devices are not checked.

        Raises ConfigError if the devices do not form groups of `fsdp` times `sequence`, each within a slice, or if
        their number of slices is not `slices`.
        """
        if target.slices is None or target.devices is None:
            return MeshShape(None, self.fsdp, self.sequence, self.slices or 1)
        if target.devices % self.fsdp:
            raise ConfigError(f'mesh.fsdp = {self.fsdp}: must divide the number of devices, {target.devices}')
        groups = target.devices // self.fsdp
        if groups % self.sequence:
            raise ConfigError(f'mesh.sequence = {self.sequence}: must divide the {groups} groups of mesh.fsdp devices')
        count, near = self.count_slices(target)
        if near % (self.fsdp * self.sequence):
            settings = f'mesh.fsdp = {self.fsdp}' + (f', mesh.sequence = {self.sequence}' if self.sequence > 1 else '')
            raise ConfigError(f'{settings}: must divide the {near} devices of each of {count} slices')
        return MeshShape(groups // self.sequence, self.fsdp, self.sequence, count)

    def count_slices(self, target: Target) -> tuple[int, int]:
        """Returns (slices, devices per slice) of a target with known devices."""
        assert target.slices is not None, target
        total, count = sum(target.slices), self.slices or len(target.slices)
        if target.platform == 'cpu' and total % count == 0:
            # In a rehearsal, neighbouring processes or simulated devices form a slice.
            return count, total // count
        if count != len(target.slices) or len(set(target.slices)) > 1:
            sizes = ' and '.join(map(str, target.slices))
            raise ConfigError(
                f'mesh.slices = {count}: but JAX sees {format_count(len(target.slices), "slice")}, of {sizes} devices; '
                'start the same command on every worker of all slices, or correct the number'
            )
        return count, target.slices[0]

    def fit(self, target: Target) -> 'MeshConfig':
        """Adapts the mesh of a training to other devices, for readers of its weights: as many devices as possible share
        parameters, or a window."""
        _, near = self.count_slices(target)
        fsdp = math.gcd(self.fsdp, near)
        return dataclasses.replace(self, fsdp=fsdp, sequence=math.gcd(self.sequence, near // fsdp))


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The sizes of the axes of a mesh.

    Attributes:
        data: None if the number of devices is not known.
        slices: the number of slices over which the devices are spread.
    """

    data: int | None
    fsdp: int
    sequence: int
    slices: int

    @property
    def shards(self) -> int | None:
        """The number of parts into which a batch is split; None if it is not known."""
        return None if self.data is None else self.data * self.fsdp

    def arrange(self, devices: Sequence[Device]) -> Mesh:
        """Returns the mesh (data, fsdp) over the planned devices, with a third axis if windows are shared.

        Devices that share parameters or a window belong to one slice: the traffic of each layer does not cross the
        network between slices.
        """
        slices = group_by_slice(devices)
        if devices[0].platform == 'cpu':
            slices = [list(members) for members in np.split(np.asarray(devices), self.slices)]
        together = self.fsdp * self.sequence
        shape = (len(slices[0]) // together, self.fsdp, *([self.sequence] if self.sequence > 1 else []))
        if together == 1:
            grids = [np.asarray(members).reshape(shape) for members in slices]
        else:
            from jax.experimental import mesh_utils

            # A pod's torus rarely has an axis of exactly fsdp chips.
            options = {'allow_split_physical_axes': True}
            grids = [mesh_utils.create_device_mesh(shape, members, **options) for members in slices]
        return Mesh(np.concatenate(grids), (*DATA_AXES, SEQUENCE_AXIS)[: len(shape)])


@dataclasses.dataclass(frozen=True)
class JobAddress:
    """The address at which the processes of a job meet, and the number of this process.

    Attributes:
        coordinator: 'host:port' at which process 0 listens.
        process_count: the number of processes of the job.
        process_id: the number of this process, from 0.
    """

    coordinator: str | None = None
    process_count: int | None = None
    process_id: int | None = None


def initialize_distributed(config: MeshConfig, job: JobAddress, *, meets: bool = True) -> None:
    """Joins the processes of the job. On Cloud TPU everything is detected; elsewhere the whole address is needed.

    With `meets`, the processes then exchange their devices, within `mesh.join_seconds`; otherwise call `meet` later.

    Raises ConfigError if the number of processes is not `mesh.processes`: a worker that trains alone is the commonest
    way to lose a day on a pod.
    """
    # JAX's handler of SIGTERM only notes the signal, while this process may wait for others that are gone.
    # `lm.training.preemption` has it installed once all processes have met.
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
            # `lm.training.heartbeat` and `_all_within` act before JAX does, which aborts.
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


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Returns the mesh over all devices; see `MeshConfig.plan` for errors and `MeshShape.arrange`."""
    devices = jax.devices() if devices is None else devices
    return config.plan(Target.of_devices(devices)).arrange(devices)


def group_devices(mesh: Mesh) -> list[list[Device]]:
    """Returns the devices at each position of the axis `data`: a group has one copy of the parameters."""
    return [list(devices.ravel()) for devices in np.moveaxis(mesh.devices, mesh.axis_names.index(DATA_AXES[0]), 0)]


def describe_mesh(mesh: Mesh, slices: int, compute_dtype: DTypeLike) -> str:
    """Describes the devices of a mesh and their use."""
    axes = ', '.join(f'{name} {size}' for name, size in mesh.shape.items())
    return (
        f'{mesh.size} × {jax.devices()[0].device_kind} ({axes}), {f"{slices} slices, " if slices > 1 else ""}'
        f'{format_count(jax.process_count(), "process", "processes")}, {np.dtype(compute_dtype).name} compute'
    )


def round_up_rows(rows: int, mesh: Mesh) -> int:
    """Returns the least number of rows, at least `rows`, that the devices can share equally."""
    return math.ceil(rows / data_shards(mesh)) * data_shards(mesh)


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Returns the sharding that splits array axis `axis` over all devices."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place(abstract: Any, mesh: Mesh, declared: dict) -> Any:
    """Returns the abstract arrays of a training state with their shardings.

    The axis `fsdp` shards all but small arrays (`lm.parameters.shared_axis`).

    Args:
        abstract: the state, or a part of it.
        declared: the declaration of each parameter (`lm.parameters.declarations`); optimizer state is sharded like its
            parameter.
    """
    size = mesh.shape[SHARED_AXIS]
    axes_of = {path: declaration.axes for path, declaration in jax.tree_util.tree_leaves_with_path(declared)}

    def with_sharding(path, leaf) -> jax.ShapeDtypeStruct:
        names = next((axes_of[path[i:]] for i in range(len(path)) if path[i:] in axes_of), ())
        axis = shared_axis(leaf.shape, size, names)
        sharding = replicated(mesh)
        if size > 1 and axis is not None and leaf.size >= MIN_SHARDED_SIZE:
            sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, SHARED_AXIS))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, abstract)
