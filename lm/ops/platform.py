"""For which platform the operations are being traced, and over which mesh the batch is split.

Both are read from the mesh in context (`with jax.set_mesh(mesh):`), which is part of jit's cache key and is set also
when a step is compiled on a laptop for a TPU topology. Without a mesh the platform is `jax.default_backend()`.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from absl import logging
from jax.sharding import PartitionSpec

from lm.errors import ConfigError


def target_platform() -> str:
    """'cpu', 'tpu' or 'gpu': where the computation that is being traced will run."""
    device = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None)
    platform = getattr(device, 'platform', None) or jax.default_backend()
    return 'gpu' if platform in ('cuda', 'rocm') else platform


def batch_axes() -> tuple[str, ...]:
    """The axes of the mesh in context over which the batch is split: all that shard_map has not taken already."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1)


def batch_shards() -> int:
    """The number of devices that share the batch under the mesh in context; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    result = 1
    for name in batch_axes():
        result *= shape[name]
    return result


def per_device(function: Callable, split: tuple[bool, ...]) -> Callable:
    """`function` run by every device on its own rows of the batch; its result has a leading batch axis.

    Kernels are opaque to the partitioner, and a loop that accumulates a gradient over the batch would communicate in
    every iteration; both want the split made explicit. Gradients of the arguments that are not split are summed over
    the devices once. Without a mesh this is `function` itself.

    Args:
        function: takes arrays (or None) and returns one.
        split: for each argument, whether its leading axis is the batch; the others are replicated.
    """
    axes = batch_axes()
    if not axes:
        return function
    rows = PartitionSpec(axes)
    in_specs = tuple(rows if s else PartitionSpec() for s in split)
    return jax.shard_map(function, in_specs=in_specs, out_specs=rows, check_vma=False)


def vmem() -> tuple[int, int | None]:
    """Bytes of on-chip memory that a TPU kernel may use, and the limit to ask the compiler for (None: its default).

    v4 has 16 MiB in all, later chips at least 64.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None)
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    return (16 * 2**20, None) if kind in ('TPU v2', 'TPU v3', 'TPU v4') else (32 * 2**20, 32 * 2**20)


def choose(
    operation: str,
    implementations: Mapping[str, ModuleType],
    preferred: Mapping[str, str],
    requested: str | None,
    *args: Any,
    **options: Any,
) -> ModuleType:
    """The implementation of `operation` for this platform, or the requested one.

    Each implementation has `unsupported(*args, **options)`, which says why it cannot compute a call, or None.
    Where the preferred one cannot, the portable 'xla' one does, and the log says so once.

    Raises:
        ConfigError: an unknown name, or a requested implementation that does not support the call.
    """
    if requested is not None:
        if requested not in implementations:
            names = ', '.join(sorted(implementations))
            raise ConfigError(f'implementation = {requested!r}: {operation} has only {names}')
        if reason := implementations[requested].unsupported(*args, **options):
            raise ConfigError(f'implementation = {requested!r}: {operation} {reason}; leave it unset to use the best')
        return implementations[requested]
    name = preferred.get(target_platform(), 'xla')
    if reason := implementations[name].unsupported(*args, **options):
        _say_once(f'{operation}: {name} {reason}; using the slower xla path')
        name = 'xla'
    return implementations[name]


@functools.cache
def _say_once(message: str) -> None:
    logging.warning(message)
