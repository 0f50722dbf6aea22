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
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import lm
from lm.config.configurable import check_kind
from lm.data import store
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.meter import Meter
from lm.data.prepare.settings import (
    check_ready_tokens,
    choose_splits,
    collect_settings,
    compare_settings,
    describe_change,
    keep_settings,
)
from lm.data.prepare.shards import Preparation, fingerprint, tokenize, train_tokenizer
from lm.data.prepare.workers import start_workers, wait_for
from lm.data.sources.base import Shard, inventory
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, LmError, MismatchError
from lm.files import LockedError, is_remote, local_path, lock
from lm.text import format_count, format_si, make_visible

FORMAT = 1


def prepare(config: PrepareConfig, path: str, console: Console | None = None) -> dict[str, Any]:
    """Makes the token store `path` unless it is there. Returns the contents of dataset.json."""
    check_kind('config', config, PrepareConfig, 'such as experiment.prepare')
    console = console or Console(markup=False, emoji=False)
    if not path:
        raise ConfigError("data.path = '': say where the token store goes, for example data.path = 'data/my_text'")
    source, folder = config.require_source(), _choose_folder(path)
    if (info := store.read_info(path)) is not None:
        return _report_existing(config, path, folder, info, console)
    check_ready_tokens(config)
    source.fetch(lambda line: console.print(line, highlight=False))
    settings = collect_settings(config)
    with _hold_lock(folder):
        made = store.read_info(path)  # by another preparation, until now
        is_done = False
        try:
            info = made or _make_store(config, path, folder, settings, console)
            is_done = True
        finally:
            if is_done or not (folder / 'tokenizer.model').exists():  # nothing is done that is worth keeping
                shutil.rmtree(folder)
                if not is_done and not is_remote(path) and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()
    if made:
        return _report_existing(config, path, folder, made, console)
    console.print(_make_table(info))
    decoded, unchanged = (sum(split[key] for split in info['splits'].values()) for key in ('decoded', 'unchanged'))
    if decoded:
        share = f'{100 * unchanged / decoded:.4g} %'
        compared = format_count(decoded, 'document that was compared', 'documents that were compared')
        verb = 'encode' if source.holds_tokens else 'decode'
        console.print(f'{share} of {compared} {verb} to themselves', highlight=False)
    bad = sum(split['bad_records'] for split in info['splits'].values())
    if bad:
        skipped = format_count(bad, 'bad record was', 'bad records were')
        console.print(f'{skipped} skipped: {path}/bad_records.jsonl names them', highlight=False)
    if 'validation' not in info['splits'] and not config.splits:
        remedy = f"{source.how_to_hold_out}; or train with data.eval_split = 'train'"
        line = f'there is no validation split, on which lm train evaluates: {remedy}'
        console.print(line, highlight=False, soft_wrap=True)
    if unread := source.list_unread():
        shown = ', '.join(unread[:5]) + (', …' if len(unread) > 5 else '')
        line = f'no split takes {format_count(len(unread), "file")} of the source: {shown}'
        console.print(make_visible(line), highlight=False, soft_wrap=True)
    console.print(f'prepared {path}  (fingerprint {info["fingerprint"][:16]})', highlight=False)
    return info


