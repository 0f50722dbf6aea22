"""The model of a step's time, compared with programs that can be counted by hand."""

import pytest
from test_program import SLICES

from lm.cost_model.program import HloProgram
from lm.cost_model.step_time import costs, scopes, step_time
from lm.cost_model.traffic import hbm_bytes
from lm.hardware import parse

REMAT = 'jit(train)/transpose(jvp())/while/body/checkpoint/rematted_computation'
PROGRAM = (
    """HloModule step, is_scheduled=true

%product (p0: bf16[1024,2048], p1: bf16[2048,1024]) -> bf16[1024,1024] {
  %p0 = bf16[1024,2048]{1,0} parameter(0)
  %p1 = bf16[2048,1024]{1,0} parameter(1)
  ROOT %dot = bf16[1024,1024]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, DOT
}

%turned (p0: bf16[1024,1024]) -> bf16[1024,1024] {
  %p0 = bf16[1024,1024]{1,0} parameter(0)
  ROOT %turn = bf16[1024,1024]{1,0} transpose(%p0), dimensions={1,0}
}

ENTRY %main (x: bf16[1024,2048], w: bf16[2048,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,2048]{1,0} parameter(0)
  %w = bf16[2048,1024]{1,0} parameter(1)
  %ahead = (bf16[2048,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[2048,1024]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %near = bf16[2048,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%ahead)
  %sum-start = bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)} all-reduce-start(%x), channel_id=1, replica_groups={{0,1,2,3}}
  %y = bf16[1024,1024]{1,0} fusion(%x, %near), kind=kOutput, calls=%product
  %sum = bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)} all-reduce-done(%sum-start)
  %kernel.7 = bf16[1024,1024]{1,0} custom-call(%y), custom_call_target="tpu_custom_call", metadata={op_name="ATTENTION"}
  %z = bf16[1024,1024]{1,0} fusion(%kernel.7), kind=kLoop, calls=%turned
  ROOT %out = bf16[1024,1024]{1,0} add(%z, %z)
}
""".replace('DOT', f'metadata={{op_name="{REMAT}/glu/dot_general"}}')
).replace('ATTENTION', 'jit(train)/jvp(attention)/pallas_call')
MIB = 2**20
V5E = parse('v5e:2x2')


class Cycles:
    def of(self, kernel):
        return 1.5e6 if kernel.name == 'kernel.7' else None


def test_each_instruction_takes_the_time_of_its_bottleneck():
    program = HloProgram(PROGRAM)
    found = {c.name: c for c in costs(program, V5E, Cycles())}
    product = 2 * 1024 * 1024 * 2048
    assert found['y'].flops == product
    # It reads x, the product and the array that was copied on chip for it; the products take less time.
    assert found['y'].bytes == (4 + 2 + 4) * MIB
    assert found['y'].seconds == pytest.approx(max(10 * MIB / 819e9, product / 197e12))
    assert (found['y'].part, found['y'].recomputed) == ('FFN', True)
    assert found['kernel.7'].seconds == pytest.approx(1.5e6 / V5E.chip.clock)
    assert (found['kernel.7'].part, found['kernel.7'].recomputed) == ('attention core', False)
    assert (found['z'].part, found['out'].part) == ('layouts, layer scan', 'optimizer')
    assert 'ahead' not in found
    # A ring of 4 sends 6 MiB for these 4 MiB, at 100 GB/s. The time of the product overlaps.
    waits = 1.5 * 4 * MIB / 100e9 - found['y'].seconds
    assert found['sum'].seconds == pytest.approx(waits)
    assert found['sum'].part == 'collectives'


def test_an_array_copied_on_chip_in_parts_is_charged_to_its_reader():
    half = '(bf16[2048,1024]{1,0}), bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}'
    parts = '\n'.join(
        f'  %part.{i} = ({half}) slice-start(%w), slice={{[{1024 * i}:{1024 * (i + 1)}], [0:1024]}}\n'
        f'  %half.{i} = bf16[1024,1024]{{1,0:T(8,128)(2,1)S(1)}} slice-done(%part.{i})'
        for i in range(2)
    )
    whole = (
        '  %near = bf16[2048,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%half.0, %half.1), '
        'custom_call_target="ConcatBitcast"'
    )
    lines = [line for line in PROGRAM.splitlines() if '%ahead =' not in line]
    text = '\n'.join(f'{parts}\n{whole}' if '%near =' in line else line for line in lines)
    found = {c.name: c for c in costs(HloProgram(text), V5E, None)}
    assert found['y'].bytes == (4 + 2 + 4) * MIB
    assert 'near' not in found


