"""The hours and the memory in headers of experiments are what `lm check` computes."""

import re
import runpy

import pytest
import tiny
from shipped import EXPERIMENTS, name_of

SCRIPT = runpy.run_path(str(tiny.ROOT / 'scripts/update_headers.py'))
TOLD = [path for path in EXPERIMENTS if 'GiB; so small' not in path.read_text() and SCRIPT['read_line'](path)]
COMPILED = ('table_1_c4/small.gin', 'table_2_pg19/kernel.gin')
"""Files whose step is compiled: each takes a minute. `scripts/update_headers.py` renews all."""


def numbers(line: str) -> list[float]:
    return [float(number.replace(',', '')) for number in re.findall(r'\d[\d,]*\.?\d*', line.partition('lm check')[2])]


@pytest.mark.slow  # compiles a step
@pytest.mark.parametrize('path', [path for path in TOLD if str(path).endswith(COMPILED)], ids=name_of)
def test_a_header_says_what_lm_check_computes(path):
    told, found = SCRIPT['read_line'](path), SCRIPT['compute_line'](path)
    assert re.sub(r'\d', '', told).split() == re.sub(r'\d', '', found).split(), 'python scripts/update_headers.py'
    assert numbers(told) == pytest.approx(numbers(found), rel=0.03, abs=0.11), 'python scripts/update_headers.py'


def test_headers_have_one_form():
    assert len(TOLD) > 15
    form = (
        r': at least [\d.]+ (hours|minutes), predicted [\d.]+ (hours|minutes), [\d.,]+ chip-hours, for [\d,]+ steps; '
    )
    unlike = [path for path in TOLD if not re.search(form, SCRIPT['read_line'](path))]
    assert [name_of(path) for path in unlike if 'was not compiled' not in SCRIPT['read_line'](path)] == []


def test_a_line_has_the_bound_and_the_prediction():
    check = {
        'speed': {'run_hours': 11.26, 'run_chip_hours': 360.2},
        'predicted': {'run_hours': 21.63, 'run_chip_hours': 692.1},
        'memory': {'needed_gib': 24.46, 'limit_gib': 30.75},
    }
    text = SCRIPT['describe'](check, 125_000)
    assert text == ('at least 11.3 hours, predicted 21.6 hours, 692 chip-hours, for 125,000 steps; 24.5 of 30.8 GiB')
    less = SCRIPT['describe'](check | {'predicted': None}, 60)
    assert less == 'at least 11.3 hours, 360 chip-hours, for 60 steps; 24.5 of 30.8 GiB'
