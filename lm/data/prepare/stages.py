"""The stages of a preparation: text → token store (lm.data.store).

1. The source lists its files and cuts them into shards.
2. A tokenizer is trained on a sample of the training split.
3. Processes tokenise the shards into intermediate files.
4. The same processes write the pieces of the store: each file of an array, and the SHA-256 of each split.
5. dataset.json is written and the intermediate files go.

One of several machines does its share of stage 3. The machine that finishes the last shard does the rest.

Every stage keeps what it finished, so the same command continues after a kill; the store does not depend on the number
of machines and processes or on interruptions, to the last byte.
"""

import concurrent.futures
import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import SynchronizedArray

from rich.console import Console

from lm.config.configurable import check_kind
from lm.data import store
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.counts import DamagedPartError
from lm.data.prepare.description import check_strict, make_table, print_summary
from lm.data.prepare.meter import Meter
from lm.data.prepare.parts import WHOLE, PartedPreparation, Share, delete_parts, find_old_parts, find_parts
from lm.data.prepare.pieces import discarding, make_piece
from lm.data.prepare.settings import (
    check_place,
    check_ready_tokens,
    collect_settings,
    compare_settings,
    describe_change,
    keep_split,
)
from lm.data.prepare.shards import Preparation, Unit, tokenize, train_tokenizer
from lm.data.prepare.workers import start_workers, wait_for
from lm.data.sources.base import Shard
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, LmError
from lm.files import JsonObject
from lm.lease import HeldError, Lease
from lm.text import format_count, format_si

HEALED = 4
"""Times that one command tries to make the pieces of the store, if some of the intermediate files are damaged."""
POLL_SECONDS = 1.0
"""Between two looks for the tokenizer that another machine makes."""


def prepare(
    config: PrepareConfig, path: str, console: Console | None = None, share: Share = WHOLE, only_assemble: bool = False
) -> JsonObject | None:
    """Makes the token store `path` unless it is there.

    Args:
        config: how the store is made; the same on all machines.
        path: the store, in a bucket or a folder that all machines see.
        console: where progress is printed.
        share: the shards of the source that are this machine's.
        only_assemble: the share is one of the pieces of the store; shards of the source are expected to be finished.

    Returns:
        The contents of dataset.json; None where other machines have yet to finish their shares.

    Raises:
        ConfigError: the configuration is wrong, or another than the parts were made with.
        LmError: `only_assemble`, and shards of the source are missing; or another process does all the work.
    """
    check_kind('config', config, PrepareConfig, 'such as experiment.prepare')
    console = console or Console(markup=False, emoji=False, highlight=False)
    if (info := find_finished(config, path, console)) is not None:
        return info
    fetch_source(config, path, console)
    work, made = PartedPreparation.plan(config, path), None
    try:
        with _hold_off_others(path) if share == WHOLE and not only_assemble else contextlib.nullcontext():
            if store.read_info(path) is None:
                work = work.begin(None if only_assemble else share.count)
                made = _make_store(work, share, only_assemble, console)
    except (LmError, OSError, ValueError):  # another machine may have been faster
        if store.read_info(path) is None:
            raise
    if made is None:
        return find_finished(config, path, console)
    delete_parts(path)
    print_summary(config, path, made, console)
    return made


def find_finished(config: PrepareConfig, path: str, console: Console) -> dict[str, object] | None:
    """Returns the contents of dataset.json where the store is finished. It compares the store with the configuration,
    and deletes intermediate files that were left beside it."""
    if not path:
        raise ConfigError("data.path = '': say where the token store goes, for example data.path = 'data/my_text'")
    if (info := store.read_info(path)) is None:
        return None
    begun_with = info.get('settings', {})
    config = keep_split(config, begun_with)
    try:
        settings, remark = collect_settings(config), ''
    except ConfigError:
        settings, remark = None, ' (its source is not there any more, so it was not compared)'
    if settings:
        compare_settings(begun_with, settings, f'{path} is finished and was prepared')
    check_strict(config, path, info)
    delete_parts(path)
    console.print(f'{path} is already prepared: nothing to do{remark}', soft_wrap=True)
    if settings and (change := describe_change(config, info)):
        remedy = f'to prepare it anew, delete {path} or name another data.path'
        console.print(f'but its source has changed since, from {change}; {remedy}', soft_wrap=True)
    console.print(make_table(info))
    return info


def fetch_source(config: PrepareConfig, path: str, console: Console) -> None:
    """Downloads missing files of the source, and replaces what an earlier version has left beside the store."""
    check_place(config, path)
    check_ready_tokens(config)
    config.require_source().fetch(console.print)
    if (old := find_old_parts(path)).is_dir():
        line = f'{old}: unfinished work of an earlier version is deleted; this version makes it anew'
        console.print(line, soft_wrap=True)
        shutil.rmtree(old)


