"""`lm prepare`: text → token store (lm.data.store).

1. A tokenizer is trained on a sample of the training split.
2. Processes tokenise shards of the source into intermediate files.
3. The intermediate files are joined, in order, into the arrays of the store.
4. dataset.json is written and the intermediate files go.

Every stage keeps what it finished, so the same command continues after a kill; the store does not depend on the number
of processes or on interruptions, to the last byte.
"""

import concurrent.futures
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import sentencepiece
from rich import box
from rich.console import Console
from rich.table import Table

import lm
import lm.data.sources.tfds
from lm.config.configurable import configurable, field
from lm.data import store
from lm.data.prepare import shards as work
from lm.data.prepare.cleaning import CLEANINGS
from lm.data.prepare.meter import Meter
from lm.data.sources.base import Shard, Source
from lm.data.tokenizer import Tokenizer, TokenizerConfig
from lm.errors import ConfigError, LmError, MismatchError, Preempted

FORMAT = 1


@configurable('prepare', resume=True)
class PrepareConfig:
    """How `lm prepare` makes the token store `data.path`."""

    source: Source | None = field(None, help='where the documents come from: @tfds(), @text_files(), @jsonl() …')
    splits: tuple[str, ...] | None = field(None, help='the splits to prepare; None: all that the source has')
    cleaning: str = field('none', choices=tuple(CLEANINGS), help='what is done to the text before it is tokenised')
    tokenizer: TokenizerConfig = field(TokenizerConfig(), help='@tokenizer()')
    max_document_bytes: int = field(100_000_000, minimum=1, help='longer documents are bad records')
    strict: bool = field(False, help='stop at the first bad record instead of listing it in bad_records.jsonl')
    processes: int | None = field(None, minimum=1, help='worker processes; None: one a CPU core')


def main(experiment: Any, arguments: Any) -> int:
    """Prepares `experiment.data.path` as `experiment.prepare` says.

    Args:
        experiment: has `prepare` (PrepareConfig) and `data` (DataConfig).
        arguments: may have `strict` (bool) and `processes` (int or None), which go before the configuration's.

    Raises:
        ConfigError: something is wrong or missing in the configuration, or the store exists with another one.
        MismatchError: the source is damaged, or has bad records and `strict` is set.
    """
    config: PrepareConfig = experiment.prepare
    changes = {'strict': config.strict or bool(getattr(arguments, 'strict', False))}
    if getattr(arguments, 'processes', None) is not None:
        changes['processes'] = arguments.processes
    config = dataclasses.replace(config, **changes)
    try:
        prepare(config, experiment.data.path)
    except concurrent.futures.process.BrokenProcessPool:
        raise LmError(
            'a worker process was killed, most likely for want of memory; run the same command again (finished shards '
            'are kept), with fewer --processes'
        ) from None
    except ImportError as error:  # of what reads gs:// and s3://
        raise ConfigError(f'{" ".join(str(error).split())[:300]}: install it and run the same command again') from None
    except OSError as error:
        place = f'{error.filename}: ' if error.filename else ''
        raise LmError(
            f'{place}{error.strerror or error}; mend that and run the same command again: finished shards are kept'
        ) from None
    except KeyboardInterrupt:
        raise Preempted('stopped; the same command goes on from here') from None
    except ValueError as error:
        if 'RESOURCE_EXHAUSTED' in str(error) or 'PERMISSION_DENIED' in str(error) or 'No space left' in str(error):
            raise LmError(f'{experiment.data.path}: {str(error).split(" [")[0]}; run it again when mended') from None
        raise
    return 0


def prepare(config: PrepareConfig, path: str, console: Console | None = None) -> dict[str, Any]:
    """Makes the token store `path`, or finds it made; returns the contents of dataset.json."""
    console = console or Console()
    if not path:
        raise ConfigError("data.path = '': say where the token store goes, for example data.path = 'data/my_text'")
    if config.source is None:
        raise ConfigError('prepare.source = None: choose a source, for example with --gin_file data/text.gin')
    info = store.read_info(path)
    if info is not None:
        try:
            settings, remark = _settings(config), ''
        except ConfigError:
            settings, remark = None, ' (its source is not there any more, so it was not compared)'
        if settings:
            _compare(info['settings'], settings, f'{path} is finished and was prepared')
        _check_strict(config, path, info)
        console.print(f'{path} is already prepared: nothing to do{remark}', highlight=False)
        console.print(_table(info))
        return info
    config.source.fetch(lambda line: console.print(line, highlight=False))
    settings = _settings(config)
    folder = _folder(path)
    with _lock(folder):
        try:
            info = _prepare(config, path, folder, settings, console)
        finally:
            if info or not (folder / 'tokenizer.model').exists():  # done, or nothing done that is worth keeping
                shutil.rmtree(folder)
                if not info and not store.is_remote(path) and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()
    console.print(_table(info))
    bad = sum(split['bad_records'] for split in info['splits'].values())
    if bad:
        console.print(f'{bad} bad records were skipped: {path}/bad_records.jsonl names them', highlight=False)
    console.print(f'prepared {path}  (fingerprint {info["fingerprint"][:16]})', highlight=False)
    return info


