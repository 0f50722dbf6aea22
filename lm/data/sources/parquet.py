"""Parquet files."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part, decode
from lm.data.sources.patterns import FilePatterns
from lm.errors import ConfigError, MismatchError, require
from lm.files import AnyPath, open_source

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet


@configurable('parquet')
class Parquet(FilePatterns):
    """Parquet files, one document a row; a part is a row group, which is read at once. Needs the extra [parquet].

    `path` may also be a data set as it lies on the hub of Hugging Face, downloaded: data/{split}-….parquet or
    {split}/….parquet.
    """

    text_field: str = field(default='text', help='the column that holds the text')

    suffixes = ('.parquet',)
    below = ('data/{split}-*.parquet', '{split}/*.parquet')

    def parts(self, path: AnyPath, unit: int) -> list[Part]:
        with self._opened(str(path)) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            columns = [column for group in groups for column in map(group.column, range(group.num_columns))]
            sizes = [c.total_uncompressed_size for c in columns if c.path_in_schema == self.text_field]
            return [Part(str(path), i, i + 1, size) for i, size in enumerate(sizes)]

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        with self._opened(part.file) as file:
            for group in range(part.start, part.stop):
                column = file.read_row_group(group, columns=[self.text_field]).column(0)
                yield from read_column(column, self.text_field, f'{part.file}@{group}', max_bytes)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator['pyarrow.parquet.ParquetFile']:
        """Opens a file. Raises ConfigError where it has no such column of text, MismatchError where it is damaged."""
        with reading('Parquet', name), open_source(name, 'parquet.path').open('rb') as stream:
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True) as file:
                needs_text(file.schema_arrow, self.text_field, name, 'parquet.text_field')
                yield file


@contextlib.contextmanager
def reading(kind: str, name: str) -> Iterator[None]:
    """Reads the file `name` of a kind, 'Parquet' or 'Arrow', with pyarrow inside the block.

    Raises ConfigError without pyarrow, and MismatchError where the file is damaged.
    """
    require('pyarrow', f'prepare.source = @{kind.lower()}()', 'parquet')
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns may be no text
        if isinstance(error, OSError) and error.errno:  # pyarrow's own have no number
            raise
        reason = ' '.join(str(error).split())[:150]
        raise MismatchError(f'{name}: not a readable {kind} file ({reason}); fetch the file again') from None


def needs_text(schema: 'pyarrow.Schema', column: str, file: str, setting: str) -> None:
    """Raises ConfigError with a list of the columns where an Arrow schema has no such column of text."""
    import pyarrow

    types = {field.name: field.type for field in schema}
    with contextlib.suppress(KeyError, pyarrow.ArrowNotImplementedError):
        pyarrow.array([], types[column]).cast('large_binary')
        return
    listed = ', '.join(f'{name} ({kind})' for name, kind in types.items())
    raise ConfigError(f'{setting} = {column!r}: {file} has {listed}; choose a column of text')


def read_column(
    column: 'pyarrow.ChunkedArray | pyarrow.Array', name: str, place: str, max_bytes: int
) -> Iterator[Document]:
    """Yields the documents of the Arrow column `name`, whose ids are PLACE:ROW."""
    for row, text in enumerate(column.cast('large_binary')):
        if text.is_valid:
            yield decode(f'{place}:{row}', text.as_py(), max_bytes)
        else:
            yield Document(f'{place}:{row}', error=f'no text in field {name!r}')
