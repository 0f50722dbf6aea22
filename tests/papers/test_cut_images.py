"""Pictures are cut into images that the source of images reads."""

import runpy

import numpy as np
import pytest
import tiny
from PIL import Image

from lm.data.sources.images import order_values

SCRIPT = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/imagenet64/cut_images.py'))


def test_pictures_become_files_of_imagenet(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 35, 50, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f'{i}.png')
    out = tmp_path / 'out'
    assert SCRIPT['main']([str(tmp_path), str(out), '--size', '16', '--shrink', '1']) == 0
    train, held_out = (np.load(out / f'{name}.npz')['data'] for name in ('train_data_batch_1', 'val_data'))
    assert (train.shape, held_out.shape) == ((5 * 6, 768), (6, 768))
    images = order_values(held_out).reshape(2, 3, 16, 16, 3)
    np.testing.assert_array_equal(images[1, 2], pixels[5, 16:32, 32:48])


def test_a_folder_of_too_few_pictures_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        SCRIPT['main']([str(tmp_path), str(tmp_path / 'out')])
    assert 'name a larger folder' in capsys.readouterr().err
