"""Copies of arrays on several devices: their bits must agree when a checkpoint is written.

Devices that hold one part of a parameter get the same sum of gradients and make the same update. A bit that flips in
one device's memory, in its update, or on its link makes its copy differ, and nothing repairs it. A checkpoint holds one
copy and its checksum, so no checksum can tell.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.checkpoint.checksum import checksum, group_arrays
from lm.checkpoint.snapshot import flatten
from lm.pod.mesh import replicated
from lm.pod.votes import Difference, find_minority
from lm.training.step import State


def compare_copies(state: State) -> Difference | None:
    """Compares the copies of each part of each array, across all hosts. All processes call it together.

    Three copies or more name the device that is wrong, two name both. An array that devices share without copies is
    not looked at. The difference stays by its nature, so nothing is repeated.
    """
    arrays = {name: x for name, x in flatten(state).items() if isinstance(x, jax.Array) and _has_copies(x)}
    suspects, different, is_certain = set(), [], True
    for name, sums in _sum_devices(arrays):
        holders = collections.defaultdict(list)
        for device, index in arrays[name].sharding.devices_indices_map(arrays[name].shape).items():
            holders[str(index)].append((device.id, sums[device.id]))
        for votes in holders.values():
            wrong, certain = find_minority(votes) if len(votes) > 1 else (frozenset(), True)
            suspects |= wrong
            is_certain &= certain
            if wrong and name not in different:
                different.append(name)
    if not different:
        return None
    devices = {device.id: device for x in arrays.values() for device in x.sharding.device_set}
    groups = [[devices[number]] for number in sorted(suspects)]
    return Difference('copies of one state', different, groups, is_certain)


def _has_copies(x: jax.Array) -> bool:
    """Tells whether several devices hold one part of x; arrays outside of a mesh have no copies."""
    if not isinstance(x.sharding, NamedSharding):
        return False
    parts = x.sharding.devices_indices_map(x.shape).values()
    return len({str(index) for index in parts}) < len(parts)


def _sum_devices(arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, dict[int, int]]]:
    """Yields the name of each array with the checksum of each device's part, by the number of the device."""
    names = iter(arrays)
    for group in group_arrays(list(arrays.values())):
        shardings = [x.sharding for x in group if isinstance(x.sharding, NamedSharding)]  # all of them are
        mesh = cast(Mesh, shardings[0].mesh)
        sums_DxN = np.asarray(_compile_sums(mesh, tuple(sharding.spec for sharding in shardings))(*group))
        for sums_D in sums_DxN.T.tolist():
            yield next(names), dict(zip((device.id for device in mesh.devices.ravel()), sums_D, strict=True))


@functools.cache
def _compile_sums(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """Returns a program: arrays with these specs → checksums [devices, arrays], each of a device's own part."""
    once = jax.jit(checksum, inline=True)  # one jaxpr for all arrays of a shape

    def compute(*parts: jax.Array) -> jax.Array:
        return jnp.stack([once(x) for x in parts])[None]

    everywhere = PartitionSpec(mesh.axis_names)
    split = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
    return jax.jit(split, out_shardings=replicated(mesh))
