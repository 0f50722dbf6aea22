"""The work of `lm prepare`'s processes: the documents of a shard → an intermediate file of tokens.

Nothing here imports jax. Each result appears whole or not at all, so a killed preparation goes on where it was.
"""

import dataclasses
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.data import tokenizers
from lm.data.prepare.cleaning import CLEANINGS
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.counts import DamagedPartError, ShardCounts, check_content, decode_counts, encode_counts
from lm.data.prepare.settings import explain_empty_share
from lm.data.prepare.shared_folder import AHEAD, SharedFolder
from lm.data.sources.base import Document, Shard
from lm.data.store import MARK
from lm.data.tokenizers import Tokenizer, TokenizerChoice, TokenizerConfig
from lm.data.tokenizers.sentencepiece import sentences, train
from lm.errors import ConfigError, LmError, MismatchError

TOKENS, LENGTHS, HASHES = '.tokens', '.lengths', '.hashes'
"""The suffixes of the intermediate files of a shard."""
MODEL = 'tokenizer.model'
"""The name of the tokenizer among the intermediate files."""
MODEL_DIGEST = 'tokenizer.sha256'
"""The name of the file with the SHA-256 of the tokenizer."""
BATCH_BYTES = 1_000_000
"""Documents tokenised together."""
COMPARED_BYTES = 100_000
"""About so much text at the beginning of each shard, and at least one document, is compared with its tokens."""
SAMPLE_READ = 4
"""Text read for the tokenizer's sample, as a multiple of the sample: it comes from all over the split."""

_IS_SPACE = np.isin(np.arange(256), [9, 10, 11, 12, 13, 28, 29, 30, 31, 32])
_WIDE_SPACES = re.compile('[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]')

_progress: Any = None
_tokenizers: dict[SharedFolder, Tokenizer] = {}


class Unit(NamedTuple):
    """A shard, and its number in its split."""

    shard: Shard
    index: int

    @property
    def base(self) -> str:
        return name_shard(self.shard.split, self.index)


def name_shard(split: str, index: int) -> str:
    """Returns the names of the intermediate files of a shard, without their suffixes."""
    return f'{split}/{index:06d}'


def name_shards(split: str, number: int) -> list[str]:
    """Returns these names of the first shards of a split."""
    return [name_shard(split, index) for index in range(number)]


@dataclasses.dataclass(frozen=True)
class Preparation:
    """The facts that all shards of a preparation have in common."""

    config: PrepareConfig
    folder: SharedFolder
    """The intermediate files, among which tokenizer.model is."""
    eod: int | str | None = None
    """Name of the end-of-document token; None: the tokenizer's own."""

    def has_tokenizer(self) -> bool:
        return self.folder.read(MODEL, slice(0, 1)) is not None

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that lies among the intermediate files. Raises LmError if it is missing or damaged."""
        if (contents := self.folder.read(MODEL)) is None:
            raise LmError(f'{MODEL} of the intermediate files is missing; run the same command again')
        written = self.folder.read(MODEL_DIGEST)
        if written is not None and written.decode(errors='replace') != hashlib.sha256(contents).hexdigest():
            raise LmError(f'{MODEL} of the intermediate files is damaged; delete all of them (parts)')
        made = tokenizers.from_bytes(contents, self.eod)
        if self.config.require_source().marks_answers:
            made.dtype = np.dtype(np.uint32)  # the mark takes a bit
        return made

    def find_finished(self, units: Sequence[Unit]) -> list[bool]:
        """Tells of each shard if its result is there. If strict, a result with bad records does not count."""
        counts = map(decode_counts, self.folder.read_many([f'{unit.base}.json' for unit in units]))
        return [found is not None and not (self.config.strict and found.bad) for found in counts]


def read_counts(folder: SharedFolder, bases: Sequence[str]) -> list[ShardCounts]:
    """Returns the counts of shards, by name. Raises DamagedPartError for one that is not finished."""
    counts = []
    for base, content in zip(bases, folder.read_many([f'{base}.json' for base in bases]), strict=True):
        if (found := decode_counts(content)) is None:
            raise DamagedPartError(base, '.json')
        counts.append(found)
    return counts


def read_parts(
    folder: SharedFolder, bases: Sequence[str], counts: Sequence[ShardCounts], suffix: str, ahead: int = AHEAD
) -> Iterator[bytes]:
    """Yields the intermediate files BASE SUFFIX of shards, which have these counts. Raises DamagedPartError."""
    contents = folder.read_many([base + suffix for base in bases], ahead)
    for base, own, content in zip(bases, counts, contents, strict=True):
        yield check_content(own, base, suffix, content)


def write_shard(folder: SharedFolder, base: str, made: 'TokenizedShard') -> None:
    """Writes BASE.tokens, BASE.lengths, BASE.hashes, and last BASE.json with the counts."""
    digests = {}
    for suffix, arrays in ((TOKENS, made.tokens), (LENGTHS, made.lengths), (HASHES, made.hashes)):
        digests[suffix] = digest_arrays(arrays)
        folder.write(base + suffix, arrays)
    folder.write(f'{base}.json', encode_counts(dataclasses.replace(made.counts, sha256=digests)))


def digest_arrays(arrays: list[np.ndarray]) -> str:
    """Computes the SHA-256 of arrays, one after another."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest()


