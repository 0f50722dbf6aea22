"""`lm report` of a student: beside its teacher on the same tokens, errors of layers, and its loss by name."""

import csv
import json
import math
import pathlib

import pytest
from made_up_runs import write_run

from lm.attention.hedgehog import Hedgehog
from lm.attention.softmax import Softmax
from lm.report.measures import Measures, name_loss
from lm.report.students import find_students, make_student_pictures
from lm.report.write import write_report
from lm.runs.records import Run


def edit_metrics(folder: pathlib.Path, change) -> None:
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    for line in lines:
        change(line)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def make_student(folder, teacher, stage='align', layers=2, quality=0.1, more=''):
    run = write_run(folder, Hedgehog(), quality=quality, steps=500)
    text = (run / 'config.gin').read_text().replace('train.objective = @next_token()', f'train.objective = @{stage}()')
    (run / 'config.gin').write_text(text + f'\n{stage}.teacher = {str(teacher)!r}\n{more}')

    def add_errors(line):
        if line['kind'] == 'train' and stage == 'align':
            line |= {f'layer_error/{i:02d}': (i + 1) / line['step'] for i in range(layers)}

    edit_metrics(run, add_errors)
    return run


@pytest.fixture
def teacher(tmp_path):
    return write_run(tmp_path / 'teacher', Softmax(), steps=500)


def test_a_student_stands_beside_its_teacher(teacher, tmp_path, capsys):
    student = make_student(tmp_path / 'student', teacher)
    for run, score in ((teacher, 0.75), (student, 0.5)):
        folder = run / 'evaluations' / 'harness'
        folder.mkdir(parents=True)
        result = {'step': 500, 'context_length': 1024, 'limit': None, 'overrides': {}}
        result['results'] = {'niah_single_1': {'alias': 'niah', '1024,none': score, '1024_stderr,none': 0.1}}
        (folder / 'a.json').write_text(json.dumps(result))
    write_report([str(student)], str(tmp_path / 'out'))
    text = (tmp_path / 'out' / 'report.md').read_text()
    (found,) = find_students([Run.read(student)], Measures())
    assert found.behind == pytest.approx(0.1)
    assert found.tasks == {'niah_single_1 at 1024 tokens': {'1024': (0.5, 0.75)}}
    row = next(line for line in text.splitlines() if line.startswith('| student | ') and 'squared error' in line)
    assert '+0.1000' in row
    assert f'{math.exp(0.1) - 1:+.1%}' in row
    assert '0.500 / 0.750' in row
    assert '| student | 512–1023 |' in text
    assert 'Students beside their teachers' in (tmp_path / 'out' / 'report.html').read_text()
    with open(tmp_path / 'out' / 'curves.csv', newline='') as file:
        points = list(csv.DictReader(file))
    behind = [float(point['y']) for point in points if point['picture'] == 'behind']
    assert behind == pytest.approx([0.1] * len(behind))
    assert len(behind) > 8
    errors = {p['series'] for p in points if p['picture'] == 'layer_errors'}
    assert errors == {'layer 0', 'layer 1'}
    assert (tmp_path / 'out' / 'layer_errors.png').exists()


def test_many_layers_are_drawn_as_the_worst_the_median_and_the_best(teacher, tmp_path):
    run = make_student(tmp_path / 'student', teacher, layers=12)
    (picture,) = (p for p in make_student_pictures(find_students([Run.read(run)], Measures())) if p.name != 'behind')
    assert [curve.label for curve in picture.curves] == ['worst layer', 'median layer', 'best layer']
    assert [float(curve.y[0]) for curve in picture.curves] == [12, 6.5, 1]


def test_other_tokens_are_not_compared(teacher, tmp_path):
    run = make_student(tmp_path / 'student', teacher)
    edit_metrics(teacher, lambda line: line.update(tokens=20_000) if line['kind'] == 'eval' else None)
    (found,) = find_students([Run.read(run)], Measures())
    assert found.behind is None
    assert f'lm evaluate --split validation --context_length 1024 with --run_dir {teacher}' in found.explain_missing()


def test_a_teacher_that_is_gone_is_named(tmp_path):
    run = make_student(tmp_path / 'student', tmp_path / 'nowhere')
    (found,) = find_students([Run.read(run)], Measures())
    assert found.explain_missing() == f'student: its teacher {tmp_path / "nowhere"} is not there.'


def test_losses_of_one_kind_share_a_picture(teacher, tmp_path):
    runs = [teacher, make_student(tmp_path / 'a', teacher), make_student(tmp_path / 'd', teacher, stage='distill')]
    mixed = make_student(tmp_path / 'm', teacher, stage='distill', more='distill.cross_entropy = 0.25\n')
    assert [name_loss(Run.read(run)) for run in [*runs, mixed]] == [
        None,
        'squared error of attention, summed over the layers',
        'divergence (nats per token)',
        'divergence and 25% cross-entropy (nats per token)',
    ]
    write_report([str(run) for run in runs], str(tmp_path / 'out'), pictures=False)
    with open(tmp_path / 'out' / 'curves.csv', newline='') as file:
        pictures = {point['picture'] for point in csv.DictReader(file) if point['picture'].startswith('loss')}
    assert pictures == {'loss', 'loss_align', 'loss_distill'}