def _prepare(
    config: PrepareConfig, path: str, folder: pathlib.Path, settings: dict[str, Any], console: Console
) -> dict[str, Any]:
    names = _split_names(config)
    shards = {name: config.source.shards(name) for name in names}
    listing = work.fingerprint([dataclasses.astuple(shard) for name in names for shard in shards[name]])
    _remember(folder, settings | {'listing': listing}, path)
    job = work.Job(config.source, config.cleaning, config.max_document_bytes, folder, config.strict)
    todo = [(shard, i) for name in names for i, shard in enumerate(shards[name])]
    total = sum(shard.bytes for shard, _ in todo)
    processes = max(1, min(config.processes or os.cpu_count() or 1, len(todo)))
    console.print(
        f'{settings["source"]["kind"]}: {", ".join(names)}, about {total / 1e6:,.0f} MB in {len(todo)} shards, '
        f'{processes} processes',
        highlight=False,
    )
    context = multiprocessing.get_context('spawn')
    progress = context.Array('q', 2)
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, work.initialize, (progress,))
    try:
        _train(config, job, shards, pool, console)
        finished = [bool(job.result(shard, i).counts()) for shard, i in todo]
        done = sum(shard.bytes for (shard, _), is_done in zip(todo, finished, strict=True) if is_done)
        if done:
            console.print(f'{sum(finished)} of {len(todo)} shards were finished before', highlight=False)
        futures = [
            pool.submit(work.tokenize, job, shard, i)
            for (shard, i), is_done in zip(todo, finished, strict=True)
            if not is_done
        ]
        with Meter(console, 'tokenising', total, done) as meter:
            for _ in _wait(futures):
                meter.update(*progress)
        seconds = time.monotonic() - meter.start
        if futures:
            console.print(
                f'tokenised {progress[0] / 1e6:,.1f} MB in {seconds:,.1f} s: {progress[0] / seconds / 1e6:.1f} MB/s, '
                f'{progress[1] / seconds / 1e6:.2f} M tokens/s',
                highlight=False,
            )
    finally:
        _stop(pool)
    return assemble(config, path, job, shards, settings, console)


def _train(config: PrepareConfig, job: work.Job, shards: dict[str, list[Shard]], pool: Any, console: Console) -> None:
    if job.model.exists():
        return
    name = 'train' if 'train' in shards else next(iter(shards))
    size = min(config.tokenizer.sample_bytes, sum(shard.bytes for shard in shards[name]))
    if config.tokenizer.model_path is None:
        kind = f'{config.tokenizer.model_type}, {config.tokenizer.vocab_size:,} pieces'
        console.print(f'training the tokenizer ({kind}) on {size / 1e6:,.0f} MB of {name}', highlight=False)
    start = printed = time.monotonic()
    for _ in _wait([pool.submit(work.train_tokenizer, job, config.tokenizer, shards[name])]):
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            console.print(f'training the tokenizer: {printed - start:.0f} s', highlight=False)
    tokenizer = Tokenizer.load(job.model)
    if not tokenizer.lossless:
        console.print(
            'the tokenizer is not lossless (it changes spaces or rare characters): perplexities by word and bits per '
            'byte will not be exact',
            highlight=False,
        )


