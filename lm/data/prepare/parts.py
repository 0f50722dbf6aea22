"""A preparation in parts, for several machines: `lm prepare --shard I/N`, `lm prepare --assemble`.

The parts are the shards of the source, and after them the pieces of the store (lm.data.prepare.pieces). Any machine
makes any part, in any order and any number of times, and the bytes are the same. All that a machine must know lies in
the folder `parts` beside the store:

     parts/settings.json             the settings that all parts were made with
     parts/HASH/tokenizer.model      made by the machine that comes first, for which the others wait
     parts/HASH/SPLIT/000000.json    the counts of a finished shard, with .tokens and .lengths
     parts/HASH/made/…               markers of finished pieces

HASH stands for the settings: a process that was forgotten cannot write between the parts of a later preparation.
"""

import concurrent.futures
import dataclasses
import functools
import json
import time
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any, NamedTuple

from rich.console import Console

from lm.config.configurable import check_kind
from lm.data import store
from lm.data.prepare import stages
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.copies import count_copies
from lm.data.prepare.counts import DamagedPartError, ShardCounts
from lm.data.prepare.description import (
    add_copies,
    check_bad_records,
    describe_split,
    describe_versions,
    finish_store,
    print_summary,
)
from lm.data.prepare.meter import Meter
from lm.data.prepare.pieces import DIGEST, MADE, StorePiece, cut_pieces, discard, make_piece
from lm.data.prepare.settings import check_ready_tokens, collect_settings, compare_settings
from lm.data.prepare.shards import Preparation, Unit, fingerprint
from lm.data.prepare.shared_folder import SharedFolder
from lm.data.prepare.workers import start_workers, wait_for
from lm.data.sources.base import Shard
from lm.errors import ConfigError, LmError
from lm.files import is_remote, local_path, open_path, parse_json
from lm.lease import HeldError, Lease
from lm.text import format_count

