"""The notebooks run, and each committed notebook is its text form with the outputs of a run without errors."""

import importlib.util
import re

import nbformat
import pytest
import tiny

PLACE = re.compile(r'/(?:home|root|tmp|work|check|usr|opt)/')


def load_script():
    spec = importlib.util.spec_from_file_location('notebooks', tiny.ROOT / 'scripts' / 'notebooks.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = load_script()


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
    assert (tmp_path / 'figures.zip').exists() == ('train_32k_on_a_tpu' in names)
