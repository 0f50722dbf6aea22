"""Static schedules in libtpu's dump, and the blocks of a kernel's grid that are skipped."""

import pytest

from lm.cost_model import schedules
from lm.errors import ConfigError


def test_schedules_are_read_from_the_dump(tmp_path):
    lines = ['', 'MATMUL, VALU, VSTORE:SPILL', '4 4 1', '== UTILIZATION:', '4 0 0', '0 2 1', '2 2 0', '0 0 0']
    prefix = '17-jvp_some_kernel_.1-0'
    (tmp_path / f'{prefix}2-final_hlo-static-per-bundle-utilization.txt').write_text('\n'.join(lines))
    product = '13 = vmatmul.msk.bf16.gmra.mxu0 %v1'
    (tmp_path / f'{prefix}4-final_bundles.txt').write_text(
        f'  0  : > {{ %{product} }}\n  0x1 PF: > {{ }}\n  0x2  : > {{ %{product} ;; %{product} }}\n0x3 LB: > {{ }}\n'
    )
    whole = schedules.read_schedule(str(tmp_path), 'some_kernel')
    assert (whole.bundles, whole.use('MATMUL'), whole.count('VSTORE:SPILL')) == (4, 6 / 16, 1)
    longest = schedules.read_schedule(str(tmp_path), 'some_kernel', longest=True)
    assert (longest.bundles, longest.use('VALU')) == (2, 0.5)
    # 16 rows per product, four units: the units take the three products in 12 cycles, and two of them in 8.
    assert (whole.rows, whole.cycles, whole.matrix_use) == (48, 12.0, 1.0)
    assert (longest.rows, longest.cycles) == (32, 8.0)
    with pytest.raises(ConfigError, match='other'):
        schedules.read_schedule(str(tmp_path), 'other')


def test_cycles_are_bundles_where_matrix_units_keep_up():
    schedule = schedules.KernelSchedule(bundles=40, rows=80, units={})
    assert (schedule.cycles, schedule.matrix_use) == (40, 0.5)


@pytest.mark.parametrize(
    ('grid', 'share'),
    [
        ((4, 4), 10 / 16),
        ((8, 4), (2 * (1 + 2 + 3 + 4)) / 32),  # blocks of keys are twice as long, on either axis first
        ((4, 8), (2 * (1 + 2 + 3 + 4)) / 32),
    ],
)
def test_blocks_above_the_diagonal_are_skipped(grid, share):
    assert schedules.causal_share(*grid) == share


@pytest.mark.parametrize(
    ('parallel', 'steps'),
    [((True, True), 8), ((True, False), 10), ((False, True), 9), ((False, False), 15)],
)
def test_cores_share_the_parallel_axes_of_a_grid(parallel, steps):
    grid = schedules.Grid((3, 5), parallel)
    assert (grid.steps_of_a_core(1), grid.steps_of_a_core(2)) == (15, steps)
