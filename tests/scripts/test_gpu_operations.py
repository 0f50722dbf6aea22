"""The timing of operations beside peers, in tiny form on a CPU; the side of PyTorch may be missing."""

import json
import subprocess
import sys

import numpy as np
import tiny

sys.path.insert(0, str(tiny.ROOT))
from scripts.gpu.peers.operation_case import ARRAYS, SCALE, OperationCase

LEAST_ERROR, MOST_ERROR = 1e-5, 0.02


def test_queries_are_scaled_exactly():
    assert np.log2(SCALE) % 1 == 0


def test_arrays_are_equal_for_all_libraries_and_keys_of_the_delta_rule_have_length_one():
    case = OperationCase('gated_delta', 64, 256, 2, 16, True)
    a, b = case.draw(), case.draw()
    assert list(a) == [*ARRAYS['gated_delta'], 'do']
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert a['k'].shape == (4, 64, 2, 16)
    assert np.allclose(np.linalg.norm(a['k'], axis=-1), 1)
    assert (a['gate'] < 0).all()


def test_operations_are_timed_and_compared_with_formulas_without_pytorch(tmp_path):
    save = tmp_path / 'result.json'
    sizes = ['--windows', '64', '--forward_windows', '64', '--tokens', '128', '--heads', '2', '--size', '16']
    command = [sys.executable, '-m', 'scripts.gpu.peers.operations', '--operations', 'retention,gated_linear']
    command += [*sizes, '--turns', '2', '--peer_python', '/bin/false', '--save', str(save)]
    subprocess.run(command, cwd=tiny.ROOT, check=True)
    result = json.loads(save.read_text())
    assert {(r['operation'], r['passes'], r['turns']) for r in result['rows']} == {
        (operation, passes, 2)
        for operation in ('retention', 'gated_linear')
        for passes in ('forward', 'forward+backward')
    }
    for values in result['values'].values():
        assert set(values) == {'lm'}
        assert {'o', 'dq', 'dk', 'dv'} <= set(values['lm'])
        assert all(LEAST_ERROR < error < MOST_ERROR for error in values['lm'].values())
    assert any('torch' in name for name in result['errors'])
