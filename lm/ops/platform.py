"""The platform for which an operation is traced, the mesh over which the batch is split, and the implementations.

Platform and mesh are read from the mesh in context (`with jax.set_mesh(mesh):`), which is part of jit's cache key. It
is also set when a step is compiled on a laptop for a TPU topology. Without a mesh the platform is
`jax.default_backend()`.

On GPUs an automatic choice takes only kernels that a GPU has shown to be right. `gpu/shown.json` lists them;
`scripts/measure.sh --merge` makes the list from the results of GPUs. Other kernels run when they are requested by name.
"""

import contextlib
import functools
import importlib
import json
import logging
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from lm.ops.chips import HOPPER, MOSAIC_GPU_JAX, limits_of
from lm.ops.errors import OperationError

SHARED_AXIS = 'fsdp'
"""The axis of a mesh whose devices share one copy of the parameters and of the optimizer state."""
DATA_AXES = ('data', SHARED_AXIS)
"""The axes of a mesh over which the batch is split. `data` replicates the parameters. Other axes,
where a mesh has any, split something else."""
SEQUENCE_AXIS = 'sequence'
"""The axis over which the tokens of a window are split (`lm.ops.sequence`)."""

KERNELS = {'tpu': ('pallas_tpu',), 'gpu': ('pallas_gpu', 'pallas_gpu_recurrent', 'pallas_gpu_channels')}
"""Platform → the implementations that it prefers of an operation without other preferences."""
SHOWN = pathlib.Path(__file__).with_name('gpu') / 'shown.json'
FEW_TOKENS = 128
LOG = logging.getLogger('lm.ops')
_CHOICES: ContextVar[dict[str, str] | None] = ContextVar('choices', default=None)
_PORTABLE: ContextVar[bool] = ContextVar('portable', default=False)


@contextlib.contextmanager
def choices(portable: bool = False) -> Iterator[dict[str, str]]:
    """Yields operation → implementation, filled in as operations are traced in the context.

    `portable`: it is 'xla' for all, also where another one is requested.
    """
    found: dict[str, str] = {}
    tokens = _CHOICES.set(found), _PORTABLE.set(portable)
    try:
        yield found
    finally:
        _CHOICES.reset(tokens[0])
        _PORTABLE.reset(tokens[1])


def target_platform() -> str:
    """Returns 'cpu', 'tpu' or 'gpu': where the computation that is being traced will run."""
    device = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None)
    platform = getattr(device, 'platform', None) or jax.default_backend()
    return 'gpu' if platform in ('cuda', 'rocm') else platform


def device_kind() -> str:
    """Returns JAX's name of the devices for which the computation that is being traced will run."""
    device = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None)
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def without_mosaic_gpu() -> str | None:
    """Returns why the Mosaic GPU kernels cannot run where the computation that is being traced will, or None."""
    if target_platform() != 'gpu' or not HOPPER.search(device_kind()):
        return 'needs a GPU of compute capability 9 (H100, H200)'
    if jax.__version_info__ < MOSAIC_GPU_JAX:
        return f'needs JAX {".".join(map(str, MOSAIC_GPU_JAX))}, not {jax.__version__}'
    return None


def not_bfloat16(*arrays: jax.Array) -> str | None:
    """Returns why kernels that take bfloat16 alone cannot take these arrays, or None."""
    dtypes = {x.dtype for x in arrays} - {jnp.dtype('bfloat16')}
    return f'takes arrays that are all bfloat16, not {", ".join(sorted(map(str, dtypes)))}' if dtypes else None


def mixed_types(*arrays: jax.Array) -> str | None:
    """Returns why kernels that take bfloat16 or float32, one of them alone, cannot take these arrays; or None."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) == 1 and dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
        return None
    return f'takes arrays that are all bfloat16 or all float32, not {", ".join(sorted(map(str, dtypes)))}'


def data_shards(mesh: Mesh) -> int:
    """Returns into how many parts `mesh` splits the batch: the devices along its data axes."""
    return math.prod(mesh.shape.get(name, 1) for name in DATA_AXES)


def batch_axes() -> tuple[str, ...]:
    """Returns the data axes of the mesh in context that have several devices and that shard_map has not taken yet."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in DATA_AXES if mesh.shape.get(name, 1) > 1 and name not in mesh.manual_axes)


def batch_shards() -> int:
    """Returns into how many parts the mesh in context splits the batch; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[name] for name in batch_axes())


def shares_parameters() -> bool:
    """Returns whether devices of the mesh in context share one copy of the parameters; False without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(SHARED_AXIS, 1) > 1


def sequence_shards() -> int:
    """Returns into how many parts windows are split, of which this computation sees one; 1: it sees them whole."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[SEQUENCE_AXIS] if SEQUENCE_AXIS in mesh.manual_axes else 1


def uneven_batch(batch: int) -> str | None:
    """Returns why `per_device` cannot split a batch of so many rows, or None."""
    shards = batch_shards()
    return f'cannot split a batch of {batch} over {shards} devices' if batch % shards else None


def per_device(function: Callable, split: tuple[bool, ...]) -> Callable:
    """Returns `function`, run by every device on its own rows of the batch; its result has a leading batch axis.

    Kernels are opaque to the partitioner, and a loop that accumulates a gradient over the batch would communicate in
    every iteration; both want the split made explicit. Gradients of the arguments that are not split are summed over
    the devices once. Devices that share one window each compute its rows. Without a mesh this is `function` itself.

    Args:
        function: takes arrays (or None) and returns one.
        split: for each argument, whether its leading axis is the batch; the others are replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = set(mesh.axis_names) - set(mesh.manual_axes)
    if all(mesh.shape[name] == 1 for name in names):
        return function
    rows = PartitionSpec(batch_axes() or None)
    in_specs = tuple(rows if s else PartitionSpec() for s in split)
    return jax.shard_map(function, in_specs=in_specs, out_specs=rows, axis_names=names, check_vma=False)


