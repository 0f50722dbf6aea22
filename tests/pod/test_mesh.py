"""The batches and slices of a mesh; and the detection of TPU workers, with and without JAX's private function."""

import re
import types

import jax
import pytest

from lm.errors import ConfigError
from lm.hardware import Target, group_by_slice
from lm.parameters import shared_axis
from lm.pod.mesh import MeshConfig, data_shards, make_mesh, round_up_rows


@pytest.mark.parametrize('fsdp', [1, 4])
def test_a_batch_is_split_over_all_devices_of_the_data_axes(fsdp):
    assert data_shards(make_mesh(MeshConfig(fsdp=fsdp))) == 8
    other = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'model'))
    assert data_shards(other) == 4
    assert [round_up_rows(n, other) for n in (1, 4, 5)] == [4, 4, 8]


@pytest.mark.parametrize(
    ('settings', 'shape'), [({}, (8, 1)), ({'fsdp': 4}, (2, 4)), ({'fsdp': 2, 'sequence': 2}, (2, 2, 2))]
)
def test_devices_that_share_parameters_or_a_window_belong_to_one_slice(settings, shape):
    found = make_mesh(MeshConfig(slices=2, **settings))
    assert found.devices.shape == shape
    first = found.devices[: shape[0] // 2]
    assert {device.id for device in first.flat} == {device.id for device in jax.devices()[:4]}


@pytest.mark.parametrize(
    ('shape', 'names', 'axis'),
    [
        # Parts of 40 rows fill registers. Parts of 213 columns do not.
        ((36, 1280, 6816), ('layer', 'embed', 'mlp'), 1),
        ((36, 3408, 1280), ('layer', 'mlp', 'embed'), 2),
        ((36, 100, 96), ('layer', 'embed', 'mlp'), 2),  # no axis fills them
        ((32, 3, 5), ('layer', 'embed', 'mlp'), None),
        ((), (), None),
    ],
)
def test_devices_share_the_axis_whose_parts_fill_registers(shape, names, axis):
    assert shared_axis(shape, 32, names) == axis


def test_more_devices_than_in_a_slice_cannot_share():
    with pytest.raises(ConfigError, match=r'mesh\.fsdp = 8: must divide the 4 devices of each of 2 slices'):
        make_mesh(MeshConfig(slices=2, fsdp=8))


@pytest.mark.parametrize(
    ('slices', 'indices', 'found'),
    [
        (None, [1, 1, 0, 0], [[2, 3], [0, 1]]),
        (2, [0, 1, 0, 1], [[0, 2], [1, 3]]),
        (1, [0, 0, 0, 0], [[0, 1, 2, 3]]),
        (2, [0, 0, 0, 0], 'mesh.slices = 2: but JAX sees 1 slice, of 4 devices'),
        (1, [0, 0, 1, 1], 'mesh.slices = 1: but JAX sees 2 slices, of 2 and 2 devices'),
        (None, [0, 0, 0, 1], 'JAX sees 2 slices, of 3 and 1 devices'),
    ],
)
def test_tpus_name_their_slices(slices, indices, found):
    kind = {'platform': 'tpu', 'device_kind': 'TPU v4'}
    devices = [types.SimpleNamespace(id=i, slice_index=index, **kind) for i, index in enumerate(indices)]
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=re.escape(found)):
            MeshConfig(slices=slices).plan(Target.of_devices(devices))
    else:
        assert MeshConfig(slices=slices).plan(Target.of_devices(devices)).slices == len(found)
        assert [[device.id for device in members] for members in group_by_slice(devices)] == found


def test_simulated_devices_that_do_not_divide_form_no_slices():
    with pytest.raises(ConfigError, match=r'mesh\.slices = 3: but JAX sees 1 slice'):
        make_mesh(MeshConfig(slices=3))
