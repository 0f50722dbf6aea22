"""Weights are compared by the logits of a fixed prompt."""

import json

import numpy as np
import pytest
from test_exchange import write_llama

from lm.cli import main
from lm.errors import MismatchError
from lm.interop import prove
from lm.interop.proof import FILE, Proof, read_proof

PROOF = Proof([1, 2], [0, 3, 5], np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3))


@pytest.mark.slow
def test_an_import_its_export_and_the_import_of_that_agree(tmp_path, capsys):
    write_llama(tmp_path / 'in', eos_token_id=2)
    run, out, again = (tmp_path / name for name in ('run', 'out', 'again'))
    task = ['--gin_param', 'data.task = @induction_heads()']
    assert main(['import', str(tmp_path / 'in'), '--run_dir', str(run), '--prove', *task]) == 0
    assert read_proof(run).logits.shape == (16, 64)
    assert main(['export', '--run_dir', str(run), '--format', 'native', '--out', str(out), '--prove']) == 0
    assert main(['import', str(out), '--run_dir', str(again), '--prove', *task]) == 0
    assert capsys.readouterr().out.count('the logits of the fixed prompt differ by 0.0e+00') == 3
    assert '## Checks\n\n- The logits of the fixed prompt' in (out / 'README.md').read_text()
    damaged = json.loads((out / FILE).read_text())
    damaged['logits'][3][5] += 1.0
    (out / FILE).write_text(json.dumps(damaged))
    assert main(['import', str(out), '--run_dir', str(tmp_path / 'other'), '--prove', *task]) == 44
    assert 'these are other weights; do not use them' in capsys.readouterr().err


def test_a_proof_is_kept_and_compared(tmp_path):
    assert read_proof(tmp_path) is None
    PROOF.write(tmp_path)
    found = read_proof(tmp_path)
    assert found.compare(PROOF, 'x').endswith('differ by 0.0e+00 of the largest from the logits of x')
    near, far = (PROOF._replace(logits=PROOF.logits + step) for step in (1e-4, np.float32(np.nan)))
    assert '1.7e-05' in near.compare(PROOF, 'x')
    with pytest.raises(MismatchError, match=r'more than 0\.0001: these are other weights'):
        far.compare(PROOF, 'x')
    with pytest.raises(MismatchError, match='is of another vocabulary'):
        PROOF._replace(ids=[0, 1, 2]).compare(found, 'x')
    for text in ('{', '{"prompt": [1], "ids": [1], "logits": [[1, 2]]}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(MismatchError, match='is damaged'):
            read_proof(tmp_path)


def test_an_export_whose_proof_is_interrupted_is_deleted(tmp_path, monkeypatch):
    def interrupt(folder):
        assert (folder / 'model.safetensors').exists()
        raise KeyboardInterrupt

    write_llama(tmp_path / 'in', eos_token_id=2)
    run, out = tmp_path / 'run', tmp_path / 'out'
    task = ['--gin_param', 'data.task = @induction_heads()']
    assert main(['import', str(tmp_path / 'in'), '--run_dir', str(run), *task]) == 0
    monkeypatch.setattr(prove, 'prove_run', lambda *_: PROOF)
    monkeypatch.setattr(prove, 'prove_folder', interrupt)
    assert main(['export', '--run_dir', str(run), '--format', 'native', '--out', str(out), '--prove']) == 130
    assert not out.exists()


def test_an_import_whose_proof_is_interrupted_is_proved_by_the_same_command(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    write_llama(tmp_path / 'in', eos_token_id=2)
    run = tmp_path / 'run'
    proven = ['import', str(tmp_path / 'in'), '--run_dir', str(run), '--prove']
    proven += ['--gin_param', 'data.task = @induction_heads()']
    monkeypatch.setattr(prove, 'prove_run', interrupt)
    assert main(proven) == 130
    monkeypatch.setattr(prove, 'prove_run', lambda *_: PROOF)
    assert main([*proven, '--set', 'train.steps=7']) == 2  # it is another import
    before = (run / 'run.json').read_bytes()
    assert main(proven) == 0
    assert read_proof(run).ids == PROOF.ids
    assert (run / 'run.json').read_bytes() == before
    assert main(proven) == 2
    assert capsys.readouterr().err.count('is there already') == 2
