"""The parts of a token store that is being prepared: shards of the source, and then the pieces of the store.

Any machine makes any part, in any order and any number of times, and the bytes are the same. All that a machine must
know lies in the folder `parts` beside the store:

     parts/lock.json                 the process that does all the work alone
     parts/settings.json             the settings that all parts were made with
     parts/HASH/tokenizer.model      made by the machine that comes first, for which the others wait
     parts/HASH/SPLIT/000000.json    the counts of a finished shard, with .tokens, .lengths and .hashes
     parts/HASH/made/…               markers of finished pieces

HASH stands for the settings: a process that was forgotten cannot write between the parts of a later preparation.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
from typing import NamedTuple

from lm.data import store
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.copies import count_copies
from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.description import describe_split, describe_versions, finish_store
from lm.data.prepare.pieces import DIGEST, MADE, StorePiece, cut_pieces
from lm.data.prepare.settings import choose_splits, collect_settings, compare_settings, keep_split
from lm.data.prepare.shards import Preparation, Unit, check_bad_records, name_shards, read_counts
from lm.data.prepare.shared_folder import SharedFolder
from lm.data.sources.base import Shard
from lm.errors import ConfigError, LmError, MismatchError
from lm.files import JsonObject, is_remote, local_path, parse_json
from lm.text import format_count

PARTS = 'parts'
SETTINGS = 'settings.json'
MOST_NAMED = 8
"""Missing shards that a message names."""


class Share(NamedTuple):
    """The work of machine `index` of `count`: every `count`-th part, from `index` on."""

    index: int
    count: int

    def pick(self, parts: list) -> list:
        return parts[self.index :: self.count]

    def __str__(self) -> str:
        return f'{self.index}/{self.count}'


WHOLE = Share(0, 1)


def read_share(text: str) -> Share:
    """Reads 'I/N'. Raises ConfigError unless 0 ≤ I < N."""
    index, _, count = text.partition('/')
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f'--shard {text}: write I/N with I from 0 to N - 1, such as --shard 0/8 to --shard 7/8')
    return Share(int(index), int(count))


@dataclasses.dataclass(frozen=True)
class PartedPreparation:
    """A preparation whose parts lie beside the store.

    Attributes:
        settings: all that the contents of the store depend on, without the listing of the source.
        machines: into so many shares the first machine has cut the work.
    """

    config: PrepareConfig
    path: str
    settings: JsonObject
    shards: dict[str, list[Shard]]
    machines: int = 1

    @classmethod
    def plan(cls, config: PrepareConfig, path: str) -> 'PartedPreparation':
        """Lists the source, and writes nothing."""
        root = find_parts(path)
        begun = root.read(SETTINGS)
        config = keep_split(config, None if begun is None else _parse_begun(root, begun)[0])
        return cls(config, path, collect_settings(config), list_shards(config))

    def begin(self, machines: int | None) -> 'PartedPreparation':
        """Writes the settings, or compares them with the settings that the parts were begun with.

        Raises ConfigError where they differ, and where there are no parts if `machines` is None.
        """
        root, known = find_parts(self.path), self.settings | {'listing': self.listing}
        if machines is None and root.read(SETTINGS) is None:
            raise ConfigError(f'--assemble: {self.path} has no parts; make them with `lm prepare --shard I/N`')
        content = json.dumps({'settings': known, 'machines': machines}, indent=2).encode()
        content = root.write_first(SETTINGS, content)
        settings, machines = _parse_begun(root, content)
        compare_settings(settings, known, f'{self.path} is unfinished and was begun')
        settings = {name: settings.get(name) for name in self.settings}  # which may spell a path in another form
        return dataclasses.replace(self, settings=settings, machines=machines)

    @functools.cached_property
    def listing(self) -> str:
        """The SHA-256 of the names and sizes of the files of the source, and of their cuts."""
        return _fingerprint([dataclasses.astuple(unit.shard) for unit in self.units])

    @functools.cached_property
    def job(self) -> Preparation:
        """The part of this preparation that travels to worker processes."""
        name = _fingerprint([self.settings, self.listing])[:12]
        folder = SharedFolder(f'{find_parts(self.path).address}/{name}')
        return Preparation(self.config, folder, self.settings['tokenizer'].get('end_of_document'))

    @property
    def folder(self) -> SharedFolder:
        """The intermediate files."""
        return self.job.folder

    @functools.cached_property
    def units(self) -> list[Unit]:
        """The shards of all splits, each with its number in its split."""
        return [Unit(shard, i) for own in self.shards.values() for i, shard in enumerate(own)]

    def check_versions(self) -> None:
        """Raises ConfigError where this machine has another version of the tokenizer's package than the first one."""
        versions = describe_versions(self.job.tokenizer())
        begun = parse_json(self.folder.write_first('versions.json', json.dumps(versions).encode()))
        for package, version in versions.items():
            if begun.get(package) != version:
                was = f'{package} {begun.get(package)}'
                raise ConfigError(
                    f'{self.path}: its parts are made with {was}, not {version}; install that version, or delete '
                    f'{self.path}/{PARTS}'
                )

    def list_missing(self) -> list[int]:
        """Returns the numbers, among all shards, of the shards that are not finished."""
        found = {split: self.folder.list_names(split) for split in self.shards}
        return [n for n, unit in enumerate(self.units) if f'{unit.index:06d}.json' not in found[unit.shard.split]]

    def explain_missing(self, missing: list[int]) -> str:
        """Returns which shards of the source are missing, and the command that makes them."""
        shares = sorted({Share(n % self.machines, self.machines) for n in missing})
        flags = ', '.join(f'--shard {share}' for share in shares[:MOST_NAMED])
        flags += f' … ({len(shares)} in all)' if len(shares) > MOST_NAMED else ''
        what = f'{len(missing)} of {format_count(len(self.units), "shard")} of the source are missing'
        return f'{what}; the same `lm prepare` with {flags} makes them'

    def read_counts(self) -> dict[str, list[ShardCounts]]:
        """Returns split → the counts of its shards. Raises LmError where some are missing, and DamagedPartError."""
        if missing := self.list_missing():
            raise LmError(f'{self.path}: {self.explain_missing(missing)}')
        return {split: read_counts(self.folder, name_shards(split, len(own))) for split, own in self.shards.items()}

    def describe_splits(self, counts: dict[str, list[ShardCounts]]) -> dict[str, dict[str, object]]:
        """Returns the entries of the splits, without their SHA-256.

        Raises MismatchError, if strict, for bad records, and the errors of `describe_split` for a split without
        documents: other settings begin anew then.
        """
        try:
            found = {name: describe_split(self.config, name, own, self.shards[name]) for name, own in counts.items()}
        except LmError:
            delete_parts(self.path)
            raise
        check_bad_records(self.config, [record for own in counts.values() for c in own for record in c.bad])
        return found

    def list_pieces(self, counts: dict[str, list[ShardCounts]]) -> list[StorePiece]:
        """Returns all pieces of the store. Raises the errors of `check_versions` and `describe_splits`."""
        self.check_versions()
        self.describe_splits(counts)
        dtype = self.job.tokenizer().dtype.name
        return [piece for split, own in counts.items() for piece in cut_pieces(split, own, dtype)]

    def finish(self, counts: dict[str, list[ShardCounts]], pieces: list[StorePiece]) -> JsonObject | None:
        """Writes dataset.json, if all pieces are made. Returns its contents, or None where pieces are missing."""
        made = self.folder.list_names(MADE)
        if any(piece.marker.removeprefix(f'{MADE}/') not in made for piece in pieces):
            return None
        for piece in pieces:
            if piece.name != DIGEST and piece.number == 0:
                for number in store.find_missing_files(self.path, piece.split, piece.name, piece.count):
                    self.folder.remove(dataclasses.replace(piece, number=number).marker)
                    raise LmError(f'{self.path}/{piece.split}/{piece.name}: a file is gone; run lm prepare --assemble')
        splits = self.describe_splits(counts)
        for split, entry in splits.items():
            entry['sha256'] = (self.folder.read(StorePiece(split, DIGEST, 0, 0, '').marker) or b'').decode()
        for split, copies in count_copies(self.folder, counts).items():
            splits[split][store.COPIES] = copies
        return finish_store(self.config, self.path, self.shards, self.settings, self.job.tokenizer(), splits, counts)


