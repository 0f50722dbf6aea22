"""Sources, tokenizers and stores with damage of any kind: each ends with one line, soon, and without a traceback.

The complete check draws a hundred damaged files per format. `scripts/test.sh -m slow` with this file draws for an hour
per format, or for FUZZ_SECONDS of processor time.
"""

import gzip
import json
import pathlib

import numpy as np
import pytest
import test_arrow
import test_images
import test_other_tokenizers
import test_parquet
import test_ready_tokens
from corpora import words, write_tfds
from damage import LENGTHS, check_damages
from test_sources import as_tf_records

from lm.data import tokenizers
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources import tfds as tfds_module
from lm.data.sources.arrow import Arrow
from lm.data.sources.images import Images
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.megatron import Megatron, _read_index
from lm.data.sources.parquet import Parquet
from lm.data.sources.proteins.fasta import Fasta
from lm.data.sources.tfds import Tfds
from lm.data.sources.token_files import TokenFiles
from lm.data.store import TokenStore
from lm.data.tokenizers.ranks import Ranks
from lm.data.tokenizers.sentencepiece import train
from lm.errors import MismatchError

TEXTS = [words(1 + i % 40, seed=i) for i in range(60)]
TOKENS = [np.arange(1 + i % 50) + 2 for i in range(60)]


def write_lines(folder):
    (folder / 'all.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in TEXTS))


def write_packed_lines(folder):
    write_lines(folder)
    (folder / 'all.jsonl.gz').write_bytes(gzip.compress((folder / 'all.jsonl').read_bytes(), mtime=0))
    (folder / 'all.jsonl').unlink()


def write_tf_records(folder):
    write_tfds(folder, {'train': TEXTS, 'test': TEXTS[:3]})
    as_tf_records(folder / 'tiny' / '1.0.0')


def write_ready_tokens(folder):
    test_ready_tokens.write_llm_c(folder / 'all.bin', test_ready_tokens.ended(TOKENS), np.uint16)


def read_documents(source) -> None:
    """Reads all documents of a source as `lm prepare --strict` reads them."""
    tfds_module._info.cache_clear()
    _read_index.cache_clear()
    for split in source.splits():
        for shard in source.shards(split):
            for document in source.read(shard, 10**6):
                if document.error:
                    raise MismatchError(document.error)


SOURCES = {
    'jsonl': (write_lines, lambda p: Jsonl(path=f'{p}/*.jsonl')),
    'packed jsonl': (write_packed_lines, lambda p: Jsonl(path=f'{p}/*.jsonl.gz')),
    'fasta': (lambda p: (p / 'a.fa').write_text('>a\nMKV\n>b\nAAC\nMM\n' * 99), lambda p: Fasta(path=str(p))),
    'parquet': (lambda p: test_parquet.write(p / 'a.parquet', TEXTS), lambda p: Parquet(path=f'{p}/*.parquet')),
    'arrow stream': (lambda p: test_arrow.write(p / 'a.arrow', TEXTS), lambda p: Arrow(path=f'{p}/*.arrow')),
    'arrow file': (
        lambda p: test_arrow.write(p / 'a.arrow', TEXTS, stream=False),
        lambda p: Arrow(path=f'{p}/*.arrow'),
    ),
    'images': (
        lambda p: test_images.write(p / 'a.npz', test_images.draw(20, 1)),
        lambda p: Images(path=f'{p}/*.npz'),
    ),
    'token files': (write_ready_tokens, lambda p: TokenFiles(path=f'{p}/*.bin', eod=1)),
    'megatron': (
        lambda p: test_ready_tokens.write_megatron(p / 'all', TOKENS, 8, '<u2'),
        lambda p: Megatron(path=f'{p}/*.idx'),
    ),
    'tfds': (write_tf_records, lambda p: Tfds(name='tiny', data_dir=str(p))),
    'tfds of array records': (
        lambda p: write_tfds(p, {'train': TEXTS, 'test': TEXTS[:3]}),
        lambda p: Tfds(name='tiny', data_dir=str(p)),
    ),
}
"""Name → a function that writes a sound folder, and one that makes the source that reads it."""


@pytest.mark.parametrize('seconds', LENGTHS)
@pytest.mark.parametrize('kind', SOURCES)
def test_damaged_sources_are_told_in_one_line(kind, seconds, tmp_path):
    write, make = SOURCES[kind]
    folder = tmp_path / 'whole' / kind.replace(' ', '_')
    folder.mkdir(parents=True)
    write(folder)
    check_damages(folder, lambda path: read_documents(make(path)), tmp_path, seconds)


TOKENIZERS = {
    'tokenizer.json': test_other_tokenizers.hugging_face,
    'tokenizer.tiktoken': lambda: Ranks.complete(test_other_tokenizers.rank_file(), tokenizers.TokenizerConfig()),
    'bare.tiktoken': test_other_tokenizers.rank_file,
    'tokenizer.model': lambda: train(tokenizers.TokenizerConfig(vocab_size=400), TEXTS),
}
"""Name of a file → a function that returns its contents."""


def read_tokenizer(path: pathlib.Path) -> None:
    """Reads the file of a tokenizer, and encodes and decodes with it."""
    tokenizer = tokenizers.load(path)
    ids = tokenizer.encode('The whale is 1851 metres,  they said. é 😀')
    assert isinstance(tokenizer.decode(ids), str)
    assert isinstance(tokenizer.piece(5), str)


@pytest.mark.parametrize('seconds', LENGTHS)
@pytest.mark.parametrize('name', TOKENIZERS)
def test_damaged_tokenizers_are_told_in_one_line(name, seconds, tmp_path):
    (tmp_path / 'whole').mkdir()
    path = tmp_path / 'whole' / name
    path.write_bytes(TOKENIZERS[name]())
    check_damages(path, read_tokenizer, tmp_path, seconds)


def read_store(path: pathlib.Path) -> None:
    """Reads a token store as `lm inspect --verify` and training read it."""
    store = TokenStore.open(str(path))
    for split in store.splits:
        store.verify(split)
        assert store.words(split) is not None
    store.tokenizer()


@pytest.mark.parametrize('seconds', LENGTHS)
def test_damaged_stores_are_told_in_one_line(seconds, tmp_path):
    write_lines(tmp_path)
    source = Jsonl(path=str(tmp_path / 'all.jsonl'))
    config = PrepareConfig(source=source, processes=1, tokenizer=tokenizers.TokenizerConfig(vocab_size=300))
    prepare(config, str(tmp_path / 'whole' / 'store'))
    (tmp_path / 'scratch').mkdir()
    check_damages(tmp_path / 'whole' / 'store', read_store, tmp_path / 'scratch', seconds)
