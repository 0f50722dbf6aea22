"""The queue of measurements: order, time limits, results, tables; the rows of the project in their tiny form."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny

MEASURE = tiny.ROOT / 'scripts' / 'measure.py'
SPEC = importlib.util.spec_from_file_location('measure', MEASURE)
measure = sys.modules['measure'] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(measure)

PACK = tiny.ROOT / '.gpu_pack'
ROWS = measure.read_rows(measure.ROWS)


def write_rows(folder: pathlib.Path, **rows: dict) -> pathlib.Path:
    """Writes rows, each with defaults for the fields that it leaves out."""
    defaults = {
        'purpose': 'A test', 'part': 'tests', 'minutes': 0.01, 'gpu_gib': 0, 'alone': False, 'value': 1, 'needs': [],
        'tiny': 'true',
    }  # fmt: skip
    lines = []
    for name, fields in rows.items():
        lines.append(f'[{name}]')
        lines += [f'{key} = {json.dumps(value)}' for key, value in (defaults | fields).items()]
    folder.mkdir(exist_ok=True)
    (folder / 'rows.toml').write_text('\n'.join(lines))
    return folder


def run(tmp_path: pathlib.Path, *arguments: str, minutes: float = 0.5, **rows: dict):
    """Runs a day of rows; returns (the finished process, row → result in the order of their ends)."""
    folder, out = write_rows(tmp_path / 'rows', **rows), tmp_path / 'out'
    places = ['--rows', str(folder), '--results', str(tmp_path / 'kept.jsonl'), '--pack', str(tmp_path / 'pack')]
    done = subprocess.run(
        [sys.executable, str(MEASURE), '--minutes', str(minutes), '--out', str(out), *places, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )
    return done, {result['row']: result for result in measure.read_results(out / 'results.jsonl')}


def test_rows_run_by_value_and_those_that_measure_times_run_last(tmp_path):
    done, results = run(
        tmp_path,
        timed={'command': 'echo \'{"x": 1}\' > $RESULT', 'alone': True, 'value': 9},
        low={'command': 'printf \'{"x": 1}\\n{"x": 2}\\n{"x"\' > $RESULT', 'value': 1},
        high={'command': 'sleep 0.3', 'value': 5},
        fails={'command': 'echo broken; (exit 3); echo not reached', 'value': 3},
    )
    assert done.returncode == 1, done.stderr
    assert list(results)[-1] == 'timed'
    assert results['timed']['beside'] == []
    assert results['timed']['result'] == {'x': 1}
    assert results['low']['result'] == [{'x': 1}, {'x': 2}]
    assert 'high' in results['low']['beside']
    assert results['fails']['code'] == 3
    assert results['fails']['tail'] == 'broken\n'
    assert 'broken' in (tmp_path / 'out' / 'log.txt').read_text()
    assert {'device', 'driver', 'versions', 'commit', 'date', 'seconds', 'command'} <= set(results['high'])


def test_rows_end_with_the_time_and_their_children_too(tmp_path):
    begun, mark = time.monotonic(), tmp_path / 'mark'
    done, results = run(
        tmp_path,
        minutes=0.05,
        long={'command': f'(sleep 9; touch {mark}) & echo \'{{"a": 1}}\' >> $RESULT; sleep 9', 'value': 2},
        too_long={'command': 'true', 'minutes': 5},
        least={'command': 'true', 'minutes': 5, 'least': 0.01},
    )
    assert time.monotonic() - begun < 8
    assert results['long']['killed']
    assert results['long']['result'] == {'a': 1}
    assert 'too_long' not in results
    assert 'too_long | no time left' in done.stdout
    assert results['least']['code'] == 0
    time.sleep(max(0, begun + 11 - time.monotonic()))
    assert not mark.exists()


def test_a_row_with_a_good_result_waits_for_its_next_version(tmp_path):
    good = {'row': 'a', 'version': 1, 'code': 0, 'device': 'H'}
    (tmp_path / 'kept.jsonl').write_text('\n'.join(json.dumps(good | more) for more in ({}, {'row': 'c', 'code': 1})))
    rows = {name: {'command': 'true'} for name in 'abc'}
    assert set(run(tmp_path, **rows)[1]) == {'b', 'c'}
    newer = measure.read_rows(write_rows(tmp_path / 'rows', a={'command': 'true', 'version': 2}))
    assert [row.name for row in measure.choose(newer, [good], None)] == ['a']
    named = measure.read_rows(write_rows(tmp_path / 'rows', **rows))
    assert [row.name for row in measure.choose(named, [good], ['a'])] == ['a']


def test_a_row_without_its_pack_is_left_out(tmp_path):
    done, results = run(tmp_path, a={'command': 'true', 'needs': ['wheels', 'text']})
    assert not results
    assert 'a: left out, it needs' in done.stdout


def test_results_are_merged_once(tmp_path):
    rows = write_rows(tmp_path / 'rows', a={'command': 'x', 'shows': ['an operation: pallas_gpu']})
    page, kept = tmp_path / 'page.md', tmp_path / 'kept.jsonl'
    page.write_text('<!-- queue -->\n<!-- end of queue -->\ntext\n<!-- occasions -->\nold\n<!-- end of occasions -->\n')
    result = {
        'row': 'a', 'version': 1, 'part': 'tests', 'date': '2026-11-27 06:00:00', 'device': 'H100', 'driver': '580',
        'commit': 'c', 'versions': {'jax': '0.11.2'}, 'code': 0, 'killed': False, 'seconds': 2.0, 'result': None,
    }  # fmt: skip
    (tmp_path / 'new.jsonl').write_text(json.dumps(result) + '\n')
    for _ in range(2):
        assert measure.merge(tmp_path / 'new.jsonl', kept, page, tmp_path / 'shown.json', measure.read_rows(rows)) == 0
        assert measure.read_results(kept) == [result]
        assert '| `a` | tests | A test | 0.01 | no | 2026-11-27, H100: good, 2.0 s |' in page.read_text()
        assert '| 2026-11-27 | H100 | 580 | c | jax 0.11.2 | 1 | 0 | 0 |' in page.read_text()
        assert 'old' not in page.read_text()
    assert json.loads((tmp_path / 'shown.json').read_text()) == {'an operation: pallas_gpu': 'a, 2026-11-27, H100'}


def test_the_record_of_kernels_is_what_the_results_show():
    """`lm.ops.platform` reads it: an automatic choice takes no other kernels."""
    assert json.loads(measure.SHOWN.read_text()) == measure.find_shown(ROWS, measure.read_results(measure.RESULTS))


def test_kernels_are_shown_by_good_results_of_the_present_version(tmp_path):
    folder = write_rows(tmp_path, a={'command': 'x', 'version': 2, 'shows': ['x: k']}, b={'command': 'x'})
    rows = measure.read_rows(folder)
    good = {'row': 'a', 'version': 2, 'date': '2026-11-27 06', 'device': 'H100', 'code': 0, 'result': None}
    assert measure.find_shown(rows, [good]) == {'x: k': 'a, 2026-11-27, H100'}
    for change in ({'code': 1}, {'version': 1}, {'device': 'cpu'}, {'tiny': True}, {'row': 'gone'}):
        assert measure.find_shown(rows, [good | change]) == {}
    compared = [
        {'kernels': 'x: k, y: l', 'right': True},
        {'kernels': 'x: m', 'right': False},
        {'kernels': '–', 'right': True},
    ]
    precision = good | {'row': 'b', 'version': 1, 'code': 1, 'result': {'benchmark': 'precision', 'rows': compared}}
    assert set(measure.find_shown(rows, [precision])) == {'x: k', 'y: l'}


def test_rows_that_were_stopped_have_not_failed():
    result = {'date': '2026-11-27 06:00:00', 'device': 'H100', 'driver': '580', 'commit': 'c', 'versions': {}}
    ends = [{'code': -15, 'killed': True}, {'code': 1, 'killed': False}, {'code': 0, 'killed': False}]
    assert measure.make_occasions([result | end for end in ends]).splitlines()[-1].endswith('| 3 | 1 | 1 |')


def test_a_missing_file_of_results_is_an_error(tmp_path, capsys):
    source, *written = (tmp_path / name for name in ('typo.jsonl', 'kept.jsonl', 'page.md', 'shown.json'))
    assert measure.merge(source, *written, []) == 2
    assert 'no such file' in capsys.readouterr().err
    assert not (tmp_path / 'kept.jsonl').exists()


def test_a_result_of_the_tiny_form_does_not_close_a_row(tmp_path):
    _, results = run(tmp_path, '--tiny', a={'command': 'false', 'tiny': 'true'})
    assert results['a']['code'] == 0
    full = {name: value for name, value in results['a'].items() if name != 'tiny'}
    on_gpu = [found | {'device': 'H200'} for found in (results['a'], full)]
    rows = measure.read_rows(tmp_path / 'rows')
    assert [[row.name for row in measure.choose(rows, [found], None)] for found in on_gpu] == [['a'], []]


def test_a_day_that_is_stopped_leaves_nothing_running(tmp_path):
    folder, out = (
        write_rows(tmp_path / 'rows', a={'command': f'echo $$ > {tmp_path}/pid; sleep 60; true'}),
        tmp_path / 'out',
    )
    places = ['--rows', str(folder), '--results', str(tmp_path / 'kept.jsonl'), '--pack', str(tmp_path / 'pack')]
    started = subprocess.Popen([sys.executable, str(MEASURE), '--minutes', '2', '--out', str(out), *places])
    until = time.monotonic() + 60
    while not ((tmp_path / 'pid').exists() and (tmp_path / 'pid').read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.05)
    started.terminate()
    assert started.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / 'pid').read_text()), 0)
    (result,) = measure.read_results(out / 'results.jsonl')
    assert result['killed']


def test_data_that_cannot_be_packed_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, 'ROOT', tmp_path)
    for name, said in {
        'stody_store': 'there are corpus',
        'study_store': 'lm prepare --gin_file .*study.gin makes it',
    }.items():
        with pytest.raises(SystemExit, match=said):
            measure.make_pack(tmp_path / 'pack', [name])
    for part, command in measure.DATA.values():
        assert 'data/' in part or 'build/' in part
        assert all((tiny.ROOT / word).exists() for word in command.split() if word.endswith(('.gin', '.py')))


def test_a_mistake_in_a_row_is_one_line(tmp_path):
    folder = write_rows(tmp_path / 'rows', a={'command': 'x', 'minute': 3})
    with pytest.raises(SystemExit, match=r"rows.toml: \[a\]: .*'minute'"):
        measure.read_rows(folder)


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.name)
def test_rows_are_complete(row):
    assert row.command
    assert row.tiny
    assert row.purpose
    assert 0 < row.minutes <= 9
    assert 0 < row.gpu_gib <= 76
    assert '/tmp/' not in row.command


def test_the_page_shows_the_queue():
    table = measure.make_queue(ROWS, measure.read_results(measure.RESULTS))
    assert table in measure.PAGE.read_text(), 'run scripts/measure.sh --merge /dev/null'


@pytest.mark.slow
@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.name)
def test_rows_in_tiny_form(row, tmp_path):
    if not all(name == 'wheels' or list(PACK.glob(f'{name}*')) for name in row.needs):
        pytest.skip('needs a pack that is not here')
    variables = measure.unpack(tmp_path, tmp_path) | {
        'JAX_PLATFORMS': 'cpu',
        'RESULT': str(tmp_path / 'result.json'),
        'SECONDS_LEFT': '60',
        'PACK': str(PACK),
    }
    done = subprocess.run(
        ['bash', '-eo', 'pipefail', '-c', row.tiny], cwd=tiny.ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert measure.read_result(tmp_path / 'result.json')


def test_a_result_with_another_checksum_is_refused(tmp_path, capsys):
    """Notebooks on TPUs write one, because people send their files by hand."""
    result = {'row': 'tpu_step', 'date': '2026-12-01', 'device': '1 × TPU v5 lite', 'sha256': '0' * 64}
    source, kept = tmp_path / 'tpu_result.jsonl', tmp_path / 'results.jsonl'
    source.write_text(json.dumps(result) + '\n')
    assert measure.merge(source, kept, tmp_path / 'page.md', tmp_path / 'shown.json', []) == 2
    assert 'tpu_step has another checksum than its figures; send the file again' in capsys.readouterr().err
    assert not kept.exists()
