"""Images as bytes, from the .npz files in which the downsampled ImageNet is distributed (Chrabaszcz et al. 2017)."""

import contextlib
import errno
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

import numpy as np

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part, hold_tokens
from lm.data.sources.patterns import FilePatterns
from lm.data.tokenizers.byte_values import END
from lm.errors import ConfigError, MismatchError
from lm.files import open_source

BATCH = 256
"""Images read at a time."""


@configurable('images')
class Images(FilePatterns):
    """Files of images, one document each: the values of its pixels row by row, red, green and blue of a pixel together.

    An array of a file is uint8. It is [images, 3·height·width] with whole planes of red, green and blue, as ImageNet64
    has them, or [images, height, width, channels]. A folder holds train_data_batch_1.npz and the like, and
    val_data.npz. A 64 × 64 image has 12,288 values (Performer §4.4). `prepare.tokenizer` is @byte_values().
    """

    array: str = field(default='data', help='the array of each file that holds the images')

    suffixes = ('.npz',)
    below = ('{split}_data*.npz',)
    aliases = (('validation', 'val'),)
    holds_tokens = True

    def check_eod(self, eod: int) -> None:
        if eod != END:
            raise ConfigError(
                f'prepare.tokenizer: its end-of-document token {eod} is a value of pixels; set it to @byte_values()'
            )

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        # The files are compressed, and far larger than memory once unpacked: they are read from their beginning.
        with self._opened(part.file) as (stream, shape):
            size = int(np.prod(shape[1:]))
            for first in range(0, shape[0], BATCH):
                count = min(BATCH, shape[0] - first)
                content = stream.read(count * size)
                if len(content) != count * size:
                    raise MismatchError(f'{part.file}: ends behind image {first}; fetch the file again')
                rows = order_values(np.frombuffer(content, np.uint8).reshape(count, *shape[1:]))
                for i, values in enumerate(rows, first):
                    yield hold_tokens(f'{part.file}@{i}', values, max_bytes)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
        """Opens the array of a file behind its header, and returns its shape.

        Raises ConfigError where the file has no such array of images, MismatchError where it is damaged.
        """
        try:
            with open_source(name, 'images.path').open('rb') as file, zipfile.ZipFile(file) as members:
                found = [member.removesuffix('.npy') for member in members.namelist()]
                if self.array not in found:
                    raise ConfigError(
                        f'images.array = {self.array!r}: {name} has {", ".join(found)}; choose the array of the images'
                    )
                with members.open(f'{self.array}.npy') as stream:
                    yield stream, self._read_header(name, stream)
        except OSError as error:
            if error.errno not in (None, errno.EINVAL):  # zipfile looks for places before the file
                raise
            raise MismatchError(f'{name}: not a readable .npz file; fetch the file again') from None
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
            reason = ' '.join(str(error).split())[:150]
            raise MismatchError(f'{name}: not a readable .npz file ({reason}); fetch the file again') from None

    def _read_header(self, name: str, stream: IO[bytes]) -> tuple[int, ...]:
        """Returns the shape of an array of images. Raises ConfigError if the array holds anything else."""
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        is_planes = len(shape) == 2 and shape[1] % 3 == 0
        if dtype != np.uint8 or is_fortran or not (is_planes or len(shape) == 4):
            raise ConfigError(
                f'images.array = {self.array!r}: {name} has {dtype.name} {list(shape)} there; images are uint8, '
                '[images, 3·pixels] or [images, height, width, channels]'
            )
        return shape


def order_values(images: np.ndarray) -> np.ndarray:
    """Returns the values of each image with its channels together [N, values], from planes or from channels."""
    if images.ndim == 2:
        images = images.reshape(len(images), 3, -1).swapaxes(1, 2)
    return images.reshape(len(images), -1)
