"""Amino acids that a model treats alike are found, and compared with BLOSUM62."""

import runpy
import sys
import types

import numpy as np
import pytest
import tiny

from lm.attention.performer import Performer
from lm.data import tokenizers
from lm.data.tokenizers.amino_acids import AminoAcidsConfig
from lm.model import ModelConfig, build

SCRIPT = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/figures_7_to_10/amino_acids.py'))
LETTERS, LENGTH = SCRIPT['LETTERS'], 30


@pytest.fixture
def run():
    """Returns a model of amino acids that was not trained, with eight windows of random ones."""
    tokenizer = tokenizers.from_bytes(AminoAcidsConfig().contents())
    attention = Performer(n_features=16, features='relu', causal=False)
    model = ModelConfig(vocab_size=28, n_layers=2, d_model=16, n_heads=2, head_dim=8, attention=attention)
    tokens = np.random.default_rng(0).integers(0, 28, 8 * LENGTH + 1)
    store = types.SimpleNamespace(
        vocab_size=28,
        tokens=lambda split: len(tokens),
        read_many=lambda split, starts, length: np.stack([tokens[at : at + length + 1] for at in starts]),
    )
    experiment = types.SimpleNamespace(
        train=types.SimpleNamespace(context_length=LENGTH), data=types.SimpleNamespace(eval_split='validation')
    )
    return types.SimpleNamespace(
        model=build(model, 0), tokenizer=tokenizer, store=store, splits=store, experiment=experiment, windows=tokens
    )


def test_the_weights_of_all_windows_are_counted(run):
    sums = SCRIPT['count_weights'](run, 800, batch=4)
    assert sums.shape == (4, 28, 20)
    rows = run.windows[: 8 * LENGTH].reshape(8, LENGTH)
    first, _ = run.model.attention_weights(rows)
    asking, asked = run.tokenizer.encode('W')[0], run.tokenizer.encode('D')[0]
    pairs = (rows == asking)[:, :, None] & (rows == asked)[:, None]
    expected = (np.asarray(first)[:, 1] * pairs).sum()
    assert sums[1, asking, LETTERS.index('D')] == pytest.approx(expected, rel=1e-4)


def test_amino_acids_with_equal_shares_are_alike():
    rng = np.random.default_rng(0)
    sums = rng.random((6, 28, 20))
    sums[:, :, LETTERS.index('E')] = 3 * sums[:, :, LETTERS.index('D')]
    for by in ('heads', 'queries'):
        similarity = SCRIPT['compute_similarity'](sums, by)
        assert SCRIPT['list_pairs'](similarity, 1) in ('DE', 'ED')
    with pytest.raises(Exception, match='--by queries'):
        SCRIPT['compute_similarity'](sums[:1], 'heads')
    sums[..., LETTERS.index('W')] = 0
    with pytest.raises(Exception, match='hold no W; take more by --windows'):
        SCRIPT['compute_similarity'](sums, 'heads')


def test_blosum62_agrees_with_itself_alone():
    blosum = SCRIPT['blosum']()
    assert np.allclose(blosum, blosum.T)
    assert np.allclose(np.diag(blosum), 1)
    found, share = SCRIPT['compare'](blosum, blosum)
    assert found == pytest.approx(1)
    assert share == 0
    found, share = SCRIPT['compare'](np.random.default_rng(0).random((20, 20)), blosum)
    assert abs(found) < 0.3
    assert share > 0.01


def test_the_command_draws_one_picture(run, tmp_path, monkeypatch, capsys):
    main = SCRIPT['main']
    monkeypatch.setitem(main.__globals__, 'lm', types.SimpleNamespace(load=lambda path: run))
    monkeypatch.setitem(main.__globals__, 'SHUFFLES', 10)
    monkeypatch.setattr(sys, 'argv', ['amino_acids.py', 'runs/x', '--out', str(tmp_path / 'picture')])
    assert main() == 0
    assert '| heads |' in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ['picture.pdf', 'picture.png']
    monkeypatch.setattr(sys, 'argv', [*sys.argv, '--by', 'embeddings'])
    assert main() == 0
    assert '| embeddings |' in capsys.readouterr().out
    run.tokenizer = None
    assert main() != 0
    assert 'name a run on data of @fasta()' in capsys.readouterr().err
