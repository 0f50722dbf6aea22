"""The bound of a step whose program can be counted partly, or not at all."""

from test_program import PROGRAM, SLICES

from lm.cost_model.roofline import roofline
from lm.hardware import parse


def test_a_loop_of_unknown_length_has_at_least_the_arithmetic_of_the_model():
    text = PROGRAM.replace('%end = s32[] constant(10)', '%end = s32[] custom-call()')
    bound = roofline(text, parse('v5e:2x2'), least_flops=7e12)
    assert 'decided at run time' in bound.notes[0]
    assert bound.hardware_teraflops == 7
    assert roofline(PROGRAM, parse('v5e:2x2'), least_flops=7e12).hardware_teraflops == 0


def test_collectives_are_summed_by_kind():
    (found,) = roofline(PROGRAM, parse('v5e:2x2')).collectives
    assert (found.kind, found.times_per_step) == ('all-reduce', 4)
    assert found.gigabytes_sent_per_device == 4 * 1.5 * 512 / 1e9


def test_transfers_between_slices_take_time_if_their_speed_is_known():
    bound = roofline(SLICES, parse('2*v5e:2x4'))
    assert bound.dcn_gigabytes == 4096 / 1e9
    assert bound.dcn_seconds == bound.seconds == 4096 / 3.125e9
    assert bound.bound_by == 'DCN'
    unknown = roofline(SLICES, parse('2*v4:2x2x2'))
    assert (unknown.dcn_gigabytes, unknown.dcn_seconds) == (4096 / 1e9, None)
    assert unknown.bound_by == 'ICI'
    alone = roofline(PROGRAM, parse('v5e:2x2'))
    assert (alone.dcn_gigabytes, alone.dcn_seconds) == (0.0, 0.0)


def test_a_program_that_cannot_be_read_has_the_bound_of_the_model():
    bound = roofline('', parse('v7x:2x2x1'), least_flops=2307e12 / 2)
    assert (bound.seconds, bound.bound_by, bound.collectives) == (1.0, 'compute', ())
    assert 'cannot read' in bound.notes[0]
