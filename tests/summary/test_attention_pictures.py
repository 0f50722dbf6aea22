"""`lm inspect --attention`: the picture and the table of what the heads of a run weigh for a text."""

import json

import matplotlib.image
import numpy as np
import pytest

import lm
from lm.cli import main
from lm.summary.attention import describe


def test_the_heads_of_a_run_are_drawn_and_measured(reference_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'def main(argv):\n    return 0\n'
    run = str(reference_run[0])
    assert main(['inspect', run, '--attention', text]) == 0
    shown = capsys.readouterr().out
    assert '4 heads are drawn in attention.png and attention.pdf' in shown
    assert 'own token' in shown
    every = matplotlib.image.imread('attention.png')

    assert main(['inspect', run, '--attention', text, '--heads', '1-0', '--tokens', '5', '--out', 'one', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert matplotlib.image.imread('one.png').shape != every.shape
    opened = lm.load(run)
    ids = [opened.tokenizer.eod_id, *opened.tokenizer.encode(text)]
    assert found['tokens'] == [opened.tokenizer.piece(int(index)) for index in ids[:5]]
    assert [(row['layer'], row['head']) for row in found['heads']] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    *_, last = opened.model.attention_weights(np.array([ids]))
    assert found['heads'][3]['own'] == pytest.approx(float(np.diagonal(last[0, 1]).mean()), abs=1e-5)
    assert found['heads'][3]['sum'] == pytest.approx(1, abs=1e-5)


def test_shares_of_signed_weights_and_of_queries_without_weights():
    weights = np.array([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [0.0, 0.0, 4.0]])
    found = describe(weights)
    assert found['own'] == (0.5 + 1) / 2
    assert found['neighbours'] == found['first'] == found['negative'] == 0.25
    assert found['distance'] == 0.25
    assert found['sum'] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--attention', 'x', '--heads', '2-0'], '--heads 2-0: the model has the layers 0 to 1'),
        (['--attention', 'x', '--heads', '1-2'], '--heads 1-2: layer 1 has the heads 0 to 1'),
        (['--attention', 'x', '--heads', '2'], "such as '0-1,2-0'"),
        (['--attention', 'x', '--tokens', '0'], '--tokens 0: must be at least 1'),
        (['--attention', 'x ' * 5000], 'give a shorter text'),
        (['--attention', 'x', '--verify'], 'leave it or --attention out'),
        (['--heads', '0-0'], 'add --attention'),
        (['--set', 'model.attention=@performer()'], 'add --attention'),
    ],
)
def test_wrong_flags_are_answered(flags, said, reference_run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['inspect', str(reference_run[0]), *flags]) != 0
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
