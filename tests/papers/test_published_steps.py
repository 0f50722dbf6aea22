"""configs/papers/maxtext/published_steps.py compares the models that were measured."""

import dataclasses
import importlib.util
import re
import subprocess
import sys

import jax
import pytest
from tiny import ROOT, environment

from lm.hardware import Target, parse
from lm.model.functions import count_parameters
from lm.plan import plan_step

SCRIPT = ROOT / 'configs/papers/maxtext/published_steps.py'


@pytest.fixture(scope='module')
def published():
    spec = importlib.util.spec_from_file_location('published', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    yield spec.loader.exec_module(module) or module
    del sys.modules[spec.name]


def test_models_have_the_number_of_parameters_in_their_names(published):
    for name, measured in published.PUBLISHED.items():
        billions = float(re.search(r'(\d+)b$', name)[1])
        assert sum(count_parameters(measured.experiment().model).values()) == pytest.approx(billions * 1e9, rel=0.04)


def test_a_rate_becomes_seconds_by_the_authors_count(published):
    """They count 6 FLOPs per parameter of a product and token, and attention as a whole square."""
    measured = published.PUBLISHED['v5e-16b']
    products = 32 * (4 * 4096 * 8192 + 3 * 4096 * 28_672) + 32_000 * 4096
    square = 12 * 2048 * 32 * 8192
    assert measured.seconds_per_step(measured.experiment()) == pytest.approx(
        (6 * products + square) * 6 * 2048 / 120e12, rel=1e-3
    )
    # For this model the authors print both: 413.433 TFLOP/s and 3.443 s.
    measured = published.PUBLISHED['v6e-llama3.1-8b']
    rate = dataclasses.replace(measured, seconds=None, teraflops=413.433)
    assert rate.seconds_per_step(rate.experiment()) == pytest.approx(measured.seconds, rel=2e-3)


def test_the_largest_models_are_planned_for_their_slices(published):
    """A stack of their layers has more numbers than 32 bits count, and each chip has a part of it."""
    for name in ('v5e-64b', 'v4-52b'):
        measured = published.PUBLISHED[name]
        plan = plan_step(measured.experiment(), Target('tpu', (parse(measured.topology).chips,)))
        assert max(leaf.size for leaf in jax.tree.leaves(plan.functions.abstract['params'])) > 2**32


def test_unknown_names_are_refused():
    done = subprocess.run(
        [sys.executable, SCRIPT, 'v5e-17b'], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert 'v5e-17b: not published; choose of v5e-16b' in done.stderr
