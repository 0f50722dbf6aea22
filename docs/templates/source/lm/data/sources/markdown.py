"""Folders of Markdown files."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Shard
from lm.data.sources.folder import Folder
from lm.errors import ConfigError
from lm.files import open_path

FRONT_MATTER = re.compile(r'\A---\n.*?^---\n', re.DOTALL | re.MULTILINE)


# `Folder` cuts the files into shards, reads them and holds some out for validation. A source of files with many
# documents each builds on `lm.data.sources.patterns.FilePatterns` instead, and any other source on `Source`.
@configurable('markdown')
class Markdown(Folder):
    """The .md files under a folder, one document each, without their front matter."""

    path: str = field(help='a folder of .md files')

    suffix = '.md'

    def folder(self) -> Any:
        folder = open_path(self.path, 'markdown.path')
        if not folder.is_dir():
            raise ConfigError(f'markdown.path = {self.path!r}: no such folder; name a folder of .md files')
        return folder

    def files(self, split: str) -> tuple[list[Any], bool]:
        return self.find(self.folder()), True

    def read(self, shard: Shard, max_bytes: int) -> Iterator[Document]:
        for document in super().read(shard, max_bytes):
            yield dataclasses.replace(document, text=FRONT_MATTER.sub('', document.text))