def vmem() -> tuple[int, int | None]:
    """Returns the bytes of on-chip memory that a TPU kernel may use, and the limit to ask the compiler for.

    It is half of the least memory of later chips, and all of the 16 MiB of v4 and before. The limit is None where it is
    the compiler's default.
    """
    chip = limits_of(device_kind())
    if chip is not None and chip.vmem_mib < 64:
        return chip.vmem_mib * 2**20, None
    return 32 * 2**20, 32 * 2**20


def matrix_side() -> int:
    """Returns the rows and columns of a matrix unit of a TPU; 128 where they are not known."""
    chip = limits_of(device_kind())
    return 128 if chip is None else chip.matrix_side


def rotates_by_steps() -> bool:
    """Returns whether a TPU rotates the rows of a register by one row at a time, and so is slow at it."""
    chip = limits_of(device_kind())
    return chip is not None and chip.rotates_by_steps


class Implementations(Mapping[str, ModuleType]):
    """The implementations of an operation, name → module, and which of them a platform prefers.

    A module has the function of the operation, which takes a call object. It may have `unsupported(call)`, which
    returns why it cannot compute the call, or None. Where it has other kernels for some calls, each shown by itself,
    `name_form(call)` returns their name, such as ' (wide heads)'; '' for the usual ones.

    A module is imported when it is first requested. Importing Pallas takes a good part of the time until the first step
    of a restarted run, and a CPU has no use for it. 'xla' is the portable implementation.
    """

    def __init__(
        self, operation: str, package: str, preferred: Mapping[str, tuple[str, ...]] = KERNELS, **modules: str
    ):
        """Stores the names; modules are imported at their first use.

        Args:
            operation: its name in messages.
            package: the package of the modules.
            preferred: platform → names, the best first; names that the operation lacks are ignored.
            modules: name → module below `package`.
        """
        self.operation = operation
        self._modules = {name: f'{package}.{module}' for name, module in modules.items()}
        self._preferred = {
            target: tuple(name for name in names if name in modules) for target, names in preferred.items()
        }

    def __getitem__(self, name: str) -> ModuleType:
        return importlib.import_module(self._modules[name])

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def choose(self, requested: str | None, call: object) -> ModuleType:
        """Returns the implementation for the platform in context, or the requested one.

        Where none that the platform prefers can compute the call, the portable one does. The log says so once.

        Raises:
            OperationError: an unknown name, or a requested implementation that does not support the call.
        """
        name = 'xla' if _PORTABLE.get() else self._name_of_choice(requested, call)
        if (noted := _CHOICES.get()) is not None:
            noted[self.operation] = name
        return self[name]

    def _name_of_choice(self, requested: str | None, call: object) -> str:
        if requested is not None:
            if requested not in self:
                names = ', '.join(sorted(self))
                raise OperationError(f'implementation = {requested!r}: {self.operation} has only {names}')
            if reason := self._find_limit(requested, call):
                raise OperationError(
                    f'implementation = {requested!r}: {self.operation} {reason}; leave it unset to use the best'
                )
            return requested
        reasons = []
        for name in self._preferred.get(target_platform(), ()):
            reason = self._find_limit(name, call) or self._not_shown(name, call)
            if reason is None:
                return name
            reasons.append(f'{name} {reason}')
        if reasons:
            _warn_once(f'{self.operation}: {", ".join(reasons)}; using the slower xla path')
        return 'xla'

    def _find_limit(self, name: str, call: object) -> str | None:
        """Returns why an implementation cannot compute the call, or None."""
        unsupported = getattr(self[name], 'unsupported', None)
        return unsupported and unsupported(call)

    def _not_shown(self, name: str, call: object) -> str | None:
        """Returns why an automatic choice leaves out an implementation that could compute the call, or None."""
        name_form = getattr(self[name], 'name_form', None)
        form = name_form(call) if name_form else ''
        if target_platform() != 'gpu' or f'{self.operation}: {name}{form}' in read_shown():
            return None
        return f'has never run{form} on a GPU, so it is chosen by name alone'


@functools.cache
def read_shown() -> dict[str, str]:
    """Returns operation, implementation and form → row, day and GPU that showed this kernel to be right."""
    return json.loads(SHOWN.read_text())


def choose_for_short(tokens: int) -> str | None:
    """Returns the implementation for so many tokens where kernels work in chunks: 'xla' for less than a chunk.

    None leaves the choice to the platform. Decoding has few tokens.
    """
    return 'xla' if tokens < FEW_TOKENS else None


@functools.cache
def _warn_once(message: str) -> None:
    LOG.warning(message)
