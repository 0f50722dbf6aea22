"""Arrow files, and so the folders that Hugging Face's `datasets` saves (`save_to_disk`)."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part
from lm.data.sources.parquet import needs_text, read_column, reading
from lm.data.sources.patterns import FilePatterns
from lm.files import AnyPath, is_remote, open_source

if TYPE_CHECKING:
    import pyarrow


_FILE_MAGIC = b'ARROW1'
"""How Arrow's file format begins; `datasets` writes the stream format, which has no table of its batches."""


@configurable('arrow')
class Arrow(FilePatterns):
    """Arrow files (IPC, of the file or the stream format), one document a row; a part is some record batches. Needs the
    extra [parquet].

    `path` may also be a folder that `datasets` has saved ({split}/data-….arrow of several splits, or data-….arrow), or
    one of its cache, which `load_dataset` leaves (NAME-{split}.arrow or NAME-{split}-….arrow).
    """

    text_field: str = field(default='text', help='the column that holds the text')

    suffixes = ('.arrow',)
    below = ('{split}/data-*.arrow', '*-{split}.arrow', '*-{split}-?????-of-?????.arrow')
    unsplit = ('data-*.arrow',)

    def parts(self, path: AnyPath, unit: int) -> list[Part]:
        parts, start, size = [], 0, 0
        with self._opened(str(path)) as batches:
            for index, batch in enumerate(batches):
                batch.validate()
                size += batch.column(self.text_field).nbytes
                if size >= unit:
                    parts.append(Part(str(path), start, index + 1, size))
                    start, size = index + 1, 0
        return [*parts, Part(str(path), start, index + 1, size)] if size else parts

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        with self._opened(part.file) as batches:
            for index, batch in enumerate(batches):  # local files are mapped: what is passed over is not read
                if index >= part.stop:
                    return
                if index >= part.start:
                    column = batch.column(self.text_field)
                    check_column(column)
                    yield from read_column(column, self.text_field, f'{part.file}@{index}', max_bytes)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Iterator['pyarrow.RecordBatch']]:
        """The record batches of a file. Raises ConfigError without such a column of text, MismatchError for damage."""
        with reading('Arrow', name), contextlib.ExitStack() as stack:
            import pyarrow.ipc

            path = open_source(name, 'arrow.path')
            stream = path.open('rb') if is_remote(path) else pyarrow.memory_map(str(path))
            stack.enter_context(stream)
            is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            stream.seek(0)
            reader = stack.enter_context((pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(stream))
            needs_text(reader.schema, self.text_field, name, 'arrow.text_field')
            yield map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)


def check_column(column: 'pyarrow.Array') -> None:
    """Raises ArrowInvalid if offsets lead out of a column: pyarrow would follow them, and end the process.

    Whether the bytes are UTF-8 is not checked: of those that are not, each is a bad record.
    """
    import pyarrow

    plain = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    column.view(plain.get(column.type, column.type)).validate(full=True)
