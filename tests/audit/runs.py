"""Other programs read the files of a run: Orbax reads a checkpoint, safetensors reads weights, SentencePiece reads
tokens. lm-evaluation-harness computes bits per byte."""

import functools
import io
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.numpy
import sentencepiece
from ledger import compares

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import tiny

import lm
from lm.checkpoint.snapshot import flatten
from lm.eval_harness.tasks import evaluate_tasks
from lm.interop.names import to_tensors

RESTORE = """
import io, pathlib, sys
import numpy as np, orbax.checkpoint as ocp
tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])
assert not any(name.split('.')[0] == 'lm' for name in sys.modules)
held = io.BytesIO()
np.savez(held, **{name: np.asarray(leaf) for name, leaf in tree.items()})
sys.stdout.buffer.write(held.getvalue())
"""


@functools.cache
def trained() -> pathlib.Path:
    """Returns the directory of a run of a few steps on real text."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix='audit-'))
    bindings = tiny.MODEL | {'data.path': str(tiny.prepare(folder)), 'train.steps': 10, 'train.eval_every': None}
    done = tiny.lm('train', '--run_dir', str(folder / 'run'), *tiny.params(bindings))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return folder / 'run'


@functools.cache
def opened():
    return lm.load(str(trained()))


@compares('a checkpoint', 'orbax.checkpoint alone, in a process without lm', bits=(32,), exact=True)
def _(dtype):
    (step,) = [p for p in (trained() / 'checkpoints').iterdir() if p.name.isdigit() and int(p.name) == opened().step]
    done = subprocess.run(
        [sys.executable, '-c', RESTORE, str(step / 'state')],
        stdout=subprocess.PIPE,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    theirs = np.load(io.BytesIO(done.stdout))
    ours = flatten(opened().weights)
    assert set(ours) <= set(theirs.files), (sorted(ours)[:3], sorted(theirs.files)[:3])
    for name, leaf in ours.items():
        yield name, leaf, theirs[name]


@compares('exported weights', 'safetensors', bits=(32,), exact=True)
def _(dtype):
    out = trained().parent / 'exported'
    done = tiny.lm('export', '--run_dir', str(trained()), '--out', str(out))
    if done.returncode:
        raise RuntimeError(done.stderr)
    theirs = safetensors.numpy.load_file(out / 'model.safetensors')
    for name, array in to_tensors(opened().weights).items():
        yield name, array, theirs[name]


@compares('tokens of the validation split', 'sentencepiece', bits=(32,), exact=True)
def _(dtype):
    store = opened().store
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained().parent / 'tokens' / 'tokenizer.model'))
    ours = store.read('validation', 0, store.tokens('validation'))
    end = int(np.flatnonzero(ours == store.tokenizer().eod_id)[0])
    text = (trained().parent / 'text' / 'validation' / 'shlex.txt').read_text(encoding='utf-8')
    yield 'tokens', ours[:end], model.encode(text)


@compares('bits per byte of lm evaluate', 'lm-evaluation-harness', bits=(32,))
def _(dtype):
    folder, run = trained().parent, opened()
    text = run.tokenizer.decode(run.store.read('validation', 0, run.store.tokens('validation') - 1))
    (folder / 'text.json').write_text(json.dumps({'page': text}) + '\n')
    (folder / 'own_text.yaml').write_text(f"""
task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / 'text.json'}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - {{metric: bits_per_byte}}
""")
    found = evaluate_tasks(run, ['own_text'], include_path=str(folder))['results']['own_text']
    yield 'bits per byte', lm.evaluate(run)['bits_per_byte'], found['bits_per_byte,none']
