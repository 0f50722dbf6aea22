"""Images as bytes, from files in the form of the downsampled ImageNet."""

import io

import numpy as np
import pytest
from rich.console import Console

from lm.data import tokenizers
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.images import Images, order_values
from lm.data.store import TokenStore
from lm.data.tokenizers.amino_acids import AminoAcidsConfig
from lm.data.tokenizers.byte_values import ByteValuesConfig
from lm.errors import ConfigError, MismatchError
from lm.evaluation.perplexity import describe_text

SIDE, VALUES = 8, 192


def draw(count: int, seed: int) -> np.ndarray:
    """Returns images [count, SIDE, SIDE, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def write(path, images: np.ndarray, save=np.savez_compressed) -> None:
    """Writes images as ImageNet64 has them: whole planes of red, green and blue, beside labels and a mean."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    save(path, data=planes, labels=np.arange(len(images)), mean=planes.mean(0))


def prepared(path, out, **options) -> TokenStore:
    config = PrepareConfig(source=Images(path=str(path)), processes=1, tokenizer=ByteValuesConfig(), **options)
    prepare(config, str(out), Console(file=io.StringIO(), width=200))
    return TokenStore.open(str(out))


def test_a_folder_of_imagenet_becomes_documents_of_pixels(tmp_path):
    folder = tmp_path / 'Imagenet64_train_npz'
    folder.mkdir()
    train, held_out = [draw(300, 0), draw(3, 1)], draw(5, 2)
    for i, images in enumerate(train, 1):
        write(folder / f'train_data_batch_{i}.npz', images, np.savez if i == 1 else np.savez_compressed)
    write(folder / 'val_data.npz', held_out)
    store = prepared(folder, tmp_path / 'tokens')
    tokens = store.read('train', 0, store.tokens('train')).reshape(303, VALUES + 1)
    assert (tokens[:, -1] == 256).all()
    np.testing.assert_array_equal(tokens[:, :-1].reshape(303, SIDE, SIDE, 3), np.concatenate(train))
    np.testing.assert_array_equal(store.document_ends('train'), (VALUES + 1) * np.arange(1, 304))
    assert (store.bytes('validation'), store.words('validation'), store.documents('validation')) == (5 * VALUES, 0, 5)
    assert store.vocab_size == 257

    figures = describe_text(5 * VALUES * np.log(256), store, 'validation')
    assert figures['bits_per_byte'] == pytest.approx(8), 'bits per dimension'
    assert 'word_perplexity' not in figures


def test_images_in_rows_and_columns_are_the_same():
    images = draw(4, 3)
    planes = images.transpose(0, 3, 1, 2).reshape(4, -1)
    np.testing.assert_array_equal(order_values(planes), order_values(images))
    np.testing.assert_array_equal(order_values(images)[0, :3], images[0, 0, 0])


def test_a_share_of_one_file_is_held_out(tmp_path):
    write(tmp_path / 'mine.npz', draw(200, 4))
    store = prepared(tmp_path / 'mine.npz', tmp_path / 'tokens')
    assert store.documents('train') + store.documents('validation') == 200
    assert 0 < store.documents('validation') < 40


@pytest.mark.parametrize(
    ('arrays', 'said'),
    [
        ({'images': draw(2, 0)}, 'has images; choose the array'),
        ({'data': np.zeros((2, 12))}, r'has float64 \[2, 12\] there; images are uint8'),
        ({'data': np.zeros((2, 13), np.uint8)}, r'uint8 \[2, 13\]'),
    ],
)
def test_files_without_images_are_refused(arrays, said, tmp_path):
    np.savez(tmp_path / 'train.npz', **arrays)
    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, tmp_path / 'tokens')


def test_damaged_files_are_refused(tmp_path):
    write(tmp_path / 'train.npz', draw(50, 0))
    content = (tmp_path / 'train.npz').read_bytes()
    for i, damaged in enumerate((content[: len(content) // 2], b'nothing')):
        (tmp_path / 'train.npz').write_bytes(damaged)
        with pytest.raises(MismatchError, match=r'not a readable \.npz file .* fetch the file again'):
            prepared(tmp_path, tmp_path / f'tokens{i}')


def test_another_tokenizer_is_refused(tmp_path):
    write(tmp_path / 'train.npz', draw(2, 0))
    config = PrepareConfig(source=Images(path=str(tmp_path)), processes=1, tokenizer=AminoAcidsConfig())
    with pytest.raises(ConfigError, match='set it to @byte_values'):
        prepare(config, str(tmp_path / 'tokens'), Console(file=io.StringIO()))


def test_values_are_read_and_written_as_braille_patterns():
    tokenizer = tokenizers.from_bytes(ByteValuesConfig().contents())
    assert tokenizer.lossless
    np.testing.assert_array_equal(tokenizer.encode('\u2800\u287f\u28ff'), [0, 127, 255])
    assert tokenizer.decode([255, 256, 1]) == '\u28ff\u2801'
    assert [tokenizer.piece(index) for index in (10, 256)] == ['\u280a', '<end>']
    with pytest.raises(MismatchError, match='is no value of a byte'):
        tokenizer.encode('grey')
