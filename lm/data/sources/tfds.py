"""Prepared datasets of TensorFlow Datasets, read without TensorFlow from ArrayRecord and from TFRecord files."""

import functools
import importlib.util
import itertools
import os
import re
import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c

from lm.config.configurable import configurable, field
from lm.data import pg19
from lm.data.sources.base import Document, Part, Shard, Source, decode, group, shard_bytes, too_long
from lm.errors import ConfigError, MismatchError, MissingPackageError
from lm.files import AnyPath, is_remote, open_path
from lm.text import parse_whole

_TEXT_FEATURES = {'pg19': 'book_text'}
_BATCH = 256
"""Records read at a time; long ones, such as books, are read one by one."""


def _check_name(name: str) -> str | None:
    head, part, _ = name.partition('[')
    alone, _, version = head.partition(':')
    if alone == name:
        return None
    remedy = [f"tfds.name = '{alone}'", *([f"tfds.version = '{version}'"] if version else [])]
    remedy += ['prepare.splits to whole splits'] if part else []
    return f'must be a name alone; set {" and ".join(remedy)}'


@configurable('tfds')
class Tfds(Source):
    """A dataset of TensorFlow Datasets: pg19, wiki40b/en, c4/en or any other with a text feature.

    Read from the newest version under data_dir. A dataset that is not there is downloaded and prepared, if the extra
    [tfds] is installed.
    """

    name: str = field(check=_check_name, help="the dataset, such as 'pg19', 'wiki40b/en' or 'c4/en'")
    data_dir: str | None = field(default=None, help='TFDS data_dir; None: $TFDS_DATA_DIR or ~/tensorflow_datasets')
    text_feature: str | None = field(
        default=None, help="the feature that holds the text; None: book_text for pg19, else 'text'"
    )
    version: str | None = field(default=None, help='the version of the dataset; None: the newest under data_dir')

    def identity(self) -> dict[str, object]:
        return {'kind': 'tfds', 'name': self.name, 'version': self._folder().name, 'text_feature': self._feature()}

    def published_words(self, split: str, documents: int) -> int | None:
        return pg19.published_words(split, documents) if self.name == 'pg19' else None

    def fetch(self, log) -> None:
        if self._versions():
            return
        missing = [module for module in ('tensorflow', 'apache_beam') if importlib.util.find_spec(module) is None]
        if missing:
            what = f'tfds.name = {self.name!r} is not prepared under {self._data_dir()}, and to download it'
            remark = ' and run this again, or set tfds.data_dir to where it lies'
            raise MissingPackageError(what, ' and '.join(missing), 'tfds', remark)
        import tensorflow_datasets as tfds
        import tensorflow_datasets.text  # registers wiki40b and c4

        log(f'{self.name} is not under {self._data_dir()}: TFDS downloads and prepares it there')
        name = f'{self.name}:{self.version}' if self.version else self.name
        try:
            builder = tfds.builder(name, data_dir=str(self._data_dir()), file_format='array_record')
            builder.download_and_prepare()
        except Exception as error:
            reason = ' '.join(str(error).split())[:300]
            raise ConfigError(
                f'tfds.name = {name!r}: TFDS could not prepare it ({reason}); see data/README.md'
            ) from error

    def splits(self) -> tuple[str, ...]:
        return tuple(_info(str(self._folder())).splits)

    def shards(self, split: str) -> list[Shard]:
        folder = self._folder()
        info = _info(str(folder))
        if info.file_format.value == 'array_record' and is_remote(folder):
            raise ConfigError(
                f'tfds.data_dir = {self.data_dir!r}: ArrayRecord files are read from disks only; copy them or mount '
                'the bucket with gcsfuse'
            )
        features = info.features
        if features is not None and self._feature() not in features:
            raise ConfigError(
                f'tfds.text_feature = {self._feature()!r}: {self.name} has {", ".join(features)}; choose one of them'
            )
        split_info, parts = info.splits[split], []
        records, unit = sum(split_info.shard_lengths), shard_bytes(split_info.num_bytes)
        try:
            files = list(zip(split_info.filepaths, split_info.shard_lengths, strict=True))
        except ValueError as error:
            raise _unreadable(str(folder), error) from None
        for path, length in files:
            size = split_info.num_bytes * length // max(1, records)
            pieces = max(1, -(-size // unit))
            cuts = [length * i // pieces for i in range(pieces + 1)]
            parts += [
                Part(str(path).rsplit('/', 1)[-1], a, b, size * (b - a) // length)
                for a, b in itertools.pairwise(cuts)
                if a < b
            ]
        return group(split, parts)

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        from tensorflow_datasets.proto import tf_example_pb2

        messages: Any = tf_example_pb2  # makes its classes when it is imported
        feature, folder = self._feature(), self._folder()
        for part in shard.parts:
            for i, record in enumerate(_records(folder / part.file, part), part.start):
                identifier = f'{part.file}#{i}'
                if len(record) > 2 * max_bytes:
                    yield too_long(identifier, max_bytes)
                    continue
                try:
                    value = messages.Example.FromString(record).features.feature[feature].bytes_list.value[0]
                except Exception as error:
                    raise _damaged(folder / part.file, i, error) from None
                yield decode(identifier, value, max_bytes)

    def _feature(self) -> str:
        return self.text_feature or _TEXT_FEATURES.get(self.name.split('/')[0], 'text')

    def _data_dir(self) -> AnyPath:
        return open_path(self.data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets', 'tfds.data_dir')

    def _versions(self) -> list[AnyPath]:
        """Returns the prepared versions, oldest first."""
        folder = self._data_dir() / self.name
        there = folder.glob('*') if not self.version and folder.exists() else ()
        found = [folder / self.version] if self.version else [p for p in there if re.fullmatch('[0-9.]+', p.name)]
        return sorted(
            (path for path in found if (path / 'dataset_info.json').exists()),
            key=lambda path: [parse_whole(number) or 0 for number in path.name.split('.')],
        )

    def _folder(self) -> AnyPath:
        versions = self._versions()
        if not versions:
            raise ConfigError(
                f'tfds.name = {self.name!r}, version {self.version or "any"}: not prepared under {self._data_dir()}; '
                'set tfds.data_dir to where it lies'
            )
        return versions[-1]


@functools.lru_cache(8)
def _info(folder: str) -> Any:
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(folder).info
    except Exception as error:
        raise _unreadable(folder, error) from None
    if not info.splits:
        raise MismatchError(f'{folder}: the dataset has no splits; prepare it again')
    if info.file_format is None or info.file_format.value not in ('array_record', 'tfrecord'):
        raise ConfigError(f'{folder}: file format {info.file_format}; prepare it as array_record or tfrecord')
    return info


def _records(path: AnyPath, part: Part) -> Iterator[bytes]:
    if not path.exists():
        raise MismatchError(f'{path}: dataset_info.json names this file, and it is gone; fetch the dataset again')
    if '.array_record' in path.name:
        return _array_records(path, part)
    return _tf_records(path, part)


def _array_records(path: AnyPath, part: Part) -> Iterator[bytes]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise ConfigError(
            f'{path}: reading it needs array_record, which exists for Linux only; prepare the dataset as tfrecord'
        ) from None
    position = part.start
    try:
        reader = ArrayRecordReader(str(path))
        large = part.bytes > 100_000 * (part.stop - part.start)
        while position < part.stop:
            stop = min(part.stop, position + (1 if large else _BATCH))
            yield from reader.read(position, stop)
            position = stop
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        raise _damaged(path, position, error) from None


def _tf_records(path: AnyPath, part: Part) -> Iterator[bytes]:
    """Reads TFRecord framing: length, masked crc32c of the length, data, masked crc32c of the data, little-endian."""
    with path.open('rb') as file:
        for i in range(part.stop):
            head = file.read(12)
            if head[8:] != masked_crc(head[:8]):
                raise _damaged(path, i, 'the length of a record is wrong')
            length = struct.unpack('<Q', head[:8])[0]
            if i < part.start:
                file.seek(length + 4, 1)
                continue
            record = file.read(length)
            if file.read(4) != masked_crc(record):
                raise _damaged(path, i, 'the checksum of a record is wrong')
            yield record


def masked_crc(content: bytes) -> bytes:
    """Computes the checksum [4 bytes] of TFRecord files: crc32c, rotated by 15 bits, a constant added."""
    crc = google_crc32c.value(content)
    return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _unreadable(folder: str, error: Exception) -> MismatchError:
    return MismatchError(f'{folder}: not a readable TFDS dataset ({" ".join(str(error).split())[:200]})')


def _damaged(path: AnyPath, record: int, error: Exception | str) -> MismatchError:
    return MismatchError(f'{path}: damaged at record {record} ({" ".join(str(error).split())[:150]}); fetch it again')
