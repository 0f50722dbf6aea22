"""`lm demo`: its figures, sentences and files. No test depends on how long anything takes."""

import json

import pytest

from lm.attention import HeadDims
from lm.bench import demo
from lm.bench.attention import LayerRow, find_costs
from lm.bench.results import ContextFigure

ROW = LayerRow('softmax', 512, 'forward+backward', 16, False, 100.0, 90.0, 120.0, cpu_milliseconds=64.0)


def test_on_a_cpu_processor_time_counts():
    assert find_costs([ROW], of_processor=True) == [ContextFigure(512, *[1e3 * 64 / 8192] * 3)]
    assert find_costs([ROW]) == [ContextFigure(512, *(1e3 * ms / 8192 for ms in (100, 90, 120)))]


def test_a_sentence_says_how_the_time_grows():
    points = [ContextFigure(512, 7.8, 7.8, 7.8), ContextFigure(8192, 60.1, 60.1, 60.1)]
    assert demo.describe_growth('softmax', points, True) == (
        'softmax: 60.1 µs per token at 8,192 tokens, 7.7 times the processor time at 512'
    )


@pytest.mark.slow  # it compiles six programs
def test_the_figures_are_printed_written_and_drawn(tmp_path, capsys):
    demo.show_costs(str(tmp_path / 'demo'), contexts=(16, 32), dims=HeadDims(2, 2, 8), repeats=1)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / 'demo' / 'demo.json').read_text())
    names = {row['mechanism'] for row in found['rows']}
    assert len(names) == 3
    assert all(f'\n{name}: ' in printed for name in names)
    assert f'The picture: {tmp_path / "demo" / "demo.png"}' in printed
    assert (tmp_path / 'demo' / 'demo.png').read_bytes()[:4] == b'\x89PNG'
