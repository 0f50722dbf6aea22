"""A report compares perplexities only where they are conditioned on the same tokens, unless it is asked to."""

import csv
import json

import pytest
from made_up_runs import evaluate, write_run

from lm.attention.softmax import Softmax
from lm.cli import main
from lm.errors import ConfigError
from lm.evaluation.conditioning import ONE_TOKEN, Conditioning
from lm.report.measures import Measures, choose_conditioning
from lm.report.students import _scored_the_same
from lm.runs.records import Run, find_runs
from lm.tasks.selective_copying import SelectiveCopying

BEGUN = {
    'before_texts': 'begin',
    'before_windows': 'begin',
    'first_token_sees': ONE_TOKEN,
    'token_id': 128_000,
    'token': '<|begin_of_text|>',
}
AFTER_TEXTS = BEGUN | {'before_windows': 'previous token'}


def state(run, conditioning) -> None:
    """Gives the periodic evaluations of a run a conditioning."""
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    lines = [line | ({'conditioning': conditioning} if line['kind'] == 'eval' else {}) for line in lines]
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


@pytest.fixture
def two(tmp_path):
    """Returns two runs: one that was trained here, and one whose texts begin with a token."""
    for name in ('ours', 'theirs'):
        write_run(tmp_path / name, Softmax(), steps=100)
    state(tmp_path / 'theirs', BEGUN)
    evaluate(tmp_path / 'theirs', perplexity=7.5)
    return tmp_path


def report(folder, *flags) -> int:
    paths = [str(folder / 'ours'), str(folder / 'theirs')]
    return main(['report', *paths, '--out', str(folder / 'out'), '--no_pictures', *flags])


def read_rows(folder) -> dict[str, dict[str, str]]:
    with open(folder / 'out' / 'runs.csv', newline='') as file:
        return {row['run']: row for row in csv.DictReader(file)}


def test_perplexities_of_different_conditioning_are_refused(two, capsys):
    assert report(two) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    assert 'ours (before texts: end of document; before windows: previous token;' in error
    assert 'theirs (before texts: begin; before windows: begin;' in error
    assert '--any_conditioning' in error
    assert not (two / 'out').exists()


def test_a_flag_compares_them_and_shows_what_differs(two, capsys):
    assert report(two, '--any_conditioning') == 0
    assert 'conditioned on' in capsys.readouterr().out
    rows = read_rows(two)
    assert rows['theirs']['perplexity'] == '7.5'
    assert 'before windows: begin' in rows['theirs']['conditioning']
    assert 'before windows: previous token' in rows['ours']['conditioning']


@pytest.mark.parametrize('names', [['data.begin_id'], ['evaluate.begin_windows', 'data.begin_id']])
def test_the_evaluations_that_runs_have_in_common_are_compared(names, two, capsys):
    """Each run may have further evaluations of the same step, after other tokens."""
    own = Conditioning.read({})
    evaluate(
        two / 'theirs', conditioning=own.__dict__ | {'token_id': 1}, perplexity=9.5, overrides=dict.fromkeys(names)
    )
    assert report(two) == 0
    assert 'conditioned on' not in capsys.readouterr().out
    assert read_rows(two)['theirs']['perplexity'] == '9.5'
    # Alone, the run is measured after its own tokens.
    theirs = Run.read(two / 'theirs')
    assert choose_conditioning([theirs], Measures()) == Conditioning.read({'conditioning': BEGUN})
    assert Measures().find_newest(theirs)['perplexity'] == 7.5


@pytest.mark.parametrize('field', ['before_texts', 'before_windows', 'first_token_sees'])
def test_each_part_of_the_statement_counts(field, two):
    state(two / 'ours', BEGUN | {field: 'another'})
    runs = find_runs([str(two / '*')])
    with pytest.raises(ConfigError, match='are conditioned differently'):
        choose_conditioning(runs, Measures())
    assert choose_conditioning(runs, Measures(), allows_any=True) is None
    evaluate(two / 'ours', conditioning=BEGUN | {'token_id': 2, 'token': '<bos>'})  # as another tokenizer calls it
    assert choose_conditioning(find_runs([str(two / '*')]), Measures()) == Conditioning.read({'conditioning': BEGUN})


def test_runs_without_a_perplexity_are_compared_with_none(two):
    write_run(two / 'task', Softmax(), steps=100, accuracy=True, data=SelectiveCopying())
    runs = [Run.read(two / name) for name in ('task', 'theirs')]
    assert choose_conditioning(runs, Measures()) == Conditioning.read({'conditioning': BEGUN})
    assert Measures(None, choose_conditioning(runs, Measures())).find_newest(runs[0])['task'] == 'copying'
    assert choose_conditioning(runs[:1], Measures()) is None


def test_a_student_is_compared_with_its_teacher_after_the_same_tokens(two):
    run = Run.read(two / 'theirs')
    (record,) = run.evaluations
    assert _scored_the_same(run, record, run, dict(record))
    assert not _scored_the_same(run, record, run, record | {'conditioning': AFTER_TEXTS})
