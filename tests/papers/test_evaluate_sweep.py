"""One run is evaluated under every point of a sweep; a result counts only for its own configuration and flags."""

import json
import runpy
import subprocess
import types

import tiny

SCRIPT = tiny.ROOT / 'configs/papers/approximate_attention/section_7/evaluate_sweep.py'
EVALUATE = runpy.run_path(str(SCRIPT))['evaluate']


def test_a_result_under_other_flags_is_measured_again(tmp_path, monkeypatch):
    commands = []

    def measure(command, **_) -> types.SimpleNamespace:
        commands.append(command)
        return types.SimpleNamespace(returncode=0, stdout=json.dumps({'number': len(commands)}))

    monkeypatch.setattr(subprocess, 'run', measure)
    point = types.SimpleNamespace(name='softmax', config='# softmax\n')
    flags = ['--split', 'test']
    asked = [[], [], flags, flags, [*flags, '--step', '20'], []]
    assert [EVALUATE(tmp_path, point, given)['number'] for given in asked] == [1, 1, 2, 2, 3, 4]
    assert commands[1][-2:] == flags
    (tmp_path / 'evaluation_sweep' / 'softmax.flags').unlink()  # by an older version
    assert EVALUATE(tmp_path, point, [])['number'] == 5
    point.config = '# softmax, otherwise\n'
    assert EVALUATE(tmp_path, point, [])['number'] == 6