@pytest.mark.parametrize(('shape', 'part'), [('8,128', 'FFN'), ('8192,2048', 'collectives')])
def test_a_collective_fused_with_products_costs_extra_only_if_it_takes_longer(shape, part):
    inside = (
        f'  %part = bf16[{shape}]{{1,0}} all-gather(%p0), channel_id=9, replica_groups={{{{0,1,2,3}}}}\n  ROOT %dot = '
    )
    alone = [line for line in PROGRAM.splitlines() if '%sum' not in line]
    fused = '\n'.join(alone).replace('  ROOT %dot = ', inside)
    found = {c.name: c for c in costs(HloProgram(fused), V5E, None)}
    assert found['y'].part == part


def test_products_hide_a_collective_that_the_compiler_spreads_over_fusions():
    gather = (
        '  %whole = bf16[4096,1024]{1,0} all-gather(%p0), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, '
        'frontend_attributes={chain_id="3"}\n'
    )
    spread = ''.join(
        f'%{name} (p0: bf16[1024,1024]) -> bf16[4096,1024] {{\n  %p0 = bf16[1024,1024]{{1,0}} parameter(0)\n{gather}'
        f'  ROOT %c = bf16[4096,1024]{{1,0:T(8,128)(2,1)S(1)}} custom-call(%whole), '
        f'custom_call_target="{target}"\n}}\n\n'
        for name, target in (('begins', 'AsyncCollectiveStart'), ('is_done', 'AsyncCollectiveDone'))
    )
    result = 'bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} fusion'
    lines = [line for line in PROGRAM.splitlines() if '%sum' not in line]
    text = '\n'.join(lines).replace('ENTRY', f'{spread}ENTRY')
    text = text.replace('  %y =', f'  %begin = {result}(%w), kind=kCustom, calls=%begins\n  %y =')
    text = text.replace('  %kernel.7', f'  %done = {result}(%begin), kind=kCustom, calls=%is_done\n  %kernel.7')
    found = {c.name: c for c in costs(HloProgram(text), V5E, None)}
    # Three quarters of 8 MiB at 100 GB/s, less the time of the 4 MiB that the start reads and of the products.
    waits = 0.75 * 8 * MIB / 100e9 - 4 * MIB / 819e9 - found['y'].seconds
    assert found['done'].seconds == pytest.approx(waits)
    assert found['done'].part == 'collectives'


def test_slices_wait_for_each_other():
    program = HloProgram(SLICES)
    found = {c.name: c for c in costs(program, parse('2*v5e:2x4'), None)}
    # 4 KiB leave and 4 KiB arrive while the transfer is under way.
    assert found['received'].seconds == pytest.approx(4096 / 3.125e9 - 2 * 4096 / 819e9, rel=0.01)
    assert {found[name].part for name in ('near', 'send', 'recv', 'received', 'whole')} == {'collectives'}
    assert 'received' not in {c.name for c in costs(program, parse('2*v4:2x2x2'), None)}


def test_parts_are_sums_and_every_byte_counts():
    program = HloProgram(PROGRAM)
    time = step_time(program, V5E, Cycles())
    found = list(costs(program, V5E, Cycles()))
    assert time.seconds == pytest.approx(sum(c.seconds for c in found))
    assert time.recomputed_seconds == pytest.approx(sum(c.seconds for c in found if c.recomputed))
    assert sum(c.bytes for c in found) == hbm_bytes(program)
    assert time.unknown_kernels == ()


def test_a_kernel_without_schedule_costs_its_traffic():
    program = HloProgram(PROGRAM)
    time = step_time(program, V5E, None)
    assert time.unknown_kernels == ('kernel',)
    (kernel,) = (c for c in costs(program, V5E, None) if c.is_kernel)
    assert kernel.seconds == pytest.approx(4 * MIB / 819e9)


def test_upper_figures_take_the_estimates_of_xla_where_these_are_longer():
    config = ', backend_config={"estimated_cycles":"%s","other":"1"}'
    given = {'%z =': 3e6, '%y =': 1, '%kernel.7 =': 9e6, '%ahead =': 2e6}
    lines = [
        line + ''.join(config % f'{cycles:.0f}' for name, cycles in given.items() if name in line)
        for line in PROGRAM.splitlines()
    ]
    program = HloProgram('\n'.join(lines))
    found = {c.name: c for c in costs(program, V5E, Cycles())}
    assert found['z'].upper_seconds == pytest.approx(3e6 / V5E.chip.clock)
    assert found['z'].upper_seconds > found['z'].seconds
    for name in ('y', 'kernel.7', 'sum', 'out'):  # a short estimate, a kernel, a collective, none
        assert found[name].upper_seconds == found[name].seconds
    model = step_time(program, V5E, Cycles())
    assert model.upper_seconds - model.seconds == pytest.approx(
        found['z'].upper_seconds - found['z'].seconds + 2e6 / V5E.chip.clock
    )
    assert found['ahead'].seconds == 0.0


def test_scopes_are_read_through_transformations():
    assert scopes('jit(train)/transpose(jvp(embedding))/mul') == ['embedding']
    assert scopes('jit(train)/jvp()/while/body/closed_call/attention/sketches/add') == ['attention', 'sketches']
    assert scopes('jit(train)/jvp()/attention_core/add') == []
