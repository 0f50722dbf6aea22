"""`lm report`: its tables hold the runs' measurements, its pictures show them, and the paper's numbers are right."""

import ast
import collections
import csv
import dataclasses
import itertools
import json
import math
import pathlib
import re
import shutil
import sys
import types

import matplotlib.figure
import matplotlib.layout_engine
import numpy as np
import pytest
import tiny
from made_up_runs import evaluate, write_run

from lm import plots as figures
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.config.configurable import REGISTRY
from lm.report import paper
from lm.report.curves import (
    BINS,
    FEWEST_TOKENS,
    Series,
    describe_settings,
    find_differing_bindings,
    find_token_range,
    make_loss_curve,
    make_series,
)
from lm.report.measures import Measures
from lm.report.pictures import Pictures
from lm.report.published import load_tables
from lm.report.report import Report
from lm.runs import records
from lm.runs.records import Run, find_runs
from lm.tasks.selective_copying import SelectiveCopying


def table(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def png_size(path: pathlib.Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_a_real_run(reference_run, tmp_path, capsys):
    # The copy leaves out evaluations of other tests: a file of `lm evaluate` counts more than the periodic evaluation.
    run = shutil.copytree(reference_run[0], tmp_path / 'run', ignore=shutil.ignore_patterns('evaluations'))
    assert main(['report', str(run), '--out', str(tmp_path / 'out')]) == 0
    printed = capsys.readouterr().out
    (row,) = table(tmp_path / 'out' / 'runs.csv')
    assert float(row['loss']) == tiny.losses(run, 'eval')[40]
    assert float(row['train_loss']) == tiny.losses(run)[40]
    assert int(row['parameters']) == json.loads((run / 'run.json').read_text())['parameters']
    assert f'{math.exp(float(row["loss"])):.3f}' in printed
    text = (tmp_path / 'out' / 'report.md').read_text()
    assert str(run) in text
    pictures = re.findall(r'\]\((.+\.png)\)', text)
    assert pictures == ['loss.png', 'position.png', 'perplexity_steps.png', 'speed_steps.png'], (
        'curves, not single dots'
    )
    for name in pictures:
        width, height = png_size(tmp_path / 'out' / name)
        assert width == round(figures.WIDTH * 300)
        assert 200 < height < 1500
        assert (tmp_path / 'out' / name).with_suffix('.pdf').read_bytes()[:4] == b'%PDF'
    assert not (tmp_path / 'out' / 'paper.csv').exists(), 'a context of 32 is not in the paper'


def test_a_changed_digit_of_metrics_is_named_with_its_run_lines_and_step(reference_run, tmp_path, capsys):
    for name in ('sound', 'changed', 'cut'):
        ignored = shutil.ignore_patterns('evaluations', 'compiled')
        shutil.copytree(reference_run[0], tmp_path / 'runs' / name, ignore=ignored)
    metrics = tmp_path / 'runs' / 'changed' / 'metrics.jsonl'
    lines = metrics.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"loss": ', '"loss": 1')
    metrics.write_text(''.join(lines))
    (tmp_path / 'runs' / 'cut' / 'metrics.jsonl').write_text(''.join(lines[:2]))
    assert main(['report', str(tmp_path / 'runs'), '--out', str(tmp_path / 'out'), '--no_pictures']) == 0
    printed = capsys.readouterr().out
    changed = r'in metrics.jsonl one of its lines 1 to \d+ has changed since the checkpoint of step \d+ was saved'
    for text in (printed, (tmp_path / 'out' / 'report.md').read_text().replace('\\', '')):
        assert re.search(f'changed: {changed}: its figures here may be wrong', text)
        assert re.search(r'cut: in metrics.jsonl \d+ of the \d+ lines .* are gone \(step \d+\)', text)
        assert 'sound: in metrics' not in text
    assert 'has changed since the checkpoint' in (tmp_path / 'out' / 'report.html').read_text()


def test_seeds_and_contexts_are_one_series(tmp_path):
    for name, attention, quality in (('s', Softmax(), 0.0), ('p', Polysketch(), 0.05)):
        for context in (512, 2048):
            for seed in (0, 1):
                write_run(tmp_path / f'{name}{context}-{seed}', attention, context=context, seed=seed, quality=quality)
    runs = find_runs([str(tmp_path)])
    first, second = make_series(runs)
    assert (first.label, len(first.runs)) == ('Softmax', 4)
    assert (second.label, len(second.runs)) == ('Polysketch (learned + local, r = 32)', 4)
    assert [run.value('train.seed') for run in first.at(512)] == [0, 1]

    assert main(['report', str(tmp_path / '*'), '--out', str(tmp_path / 'out')]) == 0
    shown = {path.stem for path in (tmp_path / 'out').glob('*.png')}
    assert shown == {'loss_512', 'loss_2048', 'position_512', 'position_2048', 'perplexity_context', 'speed_context'}
    points = [row for row in table(tmp_path / 'out' / 'curves.csv') if row['picture'] == 'perplexity_context']
    assert [(p['series'], float(p['x'])) for p in points] == [
        (label, context) for label in ('Softmax', second.label) for context in (512, 2048)
    ]
    measured = [run.last_evaluation['perplexity'] for run in first.at(512)]
    assert float(points[0]['y']) == pytest.approx(np.mean(measured))


def test_a_run_counts_once_whatever_path_leads_to_it(tmp_path):
    write_run(tmp_path / 'runs' / 'a', Softmax())
    (tmp_path / 'linked').symlink_to('runs')
    (tmp_path / 'paper').symlink_to('runs/a')
    ways = ['paper', 'linked', 'runs/a', 'runs', 'linked/../runs/*']
    assert [run.name for run in find_runs([str(tmp_path / way) for way in ways])] == ['paper']


def test_other_differences_make_another_series(tmp_path):
    write_run(tmp_path / 'a', Softmax(), steps=100)
    write_run(tmp_path / 'b', Softmax(), steps=200)
    write_run(tmp_path / 'c', Softmax(window=64), steps=100)
    write_run(tmp_path / 'd', Performer(block=128), steps=100)
    write_run(tmp_path / 'e', Performer(block=256), steps=100, data='other/wiki40b')
    assert [s.label for s in make_series(find_runs([str(tmp_path)]))] == [
        'Softmax, steps 100',
        'Softmax, steps 200',
        'Performer (2048 features), path pg19, block 128, steps 100',
        'Performer (2048 features), path wiki40b, block 256, steps 100',
        'softmax (window 64), steps 100',
    ]


def test_a_default_that_config_gin_leaves_out_makes_another_series(tmp_path):
    """The options of layers are left out at their default: a run with one and a run without it are two series."""
    write_run(tmp_path / 'plain', Softmax(), steps=100)
    write_run(tmp_path / 'normed', Softmax(qk_norm=True), steps=100)
    write_run(tmp_path / 'half', Softmax(rotary_fraction=0.5), steps=100)
    labels = {s.label for s in make_series(find_runs([str(tmp_path)]))}
    assert labels == {'Softmax', 'Softmax, rotary fraction 0.5', 'Softmax, qk norm True'}


def test_of_many_settings_only_those_that_few_runs_have_are_named(tmp_path):
    """One run per option: the labels would else repeat all options of all runs."""
    options = {'rope': {'rotary_fraction': 0.5}, 'norm': {'qk_norm': True}, 'key': {'key_offset': 0.25}}
    options |= {'plain': {}, 'window': {'window': 64}, 'cap': {'score_cap': 30.0}, 'gate': {'gate': True}}
    for name, option in options.items():
        write_run(tmp_path / name, Softmax(**option), steps=100)
    runs = find_runs([str(tmp_path)])
    labels = {run.name: label for run in runs for label in describe_settings(run, runs, find_differing_bindings(runs))}
    assert labels == {
        'rope': 'rotary fraction 0.5',
        'norm': 'qk norm True',
        'key': 'key offset 0.25',
        'window': 'window 64',
        'cap': 'score cap 30.0',
        'gate': 'gate True',
    }
    report = Report(runs, tmp_path / 'out', None, 'none')
    header, _, *rows = report.make_run_table().to_markdown().splitlines()
    assert '| settings that few runs have |' in header
    assert any(row.startswith('| key | softmax (key_offset 0.25) | key offset 0.25 |') for row in rows)
    assert any(row.startswith('| plain | softmax | – |') for row in rows)


def test_settings_of_one_name_have_pictures_of_their_own(tmp_path):
    for block in (16, 32, 64):
        write_run(tmp_path / f'p{block}', Polysketch(block=block), steps=100)
        write_run(tmp_path / f'f{block}', Performer(block=block), steps=100)
    made = Pictures(find_runs([str(tmp_path)]), Measures()).made
    assert {p.name for p in made if 'block' in p.name} == {'perplexity_polysketch_block', 'perplexity_performer_block'}


def test_paths_with_equal_ends_have_different_labels(tmp_path):
    for name, data in (('a', 'data/one/tokens'), ('b', 'data/two/tokens'), ('c', 'data/other')):
        write_run(tmp_path / name, Softmax(), steps=100, data=data)
    assert [s.label for s in make_series(find_runs([str(tmp_path)]))] == [
        'Softmax, path data/one/tokens',
        'Softmax, path data/two/tokens',
        'Softmax, path other',
    ]


def test_the_loss_curve_is_the_mean_of_the_logged_steps(tmp_path):
    write_run(tmp_path / 'a', Softmax(), noise=0.0)
    write_run(tmp_path / 'b', Softmax(), noise=0.0, seed=1)
    lines = (tmp_path / 'b' / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'b' / 'metrics.jsonl').write_text(''.join(lines[: len(lines) // 2]))  # it is still training
    run = Run.read(tmp_path / 'a')
    assert [s.label for s in make_series(find_runs([str(tmp_path)]))] == ['Softmax', 'Softmax, not finished']
    series = Series('Softmax', 0, tuple(find_runs([str(tmp_path)])))
    end = run.train[-1]['tokens']
    curve = make_loss_curve(series, 1024, 0.05 * end, end)
    assert len(curve.x) <= BINS
    assert curve.smoothed
    expected = np.interp(curve.x, [r['tokens'] for r in run.train], [r['loss'] for r in run.train])
    np.testing.assert_allclose(curve.y, expected, atol=0.01)
    assert make_loss_curve(series, 512, 0.05 * end, end) is None
    (tmp_path / 'a' / 'metrics.jsonl').write_text(''.join(lines[:3]))
    (raw,) = make_series([Run.read(tmp_path / 'a')])
    few = make_loss_curve(raw, 1024, *find_token_range(raw.runs))
    assert not few.smoothed
    assert list(few.y) == pytest.approx([r['loss'] for r in raw.runs[0].train])


def test_a_short_run_stays_visible_beside_a_long_one(tmp_path):
    write_run(tmp_path / 'long', Softmax(), steps=20_000, log_every=50)
    write_run(tmp_path / 'short', Polynomial(), steps=100)
    made = Pictures(find_runs([str(tmp_path)]), Measures())
    (loss,) = [picture for picture in made.made if picture.name == 'loss']
    short, long = sorted(loss.curves, key=lambda curve: curve.x[-1])
    assert (short.label, long.label) == ('Polynomial (deg=4), steps 100', 'Softmax, steps 20000')
    assert len(short.x) == 10, 'all logged steps but the first'
    assert long.x[0] < short.x[-1], 'the same tokens of both can be compared'
    assert loss.caption == 'Training loss (smoothed: Softmax, steps 20000).'


def test_a_series_keeps_its_style_in_all_pictures(tmp_path):
    for name, attention in (('a', Softmax()), ('b', Polynomial())):
        for i, rate in enumerate((1e-4, 1e-3, 1e-2)):
            run = write_run(tmp_path / f'{name}{i}', attention, steps=100, devices=(i + 1, 'TPU v4'))
            config = (run / 'config.gin').read_text()
            (run / 'config.gin').write_text(re.sub(r'(peak_learning_rate = ).*', rf'\g<1>{rate}', config))
    for context in (64, 128):
        evaluate(tmp_path / 'b2', context_length=context, perplexity=10.0)
    made = Pictures(find_runs([str(tmp_path)]), Measures())
    styles = {}
    for picture in made.made:
        for curve in picture.curves:
            styles.setdefault(curve.label.partition(', 1 ×')[0].partition(', 2 ×')[0].partition(', 3 ×')[0], set()).add(
                curve.style
            )
    assert {'perplexity_evaluated', 'speed_runs', 'perplexity_peak_learning_rate'} <= {p.name for p in made.made}
    assert {len(found) for found in styles.values()} == {1}, styles


def test_the_caption_names_the_positions_that_are_left_out(tmp_path):
    run = Run.read(write_run(tmp_path / 'a', Softmax()))
    losses = [b['loss'] for b in run.last_evaluation['loss_by_position'] if b['end'] <= 8]
    (picture,) = [picture for picture in Pictures([run], Measures()).made if picture.name == 'position']
    assert len(losses) == 4
    assert f'the first 8 positions, with losses of {min(losses):.2f} to {max(losses):.2f}, are' in picture.caption


def test_the_newest_evaluation_at_the_runs_own_context_counts(tmp_path):
    run = write_run(tmp_path / 'a', Softmax())
    evaluate(run, split='test', perplexity=11.0, step=2000)
    evaluate(run, split='test', perplexity=12.0, step=1000)
    evaluate(run, split='test', perplexity=13.0, step=2000, window='sliding:8')
    evaluate(run, split='test', perplexity=14.0, step=2000, context_length=64)
    report = Report(find_runs([str(run)]), tmp_path, split='test')
    assert report.rows[0]['perplexity'] == 11.0
    assert report.measures.find_newest(report.runs[0], 64)['perplexity'] == 14.0
    assert Report(find_runs([str(run)]), tmp_path).rows[0]['split'] == 'validation'
    report.write()
    assert 'perplexity_evaluated.png' in report.written


def test_a_split_that_no_run_was_evaluated_on_is_refused(tmp_path, capsys):
    run, command = write_run(tmp_path / 'a', Softmax()), ['report', str(tmp_path / 'a'), '--no_pictures']
    assert main([*command, '--out', str(tmp_path / 'out'), '--split', 'nothing']) == 2
    expected = '--split nothing: no evaluation of these runs is of it, those are of validation; run lm evaluate'
    assert expected in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
    evaluate(run, split='nothing', perplexity=11.0, step=2000)
    assert main([*command, '--out', str(tmp_path / 'out'), '--split', 'nothing']) == 0
    assert '| nothing | 11.000 |' in capsys.readouterr().out


def test_an_evaluation_of_a_part_is_marked(tmp_path):
    """An evaluation with train.eval_tokens covers a part. `lm evaluate` scores the whole split, and counts more."""
    for name in ('a', 'b', 'c'):
        run = write_run(tmp_path / name, Softmax())
        if name != 'c':
            config = (run / 'config.gin').read_text()
            (run / 'config.gin').write_text(config.replace('train.eval_tokens = None', 'train.eval_tokens = 4096'))
            lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
            lines = [{k: v for k, v in line.items() if k != 'word_perplexity'} for line in lines]
            (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    evaluate(tmp_path / 'b', word_perplexity=50.0)
    text = Report(find_runs([str(tmp_path)]), tmp_path).make_run_table().to_markdown()
    assert 'Of the first train.eval_tokens alone, until lm evaluate scores the split: a.\n' in f'{text}\n'


def test_accuracy_of_tasks(tmp_path):
    write_run(tmp_path / 'a', Softmax(), accuracy=True, data=SelectiveCopying())
    assert main(['report', str(tmp_path / 'a'), '--out', str(tmp_path / 'out')]) == 0
    assert {p.stem for p in (tmp_path / 'out').glob('*.png')} == {'loss', 'accuracy', 'speed_steps'}
    curve = [float(r['y']) for r in table(tmp_path / 'out' / 'curves.csv') if r['picture'] == 'accuracy']
    assert curve == [100 * r['accuracy'] for r in Run.read(tmp_path / 'a').evals]
    assert not (tmp_path / 'out' / 'paper.csv').exists()


def test_young_and_diverged_runs_are_shown(tmp_path):
    new = write_run(tmp_path / 'new', Softmax())
    (new / 'metrics.jsonl').unlink()
    (new / 'run.json').unlink()
    one = write_run(tmp_path / 'one', Polynomial())
    (one / 'metrics.jsonl').write_text((one / 'metrics.jsonl').read_text().splitlines(keepends=True)[0])
    bad = write_run(tmp_path / 'bad', Performer())
    text = re.sub(r'"loss": [\d.]+', '"loss": "NaN"', (bad / 'metrics.jsonl').read_text())
    (bad / 'metrics.jsonl').write_text(text)
    assert main(['report', str(tmp_path), '--out', str(tmp_path / 'out')]) == 0
    rows = {row['run']: row for row in table(tmp_path / 'out' / 'runs.csv')}
    assert rows['new']['perplexity'] == rows['one']['perplexity'] == ''
    assert rows['bad']['loss'] == 'nan'
    assert 'for want of steps: new, one' in (tmp_path / 'out' / 'report.md').read_text()


def test_long_labels_are_wrapped_and_stay_inside_the_picture(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, '_save', lambda figure, path: kept.append(figure))
    x = np.linspace(1, 2, 5)
    label = 'Polysketch (learned + local, r = 32), peak learning rate 0.003, steps 125000'
    curves = [figures.Curve(f'{label}{i}', i, x, x + i) for i in range(8)]
    figures.draw_lines('x', curves, 'x', 'y')
    figures.draw_dots('x', curves, 'x')
    for figure in kept:
        figure.draw_without_rendering()
        whole, box = figure.bbox, figure.get_tightbbox().transformed(figure.dpi_scale_trans)
        assert box.x0 >= whole.x0 - 1
        assert box.x1 <= whole.x1 + 1
        assert figure.axes[0].get_window_extent().width > whole.width / 3


KERNEL, PAPERS_RUN = {'n_layers': 13}, {'steps': 125_000, 'log_every': 1000}


def test_runs_stand_beside_the_papers_numbers(tmp_path, capsys):
    random = Polysketch(sketch='gaussian', far_factor='published', sketch_size=64, local=False)
    for context in (512, 1024):
        write_run(tmp_path / f'a{context}', random, context=context, model=KERNEL, **PAPERS_RUN)
        write_run(tmp_path / f'b{context}', Polynomial(degree=8), context=context, **PAPERS_RUN)
    out = tmp_path / 'out'
    assert main(['report', str(tmp_path), '--out', str(out), '--no_pictures']) == 0
    listed = table(out / 'paper.csv')
    assert list(dict.fromkeys(r['table'] for r in listed)) == ['pg19', 'speed']
    assert {r['differs'] for r in listed} == {''}
    assert list(dict.fromkeys(r['row'] for r in listed))[:3] == [
        'Softmax (using FlashAttention)', 'Polynomial (deg=2)', 'Polynomial (deg=4)',
    ]  # fmt: skip
    rows = {(r['table'], r['row'], int(r['column'])): r for r in listed}
    ours = rows['pg19', 'Polysketch (random, r = 64)', 1024]
    assert float(ours['paper']) == 13.35
    assert float(ours['ours']) == Run.read(tmp_path / 'a1024').last_evaluation['perplexity']
    assert ours['runs'] == 'a1024'
    speed = rows['speed', 'Polysketch (random, r = 64)', 1024]
    assert float(speed['ours']) == pytest.approx(1e6 / 0.2 / 2**20, rel=0.01)
    assert rows['pg19', 'Polynomial (deg=8)', 32768]['paper'] == ''
    text = (out / 'report.md').read_text()
    assert '13.35 / ' in text
    assert 'Ours on 32 × TPU v5 lite.' in text
    assert 'Apart' not in text
    assert not list(out.glob('*.png'))
    capsys.readouterr()
    assert main(['report', str(tmp_path), '--out', str(out), '--no_pictures', '--paper', 'wiki40b']) == 0
    missing = 'No run repeats a cell of Table 3: Wiki-40B; 4 stand apart'
    assert missing in capsys.readouterr().out
    text = (out / 'report.md').read_text()
    assert missing in text
    assert "data 'data/pg19' (paper: wiki40b)" in text
    assert main(['report', str(tmp_path), '--out', str(out), '--no_pictures', '--paper', 'none']) == 0
    assert 'Table' not in (out / 'report.md').read_text()
    capsys.readouterr()
    shutil.rmtree(tmp_path / 'a512')
    odd = write_run(tmp_path / 'odd', Softmax(window=8), context=256)
    assert main(['report', str(odd), '--out', str(out), '--no_pictures', '--paper', 'pg19']) == 0
    assert 'No run repeats a cell of Table 2: PG-19.' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('changes', 'differs'),
    [
        ({'model': {'n_layers': 1}}, 'layers 1 (paper: 12)'),
        ({'model': {'d_model': 64, 'n_heads': 1}}, 'width 64 (paper: 768)'),
        ({'tokens_per_step': 2**17}, 'tokens per step 131,072 (paper: 1,048,576)'),
        ({'steps': 400, 'log_every': 10}, 'steps 400 (paper: 125,000)'),
    ],
)
def test_a_run_that_differs_from_the_papers_stands_apart(changes, differs, tmp_path):
    write_run(tmp_path / 'ours', Softmax(), **PAPERS_RUN)
    write_run(tmp_path / 'other', Softmax(), **PAPERS_RUN | changes)
    compared = paper.compare(find_runs([str(tmp_path)]), {'perplexity': lambda run: 20.0, 'accuracy': lambda run: None})
    rows = [c.as_row() for c in compared]
    repeated = [(r['table'], r['runs']) for r in rows if r['runs'] and not r['differs']]
    apart = [r for r in rows if r['differs'] and r['table'] == 'pg19']
    assert ('pg19', 'ours') in repeated
    assert ('pg19', 'other') not in repeated
    assert [(r['runs'], r['differs'], r['paper'], r['ours']) for r in apart] == [('other', differs, 12.75, 20.0)]
    text = '\n'.join(paper.format_tables(compared))
    assert f'| other | 32 × TPU v5 lite | {differs} | Softmax (using FlashAttention) | 1k | 12.75 | 20.00 |' in text


def test_a_small_run_on_a_cpu_is_not_compared_with_the_papers_speed(tmp_path):
    write_run(tmp_path / 'toy', Softmax(), steps=4, log_every=1, model={'n_layers': 1}, devices=(1, 'cpu'))
    rows = [c.as_row() for c in paper.compare(find_runs([str(tmp_path)]), {})]
    assert [(r['table'], r['devices'], r['differs']) for r in rows] == [
        ('speed', '1 × cpu', 'layers 1 (paper: 12); 4 logged intervals (at least 10)')
    ]
    for name, devices in (('a', (32, 'TPU v4')), ('b', (32, 'TPU v4')), ('c', (8, 'NVIDIA H100'))):
        write_run(tmp_path / 'more' / name, Softmax(), seed=ord(name), devices=devices)
    compared = paper.compare(find_runs([str(tmp_path / 'more')]), {'perplexity': lambda run: None})
    speeds = [c.as_row() for c in compared]
    found = [(r['runs'], r['devices'], r['differs']) for r in speeds if r['table'] == 'speed' and r['runs']]
    assert found == [('a b', '32 × TPU v4', ''), ('c', '8 × NVIDIA H100', 'other devices than most runs')]


def test_different_devices_make_different_series_of_speed(tmp_path):
    for name, devices in (('a', (32, 'TPU v4')), ('b', (32, 'TPU v4')), ('c', (1, 'cpu'))):
        run = write_run(tmp_path / name, Softmax(), seed=ord(name), steps=100, devices=devices)
        for context in (64, 128):
            evaluate(run, context_length=context, perplexity=10.0 + ord(name))
    assert main(['report', str(tmp_path / '?'), '--out', str(tmp_path / 'out')]) == 0
    points = table(tmp_path / 'out' / 'curves.csv')
    series = [r['series'] for r in points if r['picture'] == 'speed_runs']
    assert series == ['Softmax, 32 × TPU v4', 'Softmax, 32 × TPU v4', 'Softmax, 1 × cpu']
    seeds = [r for r in points if r['picture'] == 'perplexity_evaluated']
    assert [(r['series'], float(r['x'])) for r in seeds] == [('Softmax', 64), ('Softmax', 128)]
    assert float(seeds[0]['y']) == 10 + ord('b')


def test_a_run_that_still_trains_stands_apart(tmp_path):
    run = write_run(tmp_path / 'a', Softmax(), **PAPERS_RUN)
    lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (run / 'metrics.jsonl').write_text(''.join(lines[: len(lines) // 2]))
    rows = [c.as_row() for c in paper.compare([Run.read(run)], {'perplexity': lambda run: 20.0})]
    assert [r['differs'] for r in rows if r['table'] == 'pg19'] == ['at step 62,000 of 125,000']


def test_task_results_stand_beside_the_papers_numbers(tmp_path):
    shape = {'n_layers': 2, 'd_model': 128, 'n_heads': 8, 'head_dim': 16}
    run = {'context': 4096, 'accuracy': True, 'data': SelectiveCopying(), 'log_every': 1000}
    write_run(tmp_path / 'a', Polysketch(), steps=400_000, model=shape, **run)
    assert main(['report', str(tmp_path), '--out', str(tmp_path / 'out'), '--no_pictures']) == 0
    (row,) = [r for r in table(tmp_path / 'out' / 'paper.csv') if r['runs']]
    assert (row['row'], float(row['paper'])) == ('Polysketch (learned + local)', 99.16)
    assert float(row['ours']) == 100 * Run.read(tmp_path / 'a').last_evaluation['accuracy']


def test_a_sweep_shows_how_its_points_ended(tmp_path, capsys):
    root = tmp_path / 'sweep'
    for i, rate in enumerate((1e-3, 1e-2)):
        run = write_run(root / f'rate-{rate}', Softmax(), steps=100)
        config = (run / 'config.gin').read_text()
        (run / 'config.gin').write_text(re.sub(r'(peak_learning_rate = ).*', rf'\g<1>{rate}', config))
        if i:
            text = re.sub(r'"(loss|perplexity)": [\d.]+', r'"\1": "NaN"', (run / 'metrics.jsonl').read_text())
            (run / 'metrics.jsonl').write_text(text)
    (root / 'points').mkdir()
    (root / 'points' / 'rate-0.01.json').write_text('{"exit_code": 43, "error": "not finite"}')
    refused = {'point': 'rate--1', 'status': 'failed', 'step': 0, 'steps': 100, 'exit_code': 2, 'error': 'above 0'}
    (root / 'sweep.json').write_text(json.dumps({'points': [refused]}))
    out = tmp_path / 'out'
    assert main(['report', str(root), '--out', str(out)]) == 0
    printed = capsys.readouterr().out
    assert 'No run directory: rate--1, failed (2): above 0' in printed
    heading, _, *lines = printed.splitlines()
    assert '| status | attention | peak learning rate |' in heading
    assert [line.split(' | ')[1:4] for line in lines[:2]] == [
        ['done', 'softmax', '0.001'],
        ['diverged (43)', 'softmax', '0.01'],
    ]
    rows = {r['run']: r for r in table(out / 'runs.csv')}
    assert rows['rate-0.01']['status'] == 'diverged (43)'
    drawn = [r for r in table(out / 'curves.csv') if r['picture'] == 'perplexity_runs']
    assert [r['series'] for r in drawn] == ['Softmax, peak learning rate 0.001']


def test_a_swept_number_is_an_axis_and_unfinished_points_stand_apart(tmp_path, capsys):
    for name, worse in (('softmax', 0.0), ('poly', 0.1)):
        for rate in (1e-4, 1e-3, 1e-2):
            for seed in (0, 1):
                mechanism = Polynomial() if worse else Softmax()
                run = write_run(tmp_path / f'{name}-{rate}-{seed}', mechanism, seed=seed, quality=worse, steps=500)
                config = (run / 'config.gin').read_text()
                (run / 'config.gin').write_text(re.sub(r'(peak_learning_rate = ).*', rf'\g<1>{rate}', config))
    stopped, bad = tmp_path / 'softmax-0.01-1', tmp_path / 'poly-0.01-0'
    lines = (stopped / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (stopped / 'metrics.jsonl').write_text(''.join(line for line in lines if json.loads(line)['step'] <= 300))
    text = re.sub(r'"(loss|perplexity)": [\d.]+', r'"\1": "NaN"', (bad / 'metrics.jsonl').read_text())
    (bad / 'metrics.jsonl').write_text(text)
    out = tmp_path / 'out'
    assert main(['report', str(tmp_path / '*-*'), '--out', str(out)]) == 0
    points = [row for row in table(out / 'curves.csv') if row['picture'] == 'perplexity_peak_learning_rate']
    found = {}
    for row in points:
        found.setdefault(row['series'], []).append((float(row['x']), row['low'] != row['high']))
    assert found == {
        'Softmax': [(1e-4, True), (1e-3, True), (1e-2, False)],
        'Softmax, not finished': [(1e-2, False)],
        'Polynomial (deg=4)': [(1e-4, True), (1e-3, True), (1e-2, False)],
    }
    report = (out / 'report.md').read_text()
    caption = 'Validation perplexity per token against peak learning rate; without a value: poly-0.01-0 (not finite).'
    assert f'![{caption}](perplexity_peak_learning_rate.png)' in report
    dots = {row['series'] for row in table(out / 'curves.csv') if row['picture'] == 'perplexity_runs'}
    assert 'Softmax, peak learning rate 0.01, not finished' in dots
    assert 'Softmax, peak learning rate 0.01' in dots


def test_labels_of_axes_break_where_they_read_well(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, '_save', lambda figure, path: kept.append(figure.axes[0].get_ylabel()))
    curve = figures.Curve('a', 0, np.arange(1.0, 4), np.arange(3.0))
    for label in ('training loss (nats per token)', 'validation perplexity per token', 'validation accuracy (%)'):
        figures.draw_lines('x', [curve], 'x', label)
    assert kept == [
        'training loss\n(nats per token)',
        'validation\nperplexity per token',
        'validation accuracy (%)',
    ]


def test_figures_name_their_unit_split_and_spread(tmp_path, capsys, monkeypatch):
    labels = {}
    monkeypatch.setattr(figures, '_save', lambda figure, path: labels.update({path.name: figure.axes[0]}))
    for context in (512, 1024):
        write_run(tmp_path / f'a{context}', Softmax(), context=context)
    assert main(['report', str(tmp_path), '--out', str(tmp_path / 'out')]) == 0
    heading, _, first = capsys.readouterr().out.splitlines()[:3]
    assert '| split | perplexity per token | per word | bits/byte |' in heading
    assert '| validation | ' in first
    low, high = np.quantile(Run.read(tmp_path / 'a1024').speeds, [0.25, 0.75])
    assert f'({low:,.0f}–{high:,.0f})' in first
    assert labels['perplexity_context'].get_ylabel().replace('\n', ' ') == 'validation perplexity per token'
    assert labels['position_512'].get_ylabel().replace('\n', ' ') == 'validation loss (nats per token)'
    points = [r for r in table(tmp_path / 'out' / 'curves.csv') if r['picture'] == 'speed_context']
    assert [float(r['low']) < float(r['y']) < float(r['high']) for r in points] == [True, True]
    assert float(points[1]['low']) == pytest.approx(1e6 / high)


def test_positions_with_few_tokens_are_left_out(tmp_path):
    run = write_run(tmp_path / 'a', Softmax())
    text = (run / 'metrics.jsonl').read_text()
    (run / 'metrics.jsonl').write_text(text.replace('"end": 128, "tokens": 64000', '"end": 128, "tokens": 99'))
    assert main(['report', str(run), '--out', str(tmp_path / 'out')]) == 0
    found = [r for r in table(tmp_path / 'out' / 'curves.csv') if r['picture'] == 'position']
    assert [float(r['tokens']) for r in found] == [1000 * 2**i for i in (3, 4, 5, 7, 8, 9)]
    assert f'fewer than {FEWEST_TOKENS} tokens are left out' in (tmp_path / 'out' / 'report.md').read_text()


def test_coinciding_points_stay_distinguishable(monkeypatch):
    kept = []
    monkeypatch.setattr(figures, '_save', lambda figure, path: kept.append(figure.axes[0]))
    x = np.array([1.0, 2.0])
    ys = ([1.0, 2.0], [1.0, 2.5], [1.0, 3.0])
    figures.draw_lines(
        'x', [figures.Curve(f'c{i}', i, x, np.array(y)) for i, y in enumerate(ys)], 'x', 'y', markers=True
    )
    at_one = [line for line in kept[0].lines if list(line.get_xdata()) == [1.0]]
    assert [line.get_markerfacecolor() == 'none' for line in at_one] == [False, True, True]
    sizes = [line.get_markersize() for line in at_one]
    assert sizes == sorted(set(sizes))
    at_two = [line for line in kept[0].lines if list(line.get_xdata()) == [2.0]]
    assert all(line.get_markerfacecolor() != 'none' for line in at_two)

    dots = figures.Curve('d', 0, np.array([5.0, 5.0, 5.001, 9.0]), np.zeros(4))
    figures.draw_dots('x', [dots], 'x')
    heights = list(kept[1].lines[0].get_ydata())
    assert len(set(heights[:3])) == 3
    ((middle,), (bottom, top)) = kept[1].get_yticks(), kept[1].get_ylim()
    assert heights[3] == middle == bottom / 2
    assert top == 0 < min(heights) < max(heights) < bottom


def test_a_row_of_dots_is_as_high_as_its_label(monkeypatch):
    kept = []
    monkeypatch.setattr(figures, '_save', lambda figure, path: kept.append(figure.axes[0]))
    labels = ('short', 'a label of many words that needs several lines beside its dots', 'short too')
    figures.draw_dots('x', [figures.Curve(label, 0, np.array([1.0, 2.0]), np.zeros(2)) for label in labels], 'x')
    kept[0].figure.canvas.draw()
    boxes = [label.get_window_extent() for label in kept[0].get_yticklabels()]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(boxes))


def test_weights_under_another_attention_are_not_the_run(tmp_path):
    run = write_run(tmp_path / 'a', Softmax())
    evaluate(run, split='validation', perplexity=11.0)
    evaluate(run, split='validation', perplexity=12.0, overrides={'model.attention': '@hybrid()'})
    evaluate(run, split='validation', perplexity=13.0, overrides={'softmax.window': '64'})
    report = Report(find_runs([str(run)]), tmp_path)
    assert report.rows[0]['perplexity'] == 11.0
    evaluate(run, split='validation', perplexity=14.0, overrides={'data.path': "'gs://bucket/pg19'"})
    assert Report(find_runs([str(run)]), tmp_path).rows[0]['perplexity'] == 14.0
    for name, value in {'model.rotary_base': 'None', 'data.mask_documents': 'True'}.items():
        evaluate(run, split='validation', perplexity=15.0, overrides={name: value}, data_sha256='d' * 64)
    evaluate(run, split='validation', perplexity=16.0, overrides={'data.path': "'other'"}, data_sha256='e' * 64)
    assert Report(find_runs([str(run)]), tmp_path).rows[0]['perplexity'] == 14.0
    evaluate(run, split='validation', perplexity=17.0, overrides={'model.remat': "'full'"}, data_sha256='d' * 64)
    assert Report(find_runs([str(run)]), tmp_path).rows[0]['perplexity'] == 17.0


def groups_of(key: str) -> dict[str, dict[str, list[float | None]]]:
    """Returns heading → label → the numbers of a table; None where the paper has no number."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for row in load_tables()[key].rows:
        numbers = [None if isinstance(value, str) else value for value in row.values]
        assert found.setdefault(row.group, {}).setdefault(row.label, numbers) is numbers, 'two rows of a label'
    return found


def test_the_tables_equal_the_papers():
    for key in ('pg19', 'wiki40b', 'speed'):
        assert [len(rows) for rows in groups_of(key).values()] == [4, 9] + ([3] if key == 'speed' else [])
        assert list(groups_of(key).values())[1].keys() == list(groups_of('pg19').values())[1].keys()
    for held in load_tables().values():
        assert all(len(row.values) == len(held.columns) for row in held.rows)
        bindings = {name for row in held.rows for name in row.settings} | ({held.axis} if held.axis else set())
        assert bindings <= paper.SETTINGS.keys()
        mechanisms = {name: [f.name for f in dataclasses.fields(REGISTRY[name])] for name in held.labels}
        assert all(row.fields.keys() <= {*mechanisms[row.mechanism]} for row in held.rows if row.mechanism)
    kernels = groups_of('pg19')['Kernel based methods, 13 layers']
    assert min(kernels, key=lambda label: kernels[label][-1]) == 'Polysketch (learned + local, r = 64)'


SUMS = {  # the sums of all numbers of a table, from the papers' text
    'pg19': 1074.99, 'wiki40b': 1301.08, 'speed': 278.01, 'c4': 858.34, 'c4_speed': 48.28, 'copying': 971.83,
    'induction': 531.0, 'recall': 557.5, 'arena': 2884.98, 'continued': 2866.83, 'sketches': 3.761, 'proteins': 439.25,
    'c4_tasks': 7512.2, 'c4_tasks_30k': 5344.1, 'draft_wiki40b': 233.6, 'draft_pg19': 211.8, 'draft_speed': 82.54,
    'draft_long': 1.88, 'draft_large': 29.0, 'copying_long': 95.29,
}  # fmt: skip


@pytest.mark.parametrize('key', load_tables())
def test_the_numbers_of_each_table_have_the_right_sum(key):
    rows = [row for rows in groups_of(key).values() for row in rows.values()]
    assert sum(v for row in rows for v in row if v is not None) == pytest.approx(SUMS[key], abs=0.005)


PAPERS = tiny.ROOT.parent / 'shared' / 'papers'


@pytest.mark.skipif(not PAPERS.is_dir(), reason='the text of the papers is not here')
def test_the_numbers_are_in_the_papers_text():
    text = (PAPERS / 'polysketchformer.txt').read_text()
    for key in ('pg19', 'wiki40b'):
        for label, values in [item for rows in groups_of(key).values() for item in rows.items()]:
            numbers = ' '.join('OOM' if v is None else f'{v:.2f}' for v in values)
            assert f'{label} {numbers}\n' in text.replace('(p=', '(deg=')
    groups = {'Small': (30, 125), 'Medium': (30, 125), 'Large': (None, 125)}
    for (heading, rows), (size, steps) in zip(groups_of('c4').items(), groups.items(), strict=True):
        assert size in heading
        for k, values in zip(steps, zip(*rows.values(), strict=True), strict=True):
            if k:
                start = re.search(rf'GPT-2 {size} style.*, {k}k training steps\n', text).end()
                printed = text[start:].splitlines()[: len(rows)]
                numbers = [float(re.search(r' (\d\d\.\d\d) ', line)[1]) for line in printed]
                assert numbers == list(values)
                labels = [line[: line.index(f' {v:.2f} ')] for line, v in zip(printed, values, strict=True)]
                assert [label.replace('(learned)', '(learned, r = 64)') for label in labels] == list(rows)


def test_colours_differ_and_labels_of_curves_do_not_overlap(tmp_path, monkeypatch):
    styles = [figures.Curve('', i, np.array([]), np.array([])) for i in range(21)]
    assert len({(c.colour, str(c.line)) for c in styles}) == 21
    kept = []
    monkeypatch.setattr(figures, '_save', lambda figure, path: kept.append(figure))
    x = np.linspace(1, 2, 5)
    figures.draw_lines('x', [figures.Curve(f'c{i}', i, x, x + i * 1e-4) for i in range(6)], 'x', 'y')
    (axes,) = kept[0].axes
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 6
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))
    assert all(box.x0 >= axes.get_window_extent().x1 for box in boxes), 'a label covers data'


def test_a_picture_is_laid_out_once_and_drawn_once_per_file(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, 'figure.autolayout', True)  # a user's setting, which pictures leave out
    counts = collections.Counter()

    def count(kind, name):
        plain = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **options: (counts.update([name]), plain(*args, **options))[1])

    count(matplotlib.figure.Figure, 'draw')
    count(matplotlib.layout_engine.ConstrainedLayoutEngine, 'execute')
    x = np.linspace(1, 2, 5)
    figures.draw_dots(tmp_path / 'x', [figures.Curve('one', 0, x, x)], 'x')
    assert {path.name for path in tmp_path.iterdir()} == {'x.png', 'x.pdf'}
    assert counts == {'execute': 1, 'draw': 2}
    figures.draw_lines(tmp_path / 'y', [figures.Curve('one', 0, x, x)], 'x', 'y')
    assert counts == {'execute': 3, 'draw': 4}, 'names at the ends of curves need the places before the last layout'


def test_readers_of_many_runs_parse_each_value_once(tmp_path, monkeypatch):
    for i in range(6):
        write_run(tmp_path / f'r{i}', Softmax(), seed=77_000 + i % 2)
    calls = collections.Counter()
    counted = types.SimpleNamespace(literal_eval=lambda text: (calls.update([text]), ast.literal_eval(text))[1])
    monkeypatch.setattr(records, 'ast', counted)
    runs = find_runs([str(tmp_path)])
    Report(runs, tmp_path / 'out')
    Pictures(runs, Measures())
    assert calls['77000'] == calls['77001'] == max(calls.values()) == 1, calls.most_common(3)


def test_wrong_arguments_are_refused_in_one_line(tmp_path, capsys, monkeypatch):
    for path in ('nowhere', str(tmp_path), 'x*'):
        assert main(['report', path, '--out', str(tmp_path / 'out')]) == 2
        assert capsys.readouterr().err.count('\n') == 1
    assert not (tmp_path / 'out').exists()
    run = write_run(tmp_path / 'run', Softmax(), steps=50)
    monkeypatch.chdir(tmp_path)
    assert main(['report', str(run), '--out', 'gs://b/out', '--no_pictures']) == 2
    assert "--out 'gs://b/out': must lie on a disk" in capsys.readouterr().err
    assert not (tmp_path / 'gs:').exists()
    (tmp_path / 'file').write_text('')
    assert main(['report', str(run), '--out', str(tmp_path / 'file')]) == 2
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    capsys.readouterr()
    assert main(['report', str(run), '--out', str(tmp_path / 'out')]) == 2
    assert '[report]' in capsys.readouterr().err
    assert main(['report', str(run), '--out', str(tmp_path / 'out'), '--no_pictures']) == 0
