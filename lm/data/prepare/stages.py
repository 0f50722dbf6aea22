"""The stages of a preparation: text → token store (lm.data.store).

1. A tokenizer is trained on a sample of the training split.
2. Processes tokenise shards of the source into intermediate files.
3. The intermediate files are joined, in order, into the arrays of the store.
4. dataset.json is written and the intermediate files go.

Every stage keeps what it finished, so the same command continues after a kill; the store does not depend on the number
of processes or on interruptions, to the last byte.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any

import numpy as np
from rich.console import Console

from lm.config.configurable import check_kind
from lm.data import store
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.copies import count_copies
from lm.data.prepare.counts import DamagedPartError
from lm.data.prepare.description import (
    EmptySplitError,
    add_copies,
    check_strict,
    describe_split,
    finish_store,
    make_table,
    print_summary,
)
from lm.data.prepare.meter import Meter
from lm.data.prepare.settings import (
    check_ready_tokens,
    choose_splits,
    collect_settings,
    compare_settings,
    describe_change,
    keep_settings,
)
from lm.data.prepare.shards import Preparation, Result, Unit, fingerprint, tokenize, train_tokenizer
from lm.data.prepare.workers import start_workers, wait_for
from lm.data.prepare.workspace import LocalFolder, Workspace
from lm.data.sources.base import Shard
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, LmError, MismatchError
from lm.files import is_remote, local_path
from lm.lease import HeldError, Lease
from lm.text import format_count, format_si

HEALED = 4
"""Times that one command tries to join the intermediate files, if some of them are damaged."""
PARTS_SETTINGS = 'parts/settings.json'
"""A file that is there while a store is prepared in parts (lm.data.prepare.parts)."""


def prepare(config: PrepareConfig, path: str, console: Console | None = None) -> dict[str, Any]:
    """Makes the token store `path` unless it is there. Returns the contents of dataset.json."""
    check_kind('config', config, PrepareConfig, 'such as experiment.prepare')
    console = console or Console(markup=False, emoji=False)
    if not path:
        raise ConfigError("data.path = '': say where the token store goes, for example data.path = 'data/my_text'")
    source, folder = config.require_source(), _choose_folder(path)
    remove = functools.partial(_remove_remains, folder)
    if (info := store.read_info(path)) is not None:
        return report_existing(config, path, info, console, remove)
    if store.read_file(store.open_kvstore(path), PARTS_SETTINGS) is not None:
        remedy = 'finish them with --assemble or the missing --shard, or on this machine with --shard 0/1'
        raise ConfigError(f'{path} is being prepared in parts; {remedy}; or delete {path}')
    check_ready_tokens(config)
    source.fetch(lambda line: console.print(line, highlight=False))
    settings = collect_settings(config)
    with _hold_lock(folder):
        made = store.read_info(path)  # by another preparation, until now
        goes_on = True
        try:
            info = made or _make_store(config, path, folder, settings, console)
            goes_on = False
        except EmptySplitError:  # other settings begin anew
            goes_on = False
            raise
        finally:
            if not goes_on or not (folder / 'tokenizer.model').exists():  # nothing is done that is worth keeping
                shutil.rmtree(folder)
                if not is_remote(path) and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()
    if made:
        return report_existing(config, path, made, console, remove)
    print_summary(config, path, info, console)
    return info


def report_existing(
    config: PrepareConfig, path: str, info: dict[str, Any], console: Console, remove: Callable[[], None]
) -> dict[str, Any]:
    """Checks a store that is there against the configuration, removes intermediate files, and returns `info`."""
    try:
        settings, remark = collect_settings(config), ''
    except ConfigError:
        settings, remark = None, ' (its source is not there any more, so it was not compared)'
    if settings:
        compare_settings(info['settings'], settings, f'{path} is finished and was prepared')
    check_strict(config, path, info)
    remove()
    console.print(f'{path} is already prepared: nothing to do{remark}', highlight=False, soft_wrap=True)
    if settings and (change := describe_change(config, info)):
        remedy = f'to prepare it anew, delete {path} or name another data.path'
        console.print(f'but its source has changed since, from {change}; {remedy}', highlight=False, soft_wrap=True)
    console.print(make_table(info))
    return info


def _remove_remains(folder: pathlib.Path) -> None:
    """Removes intermediate files that a kill has left beside a finished store."""
    if folder.exists():
        with contextlib.suppress(LmError, OSError), _hold_lock(folder):
            shutil.rmtree(folder)


def _make_store(
    config: PrepareConfig, path: str, folder: pathlib.Path, settings: dict[str, Any], console: Console
) -> dict[str, Any]:
    shards = list_shards(config)
    keep_settings(folder, settings | {'listing': fingerprint_listing(shards)}, path)
    job = make_job(config, settings, LocalFolder(folder))
    todo = list_units(shards)
    with start_workers(choose_processes(config, len(todo))) as (pool, progress):
        print_plan(config, todo, len(todo), console)
        _train(config, job, shards, pool, console)
        for left in reversed(range(HEALED)):
            tokenize_all(job, todo, pool, progress, console)
            try:
                return assemble(config, path, job, shards, settings, console)
            except DamagedPartError as error:
                if not left:
                    raise
                print_damage(error, console)
                Result(job.folder, error.base).discard()
    raise AssertionError('the last try returns or raises')


def print_damage(error: DamagedPartError, console: Console) -> None:
    """Says that a shard is made again."""
    line = f'{error.base}{error.suffix} of the intermediate files is damaged or gone: this shard is made again'
    console.print(line, highlight=False, soft_wrap=True)


def list_shards(config: PrepareConfig) -> dict[str, list[Shard]]:
    """Returns split → its shards."""
    source = config.require_source()
    shards = {name: source.shards(name) for name in choose_splits(config)}
    for name, own in shards.items():
        if not own:
            raise MismatchError(
                f'split {name!r}: its files hold no documents; leave it out with prepare.splits, or see the source'
            )
    return shards


def fingerprint_listing(shards: dict[str, list[Shard]]) -> str:
    """Computes the SHA-256 of the names and sizes of the files of a source, and of their cuts."""
    return fingerprint([dataclasses.astuple(shard) for own in shards.values() for shard in own])


def list_units(shards: dict[str, list[Shard]]) -> list[Unit]:
    """Returns the shards of all splits, each with its number in its split."""
    return [Unit(shard, i) for own in shards.values() for i, shard in enumerate(own)]


def list_results(job: Preparation, shards: dict[str, list[Shard]]) -> dict[str, list[Result]]:
    """Returns split → the intermediate files of its shards."""
    return {name: [job.result(shard, i) for i, shard in enumerate(own)] for name, own in shards.items()}


def make_job(config: PrepareConfig, settings: Mapping[str, Any], folder: Workspace) -> Preparation:
    """Returns what the worker processes have in common; `settings` come from `collect_settings`."""
    limit, eod = config.max_document_bytes, settings['tokenizer'].get('end_of_document')
    return Preparation(config.require_source(), config.cleaning, limit, folder, config.strict, eod)


def choose_processes(config: PrepareConfig, most: int) -> int:
    """Returns the number of worker processes, where there is work for `most` of them."""
    return max(1, min(config.processes or os.cpu_count() or 1, most))


def print_plan(config: PrepareConfig, todo: list[Unit], count: int, console: Console) -> None:
    """Prints what this process will tokenise: `todo`, of `count` shards."""
    total = sum(unit.shard.bytes for unit in todo)
    splits = ', '.join(dict.fromkeys(unit.shard.split for unit in todo))
    shards = format_count(count, 'shard')
    console.print(
        f'{config.require_source().identity()["kind"]}: {splits}, about {format_si(total)}B in '
        f'{shards if len(todo) == count else f"{len(todo)} of {shards}"}, '
        f'{format_count(choose_processes(config, len(todo)), "process", "processes")}',
        highlight=False,
    )


def tokenize_all(
    job: Preparation,
    todo: list[Unit],
    pool: concurrent.futures.Executor,
    progress: SynchronizedArray,
    console: Console,
) -> None:
    """Tokenises shards in worker processes, except finished ones."""
    finished = [job.is_finished(*unit) for unit in todo]
    total = sum(unit.shard.bytes for unit in todo)
    done = sum(unit.shard.bytes for unit, is_done in zip(todo, finished, strict=True) if is_done)
    if done:
        console.print(f'{sum(finished)} of {format_count(len(todo), "shard")} were finished before', highlight=False)
    futures = [pool.submit(tokenize, job, *unit) for unit, is_done in zip(todo, finished, strict=True) if not is_done]
    with Meter(console, 'tokenising', total, done) as meter:
        for _ in wait_for(futures):
            meter.update(*progress)
    seconds = time.monotonic() - meter.start
    if futures:
        console.print(
            f'tokenised {progress[0] / 1e6:,.1f} MB in {seconds:,.1f} s: {progress[0] / seconds / 1e6:.1f} MB/s, '
            f'{progress[1] / seconds / 1e6:.2f} M tokens/s',
            highlight=False,
        )


def _train(
    config: PrepareConfig,
    job: Preparation,
    shards: dict[str, list[Shard]],
    pool: concurrent.futures.Executor,
    console: Console,
) -> None:
    if not job.has_tokenizer():
        train(config, job, shards, pool, console)


def train(
    config: PrepareConfig,
    job: Preparation,
    shards: dict[str, list[Shard]],
    pool: concurrent.futures.Executor,
    console: Console,
) -> None:
    """Makes the tokenizer in a worker process."""
    sampled, choice = choose_sampled(shards), config.tokenizer
    verb = 'checking'
    if isinstance(choice, TokenizerConfig) and choice.model_path is None:
        verb = 'training'
        size = min(choice.sample_bytes, sum(shard.bytes for shard in sampled))
        kind = f'{choice.model_type}, {choice.vocab_size:,} pieces'
        console.print(f'training the tokenizer ({kind}) on {format_si(size)}B of {sampled[0].split}', highlight=False)
    start = printed = time.monotonic()
    for _ in wait_for([pool.submit(train_tokenizer, job, choice, sampled)]):
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            console.print(f'{verb} the tokenizer: {printed - start:.0f} s', highlight=False)
    if not job.tokenizer().lossless:
        console.print(
            'the tokenizer is not lossless (it changes spaces or rare characters): perplexities by word and bits per '
            'byte will not be exact',
            highlight=False,
        )


def choose_sampled(shards: dict[str, list[Shard]]) -> list[Shard]:
    """Returns the shards of the split that a tokenizer is trained on."""
    return shards['train' if 'train' in shards else next(iter(shards))]


def assemble(
    config: PrepareConfig,
    path: str,
    job: Preparation,
    shards: dict[str, list[Shard]],
    settings: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    """Joins the intermediate files of all shards into the arrays of the store, and finishes it.

    The memory that it takes depends on the largest shard, not on the number of tokens and documents.
    """
    tokenizer = job.tokenizer()
    results = list_results(job, shards)
    counts = {name: [result.require_counts() for result in own] for name, own in results.items()}
    splits = {name: describe_split(config, name, own, shards[name][0].held_out) for name, own in counts.items()}
    for name, split in splits.items():
        digest = hashlib.sha256()
        with Meter(console, f'writing {name}', split['tokens'] * tokenizer.dtype.itemsize) as meter:
            blocks = _digest_blocks((result.tokens(tokenizer.dtype) for result in results[name]), digest, meter)
            store.write_array(path, name, 'tokens', blocks, split['tokens'], tokenizer.dtype.name)
        ends = _digest_ends((result.lengths() for result in results[name]), digest)
        store.write_array(path, name, 'document_ends', ends, split['documents'], 'int64')
        split['sha256'] = digest.hexdigest()
    add_copies(splits, count_copies(results, counts))
    return finish_store(config, path, shards, settings, tokenizer, splits, counts)


def _digest_blocks(blocks: Iterator[np.ndarray], digest: 'hashlib._Hash', meter: Meter) -> Iterator[np.ndarray]:
    size = tokens = 0
    for block in blocks:
        digest.update(block.data)
        yield block
        size, tokens = size + block.nbytes, tokens + len(block)
        meter.update(size, tokens)


def _digest_ends(lengths: Iterator[np.ndarray], digest: 'hashlib._Hash') -> Iterator[np.ndarray]:
    """Yields the ends of the documents whose lengths come shard by shard."""
    total = 0
    for own in lengths:
        ends = total + np.cumsum(own)
        total += int(own.sum())
        digest.update(ends.astype('<i8').data)
        yield ends


def _choose_folder(path: str) -> pathlib.Path:
    """Returns the folder of the intermediate files: in the store's folder, or for a bucket in the current one."""
    if not is_remote(path):
        return local_path(path, 'data.path') / 'unfinished'
    return pathlib.Path('data') / f'unfinished-{hashlib.sha256(path.encode()).hexdigest()[:12]}'


@contextlib.contextmanager
def _hold_lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds off a second preparation of the same store."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Lease(folder))
        except HeldError:
            raise LmError(f'{folder.parent}: another `lm prepare` works on it; wait for its end or stop it') from None
        yield
