"""Bytes between HBM and the core, held to programs that can be counted by hand."""

from test_program import PROGRAM

from lm.compiled.program import HloProgram
from lm.compiled.traffic import hbm_bytes


def test_traffic_of_a_program_that_can_be_counted_by_hand():
    row = 128 * 4
    reads_a_row, copies_it, writes_a_row, counter = 2 * row, row, row, 3 * 4 + 2 * 4
    assert hbm_bytes(HloProgram(PROGRAM)) == 4 * (reads_a_row + copies_it + writes_a_row + counter)
