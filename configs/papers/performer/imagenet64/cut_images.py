#!/usr/bin/env python3
"""Cuts pictures into small images, and writes them as ImageNet64 is distributed.

    python configs/papers/performer/imagenet64/cut_images.py FOLDER data/images64 [--size 64] [--shrink 2]

Every picture of the folder (.jpg, .png) is shrunk, then cut into squares without overlap, from the upper left. The
squares of every sixth picture, in the order of their names, are for validation, so that no picture is on both sides.
The files are train_data_batch_1.npz and val_data.npz. Each row of their array `data` is uint8 with whole planes of red,
green and blue. Needs Pillow, which matplotlib brings.
"""

import argparse
import pathlib
import sys

import numpy as np
from PIL import Image

HELD_OUT = 6
"""One of so many pictures is for validation."""


def cut(picture: Image.Image, size: int, shrink: int) -> np.ndarray:
    """Returns the squares of a picture with whole planes [squares, 3·size·size] uint8."""
    picture = picture.convert('RGB')
    shrunk = picture.resize((picture.width // shrink, picture.height // shrink), Image.Resampling.BOX)
    pixels = np.asarray(shrunk)
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    squares = pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return squares.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=pathlib.Path, help='of pictures')
    parser.add_argument('out', type=pathlib.Path, help='the folder to write')
    parser.add_argument('--size', type=int, default=64, help='pixels of a side; default: 64')
    parser.add_argument('--shrink', type=int, default=2, help='pixels of a side that become one; default: 2')
    arguments = parser.parse_args(argv)
    paths = sorted(path for path in arguments.folder.rglob('*') if path.suffix.lower() in ('.jpg', '.jpeg', '.png'))
    if len(paths) < HELD_OUT:
        parser.error(f'{arguments.folder}: holds {len(paths)} pictures, fewer than {HELD_OUT}; name a larger folder')
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, is_held_out in (('train_data_batch_1', False), ('val_data', True)):
        chosen = [path for i, path in enumerate(paths) if (i % HELD_OUT == HELD_OUT - 1) == is_held_out]
        data = np.concatenate([cut(Image.open(path), arguments.size, arguments.shrink) for path in chosen])
        np.savez_compressed(arguments.out / f'{name}.npz', data=data, labels=np.zeros(len(data), np.int64))
        print(f'{arguments.out / name}.npz: {len(data):,} images of {len(chosen)} pictures')
    return 0


if __name__ == '__main__':
    sys.exit(main())
