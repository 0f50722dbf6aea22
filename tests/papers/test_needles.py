"""Needles in a haystack: where the number stands, and which answers are right."""

import runpy
import sys

import numpy as np
import pytest
import tiny

import lm
from lm.errors import ConfigError
from lm.inference.needles import describe_needles, find_needles, make_samples
from lm.model.functions import Scored

SCRIPT = runpy.run_path(str(tiny.ROOT / 'configs/papers/study/distill/needles.py'))


def test_needles_lie_at_all_depths_and_the_text_ends_with_the_number(reference_run):
    tokenizer = lm.load(str(reference_run[0])).tokenizer
    samples = make_samples(tokenizer, 900, 3)
    texts = [tokenizer.decode(sample.tokens.tolist()) for sample in samples]
    depths = [text.index('One of the special') / len(text) for text in texts]
    assert depths[0] < 0.4 < depths[1] < depths[2]
    for text, sample in zip(texts, samples, strict=True):
        number = text.split()[-1]
        assert text.count(number) == 2
        assert tokenizer.decode(sample.tokens[-sample.answer :].tolist()).strip() == number
        assert tokenizer.decode(sample.tokens[-sample.answer :][:1].tolist()).strip(), 'no blank token is asked for'
        assert 700 < len(sample.tokens) <= 900
    with pytest.raises(ConfigError, match='100 tokens are too few for a needle'):
        make_samples(tokenizer, 100, 1)


def test_a_sample_is_right_if_the_whole_number_is(reference_run, monkeypatch):
    run = lm.load(str(reference_run[0]))
    answers = iter([True, False, True])

    def score_rows(scorer, rows, accuracy):
        right = np.ones(len(rows[0]) - 1, bool)
        right[-1] = next(answers)
        return [Scored(nats=np.full(len(right), 0.5), correct=right)]

    monkeypatch.setattr('lm.evaluation.scoring.Scorer.score_rows', score_rows)
    assert describe_needles(find_needles(run, 900, 3)) == '2 of 3, 0.50'


def test_the_command_prints_a_row_per_run(reference_run, monkeypatch, capsys):
    name = str(reference_run[0])
    monkeypatch.setattr(sys, 'argv', ['needles.py', name, name, '--lengths', '900', '--samples', '1'])
    assert SCRIPT['main']() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in head.strip('|').split('|')] == ['right, nats', '900']
    assert len(rows) == 2
    assert all('0 of 1, ' in row for row in rows), 'a young model knows no number'
