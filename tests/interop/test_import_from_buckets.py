"""Imports from buckets, on servers of this machine."""

import json

import buckets
import jax
import numpy as np
import pytest
import shapes
from safetensors.numpy import save

import lm
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.errors import MismatchError
from lm.files import open_path
from lm.interop import tensor_file
from lm.interop.formats import FORMATS
from lm.interop.tensor_file import TensorFile
from lm.interop.tensors import WeightFiles, read_tensors

pytest.importorskip('s3fs', reason='needs the extra [servers]')
pytest.importorskip('gcsfs', reason='needs the extra [servers]')

if not buckets.are_available():
    pytest.skip('needs the servers of the extra [servers]', allow_module_level=True)


@pytest.fixture(scope='module', params=['s3', 'gs'])
def bucket(request, tmp_path_factory):
    with buckets.SERVERS[request.param](tmp_path_factory.mktemp(request.param)):
        yield open_path(f'{request.param}://{buckets.BUCKET}')


def upload(folder, target) -> None:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def write_header(header) -> bytes:
    """Returns a file of safetensors with this header and no numbers."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, 'little') + text


def test_an_export_in_a_bucket_is_imported(bucket, tmp_path, monkeypatch, capsys):
    """In several files, part by part; a run that it makes has the weights of the export."""
    monkeypatch.setattr(tensor_file, 'PART_BYTES', 1000)
    config = shapes.experiment(Softmax())
    weights = shapes.random_weights(config)
    (tmp_path / 'out').mkdir()
    FORMATS['safetensors'].write(shapes.run_of(config, weights), tmp_path / 'out', WeightFiles(most_bytes=20_000))
    upload(tmp_path / 'out', bucket / 'export')
    assert main(['import', str(bucket / 'export'), '--run_dir', str(tmp_path / 'run')]) == 0
    assert 'takes at most 1.0 GB of memory: its largest tensor' in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, weights, lm.load(str(tmp_path / 'run')).weights)
    assert json.loads((tmp_path / 'run' / 'run.json').read_text())['imported'] == str(bucket / 'export')


def test_what_is_missing_or_damaged_in_a_bucket_is_named(bucket, tmp_path, capsys):
    nothing = bucket / 'nothing'
    assert main(['import', str(nothing), '--run_dir', str(tmp_path / 'run')]) == 44
    said = capsys.readouterr().err
    assert said.startswith(f'lm import: error: {nothing}/config.json: there is none; name a folder')
    assert said.count('\n') == 1
    assert main(['import', str(bucket / 'x.gguf'), '--run_dir', str(tmp_path / 'run')]) == 2
    assert 'copy it from there' in capsys.readouterr().err
    folder = bucket / 'damaged'
    (folder / 'model.safetensors.index.json').write_text('{"weight_map": {"x": "a.safetensors"}}')
    with pytest.raises(MismatchError, match=r'damaged/a\.safetensors: there is none; fetch it'):
        read_tensors(folder)
    whole = save({'x': np.arange(6, dtype=np.float32).reshape(2, 3), 'y': np.ones(3, np.float16)}, {'step': '7'})
    (folder / 'a.safetensors').write_bytes(whole)
    tensors = read_tensors(folder)
    assert np.asarray(tensors['x']).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.asarray(tensors['y']).dtype == np.float32
    assert TensorFile(folder / 'a.safetensors').metadata == {'step': '7'}
    for damaged, name in (
        (whole[:4], 'header'),
        ((2**60).to_bytes(8, 'little') + whole[8:], 'a header of'),
        (whole[:8] + b'[' + whole[9:], 'no header'),
        (whole.replace(b'[2,3]', b'[2,9]'), 'no header'),
        (whole[:-1], 'another number of bytes'),
        (
            write_header({'x': {'dtype': 'F32', 'shape': [2**42], 'data_offsets': [0, 2**44]}}),
            'another number of bytes',
        ),
    ):
        (folder / 'a.safetensors').write_bytes(damaged)
        with pytest.raises(MismatchError, match=rf'a\.safetensors cannot be read \(it has .*{name}.*; fetch it again'):
            list(map(np.asarray, read_tensors(folder).values()))
    (folder / 'a.safetensors').write_bytes(save({'x': np.ones(3, np.int8)}))
    with pytest.raises(MismatchError, match="tensor 'x' holds I8, and weights are F32, BF16, F16, F64"):
        read_tensors(folder)
