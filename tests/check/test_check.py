"""`lm check`: names of topologies, costs read from compiled programs, memory, advice; the command on a tiny model."""

import dataclasses
import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm import cli
from lm.attention.softmax import Softmax
from lm.check import advice
from lm.check import compiled_step as check
from lm.compiled.program import Array, Program, group_size
from lm.compiled.roofline import roofline
from lm.compiled.traffic import hbm_bytes
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import CHIPS, SHAPES, Topology, parse, peak_flops
from lm.model import REMAT, ModelConfig
from lm.training.config import TrainConfig
from lm.training.inputs import make_batches
from lm.training.mesh import MeshConfig, make_mesh

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
SMALL = Experiment(
    model=ModelConfig(vocab_size=256, n_layers=2, d_model=64, n_heads=2, head_dim=32),
    train=TrainConfig(tokens_per_step=1024, context_length=128, steps=20_000),
)


@pytest.fixture
def on_cpus(monkeypatch):
    """Topologies are then made of simulated CPU devices, which compile fast and need no libtpu."""
    monkeypatch.setattr(Topology, 'devices', property(lambda self: jax.devices()[: self.chips]))


# ----------------------------------------------------------------------------------------------------------- topologies


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
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
        ('v4-12', '2x2x1'),
        ('v5e:', 'v5e:4x8'),
        ('', 'v5e:4x8'),
    ],
)
def test_topologies_that_do_not_exist(name, remedy):
    with pytest.raises(ConfigError, match=f'--topology {name}: .*{remedy}') as error:
        parse(name)
    assert '\n' not in str(error.value)


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


def test_peaks_are_those_of_the_mfu():
    kinds = {'v4': 'TPU v4', 'v5e': 'TPU v5 lite', 'v5p': 'TPU v5', 'v6e': 'TPU v6 lite', 'v7x': 'TPU7x'}
    for name, chip in CHIPS.items():
        assert peak_flops(kinds[name]) == chip.flops / chip.devices


