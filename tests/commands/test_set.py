"""`--set NAME=VALUE` makes the same binding as --gin_param without gin's quotes; a wrong flag leads to the setting it
means."""

import argparse

import pytest

import lm.cli
import lm.experiment
from lm.cli import VERBS, main
from lm.commands.flags import read_experiment, read_points
from lm.config.setting import write_binding
from lm.config.text import dump


@pytest.mark.parametrize(
    ('setting', 'binding'),
    [
        ('data.path=runs/x', "data.path = 'runs/x'"),
        ("data.path=it's", 'data.path = "it\'s"'),
        ('data.path=gs://b/a=b', "data.path = 'gs://b/a=b'"),
        ("data.path='runs/x'", "data.path = 'runs/x'"),
        ('data.path=2024', "data.path = '2024'"),
        ('data.path=True', "data.path = 'True'"),
        ('data.path=', "data.path = ''"),
        ('jsonl.path={split}-*.jsonl', "jsonl.path = '{split}-*.jsonl'"),
        ('jsonl.path=[ab].jsonl', "jsonl.path = '[ab].jsonl'"),
        ('jsonl.path=%DATA', 'jsonl.path = %DATA'),
        ('lm.data.path = x', "lm.data.path = 'x'"),
        ('train.steps=1_000', 'train.steps = 1_000'),
        ('optimizer.peak_learning_rate=3e-4', 'optimizer.peak_learning_rate = 3e-4'),
        ('data.mask_documents=True', 'data.mask_documents = True'),
        ('data.mask_documents=false', 'data.mask_documents = False'),
        ('train.init_from=None', 'train.init_from = None'),
        ('train.init_from=runs/a', "train.init_from = 'runs/a'"),
        ('softmax.window=none', 'softmax.window = None'),
        ('train.skip_batches=[(1, 2)]', 'train.skip_batches = [(1, 2)]'),
        ('model.attention=@polysketch()', 'model.attention = @polysketch()'),
        ('model.attention=[@a/softmax(), @b/softmax()]', 'model.attention = [@a/softmax(), @b/softmax()]'),
        ('a/softmax.window=64', 'a/softmax.window = 64'),
        ('model.remat=none', "model.remat = 'none'"),
        ('train.steps=%STEPS', 'train.steps = %STEPS'),
        ('STEPS=5', 'STEPS = 5'),
        ('mine.name=x y', "mine.name = 'x y'"),
    ],
)
def test_text_values_are_quoted_and_other_values_stay(setting, binding):
    assert write_binding(setting) == binding


@pytest.mark.parametrize(
    ('setting', 'expected'),
    [
        ('data.pth=x', 'did you mean data.path?'),
        ('data.path', 'write NAME=VALUE'),
        ('=x', 'write NAME=VALUE'),
        ('dta.path=x', 'did you mean data.path?'),
        ('train.steps=ten', "train.steps = 'ten': must be an int"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(setting, expected, capsys):
    assert main(['prepare', '--set', setting]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count('\n') == 1


def parsers():
    """Yields (command, parser) of all verbs and parts."""
    pending = [('lm', lm.cli.make_parser())]
    for name, parser in pending:
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += [(f'{name} {part}', sub) for part, sub in action.choices.items()]


def test_json_has_one_meaning():
    """It prints JSON in place of tables. A file of results has another flag, whose former name is not shown."""
    for name, parser in parsers():
        for action in parser._actions:
            if '--json' in action.option_strings and action.help is not argparse.SUPPRESS:
                assert (action.nargs, action.help.partition(' instead')[0]) == (0, 'print JSON'), name
    new, old = (lm.cli.parse(['bench', 'chips', flag, 'x.json']).save for flag in ('--save', '--json'))
    assert new == old == 'x.json'


def test_each_command_that_takes_bindings_takes_settings():
    flags = {name: {flag for a in parser._actions for flag in a.option_strings} for name, parser in parsers()}
    takers = {name for name, there in flags.items() if '--gin_param' in there}
    assert takers == {name for name, there in flags.items() if '--set' in there}
    assert {'lm train', 'lm sweep', 'lm bench step', 'lm import'} <= takers


def test_a_setting_is_recorded_as_a_binding():
    def text(*flags: str) -> str:
        return dump(read_experiment(lm.cli.parse(['train', '--run_dir', 'x', *flags])))

    assert text('--set', 'data.path=a', '--set=train.steps=7') == text(
        '--gin_param', "data.path = 'a'", '--gin_param', 'train.steps = 7'
    )
    # The last flag wins, whichever of the two it is.
    assert 'train.steps = 8\n' in text('--set', 'train.steps=7', '--gin_param', 'train.steps = 8')
    assert 'train.steps = 7\n' in text('--gin_param', 'train.steps = 8', '--set', 'train.steps=7')


def test_sweeps_take_settings(tmp_path):
    (tmp_path / 'sweep.gin').write_text('train.seed = [0, 1]\n')
    command = ['sweep', '--sweep_file', str(tmp_path / 'sweep.gin')]
    given = read_points(lm.cli.parse([*command, '--set', 'data.path=a']))
    assert given == read_points(lm.cli.parse([*command, '--gin_param', "data.path = 'a'"]))
    assert {point.experiment.data.path for point in given} == {'a'}


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (['--lr', '3'], '--set optimizer.peak_learning_rate=3;'),
        (['--lr=3'], '--set optimizer.peak_learning_rate=3;'),
        (['--steps', '5'], '--set train.steps=5;'),
        (['--seed', '5'], '--set train.seed=5;'),
        (['--train.steps', '5'], '--set train.steps=5;'),
        (['--frobnicate'], '--set SECTION.FIELD=VALUE;'),
        (['--stesp', '5'], 'did you mean --step?'),
    ],
)
def test_an_unknown_flag_suggests_a_setting(words, expected, capsys):
    assert main(['train', '--run_dir', 'x', *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count('\n') == 1


def test_verbs_without_bindings_name_no_settings(capsys):
    assert '--set' not in VERBS['report'].example
    assert main(['report', 'x', '--lr', '3']) == 2
    assert '--set' not in capsys.readouterr().err
