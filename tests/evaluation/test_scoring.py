"""Scores of given texts: programs get only the rows and tokens that were asked, and a little padding."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.evaluation import scoring
from lm.evaluation.scoring import SHORTEST, Scorer, pad_length
from lm.model.functions import Scored


@given(st.integers(1, 100_000))
def test_little_of_a_row_is_padding(length):
    padded = pad_length(length)
    assert length <= padded
    assert padded - length < (SHORTEST if length <= 128 else padded / 5)


def test_few_programs_serve_all_lengths():
    assert len({pad_length(length) for length in range(1, 8193)}) == 4 + 4 * 6


@pytest.mark.parametrize(('shards', 'rows', 'shapes'), [
    (1, [300], [(1, 321)]),
    (1, [300, 290, 289], [(4, 321)]),
    (1, [300] * 9, [(8, 321)] * 2),
    (1, [3, 300, 5], [(2, 33), (1, 321)]),
    (8, [300], [(8, 321)]),
])  # fmt: skip
def test_only_what_is_asked_is_computed(shards, rows, shapes, monkeypatch):
    """A whole batch of padding cost four fifths of the time of `run.score`."""
    seen = []

    def make_program(functions, mesh, accuracy=False):
        def score(weights, tokens):
            seen.append(tokens.shape)
            return Scored(np.asarray(tokens[:, 1:], np.float32))

        return score

    monkeypatch.setattr(scoring, 'make_scoring_program', make_program)
    monkeypatch.setattr(scoring, 'round_up_rows', lambda rows, mesh: -(-rows // shards) * shards)
    monkeypatch.setattr(scoring, 'batch_sharding', lambda mesh: None)
    monkeypatch.setattr(scoring.jax, 'make_array_from_callback', lambda shape, sharding, get: get(...))
    monkeypatch.setattr(scoring.jax, 'set_mesh', lambda mesh: __import__('contextlib').nullcontext())
    config = types.SimpleNamespace(looks_ahead='', why_parts=lambda parts, length: None)
    functions = types.SimpleNamespace(config=config)
    scorer = Scorer(functions, types.SimpleNamespace(shape={}), None, 512, 8)
    given = [np.arange(n + 1) + i for i, n in enumerate(rows)]
    found = scorer.score_rows(given)
    assert seen == shapes
    for row, scored in zip(given, found, strict=True):
        np.testing.assert_array_equal(scored.nats, row[1:])
