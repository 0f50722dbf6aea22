"""The forecast of recall: known curves are found again, and curves that allow none are refused."""

import re

import numpy as np
import pytest

from lm.inference.recall_law import CONFIDENCE, RecallLaw, forecast

TOKENS = 20_000.0 * np.arange(1, 9)


def curve(factor, exponent, limit=0.0, noise=0.0, seed=0):
    """Returns what is missing at `TOKENS`; `noise` is relative."""
    draws = np.random.default_rng(seed).normal(size=len(TOKENS))
    return (limit + factor * (TOKENS / TOKENS[0]) ** -exponent) * np.exp(noise * draws)


def test_a_power_law_is_found_again():
    law = RecallLaw.fit(TOKENS, curve(0.6, 0.5))
    needed = law.invert(0.05)
    assert needed.value == pytest.approx(TOKENS[0] * (0.6 / 0.05) ** 2)
    assert needed.low < needed.value < needed.high
    assert law.predict(TOKENS[3]).value == pytest.approx(0.6 * 4**-0.5)
    line, how, test = forecast(TOKENS, curve(0.6, 0.5))
    assert '95% of the recall of the teacher after about 2.88M tokens of stage 2' in line
    assert 'through 8 saved steps of 20k to 160k tokens' in how
    assert re.search(r'predict 0\.212 for it \(.*\), and it has 0\.212', test)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    truth, hits, n = TOKENS[0] * (0.6 / 0.05) ** 2, 0, 400
    for seed in range(n):
        found = RecallLaw.fit(TOKENS, curve(0.6, 0.5, noise=0.04, seed=seed)).invert(0.05)
        hits += found is not None and found.low <= truth <= found.high
    assert abs(hits / n - CONFIDENCE) < 0.05


@pytest.mark.parametrize(
    ('tokens', 'missing', 'why'),
    [
        (TOKENS[:3], curve(0.6, 0.5)[:3], 'it takes 4 saved steps'),
        (TOKENS[4:], curve(0.6, 0.5)[4:], '4 times the tokens of the first one'),
        (TOKENS, curve(0.6, 0.0, noise=0.05), 'does not fall with tokens by more than its scatter'),
        (TOKENS, curve(0.6, -0.3), 'does not fall'),
        (TOKENS, curve(0.5, 1.5, limit=0.2), 'slows down against a power law'),
        (TOKENS, curve(0.6, 0.5) * np.append(np.ones(7), 1.3), 'follow no power law'),
        (TOKENS, curve(0.6, 0.1), 'reaches 0.05 beyond 100 times the measured tokens'),
    ],
)
def test_points_that_allow_no_forecast_are_refused(tokens, missing, why):
    (line,) = forecast(tokens, missing)
    assert line.startswith('no forecast: ')
    assert why in line


def test_a_student_that_is_there_needs_no_forecast():
    (line,) = forecast(TOKENS, curve(0.1, 0.5))
    assert line == '95% of the recall of the teacher is there after 80k tokens'
    points = curve(0.1, 0.5)
    points[0] = 0.04  # by chance
    assert forecast(TOKENS, points) == [line]
