"""`lm bench data`: the speed at which text becomes tokens, and tokens become batches.

`lm prepare` is compared with SentencePiece alone on the same text and the same model, in turns, in one process. The
work of a worker of `lm prepare` (reading, cleaning, cutting, encoding, counting, writing) and the merging of its
results count. Training the tokenizer and starting processes do not count. A rate per core is bytes over the processor
time of all threads. Batches are read as in training, from a store in its real format.
"""

import contextlib
import dataclasses
import json
import pathlib
import random
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import sentencepiece

from lm.bench import results, timing
from lm.bench.options import DataOptions
from lm.config.project import PACKAGE, project_root
from lm.data import store
from lm.data.batches import Batches, Windows
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.parts import PartedPreparation
from lm.data.prepare.pieces import forget_pieces, make_piece
from lm.data.prepare.shards import tokenize, train_tokenizer
from lm.data.sources.jsonl import Jsonl
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError
from lm.ops.platform import data_shards
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh

MEGABYTES = 4.0
VOCAB_SIZES = (32_000, 16_000, 8_000, 4_000, 2_000, 1_000, 400)
"""Sizes of the tokenizer; the first size for which the text suffices is taken."""
SAMPLE_BYTES = 4_000_000
GOAL = 5e6
"""Tokens per second on one host."""
BATCHES = 8
"""The amount that one measurement reads."""


@dataclasses.dataclass(frozen=True)
class DataRow:
    """One way of making tokens or batches.

    Attributes:
        name: of the measurement.
        seconds, cpu_seconds: of one pass, by the clock and on all cores; medians.
        megabytes_per_second: of UTF-8 text, by the clock; None for batches.
        megabytes_per_core_second: over `cpu_seconds`.
        over_sentencepiece: rate per core over the rate of the fastest way to call SentencePiece, in the same run.
    """

    name: str
    seconds: float
    cpu_seconds: float
    tokens_per_second: float
    tokens_per_core_second: float
    megabytes_per_second: float | None = None
    megabytes_per_core_second: float | None = None
    over_sentencepiece: float | None = None


def bench_data(options: DataOptions) -> None:
    """Prints a table and writes it to a file, if there is one."""
    output = results.Output(options.save)
    printer, machine = results.Printer(), results.machine()
    packages = ('jax', 'sentencepiece', 'tensorstore')
    printer.line(results.heading('lm bench data', machine, packages))
    rows: list[DataRow] = []
    settings: dict[str, Any] = {'context_length': options.context_length}
    with tempfile.TemporaryDirectory(prefix='lm-bench-') as folder:
        if options.path is None or options.text is not None:
            size = int(1e6 * options.megabytes) if options.megabytes else None
            text, origin = read_text(options.text, size)
            documents = cut(text, options.document_bytes)
            prepared, about = measure_prepare(
                documents, pathlib.Path(folder, 'text'), options.vocab_size, options.repeats
            )
            rows += prepared
            settings |= about | {'text': origin, 'document_bytes': options.document_bytes}
            printer.line(
                f'prepare: {about["bytes"] / 1e6:.1f} MB of {origin} in {about["documents"]:,} documents, '
                f'{about["vocab_size"]:,} pieces, {about["tokens"]:,} tokens'
            )
        if options.path is None:
            path = str(pathlib.Path(folder, 'tokens'))
            write_store(path, options.tokens)
            split = 'train'
        else:
            path = options.path
            split = next(iter(store.TokenStore.open(path).splits))
        context = options.context_length
        row, step = measure_batches(path, split, context, options.tokens_per_step, options.repeats)
        rows.append(row)
        where = f'{path}, split {split}' if options.path else f'a new store of {options.tokens:,} tokens'
        settings |= {'store': where, 'tokens_per_step': step}
        printer.line(
            f'batches: windows of {context:,} from {where}, in steps of {step:,} tokens, onto the devices; files lie '
            'in the page cache'
        )
    printer.table(rows, COLUMNS)
    share = row.tokens_per_second / GOAL
    printer.line(f'batches: {share:.1f}× the goal of {GOAL / 1e6:.0f} M tokens/s a host')
    output.write('data', machine, settings, rows)


