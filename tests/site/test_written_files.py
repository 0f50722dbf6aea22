"""The page on files agrees with the output of real commands: each path, and each key."""

import importlib
import json
import re
import sys

import pytest
import tiny

sys.path.append(str(tiny.ROOT / 'docs' / 'extensions'))

from lm_reference import files
from lm_reference.keys import (
    Accounts,
    CheckpointRecord,
    EvalRecord,
    Leaf,
    Ledger,
    LockOwner,
    PositionLoss,
    RunInfo,
    SavedEvaluation,
    SplitInfo,
    StartInfo,
    StoreInfo,
    SweepRow,
    SweepTable,
    TokenizerInfo,
    TrainRecord,
)

from lm.runs.run_dir import RunDir

PAGE = (tiny.ROOT / 'docs' / 'reference' / 'files.md').read_text()
OF_ORBAX = {'_CHECKPOINT_METADATA'}
TYPES = {'str': str, 'int': int, 'float': (int, float), 'bool': bool, 'dict': dict, 'list': list, 'None': type(None)}


def check(found: dict, described: type) -> None:
    """Checks that `found` has all required keys, no other key, and values of their types."""
    assert described.__required_keys__ <= found.keys() <= described.__annotations__.keys()
    for name, kind, _ in files.keys(described):
        kind = re.sub(r'^NotRequired\[(.*)\]$', r'\1', kind)
        outer = [re.match(r'\w+', option)[0] for option in kind.split(' | ')]
        allowed = tuple(TYPES.get(word, dict) for word in outer)
        if name in found and 'Any' not in outer:
            assert isinstance(found[name], allowed if len(allowed) > 1 else allowed[0]), (name, found[name])


def paths(heading: str) -> list[str]:
    """Returns the first column of the table below a heading."""
    part = PAGE.partition(f'\n{heading}\n')[2]
    return re.findall(r'^\| `([^`]+)`', part.partition('\n#')[0], re.MULTILINE)


@pytest.fixture(scope='module')
def run(reference_run):
    done = tiny.lm('evaluate', '--run_dir', str(reference_run[0]))
    assert done.returncode == 0, done.stderr
    return reference_run[0]


def test_run_json(run):
    info = json.loads((run / 'run.json').read_text())
    check(info, RunInfo)
    check(info['starts'][0], StartInfo)
    check(info['goodput'], Ledger)
    check(info['goodput']['seconds'], Accounts)


def test_metrics(run):
    records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    assert {record['kind'] for record in records} == {'train', 'eval'}
    for record in records:
        check(record, {'train': TrainRecord, 'eval': EvalRecord}[record['kind']])


def test_evaluations(run):
    found = [json.loads(path.read_text()) for path in (run / 'evaluations').glob('*.json')]
    assert found
    for evaluation in found:
        check(evaluation, SavedEvaluation)
        for part in evaluation['loss_by_position']:
            check(part, PositionLoss)


def test_checkpoints(run):
    step = run / 'checkpoints' / '40'
    record = json.loads((step / 'metadata' / 'metadata').read_text())
    check(record, CheckpointRecord)
    assert record['leaves']
    for leaf in record['leaves'].values():
        check(leaf, Leaf)
    listed = {path.partition('/')[0] for path in paths('### `checkpoints/STEP/`')}
    assert {path.name for path in step.iterdir()} - OF_ORBAX == listed


def test_the_lock(tmp_path):
    with RunDir(tmp_path / 'run').lock():
        check(json.loads((tmp_path / 'run' / 'lock.json').read_text()), LockOwner)


def test_the_token_store(tokens):
    info = json.loads((tokens / 'dataset.json').read_text())
    check(info, StoreInfo)
    check(info['tokenizer'], TokenizerInfo)
    for split in info['splits'].values():
        check(split, SplitInfo)
    listed = {path.replace('SPLIT', 'train').partition('/')[0] for path in paths('## A token store')}
    assert {path.name for path in tokens.iterdir()} - set(info['splits']) == listed - {'train'}
    assert {path.name for path in (tokens / 'train').iterdir()} == {'tokens', 'document_ends'}


def test_a_sweep(tiny_flags, tmp_path):
    axes = tmp_path / 'axes.gin'
    axes.write_text('train.seed = [0]\ntrain.steps = 2\noptimizer.warmup_steps = 1\n')
    root = tmp_path / 'sweep'
    done = tiny.lm('sweep', '--run_dir', str(root), '--sweep_file', str(axes), *tiny_flags)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((root / 'sweep.json').read_text())
    check(table, SweepTable)
    (row,) = table['points']
    check(row, SweepRow)
    assert row['status'] == 'done'
    listed = {path.replace('NAME', row['point']) for path in paths('## A sweep')}
    assert {f'{path.name}/' if path.is_dir() else path.name for path in root.iterdir()} <= listed | {'points/'}
    assert {f'points/{path.name}' for path in (root / 'points').iterdir()} <= listed


def test_the_run_directory(run):
    listed = {path.partition('/')[0] for path in paths('## A run directory')}
    assert {path.name for path in run.iterdir()} <= listed
    for word in ('lock.json', 'metrics.jsonl.damaged', 'tensorboard', 'profile'):
        assert word in listed


def test_every_described_file_is_on_the_page():
    named = re.findall(r'^% generated: files (\S+)$', PAGE, re.MULTILINE)
    assert len(named) == len(set(named)) == 9
    for name in named:
        text = files.page(name)
        module, _, word = name.partition(':')
        for key, _, _ in files.own_keys(getattr(importlib.import_module(module), word)):
            assert f'\n| `{key}` |' in text
    assert '(key-startinfo)=' in files.page('lm_reference.keys:RunInfo')
