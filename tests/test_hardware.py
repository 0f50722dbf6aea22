"""Chips by the names that JAX uses, and slices of pods by the names that people use."""

import importlib.util
import re

import pytest

from lm.errors import ConfigError
from lm.hardware import CHIPS, GENERATIONS, SHAPES, chip_of, describe_devices, parse, peak_flops
from lm.pod.mesh import MeshConfig, make_mesh

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')


@pytest.mark.parametrize(
    ('device_kind', 'teraflops', 'vmem_mib'),
    [
        ('TPU v2', 22.5, 16),
        ('TPU v3', 61.5, 16),
        ('TPU v4', 275, 16),
        ('TPU v5 lite', 197, 128),
        ('TPU v5', 459, 64),
        ('TPU v5p', 459, 64),
        ('TPU v6 lite', 918, 128),
        ('TPU7x', 1153.5, 64),
        ('NVIDIA A100-SXM4-80GB', 312, None),
        ('NVIDIA H100 80GB HBM3', 989, None),
        ('NVIDIA H200', 989, None),
    ],
)
def test_peaks_are_those_of_one_device(device_kind, teraflops, vmem_mib):
    assert peak_flops(device_kind) == teraflops * 1e12
    assert vmem_mib in (None, chip_of(device_kind).limits.vmem_mib)


def test_a_cpu_has_no_peak():
    assert chip_of('cpu') is None
    assert peak_flops('cpu') is None


def test_a_device_kind_means_one_chip():
    kinds = [kind for chip in CHIPS for kind in chip.limits.kinds]
    assert len(kinds) == len(set(kinds))
    assert [chip_of(kind) for kind in kinds] == [chip for chip in CHIPS for _ in chip.limits.kinds]


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('v4-384', 'v4:4x4x12'),
        ('v5e:4x8', 'v5e:4x8'),
        ('v5e-32', 'v5e:4x8'),
        ('v5litepod-32', 'v5e:4x8'),
        ('V5E:2x2', 'v5e:2x2'),
        ('v6e:8x8', 'v6e:8x8'),
        ('v6e-256', 'v6e:16x16'),
        ('v4:2x4x4', 'v4:2x4x4'),
        ('v4-64', 'v4:2x4x4'),
        ('v5p-8', 'v5p:2x2x1'),
        ('tpu7x:2x2x1', 'v7x:2x2x1'),
        ('v7x-8', 'v7x:2x2x1'),
        ('2*v5e:4x8', '2*v5e:4x8'),
        ('12*v5litepod-32', '12*v5e:4x8'),
        ('1*v4:2x4x4', 'v4:2x4x4'),
    ],
)
def test_names_of_topologies(name, expected):
    assert parse(name).name == expected


@pytest.mark.parametrize(
    ('name', 'remedy'),
    [
        ('v9:2x2', 'v4, v5e, v5p, v6e, v7x'),
        ('v5e', 'v5e:4x8'),
        ('v5e:3x5', '4x8'),
        ('v5e:2x2x1', '2x2'),
        ('v4:4x4', '2x4x4'),
        ('v5e-31', '4x8'),
        ('v4-3', r'no such slice \(the number counts cores, 2 a chip\); v4 has 2x2x1'),
        ('v4-12', '2x2x1'),
        ('v5e:', 'v5e:4x8'),
        ('', 'v5e:4x8'),
    ],
)
def test_topologies_that_do_not_exist(name, remedy):
    with pytest.raises(ConfigError, match=f'--topology {name}: .*{remedy}') as error:
        parse(name)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['0*v5e:4x8', 'two*v5e:4x8', '*v5e:4x8', '-1*v5e:4x8', '2*3*v5e:4x8'])
def test_a_number_of_slices_that_is_none(name):
    with pytest.raises(ConfigError, match=f'--topology {re.escape(name)}: write SLICES.* such as 2') as error:
        parse(name)
    assert '\n' not in str(error.value)


def test_slices_are_equal():
    one, three = parse('v5e:4x8'), parse('3*v5e:4x8')
    assert (three.slices, three.chips, three.slice_name) == (3, 3 * one.chips, one.name)
    assert three.ici_bytes == one.ici_bytes
    # 25, 50, 100 and 100 Gbit/s per chip
    found = [GENERATIONS[name].dcn_bytes for name in ('v5e', 'v5p', 'v6e', 'v7x', 'v4')]
    assert found == [3.125e9, 6.25e9, 12.5e9, 12.5e9, 0]


@pytest.mark.parametrize(
    ('name', 'links'),
    [
        ('v5e:1x1', 0),
        ('v5e:2x2', 2),
        ('v5e:4x8', 2),
        ('v5e:8x16', 3),
        ('v6e:16x16', 4),
        ('v4:2x2x1', 2),
        ('v4:2x2x4', 3),
        ('v5p:4x4x4', 6),
    ],
)
def test_links_of_the_chip_in_the_corner(name, links):
    topology = parse(name)
    assert topology.ici_bytes == links * topology.chip.link_bytes


@pytest.mark.compiles
@needs_libtpu
@pytest.mark.parametrize('chip', GENERATIONS.values(), ids=list(GENERATIONS))
def test_libtpu_knows_every_topology_that_is_offered(chip):
    for shape in (SHAPES[chip.axes][0], SHAPES[chip.axes][-1]):
        topology = parse(f'{chip.name}:{shape}')
        devices = describe_devices(topology)
        assert len(devices) == topology.chips * chip.devices
        assert chip_of(devices[0].device_kind) == chip


@pytest.mark.compiles
@needs_libtpu
@pytest.mark.parametrize(('name', 'fsdp'), [('v5e:4x4', 8), ('v5e:4x8', 16), ('v4:2x4x4', 2)])
def test_fsdp_need_not_be_an_axis_of_the_torus(name, fsdp):
    topology = parse(name)
    mesh = make_mesh(MeshConfig(fsdp=fsdp), describe_devices(topology))
    assert dict(mesh.shape) == {'data': topology.chips // fsdp, 'fsdp': fsdp}


@pytest.mark.compiles
@needs_libtpu
def test_devices_that_share_parameters_are_of_one_slice():
    devices = describe_devices(parse('2*v5e:2x2'))
    for fsdp in (1, 2, 4):
        mesh = make_mesh(MeshConfig(fsdp=fsdp), devices[::-1])
        assert dict(mesh.shape) == {'data': 8 // fsdp, 'fsdp': fsdp}
        assert all(len({device.slice_index for device in row}) == 1 for row in mesh.devices)
    with pytest.raises(ConfigError, match=r'mesh\.fsdp = 8: must divide the 4 devices of each of 2 slices'):
        make_mesh(MeshConfig(fsdp=8), devices)
