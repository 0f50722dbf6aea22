"""Tests of the parts of chips: matrix units, vector units, memory and links, on all devices at once.

Each test computes integers that are known exactly, or bits that all chips must agree on. It returns the chips that are
wrong. All processes of a job call the tests together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from lm.checkpoint.checksum import checksum
from lm.pod.mesh import replicated
from lm.pod.votes import compare_rows

AXIS = 'chip'
SIDE, PRODUCTS = 512, 8
"""The matrices of a test of the matrix units, and the products of a call."""
VALUES, VECTOR_STEPS = 2**18, 16
CALLS = 4
"""Calls of a round of the units; a fault may come and go."""
LINK_WORDS = 2**20
MEMORY_SHARE, MEMORY_UNKNOWN = 0.5, 2**24
"""The share of a device's memory that is tested, and the bytes where its size is not known, as on CPUs."""


ChipTest = Callable[[int], frozenset[int]]
"""A round of a test of one part of all chips: the seed of its inputs → the positions of wrong chips, or of suspects."""


def make_tests(devices: Sequence[object], memory_bytes: int) -> dict[str, ChipTest]:
    """Returns the tests by the name of the part; chips alone have no links.

    Args:
        memory_bytes: the bytes of each device's memory that are written and read.
    """
    mesh = Mesh(np.asarray(devices), (AXIS,))
    tests: dict[str, ChipTest] = {
        'matrix units': functools.partial(check_matrix_units, mesh),
        'vector units': functools.partial(check_vector_units, mesh),
        'memory': functools.partial(check_memory, mesh, memory_bytes // 4),
    }
    return tests | ({'links': functools.partial(check_links, mesh)} if len(devices) > 1 else {})


def find_memory(device: Any) -> int:
    """Returns the bytes of a device to test: MEMORY_SHARE of it in whole GiB, so that like devices test as many."""
    limit = (device.memory_stats() or {}).get('bytes_limit', 0)
    return int(MEMORY_SHARE * limit) // 2**30 * 2**30 or MEMORY_UNKNOWN


def check_matrix_units(mesh: Mesh, seed: int) -> frozenset[int]:
    """Multiplies matrices of small integers in bfloat16, which is exact, and compares with the host's result."""
    known = compute_products(seed)
    sums = np.stack([np.asarray(_products(mesh)(np.uint32(seed))) for _ in range(CALLS)])
    return frozenset(np.flatnonzero((sums != known).any(0)).tolist())


def compute_products(seed: int) -> int:
    """Returns the sum over the bits of all products that `_products` must have, computed by the host in float64."""
    index = np.arange(SIDE * SIDE, dtype=np.uint32).reshape(SIDE, SIDE)
    a, b = (_small(_hash(index, np.full(1, seed + i, np.uint32))).astype(np.float64) for i in range(2))
    total = np.zeros(1, np.uint32)
    for _ in range(PRODUCTS):
        product = (a @ b).astype(np.int32)
        bits = product.astype(np.float32).view(np.uint32)
        total += (bits * _weigh(index)).sum(dtype=np.uint32)
        a = _small(product).astype(np.float64)
    return int(total[0])


def check_vector_units(mesh: Mesh, seed: int) -> frozenset[int]:
    """Computes elementary functions of many numbers, whose bits must agree on all chips and in all calls."""
    runs = np.stack([np.asarray(_functions(mesh)(np.uint32(seed))) for _ in range(CALLS)])
    return compare_rows(runs)[0]


def check_memory(mesh: Mesh, words: int, seed: int) -> frozenset[int]:
    """Fills the memory of each chip with a pattern, then with its inverse, and counts the words that come back
    changed."""
    wrong = np.zeros(mesh.size, np.int64)
    for inverse in (np.uint32(0), np.uint32(2**32 - 1)):
        write, read = _memory(mesh, words)
        array = write(np.uint32(seed), inverse)
        wrong += np.asarray(read(array, np.uint32(seed), inverse))
        array.delete()
    return frozenset(np.flatnonzero(wrong).tolist())


def check_links(mesh: Mesh, seed: int) -> frozenset[int]:
    """Sends a pattern to the chips at distances 1, 2, 4, …; returns the chips to which a changed word came."""
    distances = [2**i for i in range((mesh.size - 1).bit_length())]
    wrong = sum(np.asarray(_links(mesh, distance)(np.uint32(seed))).astype(np.int64) for distance in distances)
    return frozenset(np.flatnonzero(wrong).tolist())


def _everywhere(mesh: Mesh, function: Callable[..., jax.Array], *splits: bool) -> Callable[..., jax.Array]:
    """Returns a program that every chip runs; its results lie side by side, whole on every host.

    `splits` tells which arguments are split over the chips.
    """
    rows = PartitionSpec(AXIS)
    in_specs = tuple(rows if split else PartitionSpec() for split in splits)
    split = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
    return jax.jit(split, out_shardings=replicated(mesh))


def _hash(index, seed):
    """Mixes uint32 arrays of numpy or JAX: different words for each index and seed."""
    x = (index + seed * np.uint32(0x9E3779B1)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(13))


def _small(x):
    """Returns integers from −8 to 7; a sum of SIDE products of such numbers is exact in float32."""
    return (x & 15).astype(np.int32) - 8


def _weigh(index):
    """Returns odd weights: a change of one word changes the sum of all weighted words."""
    return np.uint32(2) * index + np.uint32(1)


@functools.cache
def _products(mesh: Mesh) -> Callable[..., jax.Array]:
    def compute(seed: jax.Array) -> jax.Array:
        index = jnp.arange(SIDE * SIDE, dtype=jnp.uint32).reshape(SIDE, SIDE)
        a, b = (_small(_hash(index, seed + np.uint32(i))).astype(jnp.bfloat16) for i in range(2))

        def multiply(_, carry):
            a, total = carry
            product = jnp.dot(a, b, preferred_element_type=jnp.float32)
            product = jnp.where(product == 0, 0.0, product)  # the host knows no negative zero
            total += (lax.bitcast_convert_type(product, jnp.uint32) * _weigh(index)).sum(dtype=jnp.uint32)
            return _small(product.astype(jnp.int32)).astype(jnp.bfloat16), total

        return lax.fori_loop(0, PRODUCTS, multiply, (a, jnp.uint32(0)))[1][None]

    return _everywhere(mesh, compute, False)


@functools.cache
def _functions(mesh: Mesh) -> Callable[..., jax.Array]:
    def compute(seed: jax.Array) -> jax.Array:
        x = _hash(jnp.arange(VALUES, dtype=jnp.uint32), seed).astype(jnp.float32) * np.float32(2**-32) + 0.5

        def step(_, x):
            return jnp.tanh(x) + jnp.exp(-x) * lax.rsqrt(x) + jnp.log1p(x) / (1 + x * x)

        return checksum(lax.fori_loop(0, VECTOR_STEPS, step, x))[None, None]

    return _everywhere(mesh, compute, False)


@functools.cache
def _memory(mesh: Mesh, words: int) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    def pattern(seed: jax.Array, inverse: jax.Array) -> jax.Array:
        return _hash(jnp.arange(words, dtype=jnp.uint32), seed) ^ inverse

    def read(array: jax.Array, seed: jax.Array, inverse: jax.Array) -> jax.Array:
        return (array != pattern(seed, inverse)).sum(dtype=jnp.int32)[None]

    whole, rows = PartitionSpec(), PartitionSpec(AXIS)
    write = jax.shard_map(pattern, mesh=mesh, in_specs=(whole, whole), out_specs=rows, check_vma=False)
    return jax.jit(write), _everywhere(mesh, read, True, False, False)


@functools.cache
def _links(mesh: Mesh, distance: int) -> Callable[..., jax.Array]:
    count = mesh.size

    def compute(seed: jax.Array) -> jax.Array:
        def pattern(chip: jax.Array) -> jax.Array:
            return _hash(jnp.arange(LINK_WORDS, dtype=jnp.uint32), seed + chip.astype(jnp.uint32))

        me = lax.axis_index(AXIS)
        came = lax.ppermute(pattern(me), AXIS, [(i, (i + distance) % count) for i in range(count)])
        return (came != pattern((me - distance) % count)).sum(dtype=jnp.int32)[None]

    return _everywhere(mesh, compute, False)
