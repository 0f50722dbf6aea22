"""`lm inspect`: its output agrees with the files, and it finds damage."""

import json
import re
import shutil

import made_up_runs
import pytest
import tiny

from lm.attention.softmax import Softmax
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import Snapshot
from lm.cli import main
from lm.errors import LmError
from lm.runs.records import Run, find_runs
from lm.summary import runs, tables


@pytest.fixture
def run(reference_run, tmp_path):
    """Returns a copy of the reference run that a test may spoil."""
    return shutil.copytree(reference_run[0], tmp_path / 'run')


def inspect(capsys, *arguments: str) -> tuple[int, dict, str]:
    """Returns (exit code, the JSON, stderr)."""
    code = main(['inspect', *arguments, '--json'])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else {}, printed.err


def test_a_run_is_described(reference_run, capsys):
    run, _ = reference_run
    code, found, _ = inspect(capsys, str(run), '--verify')
    assert code == 0
    assert (found['status'], found['step'], found['steps']) == ('finished', 40, 40)
    assert [c['step'] for c in found['checkpoints']] == [30, 40]
    for checkpoint in found['checkpoints']:
        assert checkpoint['health'] == 'verified'
        folder = run / 'checkpoints' / str(checkpoint['step'])
        assert checkpoint['bytes'] == sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())
        assert checkpoint['saved'].startswith('20')
    info = json.loads((run / 'run.json').read_text())
    assert sum(found['parameters'].values()) == info['parameters']
    assert found['parameters']['embedding'] == 400 * 32
    assert found['fingerprints'] == {'data': info['data'], 'tokenizer': info['tokenizer']}
    assert found['last_train']['loss'] == tiny.losses(run)[40]
    assert found['last_eval']['loss'] == tiny.losses(run, 'eval')[40]
    assert found['damage'] == []

    assert main(['inspect', str(run)]) == 0
    shown = capsys.readouterr().out
    for words in ('finished, step 40 of 40', '2 layers of width 32', 'softmax', 'embedding 12,800', 'complete'):
        assert words in shown


def test_a_step_that_was_saved_between_two_lines_of_the_log_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, 'DELETION_SECONDS', 0.0)
    run = made_up_runs.write_run(tmp_path / 'run', Softmax(), steps=100)
    lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (run / 'metrics.jsonl').write_text(''.join(lines[:4]))  # steps 1, 10, 20 and 30
    (run / 'run.json').write_text(json.dumps(json.loads((run / 'run.json').read_text()) | {'saved_step': 37}))
    assert Run.read(run).step == 30, 'the checkpoint is gone'
    (run / 'checkpoints' / '100').rename(run / 'checkpoints' / '37')
    assert main(['inspect', str(run)]) == 44, 'the checkpoint holds nothing'
    assert 'not finished, step 37 of 100' in capsys.readouterr().out
    assert main(['report', str(run), '--out', str(tmp_path / 'out')]) == 0
    assert '37 of 100' in (tmp_path / 'out' / 'report.md').read_text()


def test_parameters_are_counted_before_the_first_checkpoint(run, capsys):
    _, with_checkpoint, _ = inspect(capsys, str(run))
    shutil.rmtree(run / 'checkpoints')
    code, found, _ = inspect(capsys, str(run))
    assert code == 0
    assert found['checkpoints'] == []
    assert found['status'] == 'not finished'
    assert found['parameters'] == with_checkpoint['parameters']


def test_imported_weights_are_not_shown_as_an_unfinished_run(run, tmp_path, capsys):
    shutil.rmtree(run / 'evaluations', ignore_errors=True)
    (run / 'metrics.jsonl').unlink()
    info = json.loads((run / 'run.json').read_text())
    (run / 'run.json').write_text(json.dumps(info | {'imported': 'exports/theirs'}))
    assert inspect(capsys, str(run))[1]['status'] == 'imported'
    assert main(['inspect', str(run)]) == 0
    assert 'imported from exports/theirs, not trained' in capsys.readouterr().out
    assert main(['report', str(run), '--out', str(tmp_path / 'out'), '--no_pictures']) == 0
    shown = capsys.readouterr().out
    assert 'imported' in shown
    assert 'not finished' not in shown


