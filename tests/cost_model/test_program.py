"""The text of a compiled program gives its buffers, loops and collectives."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.cost_model.collectives import collectives, group_size, transfers
from lm.cost_model.program import Array, HloProgram
from lm.cost_model.traffic import hbm_bytes
from lm.hardware import describe_devices, parse
from lm.pod.mesh import MeshConfig, make_mesh


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


def test_a_loop_and_its_collectives_count_as_often_as_they_run():
    program = HloProgram(PROGRAM)
    assert program.times == {'main': 1, 'body': 4}
    row = 128 * 4
    (found,) = collectives(program)
    assert (found.kind, found.devices, found.times, found.bytes) == ('all-reduce', 4, 4, row)
    assert found.sent == 2 * 3 / 4 * row


def test_elements_of_tuples_are_read_in_both_notations():
    before, loop = PROGRAM[: PROGRAM.index('%condition')], PROGRAM[PROGRAM.index('%condition') :]
    for name, index in (('i', 0), ('x', 1)):  # the notation of JAX 0.12
        loop = re.sub(rf' *%{name} = .* get-tuple-element\(%state\).*\n', '', loop)
        text, entry = loop.split('ENTRY')
        loop = re.sub(rf'%{name}(?=[,)])', f'%state#{index}', text) + 'ENTRY' + entry
    text = before + loop
    assert (text.count('#0'), text.count('#1'), text.count('tuple-element')) == (4, 2, 1)
    old, new = HloProgram(PROGRAM), HloProgram(text)
    assert (new.times, new.unknown_loops) == (old.times, [])
    element = new.by_name['body']['state#1']
    assert (element.opcode, element.operands, element.arrays) == (
        'get-tuple-element',
        ['state'],
        old.by_name['body']['x'].arrays,
    )
    assert hbm_bytes(new) == hbm_bytes(old) > 0


def test_an_element_of_a_tuple_inside_a_tuple():
    text = """ENTRY %main (x: (s32[], (f32[2,3], bf16[4]))) -> bf16[4] {
  %x = (s32[], (f32[2,3]{1,0:T(8,128)}, /*index=1*/bf16[4]{0})) parameter(0)
  ROOT %y = bf16[4]{0} negate(%x#1#1)
}
"""
    (inner,) = (i for i in HloProgram(text).computations['main'] if i.name == 'x#1#1')
    assert (inner.operands, inner.arrays) == (['x#1'], [Array('bf16', (4,), '0')])


def test_an_unknown_loop_end_is_not_guessed():
    program = HloProgram(PROGRAM.replace('%end = s32[] constant(10)', '%end = s32[] custom-call()'))
    assert program.unknown_loops == ['loop']
    assert program.times['body'] == 1


@pytest.mark.parametrize('branches', ['branch_computations={%long, %short}', 'branch_computations={%short, %long}'])
def test_the_cheaper_of_two_branches_counts(branches):
    text = """%short (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[] reduce(%x)
}

%long (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  %z = f32[8]{0} exponential(%x)
  ROOT %y = f32[] reduce(%z)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %found = f32[] conditional(%i, %x, %x), BRANCHES
}
"""
    assert HloProgram(text.replace('BRANCHES', branches)).times == {'main': 1, 'short': 1}


def test_a_branch_that_reads_nothing_is_never_taken():
    text = """%never (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[] constant(0)
}

%always (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[] reduce(%x)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %found = f32[] conditional(%i, %x, %x), branch_computations={%never, %always}
}
"""
    assert HloProgram(text).times == {'main': 1, 'always': 1}


def test_the_parts_of_a_chain_of_collectives_count_once():
    lines = '\n'.join(
        f'  %part.{i} = f32[64]{{0}} all-gather(%x), channel_id=7, replica_groups={{{{0,1}}}}, dimensions={{0}}, '
        f'frontend_attributes={{chain_id="{chain}"}}'
        for i, chain in enumerate([0, 0, 0])
    )
    text = f'ENTRY %main (x: f32[32]) -> f32[64] {{\n  %x = f32[32]{{0}} parameter(0)\n{lines}\n}}\n'
    (found,) = collectives(HloProgram(text))
    assert (found.kind, found.bytes, found.sent, found.shapes) == ('all-gather', 256, 128, ((64,),))


def test_collectives_of_one_shard_map_share_a_channel_and_count_each():
    mesh = Mesh(jax.devices(), ('data',))

    def sums(x, y):
        return jax.lax.psum(x, 'data'), jax.lax.all_gather(y, 'data'), jax.lax.all_gather(2 * y, 'data', axis=1)

    rows = PartitionSpec('data')
    split = jax.shard_map(sums, mesh=mesh, in_specs=(rows, rows), out_specs=PartitionSpec(), check_vma=False)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, rows)) for shape in ((64, 4), (8, 3))
    ]
    found = collectives(HloProgram(jax.jit(split).lower(*arrays).compile().as_text()))
    assert sorted(c.kind for c in found) == ['all-gather', 'all-gather', 'all-reduce']


def test_collectives_of_sharded_gradients():
    mesh = Mesh(jax.devices(), ('data',))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (('data',), ()))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=whole)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), out_shardings=whole)
    found = collectives(HloProgram(gradient.lower(w, x).compile().as_text()))
    assert {c.kind for c in found} == {'all-reduce'}
    assert sum(c.sent for c in found) == pytest.approx(2 * 7 / 8 * 32 * 16 * 4)


SLICES = """HloModule slices, is_scheduled=true

ENTRY %main (x: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  %token = token[] after-all()
  %near = f32[8,128]{1,0} reduce-scatter(%x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  %send = (f32[8,128]{1,0}, u32[], token[]) send(%near, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="sum_0",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[8,128]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="sum_0",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %received = (f32[8,128]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %far = f32[8,128]{1,0} get-tuple-element(%received), index=0
  ROOT %whole = f32[64,128]{1,0} all-gather(%far), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}
"""  # noqa: E501


def test_transfers_between_slices_and_inside_a_slice():
    program = HloProgram(SLICES)
    (found,) = transfers(program, 2)
    assert (found.name, found.kind, found.times, found.bytes) == ('send', 'ALL_REDUCE', 1, 8 * 128 * 4)
    assert [transfers(program, n)[0].sent for n in (2, 4)] == [4096, 1.5 * 4096]
    assert [(c.kind, c.bytes) for c in collectives(program)] == [('reduce-scatter', 32_768), ('all-gather', 32_768)]
    assert transfers(HloProgram(PERMUTE), 2) == []


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_a_reduction_over_two_slices_as_libtpu_writes_it():
    mesh = make_mesh(MeshConfig(), describe_devices(parse('2*v5e:2x2')))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (('data',), ()))
    x = jax.ShapeDtypeStruct((8, 256, 128), jnp.float32, sharding=rows)
    program = HloProgram(jax.jit(lambda x: x.sum(0), out_shardings=whole).lower(x).compile().as_text())
    # Each of the four chips of a slice sends its quarter of the slice's result.
    assert [(t.kind, t.times, t.bytes) for t in transfers(program, 2)] == [('ALL_REDUCE', 1, 256 * 128 * 4 / 4)]
    assert {c.devices for c in collectives(program)} == {4}


PERMUTE = """HloModule permute, is_scheduled=true

ENTRY %main (x: f32[2,64]) -> f32[2,64] {
  %x = f32[2,64]{1,0} parameter(0)
  %start = (f32[2,64]{1,0}, f32[2,64]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
  %done = f32[2,64]{1,0} collective-permute-done(%start)
  ROOT %again = f32[2,64]{1,0} collective-permute(%done), channel_id=1, source_target_pairs={{0,2},{1,3}}
}
"""  # noqa: E501


def test_a_permute_sends_its_array_and_no_context():
    found = collectives(HloProgram(PERMUTE))
    assert [(c.kind, c.bytes, c.sent) for c in found] == [('collective-permute', 512, 512)] * 2
