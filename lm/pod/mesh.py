"""The mesh that the devices form, and where each array lies on it.

Axes: `data` replicates the parameters, `fsdp` shards them and the optimizer state; the batch is split over both. Where
there is an axis `sequence`, each window is split over it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.hardware import Device, Target, group_by_slice
from lm.ops.platform import DATA_AXES, SEQUENCE_AXIS, SHARED_AXIS, data_shards
from lm.parameters import shared_axis
from lm.text import format_count

MIN_SHARDED_SIZE = 2**14
"""Arrays with fewer elements are replicated: their all-gather would cost more latency than their memory is worth."""


@configurable('mesh', resume=True)
class MeshConfig(Configurable):
    """The use of the devices."""

    fsdp: int = field(default=1, minimum=1, help='devices that share one copy of parameters and optimizer state')
    sequence: int = field(default=1, minimum=1, help='devices that share a window: each has a part of its tokens')
    processes: int | None = field(
        default=None, minimum=1, inherit=False, help='refuse to start with any other number of processes'
    )
    slices: int | None = field(
        default=None,
        minimum=1,
        inherit=False,
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
        """Adapts a training's mesh to the devices of a reader: as many as possible share parameters, or a window."""
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
