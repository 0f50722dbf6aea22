#!/usr/bin/env python
"""Executes the notebooks of docs/notebooks and keeps their outputs. People edit NAME.md; this makes NAME.ipynb of it.

     pip install -e '.[notebooks,report]'
     scripts/notebooks.py                                   # all notebooks, one after the other, in a new folder
     scripts/notebooks.py look_at_a_run --folder /tmp/run   # one notebook, in a folder that may hold runs already
     scripts/notebooks.py --tiny                            # in their tiny form, as the tests run them; writes nothing

`tiny.toml` holds the parameters of the tiny form. A cell behind the cell with the tag `parameters` sets them.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import tomllib

import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / 'docs' / 'notebooks'
TINY = tomllib.loads((FOLDER / 'tiny.toml').read_text())
NEEDS_TPU = {'train_32k_on_a_tpu'}
"""Notebooks whose kept outputs are from their tiny form."""
SECONDS = 3600
"""The limit for one cell."""
RUN_COMMANDS = """
def run_command(command):
    import os, subprocess
    command = get_ipython().var_expand(command, depth=1)
    plain = {name: value for name, value in os.environ.items() if name not in ('FORCE_COLOR', 'CLICOLOR_FORCE')}
    done = subprocess.run(
        command, env=plain, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, end='')
    if done.returncode:
        raise RuntimeError(f'exit code {done.returncode}: {command}')

get_ipython().system = run_command
"""
"""Commands that begin with `!` write to a pipe here, and so without colours, and an error stops the notebook. IPython
itself gives them a terminal and goes on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', choices=[[], *TINY], help='default: all')
    parser.add_argument('--folder', type=pathlib.Path, help='where the notebooks run; default: a new temporary folder')
    parser.add_argument('--tiny', action='store_true', help='run the tiny form and write nothing')
    arguments = parser.parse_args()
    folder = arguments.folder or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or TINY:
        print(f'== {name}', flush=True)
        notebook = execute(name, folder, tiny=arguments.tiny or name in NEEDS_TPU)
        if not arguments.tiny:
            nbformat.write(notebook, FOLDER / f'{name}.ipynb')


def read(name: str, *, tiny: bool) -> nbformat.NotebookNode:
    """Returns the notebook of NAME.md, without outputs."""
    notebook = jupytext.read(FOLDER / f'{name}.md')
    if tiny:
        (place,) = (i for i, cell in enumerate(notebook.cells) if 'parameters' in cell.metadata.get('tags', ()))
        lines = ['# The tiny form, which two CPU cores run in a minute.']
        lines += [f'{key} = {value!r}' for key, value in TINY[name].items()]
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell('\n'.join(lines)))
    for i, cell in enumerate(notebook.cells):
        cell.id = f'cell-{i}'  # random ids would change at each execution
    return notebook


def execute(name: str, folder: pathlib.Path, *, tiny: bool) -> nbformat.NotebookNode:
    """Returns the notebook with the outputs of its cells, which run in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook = read(name, tiny=tiny)
    # `!lm` must be the command of this interpreter, which may be in no PATH.
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ['PATH']])
    environment = os.environ | {'PATH': path, 'COLUMNS': '120'}
    notebook.cells.insert(0, nbformat.v4.new_code_cell(RUN_COMMANDS))
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name='python3', resources={'metadata': {'path': str(folder)}}
    )
    client.execute(env=environment)
    del notebook.cells[0]
    for cell in notebook.cells:
        cell.metadata.pop('execution', None)  # times of day
        for output in cell.get('outputs', ()):
            if 'text' in output:
                output.text = output.text.replace(f'{folder.resolve()}/', '')
    return notebook


if __name__ == '__main__':
    main()