def _wait(futures: list[concurrent.futures.Future]) -> Iterator[None]:
    """Yields a few times a second until all are done; raises the first error."""
    while futures:
        done, _ = concurrent.futures.wait(futures, 0.2, concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        futures = [future for future in futures if future not in done]
        yield


def _stop(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Ends the workers at once: what they have not finished will be done again."""
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def assemble(
    config: PrepareConfig,
    path: str,
    job: work.Job,
    shards: dict[str, list[Shard]],
    settings: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    tokenizer = Tokenizer.load(job.model)
    splits, bad = {}, []
    for name, own in shards.items():
        results = [job.result(shard, i) for i, shard in enumerate(own)]
        counts = [result.counts() for result in results]
        split = {key: sum(c[key] for c in counts) for key in ('documents', 'bytes', 'words', 'tokens')}
        split['bad_records'] = sum(len(c['bad']) for c in counts)
        bad += [record for c in counts for record in c['bad']]
        if not split['documents']:
            raise MismatchError(
                f'split {name!r}: no usable documents; leave it out with prepare.splits, or see the source'
            )
        ends = np.cumsum(np.concatenate([result.lengths() for result in results]), dtype=np.int64)
        digest = hashlib.sha256()
        with Meter(console, f'writing {name}', split['tokens'] * tokenizer.dtype.itemsize) as meter:
            blocks = _digested((result.tokens(tokenizer.dtype) for result in results), digest, meter)
            store.write_array(path, name, 'tokens', blocks, split['tokens'], tokenizer.dtype.name)
        store.write_array(path, name, 'document_ends', [ends], len(ends), 'int64')
        splits[name] = split | {'sha256': store.split_digest(digest, ends)}
    store.write_file(path, 'tokenizer.model', tokenizer.model)
    store.write_file(path, 'bad_records.jsonl', ''.join(json.dumps(record) + '\n' for record in bad).encode())
    info = {
        'format': FORMAT,
        'source': settings['source'],
        'cleaning': config.cleaning,
        'dtype': tokenizer.dtype.name,
        'splits': splits,
        'tokenizer': {
            'sha256': tokenizer.sha256,
            'vocab_size': tokenizer.vocab_size,
            'eod_id': tokenizer.eod_id,
            'lossless': tokenizer.lossless,
        },
        'settings': settings,
        'created_with': {'lm': lm.__version__, 'sentencepiece': sentencepiece.__version__},
    }
    store.write_info(path, info)
    return store.read_info(path)


def _digested(blocks: Iterator[np.ndarray], digest: Any, meter: Meter) -> Iterator[np.ndarray]:
    size = tokens = 0
    for block in blocks:
        digest.update(block)
        yield block
        size, tokens = size + block.nbytes, tokens + len(block)
        meter.update(size, tokens)


def _split_names(config: PrepareConfig) -> tuple[str, ...]:
    found = config.source.splits()
    for name in config.splits or ():
        if name not in found:
            raise ConfigError(f'prepare.splits: {name!r} is not in the source, which has {", ".join(found)}')
    return config.splits or found


def _settings(config: PrepareConfig) -> dict[str, Any]:
    """All that the contents of the store depend on."""
    tokenizer = dataclasses.asdict(config.tokenizer)
    if config.tokenizer.model_path is not None:
        tokenizer = {'model_sha256': Tokenizer.load(config.tokenizer.model_path).sha256}
    settings = {
        'source': config.source.identity(),
        'splits': list(_split_names(config)),
        'cleaning': config.cleaning,
        'max_document_bytes': config.max_document_bytes,
        'tokenizer': tokenizer,
    }
    return json.loads(json.dumps(settings))


def _compare(old: dict[str, Any], new: dict[str, Any], what: str, section: str = 'prepare') -> None:
    """Raises ConfigError that names the first setting that differs."""
    remedy = 'choose another data.path or delete it'
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict) and was.get('kind') == now.get('kind'):
            _compare(was, now, what, now.get('kind', key))
        if key == 'listing':
            raise ConfigError(f'{what} from other files: those of the source changed since; {remedy}')
        if isinstance(was, dict) and isinstance(now, dict):
            was, now = was['kind'], now['kind']
        raise ConfigError(f'{what} with {section}.{key} = {was!r}, not {now!r}; {remedy}')


def _check_strict(config: PrepareConfig, path: str, info: dict[str, Any]) -> None:
    bad = sum(split['bad_records'] for split in info['splits'].values())
    if config.strict and bad:
        raise MismatchError(
            f'{path} was prepared without {bad} bad records (see bad_records.jsonl); mend them, delete the store and '
            'prepare it again'
        )


def _folder(path: str) -> pathlib.Path:
    """Where the intermediate files go: into the store's own folder, or for a bucket below the current one."""
    if not store.is_remote(path):
        return store.local_folder(path) / 'unfinished'
    return pathlib.Path('data') / f'unfinished-{hashlib.sha256(path.encode()).hexdigest()[:12]}'


class _lock:
    """Holds off a second preparation of the same store; the lock goes with the process, however it ends."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __enter__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = (self.folder / 'lock').open('w')
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LmError(
                f'{self.folder.parent}: another `lm prepare` works on it; wait for its end or stop it'
            ) from None

    def __exit__(self, *_) -> None:
        self.file.close()


def _remember(folder: pathlib.Path, settings: dict[str, Any], path: str) -> None:
    file = folder / 'settings.json'
    if file.exists():
        _compare(json.loads(file.read_text()), settings, f'{path} is unfinished and was begun')
    else:
        work.write_whole(file, [json.dumps(settings, indent=2).encode()])


def _table(info: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column('split', no_wrap=True)
    for name in ('documents', 'bytes', 'words', 'tokens', 'bytes/token', 'bad'):
        table.add_column(name, justify='right', no_wrap=True)
    for name, split in info['splits'].items():
        numbers = [f'{split[key]:,}' for key in ('documents', 'bytes', 'words', 'tokens')]
        table.add_row(name, *numbers, f'{split["bytes"] / split["tokens"]:.2f}', f'{split["bad_records"]:,}')
    return table