def _report_existing(
    config: PrepareConfig, path: str, folder: pathlib.Path, info: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Checks a store that is there against the configuration, removes intermediate files, and returns `info`."""
    try:
        settings, remark = collect_settings(config), ''
    except ConfigError:
        settings, remark = None, ' (its source is not there any more, so it was not compared)'
    if settings:
        compare_settings(info['settings'], settings, f'{path} is finished and was prepared')
    _check_strict(config, path, info)
    if folder.exists():  # killed before it could go
        with contextlib.suppress(LmError, OSError), _hold_lock(folder):
            shutil.rmtree(folder)
    console.print(f'{path} is already prepared: nothing to do{remark}', highlight=False, soft_wrap=True)
    if settings and (change := describe_change(config, info)):
        remedy = f'to prepare it anew, delete {path} or name another data.path'
        console.print(f'but its source has changed since, from {change}; {remedy}', highlight=False, soft_wrap=True)
    console.print(_make_table(info))
    return info


def _make_store(
    config: PrepareConfig, path: str, folder: pathlib.Path, settings: dict[str, Any], console: Console
) -> dict[str, Any]:
    names, source = choose_splits(config), config.require_source()
    shards = {name: source.shards(name) for name in names}
    listing = fingerprint([dataclasses.astuple(shard) for name in names for shard in shards[name]])
    keep_settings(folder, settings | {'listing': listing}, path)
    limit, eod = config.max_document_bytes, config.tokenizer.end_of_document
    job = Preparation(source, config.cleaning, limit, folder, config.strict, eod)
    todo = [(shard, i) for name in names for i, shard in enumerate(shards[name])]
    total = sum(shard.bytes for shard, _ in todo)
    processes = max(1, min(config.processes or os.cpu_count() or 1, len(todo)))
    console.print(
        f'{settings["source"]["kind"]}: {", ".join(names)}, about {format_si(total)}B in '
        f'{format_count(len(todo), "shard")}, '
        f'{format_count(processes, "process", "processes")}',
        highlight=False,
    )
    with start_workers(processes) as (pool, progress):
        _train(config, job, shards, pool, console)
        finished = [job.is_finished(shard, i) for shard, i in todo]
        done = sum(shard.bytes for (shard, _), is_done in zip(todo, finished, strict=True) if is_done)
        if done:
            console.print(
                f'{sum(finished)} of {format_count(len(todo), "shard")} were finished before', highlight=False
            )
        futures = [
            pool.submit(tokenize, job, shard, i)
            for (shard, i), is_done in zip(todo, finished, strict=True)
            if not is_done
        ]
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
    return assemble(config, path, job, shards, settings, console)


def _train(
    config: PrepareConfig,
    job: Preparation,
    shards: dict[str, list[Shard]],
    pool: concurrent.futures.Executor,
    console: Console,
) -> None:
    if job.model.exists():
        return
    name = 'train' if 'train' in shards else next(iter(shards))
    choice = config.tokenizer
    if isinstance(choice, TokenizerConfig) and choice.model_path is None:
        size = min(choice.sample_bytes, sum(shard.bytes for shard in shards[name]))
        kind = f'{choice.model_type}, {choice.vocab_size:,} pieces'
        console.print(f'training the tokenizer ({kind}) on {format_si(size)}B of {name}', highlight=False)
    start = printed = time.monotonic()
    for _ in wait_for([pool.submit(train_tokenizer, job, choice, shards[name])]):
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            console.print(f'training the tokenizer: {printed - start:.0f} s', highlight=False)
    if not job.tokenizer().lossless:
        console.print(
            'the tokenizer is not lossless (it changes spaces or rare characters): perplexities by word and bits per '
            'byte will not be exact',
            highlight=False,
        )


def assemble(
    config: PrepareConfig,
    path: str,
    job: Preparation,
    shards: dict[str, list[Shard]],
    settings: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    tokenizer = job.tokenizer()
    splits, bad = {}, []
    for name, own in shards.items():
        results = [job.result(shard, i) for i, shard in enumerate(own)]
        counts = [result.counts() or {} for result in results]
        split = {key: sum(c[key] for c in counts) for key in ('documents', 'bytes', 'words', 'tokens')}
        # Shards that were finished by a version that did not compare them count nothing.
        split |= {key: sum(c.get(key, 0) for c in counts) for key in ('decoded', 'unchanged')}
        split['bad_records'] = sum(len(c['bad']) for c in counts)
        bad += [record for c in counts for record in c['bad']]
        if not split['documents']:
            raise MismatchError(
                f'split {name!r}: no usable documents; leave it out with prepare.splits, or see the source'
            )
        ends = np.cumsum(np.concatenate([result.lengths() for result in results]), dtype=np.int64)
        digest = hashlib.sha256()
        with Meter(console, f'writing {name}', split['tokens'] * tokenizer.dtype.itemsize) as meter:
            blocks = _digest_blocks((result.tokens(tokenizer.dtype) for result in results), digest, meter)
            store.write_array(path, name, 'tokens', blocks, split['tokens'], tokenizer.dtype.name)
        store.write_array(path, name, 'document_ends', [ends], len(ends), 'int64')
        published = config.require_source().published_words(name, split['documents'])
        if published is not None:
            split['published_words'] = published
        splits[name] = split | {'sha256': store.digest_split(digest, ends)}
    store.write_file(path, tokenizer.file_name, tokenizer.model)
    store.write_file(path, 'bad_records.jsonl', ''.join(json.dumps(record) + '\n' for record in bad).encode())
    info = {
        'format': FORMAT,
        'source': settings['source'],
        'cleaning': config.cleaning,
        'dtype': tokenizer.dtype.name,
        'files': inventory(shard for own in shards.values() for shard in own),
        'splits': splits,
        'tokenizer': {
            'file': tokenizer.file_name,
            'sha256': tokenizer.sha256,
            'vocab_size': tokenizer.vocab_size,
            'eod_id': tokenizer.eod_id,
            'lossless': tokenizer.lossless,
            **({} if tokenizer.holds_text else {'holds_text': False}),
        },
        'settings': settings,
        'created_with': {'lm': lm.__version__, tokenizer.library: importlib.metadata.version(tokenizer.library)},
    }
    return store.write_info(path, info)


def _digest_blocks(blocks: Iterator[np.ndarray], digest: 'hashlib._Hash', meter: Meter) -> Iterator[np.ndarray]:
    size = tokens = 0
    for block in blocks:
        digest.update(block.data)
        yield block
        size, tokens = size + block.nbytes, tokens + len(block)
        meter.update(size, tokens)


def _check_strict(config: PrepareConfig, path: str, info: dict[str, Any]) -> None:
    bad = sum(split['bad_records'] for split in info['splits'].values())
    if config.strict and bad:
        raise MismatchError(
            f'{path} was prepared without {bad} bad records (see bad_records.jsonl); mend them, delete the store and '
            'prepare it again'
        )


def _choose_folder(path: str) -> pathlib.Path:
    """Returns the folder of the intermediate files: in the store's folder, or for a bucket in the current one."""
    if not is_remote(path):
        return local_path(path, 'data.path') / 'unfinished'
    return pathlib.Path('data') / f'unfinished-{hashlib.sha256(path.encode()).hexdigest()[:12]}'


@contextlib.contextmanager
def _hold_lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds off a second preparation of the same store."""
    try:
        file = lock(folder / 'lock')
    except LockedError:
        raise LmError(f'{folder.parent}: another `lm prepare` works on it; wait for its end or stop it') from None
    with file:
        yield


def _make_table(info: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column('split', no_wrap=True)
    for name in ('documents', 'bytes', 'words', 'tokens', 'bytes/token', 'bad'):
        table.add_column(name, justify='right', no_wrap=True)
    for name, split in info['splits'].items():
        numbers = [f'{split[key]:,}' for key in ('documents', 'bytes', 'words', 'tokens')]
        table.add_row(name, *numbers, f'{split["bytes"] / split["tokens"]:.2f}', f'{split["bad_records"]:,}')
    return table
