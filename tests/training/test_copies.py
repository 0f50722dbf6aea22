"""Copies of a state that differ in one bit name the device, with and without shared parameters."""

import chips
import jax
import pytest

from lm.checkpoint.snapshot import flatten
from lm.training.copies import compare_copies


def named(found) -> list[int]:
    return [device.id for group in found.groups for device in group]


def damage(state, name: str, device: int):
    """Returns the state with one bit flipped in a device's copy of an array."""
    leaves = [chips.damage(x, device) if key == name else x for key, x in flatten(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


@pytest.mark.parametrize(
    ('devices', 'fsdp', 'suspects', 'is_certain'), [(4, 1, [2], True), (2, 1, [0, 1], False), (4, 2, [0, 2], False)]
)
def test_a_bit_that_flips_in_one_copy_is_found(devices, fsdp, suspects, is_certain, monkeypatch):
    monkeypatch.setattr('lm.pod.mesh.MIN_SHARDED_SIZE', 1)
    bench = chips.make_bench(devices, fsdp=fsdp)
    assert compare_copies(bench.state) is None
    bad = suspects[-1]
    arrays = flatten(bench.state)
    moments = [name for name in arrays if name.startswith('optimizer') and arrays[name].ndim > 1]
    shared = [name for name in arrays if not arrays[name].sharding.is_fully_replicated]
    assert bool(shared) == (fsdp > 1)
    name = next(name for name in moments if fsdp == 1 or name in shared)
    found = compare_copies(damage(bench.state, name, bad))
    assert (found.arrays, named(found), found.is_certain, found.stays) == ([name], suspects, is_certain, None)
    assert f'copies of one state differ in 1 array ({name})' in found.describe({})


def test_an_array_without_copies_is_not_compared(monkeypatch):
    monkeypatch.setattr('lm.pod.mesh.MIN_SHARDED_SIZE', 1)
    bench = chips.make_bench(4, fsdp=4)
    arrays = flatten(bench.state)
    name = next(name for name in arrays if arrays[name].ndim > 1 and not arrays[name].sharding.is_fully_replicated)
    assert compare_copies(damage(bench.state, name, 1)) is None
    assert compare_copies({'params': 3, 'step': jax.numpy.zeros(())}) is None


def test_a_link_that_damages_a_sum_makes_copies_differ():
    """The device that gets another sum of gradients makes another update than all others."""
    bench = chips.make_bench()
    with chips.wrong_link(3), jax.set_mesh(bench.mesh):
        state, _ = bench.train()(bench.state, bench.batch())
    assert named(compare_copies(state)) == [3]
    sound = chips.make_bench()
    with jax.set_mesh(sound.mesh):
        assert compare_copies(sound.train()(sound.state, sound.batch())[0]) is None
