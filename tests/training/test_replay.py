"""Replays name the simulated devices that compute wrongly, and agree on all others to the bit."""

import dataclasses

import chips
import jax
import numpy as np
import pytest
from mechanisms_list import MECHANISMS
from tiny import train_step

from lm.hardware import describe_devices, parse
from lm.ops.documents import Documents
from lm.pod.mesh import MeshConfig, make_mesh
from lm.pod.votes import find_minority
from lm.training.optimizer import OptimizerConfig
from lm.training.program import StepProgram
from lm.training.replay import Replay, describe_replay


def named(found) -> list[int]:
    return [device.id for group in found.groups for device in group]


@pytest.mark.parametrize(('devices', 'certain', 'suspects'), [(4, True, [2]), (2, False, [0, 1])])
def test_a_chip_whose_products_are_always_wrong_is_named(devices, certain, suspects):
    bench = chips.make_bench(devices)
    with chips.wrong_products(2 % devices):
        found = bench.replay.check(bench.state, bench.batch(), 0)
    assert (named(found), found.is_certain, found.stays) == (suspects, certain, True)
    assert 'loss' in found.arrays
    assert any(name.startswith('gradient of ') for name in found.arrays)
    hosts = {0: 'worker-3'}
    assert f'{jax.devices()[suspects[0]]} on worker-3 (process 0)' in found.describe(hosts)
    assert ('one of them' in found.describe(hosts)) is not certain
    assert found.record(7, hosts)['groups'][0] == [f'{jax.devices()[suspects[0]]} on worker-3 (process 0)']


@pytest.mark.parametrize('devices', [1, 2, 4])
def test_a_fault_that_comes_once_is_told_from_one_that_stays(devices):
    """Repetitions give the right bits more votes, so two devices suffice to name the wrong one."""
    bench = chips.make_bench(devices)
    sound, faulty, bad = bench.replay, chips.make_bench(devices).replay, devices - 1
    batch, calls = bench.batch(), []
    with chips.wrong_products(bad):
        faulty.compute(bench.state, batch, 3)
    plain = sound.compute

    def compute(*arguments):
        calls.append(arguments)
        return (faulty.compute if len(calls) == 1 else plain)(*arguments)

    sound.compute = compute
    found = sound.check(bench.state, batch, 3)
    assert (named(found), found.is_certain, found.stays) == ([bad], True, False)
    assert 'did not come again' in found.describe({})
    assert sound.check(bench.state, batch, 4) is None


def test_damaged_parameters_and_a_wrong_link_are_seen():
    bench = chips.make_bench()
    params = jax.tree.map(lambda x: x, bench.state['params'])
    leaves, tree = jax.tree.flatten(params)
    leaves[-1] = chips.damage(leaves[-1], 1)
    damaged = bench.state | {'params': jax.tree.unflatten(tree, leaves)}
    assert named(bench.replay.check(damaged, bench.batch(), 0)) == [1]
    assert bench.replay.check(bench.state, bench.batch(), 0) is None
    linked = chips.make_bench()
    with chips.wrong_link(3):
        assert named(linked.replay.check(linked.state, linked.batch(), 0)) == [3]


@pytest.mark.parametrize(('fsdp', 'sequence', 'found'), [(2, 1, True), (1, 2, True), (4, 1, False)])
def test_groups_that_share_parameters_or_a_window_move_whole(fsdp, sequence, found):
    bench = chips.make_bench(fsdp=fsdp, sequence=sequence, documents=Documents(eod_id=0))
    assert [bench.replay.check(bench.state, bench.batch(i), i) for i in range(4)] == [None] * 4
    wrong = chips.make_bench(fsdp=fsdp, sequence=sequence)
    with chips.wrong_products(1 % wrong.mesh.shape['data']):
        difference = wrong.replay.check(wrong.state, wrong.batch(), 0)
    if not found:
        assert difference is None, 'a single group repeats its own fault'
    else:
        assert (len(named(difference)), len(difference.groups), difference.stays) == (4, 2, True)


def test_turns_go_through_groups_and_microbatches():
    bench = chips.make_bench(2, microbatches=2)
    batch = bench.batch()
    rows = [bench.replay.compute(bench.state, batch, turn) for turn in range(5)]
    assert len({row[0].tobytes() for row in rows[:4]}) == 4
    np.testing.assert_array_equal(rows[4], rows[0])
    assert rows[0].shape == (2, len(bench.replay.names))
    assert bench.replay.names[0] == 'loss'


def test_votes():
    assert find_minority([(0, 'a'), (1, 'a'), (2, 'b')]) == ({2}, True)
    assert find_minority([(0, 'a'), (1, 'b')]) == ({0, 1}, False)
    assert find_minority([(0, 'a'), (1, 'b'), (0, 'a'), (1, 'c')]) == ({1}, True)
    assert find_minority([(0, 'a'), (0, 'b')]) == ({0}, True)
    assert find_minority([(0, 'a'), (1, 'a')]) == (set(), True)
    assert find_minority([(0, 'a'), (0, 'a')]) == (set(), True)


def test_the_plan_says_what_replays_see():
    assert describe_replay(None, 4, 1) == {}
    assert 'which sees only faults that come and go' in describe_replay(100, 1, 4)['replay']
    assert 'one of two unless' in describe_replay(100, 2, 1)['replay']
    assert describe_replay(100, 8, 2)['replay'] == 'every 100 steps, names a group of 2 chips by the others’ votes'


@pytest.mark.slow
@pytest.mark.parametrize('fsdp', [1, 2])
@pytest.mark.parametrize('form', ['softmax', 'polysketch learned local', 'delta gate'])
def test_replays_compile_for_a_tpu_with_its_kernels(form, fsdp):
    """The compiler refuses kernels where it may split an axis."""
    model = dataclasses.replace(chips.MODEL, d_model=256, head_dim=128, attention=MECHANISMS[form], dtype='bfloat16')
    step = train_step(model, OptimizerConfig(warmup_steps=2), 10, platform='tpu')
    program = StepProgram(step, (2, 4, 513), np.dtype(np.uint16))
    mesh = make_mesh(MeshConfig(fsdp=fsdp), describe_devices(parse('v5e:2x2')))
    assert 'tpu_custom_call' in Replay(program, mesh).lower().compile().as_text()
