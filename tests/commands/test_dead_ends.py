"""The second command of a newcomer works, or ends with a line that holds the next one."""

import os
import pathlib
import shutil
import subprocess

import pytest
import tiny

from lm.cli import main
from lm.commands.flags import setting
from lm.commands.inspect import SENTENCE
from lm.commands.verb import Call
from lm.data.dataset import DataConfig
from lm.inference import no_data
from lm.inference.loaded_run import open_run
from lm.runs.info import read_raw
from lm.runs.run_dir import RunDir


@pytest.mark.parametrize(
    ('typed', 'binding'),
    [
        ('model.attention=polysketch', 'model.attention = @polysketch()'),
        ('model.attention=polysketch()', 'model.attention = @polysketch()'),
        ('model.attention=wide/polysketch', 'model.attention = @wide/polysketch()'),
        ('optimizer.rule=muon', 'optimizer.rule = @muon()'),
        ('data.path=polysketch', "data.path = 'polysketch'"),
        ('model.attention=polysketsch', "model.attention = 'polysketsch'"),
    ],
)
def test_a_bare_name_is_what_the_field_takes(typed, binding):
    assert setting(typed) == binding


@pytest.mark.parametrize('words', [['RUN'], ['--run_dir', 'RUN']])
@pytest.mark.parametrize('verb', ['evaluate', 'generate', 'export'])
def test_verbs_of_a_run_take_its_path(verb, words, tmp_path, capsys):
    run = str(tmp_path / 'a run')
    more = ['--out', str(tmp_path / 'out')] if verb == 'export' else []
    assert main([verb, *(run if word == 'RUN' else word for word in words), *more]) == 2
    assert f'{run}: holds no config.gin' in capsys.readouterr().err


@pytest.mark.parametrize(('words', 'remedy'), [([], 'runs/quickstart'), (['runs/a', '--run_dir', 'runs/b'], 'runs/a')])
@pytest.mark.parametrize('verb', ['evaluate', 'generate'])
def test_one_run_is_named(verb, words, remedy, capsys):
    assert main([verb, *words]) == 2
    assert capsys.readouterr().err.endswith(f': lm {verb} {remedy}\n')


@pytest.mark.parametrize('more', [[], ['--set', 'train.steps=60']])
def test_a_mistyped_run_is_named(more, tmp_path, capsys):
    run = tmp_path / 'quickstrat'
    assert main(['train', '--run_dir', str(run), *more]) == 2
    assert f'--run_dir {run}: holds no run to go on with' in capsys.readouterr().err
    assert not run.exists()


def test_attention_without_a_text_takes_one(reference_run, monkeypatch):
    made: list[Call] = []
    monkeypatch.setattr('lm.summary.attention.show_attention', lambda *run, text, **options: made.append(text))
    assert main(['inspect', str(reference_run[0]), '--attention']) == 0
    assert made == [SENTENCE]


def test_a_copied_run_has_its_tokenizer(reference_run, tmp_path):
    copy = tmp_path / 'copy'
    shutil.copytree(reference_run[0], copy, ignore=shutil.ignore_patterns('compiled'))
    run = open_run(str(copy), [f"data.path = '{tmp_path / 'nowhere'}'"])
    original = open_run(str(reference_run[0]))
    assert run.tokenizer.sha256 == original.tokenizer.sha256
    assert run.tokenizer.eod_id == original.tokenizer.eod_id == read_raw(RunDir(str(copy), found=True).info)['end_id']
    with pytest.raises(type(run.store.error), match=r'nowhere.*no finished token store'):
        _ = run.splits


def test_a_relative_path_counts_from_where_the_run_began(reference_run, tmp_path, monkeypatch):
    directory = RunDir(str(reference_run[0]), found=True)
    original = open_run(str(reference_run[0]))
    path = pathlib.Path(original.experiment.data.path)
    monkeypatch.setattr(no_data, 'read_info', lambda file: {'folder': str(path.parent)})
    monkeypatch.chdir(tmp_path)
    assert not (tmp_path / path.name).exists()
    moved = type(original.experiment)(
        **{name: value for name, value in vars(original.experiment).items() if name != 'data'},
        data=DataConfig(path=path.name),
    )
    assert no_data.open_data(moved, directory).fingerprints == original.splits.fingerprints


def start_quickstart(folder: pathlib.Path, may_write: bool = True, **variables: str) -> str:
    (folder / 'scripts').mkdir()
    shutil.copy(tiny.ROOT / 'scripts' / 'quickstart.sh', folder / 'scripts')
    folder.chmod(0o755 if may_write else 0o555)
    command = ['bash', str(folder / 'scripts' / 'quickstart.sh')]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_the_quickstart_names_a_python_that_is_not_there(tmp_path):
    line = start_quickstart(tmp_path, PYTHON='/wrong')
    assert line.startswith('quickstart: PYTHON=/wrong: no such program; install Python')


@pytest.mark.skipif(os.geteuid() == 0, reason='the administrator may write everywhere')
def test_the_quickstart_names_a_folder_that_cannot_be_written(tmp_path):
    folder = tmp_path / 'a clone'
    folder.mkdir()
    line = start_quickstart(folder, may_write=False)
    assert 'a clone cannot be written' in line
    assert line.endswith(f'cp -r {tmp_path}/a\\ clone ~/lm')


def test_scripts_keep_the_ends_of_their_lines(tmp_path):
    """Git for Windows turns LF into CRLF, unless the files say otherwise."""
    command = ['git', '-c', 'core.autocrlf=true', 'check-attr', 'text', '--', 'scripts/quickstart.sh']
    done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.stdout == 'scripts/quickstart.sh: text: unset\n'
