"""The notebooks run, and each committed notebook is its text form with the outputs of a run without errors."""

import importlib.util
import json
import re
import sys

import nbformat
import pytest
import tiny

from lm import cli

PLACE = re.compile(r'/(?:home|root|tmp|work|check|usr|opt)/')


def load_script(path: str):
    spec = importlib.util.spec_from_file_location(path.rpartition('/')[2], tiny.ROOT / 'scripts' / f'{path}.py')
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = load_script('notebooks')


def test_every_notebook_has_a_tiny_form_and_is_on_the_page():
    names = {path.stem for path in NOTEBOOKS.FOLDER.glob('*.ipynb')}
    assert names == set(NOTEBOOKS.TINY) >= NOTEBOOKS.NEEDS_TPU
    assert names == set(re.findall(r'\]\((\w+)\.ipynb\)', (NOTEBOOKS.FOLDER / 'README.md').read_text()))


@pytest.mark.parametrize('name', NOTEBOOKS.TINY)
def test_the_committed_notebook_is_its_text_form_with_outputs(name):
    notebook = nbformat.read(NOTEBOOKS.FOLDER / f'{name}.ipynb', as_version=4)
    text = NOTEBOOKS.read(name, tiny=name in NOTEBOOKS.NEEDS_TPU)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in text.cells
    ], f'run scripts/notebooks.py {name}'
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
    assert any('image/png' in output.get('data', {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == 'error']
    assert not [output.text for output in outputs if 'text' in output and PLACE.search(output.text)]


@pytest.mark.parametrize(
    'names',
    [
        pytest.param(['first_run', 'look_at_a_run'], id='on any machine'),
        pytest.param(['train_32k_on_a_tpu'], id='on a TPU', marks=pytest.mark.slow),  # four processor minutes
    ],
)
def test_the_notebooks_run(names, tmp_path, monkeypatch):
    """They run in one folder, so that one of them finds the run of another."""
    monkeypatch.setenv('XLA_FLAGS', tiny.COMPILE_QUICKLY)  # one device, as users have
    for name in names:
        notebook = NOTEBOOKS.execute(name, tmp_path, tiny=True)
        outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
        assert not [output for output in outputs if output.output_type == 'error'], name
    if 'train_32k_on_a_tpu' in names:
        lines = [json.loads(line) for line in (tmp_path / 'tpu_result.jsonl').read_text().splitlines()]
        assert [line['row'] for line in lines] == ['tpu_precision', 'tpu_step', 'tpu_train']
        measure = load_script('measure')
        assert all(map(measure.is_whole, lines))
        assert not measure.is_whole(lines[0] | {'device': 'another'})


@pytest.mark.slow  # each compiles a whole step for a TPU: minutes
@pytest.mark.parametrize(('devices', 'topology'), [(1, 'v5e:1x1'), (8, 'v5e:2x4')])
def test_the_step_fits_the_free_slices(devices, topology, tmp_path, monkeypatch, capsys):
    """Colab lends one chip, Kaggle eight. The cells of the notebook write the configuration."""
    pytest.importorskip('libtpu')
    monkeypatch.chdir(tmp_path)
    cells = [cell.source for cell in NOTEBOOKS.read('train_32k_on_a_tpu', tiny=False).cells if cell.cell_type == 'code']
    names = {'devices': devices, 'kind': 'TPU v5 lite'}
    for first_line in ('repository = ', 'import pathlib\n\nsettings = ', 'SLICES = '):
        (cell,) = [cell for cell in cells if cell.startswith(first_line)]
        exec(cell.partition('\nif topology')[0], names)
    assert names['topology'] == topology
    flags = [*names['gin'].split(), '--gin_file', names['attention'], '--topology', topology, '--no_advice']
    assert names['context_length'] == 32_768
    assert cli.main(['check', *flags]) == 0, capsys.readouterr().err