def list_shards(config: PrepareConfig) -> dict[str, list[Shard]]:
    """Returns split → its shards."""
    shards = {name: config.require_source().shards(name) for name in choose_splits(config)}
    for name, own in shards.items():
        if not own:
            raise MismatchError(
                f'split {name!r}: its files hold no documents; leave it out with prepare.splits, or see the source'
            )
    return shards


def find_parts(path: str) -> SharedFolder:
    """Returns the folder of all parts of a store."""
    return SharedFolder(f'{path.rstrip("/")}/{PARTS}')


def _parse_begun(root: SharedFolder, content: bytes) -> tuple[JsonObject, int]:
    """Returns the settings and the number of machines of a preparation that was begun. Raises MismatchError."""
    try:
        begun = parse_json(content)
        return {**begun['settings'], 'source': dict(begun['settings']['source'])}, int(begun['machines'])
    except (KeyError, TypeError, ValueError):
        file = f'{root.address}/{SETTINGS}'
        raise MismatchError(f'{file}: damaged; delete {root.address} and run the same command again') from None


def find_old_parts(path: str) -> pathlib.Path:
    """Returns the folder in which earlier versions kept the intermediate files of one machine."""
    if not is_remote(path):
        return local_path(path, 'data.path') / 'unfinished'
    return pathlib.Path('data') / f'unfinished-{hashlib.sha256(path.encode()).hexdigest()[:12]}'


def delete_parts(path: str) -> None:
    """Deletes the intermediate files of a store, and its folder if that is all there is."""
    find_parts(path).delete()
    shutil.rmtree(find_old_parts(path), ignore_errors=True)
    if not is_remote(path):
        with contextlib.suppress(OSError):
            local_path(path).rmdir()


def _fingerprint(value: object) -> str:
    """Computes the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