# ------------------------------------------------------------------------------------------------------------- prepare


def read_text(path: str | None, size: int | None) -> tuple[str, str]:
    """Returns (at most `size` bytes of text, its description).

    Without a file, the text is made of random sentences from the documentation. Raises ConfigError if the file cannot
    be read or is empty.
    """
    if path is None:
        return made_up_text(size or int(1e6 * MEGABYTES)), 'made-up text (sentences of the documentation, drawn)'
    try:
        raw = pathlib.Path(path).read_bytes()[:size]
    except OSError as error:
        raise ConfigError(f'--text {path}: {error.strerror}') from None
    text = raw.decode('utf-8', errors='ignore')
    if not text.strip():
        raise ConfigError(f'--text {path}: holds no text in UTF-8')
    return text, pathlib.Path(path).name


def made_up_text(size: int) -> str:
    """Returns `size` bytes of sentences from this package's documentation and docstrings, in random order."""
    root = project_root()
    files = sorted([*root.glob('*.md'), *root.glob('docs/*.md'), *PACKAGE.glob('**/*.py')])
    prose = []
    for file in files:
        content = file.read_text(encoding='utf-8')
        prose += [content] if file.suffix == '.md' else re.findall(r'"""(.*?)"""', content, re.DOTALL)
    sentences = [s for s in re.split(r'(?<=[.:;])\s+', '\n\n'.join(prose)) if len(s) > 3]
    draw, parts, total = random.Random(0), [], 0
    while total < size:
        parts.append(draw.choice(sentences) + draw.choice((' ', ' ', ' ', '\n', '\n\n')))
        total += len(parts[-1].encode())
    return ''.join(parts).encode()[:size].decode(errors='ignore')


def cut(text: str, size: int) -> list[str]:
    """Returns documents of about `size` characters, cut at the ends of lines or words."""
    found = re.findall(rf'(?s).{{1,{size}}}(?:\s|\Z)|.{{1,{size}}}', text)
    return [document for document in found if document.strip()]


def measure_prepare(
    documents: list[str], folder: pathlib.Path, vocab_size: int | None, repeats: int
) -> tuple[list[DataRow], dict[str, Any]]:
    """Returns the rates of SentencePiece and of `lm prepare`, and a description of the text."""
    folder.mkdir(parents=True)
    with (folder / 'train.jsonl').open('w', encoding='utf-8') as file:
        file.writelines(json.dumps({'text': document}) + '\n' for document in documents)
    source = Jsonl(path=str(folder))
    config = PrepareConfig(
        source=source, splits=('train',), tokenizer=_TOKENIZER, max_document_bytes=10**9, strict=True
    )
    parts = PartedPreparation.plan(config, str(folder / 'tokens'))
    _train(parts, vocab_size)
    tokenizer = parts.job.tokenizer()
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    lines = [line for document in documents for line in document.splitlines(keepends=True)]

    def lm_prepare() -> None:
        for unit in parts.units:
            parts.folder.remove(f'{unit.base}.json')
            tokenize(parts.job, unit)
        forget_pieces(parts.folder, 'train')
        counts = parts.read_counts()
        pieces = parts.list_pieces(counts)
        for piece in pieces:
            make_piece(parts.folder, parts.path, piece)
        parts.finish(counts, pieces)

    calls: dict[str, Callable[[], Any]] = {
        'SentencePiece, documents': lambda: processor.encode(documents, num_threads=1) and None,
        'SentencePiece, lines': lambda: processor.encode(lines, num_threads=1) and None,
        'lm prepare': lm_prepare,
    }
    times = timing.all_in_turns(calls, repeats)
    size = sum(len(d.encode()) for d in documents)
    tokens = sum(found.tokens for found in parts.read_counts()['train'])
    best = min(found.cpu_seconds for name, found in times.items() if name != 'lm prepare')
    rows = [
        dataclasses.replace(
            make_row(name, found, tokens),
            megabytes_per_second=size / found.seconds / 1e6,
            megabytes_per_core_second=size / found.cpu_seconds / 1e6,
            over_sentencepiece=best / found.cpu_seconds,
        )
        for name, found in times.items()
    ]
    about = {'bytes': size, 'documents': len(documents), 'tokens': tokens, 'vocab_size': tokenizer.vocab_size}
    return rows, about


