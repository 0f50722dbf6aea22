"""The table of other packages' TPU kernels: rows, reasons and the page. Nothing is compiled but one call of ours."""

import base64
import dataclasses
import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny

sys.path.insert(0, str(tiny.ROOT))
from lm.cost_model.program import Instruction
from scripts.peers import compare
from scripts.peers.measure import Figures, has_loops, measure, pretend
from scripts.peers.operations import OPERATIONS, Shape
from scripts.peers.packages import PEERS, MaxText, load_functions
from scripts.peers.page import make_page
from scripts.peers.rows import Row, read_rows

ADAPTER = """
from scripts.peers.packages import Peer

class Sums(Peer):
    name, package, version = 'Sums', 'sums', '1.2'
    differs = {'linear': 'it adds nothing'}

    def operations(self):
        return {'linear': lambda q, k, v: v}

class Missing(Peer):
    name, package = 'Missing', 'no-such-package'

PEERS = (Sums, Missing)
"""
QUICK = Shape(2, 16, 32)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command with a stand-in for the compiler; returns the rows and the page."""
    (tmp_path / 'adapter.py').write_text(ADAPTER)
    calls = []

    def stand_in(compute, inputs, generation):
        calls.append(generation)
        if generation == 'v7x':
            raise NotImplementedError('refuses TPU7x\nat length')
        return Figures(kernels=2.0 * len(calls), model=1.0, estimate=2.0, temporaries_mib=3.0, hbm_bytes=4.0)

    monkeypatch.setattr(compare, 'measure', stand_in)
    monkeypatch.setattr(compare, 'compiler', lambda: 'jax 1, libtpu 2')

    def run_command(*flags):
        calls.clear()
        save, page = tmp_path / 'rows.json', tmp_path / 'page.md'
        given = ['--save', str(save), '--page', str(page), '--adapter', str(tmp_path / 'adapter.py')]
        given += ['--peers', 'sums', 'no-such-package', '--heads', '12x64', '--lengths', '4096']
        assert compare.main([*given, *flags]) == 0
        return read_rows(save), page.read_text(), list(calls)

    return run_command


def test_every_row_has_figures_or_a_reason(run):
    rows, page, calls = run('--operations', 'linear', '--generations', 'v6e', 'v7x')
    assert calls == ['v6e', 'v6e', 'v7x', 'v7x']
    assert [(row.generation, row.peer, row.figures is None) for row in rows] == [
        ('v6e', 'lm', False),
        ('v6e', 'Sums', False),
        ('v6e', 'Missing', True),
        ('v7x', 'lm', True),
        ('v7x', 'Sums', True),
        ('v7x', 'Missing', True),
    ]
    assert rows[2].reason.startswith('PackageNotFoundError: ')
    assert rows[4].reason == 'NotImplementedError: refuses TPU7x'
    # 4 + 1 of 2 + 1 cycles with our model, and 4 + 2 of 2 + 2 with XLA's estimates.
    assert '1.67, 1.50 | it adds nothing' in page
    assert 'PackageNotFoundError' in page


@pytest.mark.parametrize(('differs', 'said'), [('', True), ('it adds nothing', False)])
def test_the_page_names_rows_in_which_a_peer_of_equal_work_is_ahead(differs, said):
    ours = Row('linear', '12x64', 4096, 'v6e', 'lm', '1', 'jax 1', figures=Figures(4.0, 1.0, 8.0, 0.0, 0.0))
    theirs = dataclasses.replace(ours, peer='Sums', differs=differs, figures=Figures(5.0, 1.0, 2.0, 0.0, 0.0))
    line = "- Sums, linear attention, 12 × 64, 4,096 tokens, v6e: 0.58 with XLA's estimates. It has less around them."
    assert (line in make_page([ours, theirs])) == said
    assert ('In no row.' in make_page([ours, theirs])) != said


def test_rows_of_the_same_versions_are_kept(run, monkeypatch):
    first, _, _ = run('--operations', 'linear', '--generations', 'v6e')
    again, _, calls = run('--operations', 'linear', 'softmax', '--generations', 'v6e')
    assert again[: len(first)] == first
    assert calls == ['v6e']  # our softmax; `Sums` has none
    monkeypatch.setattr(compare, 'compiler', lambda: 'jax 1, libtpu 3')
    newer, page, calls = run('--operations', 'linear', '--generations', 'v6e')
    assert len(calls) == 2
    assert len(newer) == len(again) + 3
    assert 'jax 1, libtpu 2; jax 1, libtpu 3' in page


@pytest.mark.parametrize('name', OPERATIONS)
def test_our_calls_compute(name):
    operation = OPERATIONS[name]
    found = jax.eval_shape(operation.compute, *operation.inputs(QUICK))
    assert (found.shape, found.dtype) == ((1, 32, 2, 16), jnp.bfloat16)


def test_equal_work_is_not_described():
    assert all(set(peer.differs) <= set(OPERATIONS) for peer in PEERS)
    assert len({peer.package for peer in PEERS}) == len(PEERS)


def test_functions_come_from_the_file_alone(tmp_path, monkeypatch):
    (tmp_path / 'lonely').mkdir()
    (tmp_path / 'lonely/__init__.py').write_text('')
    (tmp_path / 'lonely/rule.py').write_text('import nothing_here\n\ndef double(x):\n    return jnp.add(x, x)\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert load_functions('lonely/rule.py', 'lonely', ['double'])['double'](2) == 4
    with pytest.raises(ImportError):
        load_functions('gone/rule.py', 'no_such_package', ['double'])
    assert MaxText.package == 'maxtext'


@pytest.mark.parametrize(('words', 'loops'), [(b'\0for\0', True), (b'\0while\0', True), (b'\0format\0', False)])
def test_loops_in_kernels_are_seen(words, loops):
    body = base64.b64encode(b'scf' + words).decode()
    kernel = Instruction('k', 'custom-call', '', '', f'"body":"{body}"', is_root=False)
    assert has_loops(kernel) == loops


def test_packages_see_the_described_devices():
    with pretend(jax.devices('cpu')[:1]):
        assert jax.default_backend() == 'tpu'
    assert jax.default_backend() == 'cpu'


def test_record_has_a_reason_or_figures_for_each_row():
    path = tiny.ROOT / 'scripts/peers/results.json'
    rows = read_rows(path)
    assert len({row.key for row in rows}) == len(rows) == len(json.loads(path.read_text())['rows'])
    assert all((row.figures is None) == bool(row.reason) for row in rows)
    assert (tiny.ROOT / 'docs/lab/peers.md').read_text() == make_page(rows)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_figures_of_a_call():
    operation, shape = OPERATIONS['linear'], Shape(4, 64, 1024)
    both, forward = (measure(operation.compute, operation.inputs(shape), 'v5e', forward=f) for f in (False, True))
    assert both.kernels > forward.kernels > 0
    assert both.estimate >= both.model >= 0
    assert (both.uncounted, both.looping) == ((), ())
    assert both.hbm_bytes > forward.hbm_bytes > 4 * 64 * 2  # three inputs and the outputs
