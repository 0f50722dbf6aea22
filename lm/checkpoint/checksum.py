"""A checksum of an array that does not depend on how the array is spread over devices.

Every element's bits and its index in the whole array are mixed into a 32-bit word; the words are added modulo 2³². For
a given index the mixing is a bijection, so a change confined to one element always changes the checksum; any other
change escapes with probability 2⁻³². Integer addition has no rounding and no order: every sharding gives one result.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

TOGETHER, TOGETHER_AT_LEAST = 1 / 8, 2**26
"""The share of all bytes, and the bytes, that one program sums up; one array alone may be more."""


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the checksum, 0 ≤ c < 2³², of each array. All processes that hold the arrays must call it together."""
    if (here := take_here(arrays)) is not None and all(x.itemsize <= 4 for x in here.values()):
        return {name: checksum_of_part(x, 0) for name, x in here.items()}
    return {name: int(c) for name, c in reduce_each(_traced_once, arrays).items()}


def take_here(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray] | None:
    """Returns the arrays as NumPy's where that costs no program: few bytes on CPUs of this process; None elsewhere.

    NumPy reduces them about as fast as a program, which takes half a second to compile.
    """
    if sum(x.nbytes for x in arrays.values()) > TOGETHER_AT_LEAST:
        return None
    if not all(isinstance(x, np.ndarray) or _is_here(x) for x in arrays.values()):
        return None
    return {name: np.asarray(x) for name, x in arrays.items()}


def _is_here(x: jax.Array) -> bool:
    on_cpus = all(device.platform == 'cpu' for device in x.devices())
    return on_cpus and x.is_fully_addressable and jax.dtypes.itemsize_bits(x.dtype) >= 8


def reduce_each(function: Callable[[jax.Array], jax.Array], arrays: Mapping[str, jax.Array]) -> dict[str, np.generic]:
    """Returns `function` of each array, a scalar. All processes that hold the arrays must call it together."""
    if not arrays:
        return {}
    shardings = [getattr(x, 'sharding', None) for x in arrays.values()]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    groups = group_arrays(list(arrays.values()))
    found = np.concatenate([np.asarray(_compiled(function, replicated)(group)) for group in groups])
    return dict(zip(arrays, found, strict=True))


def group_arrays(arrays: list[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yields the arrays, a few at a time. On CPUs programs compute with temporaries: for all arrays together, they
    would take as much memory as the state itself. All processes make the same groups."""
    limit = max(TOGETHER_AT_LEAST, int(TOGETHER * sum(x.nbytes for x in arrays)))
    group: list[jax.Array] = []
    for x in arrays:
        if group and sum(y.nbytes for y in group) + x.nbytes > limit:
            yield group
            group = []
        group.append(x)
    if group:
        yield group


PART = 2**20
"""Elements whose checksum NumPy computes together: they fit a cache."""


@functools.cache
def _compiled(function: Callable[[jax.Array], jax.Array], out_sharding: NamedSharding | None) -> jax.stages.Wrapped:
    # One jaxpr for all arrays of a shape: there are few shapes, and tracing is a part of every restart.
    return jax.jit(lambda leaves: jnp.stack([function(x) for x in leaves]), out_shardings=out_sharding)


def checksum(x: jax.Array) -> jax.Array:
    """Computes a uint32 scalar, purely and traceably; elementwise except one sum: no sharded array is gathered."""
    # Operations of lax instead of Python's operators, which take ten times as long to trace.
    words = _words(x)
    # The flat index from one iota an axis: a reshape would make XLA move a sharded array.
    index = lax.full(words.shape, np.uint32(0))
    stride = 1
    for axis in reversed(range(words.ndim)):
        along = lax.broadcasted_iota(np.uint32, words.shape, axis)
        index = lax.add(index, lax.mul(along, np.uint32(stride % 2**32)))
        stride *= words.shape[axis]
    key = lax.add(lax.mul(index, np.uint32(0x9E3779B1)), np.uint32(0x7F4A7C15))
    return lax.reduce_sum(_mix(lax.bitwise_xor(words, key)), tuple(range(words.ndim)))


def checksum_of_part(part: np.ndarray, first: int) -> int:
    """Returns the share of `checksum` that a part of an array has, modulo 2³².

    `first` is the flat index of its first element in the whole array; elements have at most 32 bits.
    """
    if part.dtype.itemsize > 4:
        raise ValueError(f'{part.dtype}: has more than 32 bits')
    flat, total = part.reshape(-1), 0
    for start in range(0, flat.size, PART):
        own = flat[start : start + PART]
        words = own.view(f'u{own.dtype.itemsize}').astype(np.uint32)
        index = np.arange(first + start, first + start + own.size, dtype=np.uint64).astype(np.uint32)
        words ^= index * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            words ^= words >> np.uint32(shift)
            words *= np.uint32(factor)
        words ^= words >> np.uint32(16)
        total += int(words.sum(dtype=np.uint64))
    return total % 2**32


_traced_once = jax.jit(checksum, inline=True)


def _mix(x: jax.Array) -> jax.Array:
    """Mixes uint32, a bijection with good avalanche ("lowbias32", C. Wellons, Prospecting for Hash Functions, 2018)."""
    x = lax.mul(_xor_shifted(x, 16), np.uint32(0x7FEB352D))
    x = lax.mul(_xor_shifted(x, 15), np.uint32(0x846CA68B))
    return _xor_shifted(x, 16)


def _xor_shifted(x: jax.Array, bits: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(bits)))


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as uint32; 64-bit elements become two words along a new last axis."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, getattr(jnp, f'uint{bits}')).astype(jnp.uint32)