@pytest.mark.parametrize(
    ('lines', 'shown'),
    [
        ({'data.path': "''", 'data.task': '@listops()', 'data.mixture': '[]'}, '@listops()'),
        ({'data.path': "'data'", 'data.task': 'None', 'data.mixture': "[('a', 1.0)]"}, "'data' [('a', 1.0)]"),
        ({'data.path': "''", 'data.task': 'None', 'data.mixture': '[]'}, '–'),
        ({}, '–'),
    ],
)
def test_a_run_learns_a_task_or_a_store_or_a_mixture(lines, shown):
    assert tables.data_of(lines) == shown


def test_parameters_of_an_unknown_mechanism_come_from_the_record(run, capsys):
    config = run / 'config.gin'
    config.write_text('import nobodys_module\n' + config.read_text().replace('@softmax()', '@nobodys()'))
    code, found, _ = inspect(capsys, str(run))
    assert code == 0
    assert found['parameters'] == {'in all': json.loads((run / 'run.json').read_text())['parameters']}


def test_only_verify_finds_damage_in_a_checkpoint(run, capsys):
    data = max((run / 'checkpoints' / '40' / 'state').rglob('*'), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert inspect(capsys, str(run))[0] == 0
    code, found, error = inspect(capsys, str(run), '--verify')
    assert code == 44
    assert error.count('\n') == 1
    assert 'step 40' in error
    assert [c['sound'] for c in found['checkpoints']] == [True, False]


def test_a_changed_digit_of_the_metrics_is_named(run, capsys):
    path = run / 'metrics.jsonl'
    before = path.read_text()
    assert main(['inspect', str(run)]) == 0
    path.write_text(before.replace('"loss": ', '"loss": 1', 1))
    assert main(['inspect', str(run)]) == 44
    assert re.search(
        r'metrics.jsonl: one of its lines 1 to \d+ has changed since the checkpoint', capsys.readouterr().err
    )
    path.write_text(before)


def test_a_damaged_record_is_found_without_verify(run, capsys):
    record = run / 'checkpoints' / '30' / 'metadata' / 'metadata'
    record.write_text(record.read_text().replace('"step": 30', '"step": 31').replace('"step":30', '"step":31'))
    (run / 'checkpoints' / '20.damaged').mkdir()
    code, found, _ = inspect(capsys, str(run))
    assert code == 44
    assert [c['sound'] for c in found['checkpoints']] == [False, True]
    assert found['set_aside'] == ['20.damaged']


def test_storage_that_fails_during_the_inspection_is_not_damage(run, capsys, monkeypatch):
    def fail(self):
        raise LmError('the storage does not answer')

    monkeypatch.setattr(Snapshot, 'record', fail)
    assert main(['inspect', str(run)]) == 1
    assert capsys.readouterr().err.endswith('the storage does not answer\n')


def test_files_that_come_and_go_during_the_inspection_are_not_damage(run, capsys, monkeypatch):
    """A continuing run deletes old checkpoints and writes new ones."""
    verify = Checkpointer.verify

    def while_30_is_deleted(self, step):
        if step == 30:
            shutil.rmtree(run / 'checkpoints' / '30' / 'state', ignore_errors=True)  # deleting takes a while
        verify(self, step)

    monkeypatch.setattr(Checkpointer, 'verify', while_30_is_deleted)
    monkeypatch.setattr(runs.time, 'sleep', lambda seconds: shutil.rmtree(run / 'checkpoints' / '30'))
    (run / 'checkpoints' / '50' / 'state').mkdir(parents=True)  # not yet complete
    code, found, _ = inspect(capsys, str(run), '--verify')
    assert code == 0
    assert [(c['step'], c['health']) for c in found['checkpoints']] == [(40, 'verified')]
    assert found['set_aside'] == ['50']


def test_half_written_and_foreign_records_are_left_out(run, tmp_path, capsys):
    before = Run.read(run)
    with open(run / 'metrics.jsonl', 'ab') as file:
        file.write(b'[1]\n{"kind": "train", "step": 41}\n{"kind": "train", "step": "x", "loss": 1}\n{"kind": 3}\n')
        file.write(b'{"kind": "eval", "step": 41, "loss": null}\n"\xff\xfe"\n{"kind": "train", "step": 42, "lo')
    (run / 'evaluations').mkdir(exist_ok=True)
    for i, text in enumerate(('', '[]', '{"loss": 3', '{"loss": 3}', '3')):
        (run / 'evaluations' / f'{i}.json').write_text(text)
    (run / 'run.json').write_text('[]')
    found = Run.read(run)
    assert (found.train, found.evals) == (before.train, before.evals)
    assert len(found.evaluations) == len(before.evaluations)
    assert main(['inspect', str(run)]) == 0
    assert main(['report', str(run), '--out', str(tmp_path / 'out'), '--no_pictures']) == 0

    foreign = run.parent / 'foreign'
    foreign.mkdir()
    (foreign / 'config.gin').write_bytes(b'\xfftrainer.epochs = 3\n')
    capsys.readouterr()
    for command in (['inspect', str(foreign)], ['report', str(foreign), '--out', str(tmp_path / 'out')]):
        assert main(command) == 2
        assert 'not one of lm train' in capsys.readouterr().err
    assert [r.name for r in find_runs([str(run.parent)])] == ['run']


def test_a_damaged_table_of_a_sweep_is_reported(tmp_path, capsys):
    for text in ('', '[]', '{"points": [{}]}', '{"points": 3}'):
        (tmp_path / 'sweep.json').write_text(text)
        code, _, error = inspect(capsys, str(tmp_path))
        assert code == 44
        assert error.count('\n') == 1
        assert 'run the same lm sweep again' in error


def test_an_unfinished_token_store_is_reported(tmp_path, capsys):
    (tmp_path / 'parts').mkdir()
    code, _, error = inspect(capsys, str(tmp_path))
    assert code == 2
    assert 'is an unfinished token store; run the same lm prepare again' in error


def test_a_run_in_progress_is_described(run):
    metrics = run / 'metrics.jsonl'
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(''.join(lines[:7]) + lines[7][:20])
    shutil.rmtree(run / 'checkpoints' / '40')
    found = Run.read(run)
    assert found.step == 7
    assert not found.is_finished()
    assert found.last_evaluation is None
    (run / 'metrics.jsonl').unlink()
    (run / 'run.json').unlink()
    assert Run.read(run).step == 0
    assert main(['inspect', str(run)]) == 44  # the lines of its checkpoint are gone


def test_a_token_store_is_described(tokens, capsys, tmp_path):
    code, found, _ = inspect(capsys, str(tokens), '--verify')
    assert code == 0
    info = json.loads((tokens / 'dataset.json').read_text())
    assert found['splits'].keys() == info['splits'].keys() == {'train', 'validation', 'test'}
    for name, split in found['splits'].items():
        for count in ('documents', 'bytes', 'words', 'tokens'):
            assert split[count] == info['splits'][name][count]
        assert split['bytes_per_token'] == pytest.approx(split['bytes'] / split['tokens'])
        assert split['health'] == 'verified'
    assert found['fingerprint'] == info['fingerprint']
    assert found['source'] == info['source']
    assert main(['inspect', str(tokens)]) == 0
    assert f'{info["splits"]["train"]["tokens"]:,}' in capsys.readouterr().out

    copy = shutil.copytree(tokens, tmp_path / 'copy')
    data = max((copy / 'train' / 'tokens').rglob('*'), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    code, found, error = inspect(capsys, str(copy), '--verify')
    assert code == 44
    assert 'train' in error
    assert found['splits']['train']['health'] == 'damaged'
    assert found['splits']['test']['health'] == 'verified'


@pytest.mark.parametrize('path', ['nowhere', '.'])
def test_a_folder_that_is_neither_run_nor_store_is_refused(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, error = inspect(capsys, path)
    assert code == 2
    assert error.count('\n') == 1


def test_runs_are_found_by_directory_root_and_glob(run):
    root = run.parent
    for patterns in ([str(run)], [str(root)], [str(root / '*')], [str(run), str(root), str(root / 'r*')]):
        assert [r.name for r in find_runs(patterns)] == ['run']
    run = Run.read(run)
    assert run.attention == 'softmax'
    assert run.value('optimizer.peak_learning_rate') == 3e-3
    assert run.tokens_per_second > 0