@contextlib.contextmanager
def _hold_off_others(path: str) -> Iterator[None]:
    """A block in which this process does all the work."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Lease(find_parts(path).address))
        except HeldError:
            raise LmError(f'{path}: another `lm prepare` works on it; wait for its end or stop it') from None
        yield


def _make_store(
    work: PartedPreparation, share: Share, only_assemble: bool, console: Console
) -> dict[str, object] | None:
    with start_workers(choose_processes(work.config, len(share.pick(work.units)))) as (pool, progress):
        if not only_assemble:
            todo = share.pick(work.units)
            print_plan(work, todo, console)
            _make_tokenizer(work, share, pool, console)
            work.check_versions()
            _tokenize_all(work.job, todo, pool, progress, console)
            if missing := work.list_missing():
                if store.read_info(work.path) is None:
                    line = f'--shard {share} is done; {work.explain_missing(missing)}'
                    console.print(line, soft_wrap=True)
                return None
        for left in reversed(range(HEALED)):
            try:
                with discarding(work.folder):
                    return _assemble(work, share, only_assemble, pool, console)
            except DamagedPartError as error:
                if not left:
                    raise
                line = f'{error.file} of the intermediate files is damaged or gone: this shard is made again'
                console.print(line, soft_wrap=True)
            _tokenize_all(work.job, [work.units[n] for n in work.list_missing()], pool, progress, console)
    raise AssertionError('the last try returns or raises')


def choose_processes(config: PrepareConfig, most: int) -> int:
    """Returns the number of worker processes, where there is work for `most` of them."""
    return max(1, min(config.processes or os.cpu_count() or 1, most))


def print_plan(work: PartedPreparation, todo: list[Unit], console: Console) -> None:
    """Prints which of all shards this process will tokenise."""
    total = sum(unit.shard.bytes for unit in todo)
    splits = ', '.join(dict.fromkeys(unit.shard.split for unit in todo))
    shards = format_count(len(work.units), 'shard')
    console.print(
        f'{work.config.require_source().identity()["kind"]}: {splits}, about {format_si(total)}B in '
        f'{shards if len(todo) == len(work.units) else f"{len(todo)} of {shards}"}, '
        f'{format_count(choose_processes(work.config, len(todo)), "process", "processes")}'
    )


def _make_tokenizer(work: PartedPreparation, share: Share, pool: concurrent.futures.Executor, console: Console) -> None:
    """Returns when the tokenizer is there: this machine makes it, or waits for another one that does."""
    lease, is_waiting = Lease(work.folder.address, 'tokenizer.lease'), False
    while not work.job.has_tokenizer():
        try:
            with lease:
                if not work.job.has_tokenizer():
                    _train(work, pool, console)
                return
        except HeldError:
            if not is_waiting:
                console.print('waiting for the tokenizer, which another machine makes')
            is_waiting = True
            time.sleep(POLL_SECONDS)
        except BaseException as error:
            # Such as too large a vocabulary: nothing is worth keeping. After a stop, other machines may go on.
            if share == WHOLE or isinstance(error, LmError):
                delete_parts(work.path)
            raise


def _train(work: PartedPreparation, pool: concurrent.futures.Executor, console: Console) -> None:
    sampled, choice = choose_sampled(work.shards), work.config.tokenizer
    verb = 'checking'
    if isinstance(choice, TokenizerConfig) and choice.model_path is None:
        verb = 'training'
        size = min(choice.sample_bytes, sum(shard.bytes for shard in sampled))
        kind = f'{choice.model_type}, {choice.vocab_size:,} pieces'
        console.print(f'training the tokenizer ({kind}) on {format_si(size)}B of {sampled[0].split}')
    start = printed = time.monotonic()
    for _ in wait_for([pool.submit(train_tokenizer, work.job, choice, sampled)]):
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            console.print(f'{verb} the tokenizer: {printed - start:.0f} s', highlight=False)
    if not work.job.tokenizer().lossless:
        console.print(
            'the tokenizer is not lossless (it changes spaces or rare characters): perplexities by word and bits per '
            'byte will not be exact'
        )


def choose_sampled(shards: dict[str, list[Shard]]) -> list[Shard]:
    """Returns the shards of the split that a tokenizer is trained on."""
    return shards['train' if 'train' in shards else next(iter(shards))]


def _tokenize_all(
    job: Preparation, todo: list[Unit], pool: concurrent.futures.Executor, progress: SynchronizedArray, console: Console
) -> None:
    """Tokenises shards in worker processes, except finished ones."""
    finished = job.find_finished(todo)
    total = sum(unit.shard.bytes for unit in todo)
    done = sum(unit.shard.bytes for unit, is_done in zip(todo, finished, strict=True) if is_done)
    if done:
        console.print(f'{sum(finished)} of {format_count(len(todo), "shard")} were finished before')
    futures = [pool.submit(tokenize, job, unit) for unit, is_done in zip(todo, finished, strict=True) if not is_done]
    with Meter(console, 'tokenising', total, done) as meter:
        for _ in wait_for(futures):
            meter.update(*progress)
    seconds = time.monotonic() - meter.start
    if futures:
        console.print(
            f'tokenised {progress[0] / 1e6:,.1f} MB in {seconds:,.1f} s: {progress[0] / seconds / 1e6:.1f} MB/s, '
            f'{progress[1] / seconds / 1e6:.2f} M tokens/s'
        )


def _assemble(
    work: PartedPreparation, share: Share, only_assemble: bool, pool: concurrent.futures.Executor, console: Console
) -> dict[str, object] | None:
    """Makes the pieces of the store, or a share of them, and finishes the store, if all are made.

    It begins at a place that depends on the share: of two machines that have all to do, each skips what the other has
    made.
    """
    counts = work.read_counts()
    pieces = work.list_pieces(counts)
    todo = share.pick(pieces) if only_assemble else pieces
    first = len(todo) * share.index // share.count
    todo = todo[first:] + todo[:first]
    futures = [pool.submit(make_piece, work.folder, work.path, piece) for piece in todo]
    token_bytes = work.job.tokenizer().dtype.itemsize
    with Meter(console, 'writing', sum(piece.bytes for piece in todo)) as meter:
        for _ in wait_for(futures):
            done = sum(piece.bytes for piece, future in zip(todo, futures, strict=True) if future.done())
            meter.update(done, done // token_bytes)
    info = work.finish(counts, pieces)
    if info is None:
        line = f'--shard {share} of the store is written; other shares of it are missing'
        console.print(line, soft_wrap=True)
    return info
