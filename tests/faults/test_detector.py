"""The detector of wrong chips: one fault and one layout by default; the whole table and all mechanisms are slow."""

import detector
import pytest


@pytest.fixture(autouse=True)
def _small_matrices_are_shared(monkeypatch):
    monkeypatch.setattr('lm.pod.mesh.MIN_SHARDED_SIZE', 1)


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, id=case.name, marks=[] if 'optimizer' in case.name else pytest.mark.slow)
        for case in detector.CASES
    ],
)
def test_faults_are_found_and_named(case):
    row, is_right = detector.try_case(case, tries=2)
    assert is_right, row


@pytest.mark.parametrize(
    ('form', 'layout'),
    [
        ('performer', 'data 2, redrawn projections'),
        *(
            pytest.param(form, layout, marks=pytest.mark.slow)
            for form in detector.MECHANISMS
            for layout in detector.LAYOUTS
        ),
    ],
)
def test_sound_chips_raise_no_alarm(form, layout):
    assert detector.count_alarms(detector.MECHANISMS[form], detector.LAYOUTS[layout], steps=5) == 0


@pytest.mark.slow
def test_a_replay_costs_about_one_microbatch():
    """Measured at 0.97 and 1.04; the limits leave room for a busy machine, where calls of a few milliseconds vary."""
    assert 0.3 < detector.measure_cost(repeats=7) < 3