_TOKENIZER = TokenizerConfig(sample_bytes=SAMPLE_BYTES)


def _train(parts: PartedPreparation, vocab_size: int | None) -> None:
    """Trains a tokenizer like `lm prepare`, with as many pieces as the text allows."""
    *larger, least = (vocab_size,) if vocab_size else VOCAB_SIZES
    for n in larger:
        with contextlib.suppress(ConfigError):
            return train_tokenizer(parts.job, dataclasses.replace(_TOKENIZER, vocab_size=n), parts.shards['train'])
    return train_tokenizer(parts.job, dataclasses.replace(_TOKENIZER, vocab_size=least), parts.shards['train'])


# ------------------------------------------------------------------------------------------------------------- batches


def write_store(path: str, tokens: int, vocab_size: int = 32_000) -> None:
    """Writes a token store of random tokens in the real format."""
    draw = np.random.default_rng(0)
    for number, start in enumerate(range(0, tokens, store.SHARD)):
        drawn = draw.integers(0, vocab_size, min(store.SHARD, tokens - start), np.uint16)
        store.write_array_file(path, 'train', 'tokens', number, drawn, tokens)
    store.write_array_file(path, 'train', 'document_ends', 0, np.array([tokens], np.int64), 1)
    split = {'documents': 1, 'bytes': 4 * tokens, 'words': tokens, 'tokens': tokens}
    info = {
        'source': {'kind': 'random'},
        'dtype': 'uint16',
        'splits': {'train': split | {'sha256': ''}},
        'tokenizer': {'sha256': '', 'vocab_size': vocab_size, 'eod_id': 1},
    }
    store.write_info(path, info)


def measure_batches(path: str, split: str, context: int, tokens_per_step: int, repeats: int) -> tuple[DataRow, int]:
    """Returns the rate at which `Batches.prefetch` delivers batches on the devices of this host, and the tokens per
    batch.

    A batch has as many whole windows per device as fit into `tokens_per_step`.
    """
    opened = store.TokenStore.open(path)
    mesh = make_mesh(MeshConfig())
    shards = data_shards(mesh)
    windows = tokens_per_step // context // shards * shards
    if not windows:
        raise ConfigError(f'--tokens_per_step {tokens_per_step}: {shards} devices need at least {shards * context}')
    chosen = Windows(opened.tokens(split), context, windows, seed=0)
    batches = Batches(opened, split, chosen, 1, batch_sharding(mesh, axis=1))
    position = 0

    def read() -> None:
        nonlocal position
        with contextlib.closing(batches.prefetch(position, position + BATCHES)) as ahead:
            for batch in ahead:
                jax.block_until_ready(batch)
        position += BATCHES

    found = timing.all_in_turns({'batches': read}, repeats)['batches']
    return make_row('batches', found, BATCHES * windows * context), windows * context


def make_row(name: str, found: timing.Times, tokens: int) -> DataRow:
    """Returns the rates of a pass over so many tokens."""
    rates = tokens / found.seconds, tokens / found.cpu_seconds
    return DataRow(name, found.seconds, found.cpu_seconds, *rates)


COLUMNS = {
    'name': ('', str),
    'seconds': ('s', '{:.3f}'.format),
    'cpu_seconds': ('CPU s', '{:.3f}'.format),
    'megabytes_per_second': ('MB/s', '{:.2f}'.format),
    'megabytes_per_core_second': ('MB/s per core', '{:.2f}'.format),
    'tokens_per_second': ('tokens/s', '{:,.0f}'.format),
    'tokens_per_core_second': ('tokens/s per core', '{:,.0f}'.format),
    'over_sentencepiece': ('per core ÷ SentencePiece', '{:.1%}'.format),
}