def initialize(progress: object) -> None:
    """Runs first in each worker: `progress` is a shared array of bytes read and tokens made."""
    global _progress
    _progress = progress
    for number in (signal.SIGINT, signal.SIGHUP):  # which the terminal sends to all; the parent answers
        signal.signal(number, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_leave_with_parent, args=(parent.sentinel,), daemon=True).start()


def _leave_with_parent(sentinel: int) -> None:
    """Ends a worker whose parent was killed: it would wait for work for ever."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


class TokenizedShard(NamedTuple):
    """The documents of a shard: token ids, tokens per document, and 8 bytes of the SHA-256 of each, batch by batch."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    hashes: list[np.ndarray]
    counts: ShardCounts


def tokenize(job: Preparation, unit: Unit) -> None:
    """Writes the intermediate files of a shard, if they are not there yet."""
    if not job.find_finished([unit])[0]:
        tokenizer = _tokenizers.get(job.folder) or job.tokenizer()
        _tokenizers[job.folder] = tokenizer
        write_shard(job.folder, unit.base, tokenize_shard(job.config, tokenizer, unit.shard))


def tokenize_shard(config: PrepareConfig, tokenizer: Tokenizer, shard: Shard) -> TokenizedShard:
    """Reads and tokenizes the documents of a shard."""
    made, source = TokenizedShard([], [], [], ShardCounts()), hashlib.sha256()
    counts, holds_tokens = made.counts, config.require_source().holds_tokens
    for batch, bad in _batches(config, shard):
        counts.bad += bad
        if not batch:
            continue
        made.hashes.append(digest_documents(batch, source))
        texts, tokens, lengths = encode(config, tokenizer, batch)
        made.tokens.append(tokens)
        made.lengths.append(lengths)
        if not (counts.decoded or uses_special_tokens(config)):  # special tokens have no text
            n = counts.decoded = 1 + int(np.searchsorted(np.cumsum([len(t) for t in texts[1:]]), COMPARED_BYTES))
            counts.unchanged = count_unchanged(
                tokenizer, texts[:n], tokens[: lengths[:n].sum()], lengths[:n], holds_tokens
            )
        if tokenizer.holds_text:
            encoded = [text.encode() for text in texts]
            size = sum(map(len, encoded))
            counts.words += sum(map(count_words, texts, encoded))
        else:
            size = len(tokens) - len(texts)
        counts.documents += len(texts)
        counts.bytes += size
        counts.tokens += len(tokens)
        if _progress is not None:
            with _progress.get_lock():
                _progress[0] += size
                _progress[1] += len(tokens)
    counts.source = source.hexdigest()
    return made


def train_tokenizer(job: Preparation, config: TokenizerChoice, shards: list[Shard]) -> None:
    """Writes the model of the tokenizer: an existing or a fixed one, or one trained on a sample of the shards."""
    if (existing := tokenizers.load_existing(config)) is not None:
        contents = existing.model
    elif isinstance(config, TokenizerConfig):
        try:
            contents = train(config, Sample(job.config, config.sample_bytes, shards))
        except MismatchError:
            held_out = shards[0].held_out
            if held_out is None or any(True for shard in shards for _ in documents(job.config, shard)):
                raise
            raise ConfigError(explain_empty_share(job.config, shards[0].split, held_out)) from None
    else:
        contents = config.contents()
    job.folder.write_first(MODEL_DIGEST, hashlib.sha256(contents).hexdigest().encode())
    job.folder.write_first(MODEL, contents)


def documents(config: PrepareConfig, shard: Shard) -> Iterator[Document]:
    """Yields cleaned documents of a shard; bad ones carry the reason. Raises MismatchError for them if strict."""
    clean = CLEANINGS[config.cleaning]
    for document in config.require_source().read(shard, config.max_document_bytes):
        if document.error is None and document.tokens is None:
            text = clean(document.text)
            document = dataclasses.replace(document, text=text, error=_fault(text))
        if document.error:
            check_bad_records(config, [describe_bad(shard, document)])
        yield document


def describe_bad(shard: Shard, document: Document) -> dict[str, str]:
    """Returns the record of a bad document in bad_records.jsonl."""
    return {'split': shard.split, 'document': document.id, 'reason': document.error or ''}


def check_bad_records(config: PrepareConfig, bad: Sequence[dict[str, str]]) -> None:
    """Raises MismatchError that names the first bad record, where bad records are to stop a preparation."""
    if config.strict and bad:
        first = bad[0]
        raise MismatchError(
            f'split {first["split"]!r}, document {first["document"]}: {first["reason"]}; mend it, or run without '
            '--strict to skip such documents and list them'
        )


def uses_special_tokens(config: PrepareConfig) -> bool:
    """Tells whether names of special tokens in a text are these tokens."""
    return config.special_tokens or config.require_source().marks_answers


