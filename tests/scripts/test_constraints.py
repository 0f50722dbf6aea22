"""All extras can be installed together with the pinned versions.

Otherwise no separate machine could be set up, for example to prepare data.
"""

import subprocess
import sys

import pytest
import tiny

uv = pytest.importorskip('uv', reason='needs uv, which is in the extra [test]')

PYTHONS = ('3.11', '3.12', '3.13', '3.14')


@pytest.mark.parametrize('python', PYTHONS)
def test_all_extras_can_be_installed_with_the_pinned_versions(python, tmp_path):
    command = [uv.find_uv_bin(), 'pip', 'compile', '--all-extras', '--color=never', f'--python-version={python}']
    command += ['--constraints=scripts/constraints.txt', f'--output-file={tmp_path / "found"}', 'pyproject.toml']
    done = subprocess.run(
        [*command, f'--python={sys.executable}'], cwd=tiny.ROOT, capture_output=True, text=True, timeout=300
    )
    if done.returncode and (
        'No solution found' not in done.stderr or 'was not found in the package registry' in done.stderr
    ):
        pytest.skip(f'the package registry does not answer, or lacks a package: {done.stderr[-300:]}')
    assert done.returncode == 0, done.stderr
    assert '\ntensorflow-cpu==' in (tmp_path / 'found').read_text()