def test_without_libtpu_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert cli.main(['check', '--topology', 'v5e:2x2']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'.[tpu]'" in error


@needs_libtpu
@pytest.mark.parametrize('chip', CHIPS.values(), ids=list(CHIPS))
def test_libtpu_knows_every_topology_that_is_offered(chip):
    for shape in (SHAPES[chip.axes][0], SHAPES[chip.axes][-1]):
        topology = parse(f'{chip.name}:{shape}')
        assert len(topology.devices) == topology.chips * chip.devices
        assert peak_flops(topology.devices[0].device_kind) == chip.flops / chip.devices


@needs_libtpu
@pytest.mark.parametrize(('name', 'fsdp'), [('v5e:4x4', 8), ('v5e:4x8', 16), ('v4:2x4x4', 2)])
def test_fsdp_need_not_be_an_axis_of_the_torus(name, fsdp):
    topology = parse(name)
    mesh = make_mesh(MeshConfig(fsdp=fsdp), topology.devices)
    assert dict(mesh.shape) == {'data': topology.chips // fsdp, 'fsdp': fsdp}


# ------------------------------------------------------------------------------------------------------------- programs


def test_bytes_of_tiled_buffers():
    assert Array('bf16', (12, 32, 64), '2,1,0:T(8,128)(2,1)').hbm == 12 * 32 * 128 * 2
    assert Array('f32', (5, 3), '0,1:T(8,128)').hbm == 128 * 8 * 4
    assert Array('f32', (5, 3), '1,0:T(8,128)S(1)').hbm == 0
    assert Array('pred', (7,), '').hbm == Array('pred', (7,), '').size == 7
    assert Array('s4', (8,), '0').size == 4


@pytest.mark.parametrize(
    ('text', 'size'),
    [
        ('replica_groups={{0,1,2,3},{4,5,6,7}}, x', 4),
        ('replica_groups=[8,2]<=[2,4,2]T(1,0,2), x', 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}, x", 8),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_0','axis_1'}, x", 16),
    ],
)
def test_sizes_of_groups(text, size):
    assert group_size(text) == size


PROGRAM = """HloModule example, is_scheduled=true

%sliced (p0: f32[10,128], p1: s32[]) -> f32[1,128] {
  %p0 = f32[10,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut = f32[1,128]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,128}
}

%put (p0: f32[10,128], p1: f32[1,128], p2: s32[]) -> f32[10,128] {
  %p0 = f32[10,128]{1,0} parameter(0)
  %p1 = f32[1,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[10,128]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%condition (state: (s32[], f32[10,128])) -> pred[] {
  %state = (s32[], f32[10,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%body (state: (s32[], f32[10,128])) -> (s32[], f32[10,128]) {
  %state = (s32[], f32[10,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = f32[10,128]{1,0} get-tuple-element(%state), index=1
  %row = f32[1,128]{1,0} fusion(%x, %i), kind=kLoop, calls=%sliced
  %near = f32[1,128]{1,0:T(1,128)S(1)} copy(%row)
  %sum = f32[1,128]{1,0:T(1,128)S(1)} all-reduce(%near), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %y = f32[10,128]{1,0} fusion(%x, %sum, %i), kind=kLoop, calls=%put
  ROOT %out = (s32[], f32[10,128]{1,0}) tuple(%next, %y)
}

ENTRY %main (x: f32[10,128]) -> f32[10,128] {
  %x = f32[10,128]{1,0} parameter(0)
  %start = s32[] constant(2)
  %init = (s32[], f32[10,128]{1,0}) tuple(%start, %x)
  %loop = (s32[], f32[10,128]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[10,128]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_costs_of_a_program_that_can_be_counted_by_hand():
    program = Program(PROGRAM)
    assert program.times == {'main': 1, 'body': 4}
    row = 128 * 4
    reads_a_row, copies_it, writes_a_row, counter = 2 * row, row, row, 3 * 4 + 2 * 4
    assert hbm_bytes(program) == 4 * (reads_a_row + copies_it + writes_a_row + counter)
    (found,) = program.collectives()
    assert (found.kind, found.devices, found.times, found.bytes) == ('all-reduce', 4, 4, row)
    assert found.sent == 2 * 3 / 4 * row


def test_an_unknown_end_of_a_loop_is_not_guessed():
    program = Program(PROGRAM.replace('%end = s32[] constant(10)', '%end = s32[] custom-call()'))
    assert program.unknown_loops == ['loop']
    assert program.times['body'] == 1
    text = PROGRAM.replace('%end = s32[] constant(10)', '%end = s32[] custom-call()')
    bound = roofline(text, parse('v5e:2x2'), least_flops=7e12)
    assert 'decided at run time' in bound.notes[0]
    assert bound.hardware_teraflops == 7
    assert roofline(PROGRAM, parse('v5e:2x2'), least_flops=7e12).hardware_teraflops == 0


def test_a_program_that_cannot_be_read_has_the_bound_of_the_model():
    bound = roofline('', parse('v7x:2x2x1'), least_flops=2307e12 / 2)
    assert (bound.seconds, bound.bound_by, bound.exchanges) == (1.0, 'compute', ())
    assert 'cannot read' in bound.notes[0]


def test_the_parts_of_a_chain_of_collectives_count_once():
    lines = '\n'.join(
        f'  %part.{i} = f32[64]{{0}} all-gather(%x), channel_id=7, replica_groups={{{{0,1}}}}, dimensions={{0}}'
        for i in range(3)
    )
    text = f'ENTRY %main (x: f32[32]) -> f32[64] {{\n  %x = f32[32]{{0}} parameter(0)\n{lines}\n}}\n'
    (found,) = Program(text).collectives()
    assert (found.kind, found.bytes, found.sent) == ('all-gather', 256, 128)


def test_exchanges_of_sharded_gradients():
    mesh = Mesh(jax.devices(), ('data',))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (('data',), ()))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=whole)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), out_shardings=whole)
    found = Program(gradient.lower(w, x).compile().as_text()).collectives()
    assert {c.kind for c in found} == {'all-reduce'}
    assert sum(c.sent for c in found) == pytest.approx(2 * 7 / 8 * 32 * 16 * 4)


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ('message', 'gib'),
    [
        ('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO '
         'temporaries (28.01G) exceeds available HBM (15.75G). HLO module: jit_train.', 28.01),
        ('RESOURCE_EXHAUSTED: … on HBM, … temporaries (1.50T) exceeds available HBM (15.75G)', 1536),
        ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.0M of 15.75G hbm.', 0.5),
        ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm: too much', math.inf),
        ('RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.0M of 16.0M vmem.', None),
        ('INTERNAL: Mosaic failed to compile TPU kernel', None),
    ],
)  # fmt: skip
def test_refusals_of_the_compiler(message, gib):
    assert check.out_of_memory(message) == gib


# --------------------------------------------------------------------------------------------------------------- advice


def test_changes_that_recompute_least_come_first():
    experiment = dataclasses.replace(SMALL, train=TrainConfig(tokens_per_step=4096, context_length=128))  # 32 windows
    found = list(advice.candidates(experiment, parse('v5e:2x4')))
    assert found[:3] == [
        {'train.microbatches': 2},
        {'train.microbatches': 4},
        {'model.remat': 'dots'},
    ]
    assert found[-1] == {'train.microbatches': 4, 'model.remat': 'full', 'mesh.fsdp': 8}
    assert len(found) == 2 * 4 * 3 - 1
    recomputed = [list(REMAT).index(c.get('model.remat', 'none')) for c in found if 'mesh.fsdp' not in c]
    assert recomputed == sorted(recomputed)


def test_a_large_state_is_shared_first():
    experiment = dataclasses.replace(SMALL, model=ModelConfig(n_layers=36, d_model=1280, n_heads=20))
    assert next(advice.candidates(experiment, parse('v5e:2x4'))) == {'mesh.fsdp': 8}
    assert 'mesh.fsdp' not in next(advice.candidates(experiment, parse('v5p:2x2x1')))


def test_only_microbatches_that_the_devices_can_share():
    assert [c for c in advice.candidates(SMALL, parse('v5e:2x4')) if 'train.microbatches' in c] == []


def pretend(fits):
    """`check` whose memory is a function of the configuration."""

    def made(experiment, topology, bindings=None):
        experiment = check.changed(experiment, bindings or {})
        needed = fits(experiment)
        bindings = tuple(f'{k} = {v!r}' for k, v in (bindings or {}).items())
        return check.Check('v5e:2x2', 4, 4, bindings, needed <= 16, check.Memory(16, needed), None, None, 0.0)

    return made


@pytest.mark.parametrize(
    ('needs', 'expected'),
    [
        (lambda e: 30 / e.train.microbatches, ('train.microbatches = 2',)),
        (lambda e: {'none': 40, 'dots': 20, 'attention': 10, 'full': 5}[e.model.remat], ("model.remat = 'attention'",)),
        (lambda e: 20 / e.mesh.fsdp, ('mesh.fsdp = 4',)),
        (lambda e: 20 + 1 / e.train.microbatches, None),
    ],
)
def test_advice_is_the_first_that_fits(needs, expected, on_cpus, monkeypatch):
    monkeypatch.setattr(advice, 'check', pretend(needs))
    failed = pretend(needs)(SMALL, 'v5e:2x2')
    found = advice.advise(SMALL, parse('v5e:2x2'), failed)
    if expected is None:
        assert found.check is None
        assert found.nearest.needed_gib == 20.5
        assert 'larger topology' in check.failure(dataclasses.replace(failed, advice=found))
        return
    assert found.check.bindings == expected
    assert expected[0] in check.failure(dataclasses.replace(failed, advice=found))


# ---------------------------------------------------------------------------------------------------------- the command


def test_a_batch_that_does_not_divide_is_the_error_of_training(on_cpus):
    experiment = dataclasses.replace(SMALL, train=TrainConfig(tokens_per_step=3 * 128, context_length=128))
    with pytest.raises(ConfigError) as of_check:
        check.check(experiment, 'v5e:2x2')
    with pytest.raises(ConfigError) as of_training:
        make_batches(experiment.data, experiment.train, None, make_mesh(MeshConfig(), jax.devices()[:4]))
    assert str(of_check.value) == str(of_training.value)


def test_the_plan_needs_no_compiler(capsys):
    assert cli.main(['check', *tiny.params(tiny.MODEL)]) == 0
    printed = capsys.readouterr().out
    assert 'tokens per step         256 (8 windows of 32, 1 microbatch)' in printed
    assert 'embedding' in printed
    assert 'topology' not in printed
    assert cli.main(['check', '--json', *tiny.params(tiny.MODEL)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['checks'] == []
    assert found['plan']['parameters_total'] == sum(found['plan']['parameters'].values())
    assert found['plan']['tokens_total'] == 40 * 256


def test_the_step_of_training_on_simulated_devices(on_cpus):
    found = check.check(SMALL, 'v5e:2x2')
    model_teraflops = SMALL.model.flops_per_token(128) * 1024 / 4 / 1e12
    assert found.fits
    assert 1.0 < found.roofline.hardware_teraflops / model_teraflops < 1.3
    parameters, embedding = check.plan(SMALL).parameters_total, 256 * 64
    assert found.memory.arguments_gib == pytest.approx(3 * 4 * parameters / 2**30, rel=0.01)
    assert found.memory.aliased_gib == pytest.approx(found.memory.outputs_gib, rel=0.01)
    gradients = sum(e.gigabytes_sent_per_device for e in found.roofline.exchanges)
    # The embedding is tied, and its gradients as table of inputs and of outputs are summed over the devices each.
    assert gradients <= 2 * 3 / 4 * 4 * (parameters + embedding) / 1e9 * 1.01
    assert gradients >= 2 * 3 / 4 * 4 * parameters / 1e9
    speed = found.speed
    assert speed.run_chip_hours == pytest.approx(20_000 * speed.seconds_per_step * 4 / 3600)
    assert speed.mfu < 1


@needs_libtpu
def test_the_command_compiles_for_a_pod(capsys):
    flags = tiny.params(tiny.MODEL | {'train.tokens_per_step': 1024, 'train.context_length': 128, 'model.n_layers': 2})
    assert cli.main(['check', '--json', '--topology', 'v5e:2x2', *flags]) == 0
    (found,) = json.loads(capsys.readouterr().out)['checks']
    assert (found['topology'], found['chips'], found['fits']) == ('v5e:2x2', 4, True)
    assert 0 < found['memory']['arguments_gib'] < found['memory']['needed_gib'] < found['memory']['limit_gib']
    assert found['roofline']['notes'] == []
    model_teraflops = (
        ModelConfig(
            vocab_size=400, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=Softmax()
        ).flops_per_token(128)
        * 1024
        / 4e12
    )
    # Splash attention computes whole blocks and its backward pass forms the scores again.
    assert 1.0 < found['roofline']['hardware_teraflops'] / model_teraflops < 1.6
    assert {e['kind'] for e in found['roofline']['exchanges']} == {'all-reduce'}
    assert 0 < found['speed']['mfu'] < 1
    check_tables_print(found, capsys)


def check_tables_print(found, capsys):
    """The table of what was found has every figure a newcomer looks for."""
    from lm.check.tables import print_check
    from lm.compiled.roofline import Exchange, Roofline

    exchanges = tuple(Exchange(**e) for e in found['roofline'].pop('exchanges'))
    built = check.Check(
        **found
        | {
            'memory': check.Memory(**found['memory']),
            'roofline': Roofline(**found['roofline'], exchanges=exchanges),
            'speed': check.Speed(**found['speed']),
        }
    )
    print_check(built, check.plan(SMALL))
    printed = capsys.readouterr().out
    for words in (
        '4 chips',
        'GiB of 15.75 GiB of HBM: fits',
        'bound by',
        'all-reduce',
        'MFU',
        'chip-hours',
        'not a measurement',
    ):
        assert words in printed


def test_a_step_that_does_not_fit_ends_with_the_remedy(on_cpus, monkeypatch, capsys):
    needs = lambda e: 30 / e.train.microbatches  # noqa: E731
    monkeypatch.setattr(check, 'check', pretend(needs))
    monkeypatch.setattr(advice, 'check', pretend(needs))
    flags = tiny.params(tiny.MODEL)
    assert cli.main(['check', '--topology', 'v5e:2x2', *flags]) == 2
    printed = capsys.readouterr()
    assert 'does NOT fit' in printed.out
    assert printed.err.splitlines()[-1].endswith('add --gin_param "train.microbatches = 2"')
    assert cli.main(['check', '--topology', 'v5e:2x2', '--no_advice', *flags]) == 2
    printed = capsys.readouterr()
    assert 'tried' not in printed.out
    assert 'larger topology' in printed.err.splitlines()[-1]