def encode(
    config: PrepareConfig, tokenizer: Tokenizer, batch: list[Document]
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Returns the texts of documents, and token ids and lengths as `Tokenizer.encode_documents` returns them.

    The text of ready tokens is what they decode to. Raises MismatchError for ids that the tokenizer does not have.
    """
    source, texts = config.require_source(), [document.text for document in batch]
    if source.marks_answers:
        parts = [mark_answers(tokenizer, document) for document in batch]
        return texts, np.concatenate(parts), np.array([len(ids) for ids in parts], np.int64)
    if not source.holds_tokens:
        return texts, *tokenizer.encode_documents(texts, config.special_tokens)
    parts = []
    for document in batch:
        assert document.tokens is not None, 'the source holds tokens'
        ids = document.tokens.astype(np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise MismatchError(
                f'document {document.id} holds ids up to {ids.max()}, the tokenizer has {tokenizer.vocab_size}; '
                'name the tokenizer that made the tokens with tokenizer.model_path'
            )
        is_ended = len(ids) and ids[-1] == tokenizer.eod_id
        parts.append(ids if is_ended else np.append(ids, tokenizer.eod_id))
    texts = [tokenizer.decode(ids[:-1]) for ids in parts]
    return texts, np.concatenate(parts).astype(tokenizer.dtype), np.array([len(ids) for ids in parts], np.int64)


def mark_answers(tokenizer: Tokenizer, document: Document) -> np.ndarray:
    """Returns the tokens of a conversation, uint32 [tokens]; those outside of its answers have the bit `MARK`."""
    ids, belongs = tokenizer.encode_answers(document.text, document.answers)
    if not len(ids) or ids[-1] != tokenizer.eod_id:
        ids, belongs = np.append(ids, tokenizer.eod_id), np.append(belongs, False)
    return ids.astype(np.uint32) | np.where(belongs, 0, MARK).astype(np.uint32)


def digest_documents(batch: list[Document], digest: 'hashlib._Hash') -> np.ndarray:
    """Adds documents, as they go to the tokenizer, to the digest of a shard's source.

    Returns 8 bytes of the SHA-256 of each document, uint64 [documents].
    """
    hashes = np.empty(len(batch), np.uint64)
    for i, document in enumerate(batch):
        own = document.digest()
        digest.update(own)
        hashes[i] = int.from_bytes(own[:8], 'little')
    return hashes


def count_unchanged(
    tokenizer: Tokenizer, texts: list[str], tokens: np.ndarray, lengths: np.ndarray, holds_tokens: bool
) -> int:
    """Counts the texts that their tokens decode to; for ready tokens, the tokens that their text encodes to."""
    documents = [ids[:-1] for ids in np.split(tokens, np.cumsum(lengths)[:-1])]
    if holds_tokens:
        found = zip(tokenizer.encode_batch(texts), documents, strict=True)
        return sum(np.array_equal(again, ids) for again, ids in found)
    return sum(tokenizer.decode(ids) == text for ids, text in zip(documents, texts, strict=True))


def count_words(text: str, encoded: bytes) -> int:
    """Counts as len(text.split()) does, five times as fast; `encoded` is the UTF-8 of the text."""
    if not encoded:
        return 0
    if not text.isascii() and _WIDE_SPACES.search(text):
        return len(text.split())
    is_space = _IS_SPACE[np.frombuffer(encoded, np.uint8)]
    return int(np.count_nonzero(is_space[:-1] & ~is_space[1:])) + int(not is_space[0])


def _fault(text: str) -> str | None:
    if not text:
        return 'empty'
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can express
        return 'invalid UTF-8'
    return None


def _batches(config: PrepareConfig, shard: Shard) -> Iterator[tuple[list[Document], list[dict[str, str]]]]:
    batch, bad, size = [], [], 0
    for document in documents(config, shard):
        if document.error:
            bad.append(describe_bad(shard, document))
            continue
        batch.append(document)
        size += len(document.text if document.tokens is None else document.tokens)
        if size >= BATCH_BYTES:
            yield batch, bad
            batch, bad, size = [], [], 0
    if batch or bad:
        yield batch, bad


@dataclasses.dataclass(frozen=True)
class Sample:
    """Text of at most `limit` bytes from all over the shards, the same in each iteration.

    It reads about SAMPLE_READ times the limit, from shards that are spread evenly over the split. It takes evenly
    spread pieces of their documents, so that neither a few long books nor the beginning of the split prevail.
    """

    config: PrepareConfig
    limit: int
    shards: list[Shard]

    def __iter__(self) -> Iterator[str]:
        total = sum(shard.bytes for shard in self.shards)
        count = min(len(self.shards), max(1, -(-len(self.shards) * SAMPLE_READ * self.limit // max(1, total))))
        chosen = [self.shards[i * len(self.shards) // count] for i in range(count)]
        share = min(1.0, self.limit / max(1, sum(shard.bytes for shard in chosen)))
        due, taken = 0.0, 0
        for shard in chosen:
            for document in documents(self.config, shard):
                if document.error:
                    continue
                for piece in sentences(document.text):
                    due += share
                    if due < 1:
                        continue
                    due -= 1
                    taken += len(piece.encode())
                    if taken > self.limit:
                        return
                    yield piece