PARTS = 'parts'
POLL_SECONDS = 1.0
"""Between two looks for the tokenizer that another machine makes."""
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
        config: how the store is made.
        path: the store.
        settings: all that the contents of the store depend on, without the listing of the source.
        shards: split → its shards.
        machines: into so many shares the first machine has cut the work.
    """

    config: PrepareConfig
    path: str
    settings: dict[str, Any]
    shards: dict[str, list[Shard]]
    machines: int

    @classmethod
    def begin(cls, config: PrepareConfig, path: str, machines: int | None) -> 'PartedPreparation':
        """Writes the settings, or compares them with the settings that the parts were begun with.

        Raises ConfigError where they differ, where a preparation without parts is unfinished, and where there are no
        parts if `machines` is None.
        """
        if not is_remote(path) and (local_path(path) / 'unfinished').exists():
            remedy = f'finish that without --shard, or delete {path}/unfinished'
            raise ConfigError(f'{path} is being prepared by one machine; {remedy}')
        settings, shards = collect_settings(config), stages.list_shards(config)
        known = settings | {'listing': stages.fingerprint_listing(shards)}
        content = json.dumps({'settings': known, 'machines': machines}, indent=2).encode()
        root = SharedFolder(path)
        if machines is None and root.read(stages.PARTS_SETTINGS) is None:
            raise ConfigError(f'--assemble: {path} has no parts; make them with `lm prepare --shard I/N`')
        begun = parse_json(root.write_first(stages.PARTS_SETTINGS, content))
        compare_settings(begun['settings'], known, f'{path} is unfinished and its parts were begun')
        return cls(config, path, settings, shards, begun['machines'])

    @property
    def folder(self) -> SharedFolder:
        """The intermediate files."""
        name = fingerprint([self.settings, stages.fingerprint_listing(self.shards)])[:12]
        return SharedFolder(f'{self.path.rstrip("/")}/{PARTS}/{name}')

    @functools.cached_property
    def job(self) -> Preparation:
        return stages.make_job(self.config, self.settings, self.folder)

    @property
    def units(self) -> list[Unit]:
        """All shards of the source."""
        return stages.list_units(self.shards)

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
        return [n for n, (shard, i) in enumerate(self.units) if f'{i:06d}.json' not in found[shard.split]]

    @functools.cached_property
    def counts(self) -> dict[str, list[ShardCounts]]:
        """Split → the counts of its shards.

        Raises LmError where some are not finished, and DamagedPartError after it has discarded a shard.
        """
        if missing := self.list_missing():
            raise LmError(f'{self.path}: {self.explain_missing(missing)}')
        found = {}
        for split, own in self.shards.items():
            results = [self.job.result(shard, i) for i, shard in enumerate(own)]
            contents = self.folder.read_many([f'{result.base}.json' for result in results])
            found[split] = []
            for result, content in zip(results, contents, strict=True):
                if (counts := result.parse_counts(content)) is None:
                    error = DamagedPartError(result.base, '.json')
                    discard(self.folder, error)
                    raise error
                found[split].append(counts)
        return found

    def forget_counts(self) -> None:
        """Makes the next `counts` read the files again."""
        self.__dict__.pop('counts', None)

    def explain_missing(self, missing: list[int]) -> str:
        """Returns which shards of the source are missing, and the command that makes them."""
        shares = sorted({Share(n % self.machines, self.machines) for n in missing})
        flags = ', '.join(f'--shard {share}' for share in shares[:MOST_NAMED])
        flags += f' … ({len(shares)} in all)' if len(shares) > MOST_NAMED else ''
        what = f'{len(missing)} of {format_count(len(self.units), "shard")} of the source are missing'
        return f'{what}; the same `lm prepare` with {flags} makes them'

    def list_pieces(self) -> list[StorePiece]:
        """Returns all pieces of the store. Raises LmError where shards are missing, and MismatchError for a split
        without documents and, if strict, for bad records."""
        pieces = []
        for split, counts in self.counts.items():
            dtype = self.job.tokenizer().dtype.name
            describe_split(self.config, split, counts, self.shards[split][0].held_out)
            check_bad_records(self.config, [record for c in counts for record in c.bad])
            pieces += cut_pieces(split, counts, dtype)
        return pieces

    def finish(self, pieces: list[StorePiece]) -> dict[str, Any] | None:
        """Writes dataset.json and deletes the parts, if all pieces are made. Returns the contents of dataset.json, or
        None where pieces are missing."""
        made = self.folder.list_names(MADE)
        if any(piece.marker.removeprefix(f'{MADE}/') not in made for piece in pieces):
            return None
        for piece in pieces:
            if piece.name != DIGEST and piece.number == 0:
                for number in store.find_missing_files(self.path, piece.split, piece.name, piece.count):
                    lost = dataclasses.replace(piece, number=number)
                    self.folder.kvstore.write(lost.marker, None).result()
                    raise LmError(f'{self.path}/{piece.split}/{piece.name}: a file is gone; run lm prepare --assemble')
        splits = {}
        for split, counts in self.counts.items():
            digest = self.folder.read(StorePiece(split, DIGEST, 0, 0, '').marker) or b''
            splits[split] = describe_split(self.config, split, counts) | {'sha256': digest.decode()}
        add_copies(splits, count_copies(stages.list_results(self.job, self.shards), self.counts))
        tokenizer = self.job.tokenizer()
        info = finish_store(self.config, self.path, self.shards, self.settings, tokenizer, splits, self.counts)
        delete_parts(self.path)
        return info


def delete_parts(path: str) -> None:
    """Deletes the intermediate files of a finished store."""
    SharedFolder(f'{path.rstrip("/")}/{PARTS}').delete()


def prepare_share(
    config: PrepareConfig, path: str, share: Share, only_assemble: bool = False, console: Console | None = None
) -> dict[str, Any] | None:
    """Makes a share of the parts of the store `path`; who finishes the last one makes the store of them.

    Args:
        config: how the store is made; the same on all machines.
        path: the store, in a bucket or a folder that all machines see.
        share: which parts are this machine's.
        only_assemble: the share is one of the pieces of the store; shards of the source are expected to be finished.
        console: where progress is printed.

    Returns:
        The contents of dataset.json; None where other machines have yet to finish their shares.

    Raises:
        ConfigError: the configuration is wrong, or another than the parts were made with.
        LmError: `only_assemble`, and shards of the source are missing.
    """
    check_kind('config', config, PrepareConfig, 'such as experiment.prepare')
    console = console or Console(markup=False, emoji=False)
    if (info := find_finished(config, path, console)) is not None:
        return info
    try:
        work = begin(config, path, None if only_assemble else share.count, console)
        with start_workers(stages.choose_processes(config, len(share.pick(work.units)))) as (pool, progress):
            if not only_assemble:
                _tokenize(work, share, pool, progress, console)
                if missing := work.list_missing():
                    if (info := find_finished(config, path, console)) is None:
                        console.print(
                            f'--shard {share} is done; {work.explain_missing(missing)}', highlight=False, soft_wrap=True
                        )
                    return info
            pieces = share if only_assemble else Share(0, 1)
            for left in reversed(range(stages.HEALED)):
                try:
                    info = _assemble(work, pieces, share, pool, console)
                    break
                except DamagedPartError as error:
                    if not left:
                        raise
                    stages.print_damage(error, console)
                    discard(work.folder, error)
                    work.forget_counts()
                    units = work.units
                    stages.tokenize_all(work.job, [units[n] for n in work.list_missing()], pool, progress, console)
    except (LmError, OSError, ValueError):
        if (info := find_finished(config, path, console)) is None:  # another machine may have been faster
            raise
        return info
    if info is not None:
        print_summary(config, path, info, console)
    return info


def find_finished(config: PrepareConfig, path: str, console: Console) -> dict[str, Any] | None:
    """Returns the contents of dataset.json where the store is finished, and deletes parts that were left beside it."""
    if not path:
        raise ConfigError("data.path = '': say where the token store goes, for example data.path = 'gs://bucket/text'")
    if (info := store.read_info(path)) is None:
        return None
    return stages.report_existing(config, path, info, console, functools.partial(delete_parts, path))


def begin(config: PrepareConfig, path: str, machines: int | None, console: Console) -> PartedPreparation:
    """Begins a preparation in parts, or joins it; None: only joins it."""
    check_ready_tokens(config)
    config.require_source().fetch(lambda line: console.print(line, highlight=False))
    return PartedPreparation.begin(config, path, machines)


def _tokenize(
    work: PartedPreparation,
    share: Share,
    pool: concurrent.futures.Executor,
    progress: SynchronizedArray,
    console: Console,
) -> None:
    todo = share.pick(work.units)
    stages.print_plan(work.config, todo, len(work.units), console)
    _train(work, pool, console)
    work.check_versions()
    stages.tokenize_all(work.job, todo, pool, progress, console)


def _train(work: PartedPreparation, pool: concurrent.futures.Executor, console: Console) -> None:
    """Returns when the tokenizer is there: this machine makes it, or waits for another one that does."""
    lease, is_waiting = Lease(open_path(work.folder.address), 'tokenizer.lease'), False
    while not work.job.has_tokenizer():
        try:
            with lease:
                if not work.job.has_tokenizer():
                    _train_alone(work, pool, console)
                return
        except HeldError:
            if not is_waiting:
                console.print('waiting for the tokenizer, which another machine makes', highlight=False)
            is_waiting = True
            time.sleep(POLL_SECONDS)


def _train_alone(work: PartedPreparation, pool: concurrent.futures.Executor, console: Console) -> None:
    try:
        stages.train(work.config, work.job, work.shards, pool, console)
    except LmError:
        delete_parts(work.path)  # such as too large a vocabulary: nothing is done that is worth keeping
        raise


def _assemble(
    work: PartedPreparation, share: Share, own: Share, pool: concurrent.futures.Executor, console: Console
) -> dict[str, Any] | None:
    """Makes a share of the pieces and finishes the store, if all are made.

    It begins at a place that depends on `own`: of two machines that have all to do, each skips what the other has made.
    """
    pieces = work.list_pieces()
    work.check_versions()
    todo = share.pick(pieces)
    first = len(todo) * own.index // own.count
    futures = [pool.submit(make_piece, work.folder, work.path, piece) for piece in todo[first:] + todo[:first]]
    sizes = [piece.bytes for piece in todo[first:] + todo[:first]]
    with Meter(console, 'writing', sum(sizes)) as meter:
        for _ in wait_for(futures):
            done = sum(size for size, future in zip(sizes, futures, strict=True) if future.done())
            meter.update(done, done // work.job.tokenizer().dtype.itemsize)
    info = work.finish(pieces)
    if info is None:
        console.print(
            f'--shard {share} of the store is written; other shares of it are missing', highlight=False, soft_wrap=True
        )
    return info
