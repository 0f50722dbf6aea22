"""Folders of text files."""

import pathlib

from lm.config.configurable import configurable, field
from lm.data import pg19
from lm.data.sources.base import SPLITS
from lm.data.sources.folder import Folder, walk, walk_bucket
from lm.errors import ConfigError
from lm.files import AnyPath, open_source


@configurable('text_files')
class TextFiles(Folder):
    """A folder of .txt files, one document each.

    Folders train/, validation/ and test/ in it are the splits: PG-19's own layout (its metadata.csv is not needed).
    Otherwise a share of the files, by a hash of their names, is held out for validation; of a single file its end.
    Copies of a file stay together.
    """

    path: str = field(help='a folder of .txt files, or one that holds train/ validation/ test/')

    suffix = '.txt'

    def identity(self) -> dict[str, object]:
        return super().identity() | ({'layout': 'pg19'} if (self.folder() / 'metadata.csv').exists() else {})

    def published_words(self, split: str, documents: int) -> int | None:
        names = [path.name for path in self.files(split)[0]]
        is_pg19 = 'layout' in self.identity() or (len(names) == documents and pg19.are_books(names))
        return pg19.published_words(split, documents) if is_pg19 else None

    def splits(self) -> tuple[str, ...]:
        folder = self.folder()
        return tuple(s for s in SPLITS if (folder / s).is_dir()) or super().splits()

    def list_unread(self) -> list[str]:
        folder = self.folder()
        splits = [s for s in SPLITS if (folder / s).is_dir()]
        read = {path for s in splits or ['train'] for path in self.files(s)[0]}
        others = walk(folder) if isinstance(folder, pathlib.Path) else walk_bucket(folder, self.suffix)
        names = {self.name_of(path, folder) for path in others if path not in read and path.name != 'metadata.csv'}
        return sorted(names)

    def folder(self) -> AnyPath:
        folder = open_source(self.path, 'text_files.path')
        if not folder.is_dir():
            raise ConfigError(f'text_files.path = {self.path!r}: no such folder; name a folder of .txt files')
        return folder

    def files(self, split: str) -> tuple[list[AnyPath], bool]:
        folder = self.folder() / split
        return (self.find(folder), False) if folder.is_dir() else (self.find(self.folder()), True)
