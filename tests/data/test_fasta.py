"""FASTA and amino acids: line breaks, compression and cuts do not change the sequences of a file."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lm.data import tokenizers
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.proteins.fasta import NO_NAME, Fasta
from lm.data.store import TokenStore
from lm.data.tokenizers.amino_acids import LETTERS, STANDARD, AminoAcids, AminoAcidsConfig
from lm.errors import ConfigError, MismatchError

SEQUENCES = st.lists(st.text(LETTERS, min_size=1, max_size=80), min_size=1, max_size=12)


def documents(path, unit=None, max_bytes=10**6, **options):
    """Returns all documents of a file in order, cut into pieces of `unit` bytes; none is held out."""
    source = Fasta(path=str(path), **options)
    parts = source.parts(path, unit or 10**9)
    return [d for part in parts for d in source.read_part(part, max_bytes)]


def write(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.name.endswith('.gz') else content)
    return path


@settings(max_examples=60)
@given(
    sequences=SEQUENCES,
    width=st.integers(1, 90),
    ending=st.sampled_from(['\n', '\r\n']),
    last=st.booleans(),
    lower=st.booleans(),
    stop=st.booleans(),
    packed=st.booleans(),
    unit=st.integers(1, 200),
)
def test_a_sequence_does_not_depend_on_how_it_is_written(
    tmp_path_factory, sequences, width, ending, last, lower, stop, packed, unit
):
    """The test varies line lengths, line ends, a missing last line end, masked regions, stops, gzip and cuts."""
    text = ''
    for i, sequence in enumerate(sequences):
        written = (sequence.lower() if lower else sequence) + '*' * stop
        lines = [written[at : at + width] for at in range(0, len(written), width)]
        text += ending.join([f'>sp|P{i:05}|NAME_{i} some > words', *lines, '']) + ending * (i % 2)
    text = text if last else text.rstrip('\r\n')
    path = write(tmp_path_factory.mktemp('fasta') / ('a.fasta.gz' if packed else 'a.fasta'), text.encode())
    found = documents(path, unit)
    assert [d.text for d in found] == sequences
    assert not any(d.error for d in found)
    at = [int(d.id.rpartition('@')[2]) for d in found]
    assert all(text.encode()[a:].startswith(b'>sp|') for a in at)
    assert len(set(at)) == len(at)


def test_broken_records_are_reported_and_spoil_nothing_around_them(tmp_path):
    """A record that is no sequence carries an error, and its neighbours are read correctly."""
    content = (
        b'\xef\xbb\xbf' * 0
        + b'ACD\nEFG\n\n>\nACD\n; a comment\nEF\n>empty\n\n>gap\nAC-D\n>inside\nAC*D\n>end\nACD*\n>last'
    )
    found = documents(write(tmp_path / 'a.fa', content))
    assert [(d.text, d.error) for d in found] == [
        ('', NO_NAME),
        ('ACDEF', None),
        ('', None),
        ('', "'-' is no amino acid"),
        ('', "'*' is no amino acid"),
        ('ACD', None),
        ('', None),
    ]
    marked = write(tmp_path / 'marked.fa', b'\xef\xbb\xbf>a\nAC\n')  # Notepad writes this mark
    assert [(d.text, d.error) for d in documents(marked)] == [('AC', None)]
    assert documents(write(tmp_path / 'none.fa', b'')) == []
    assert documents(write(tmp_path / 'blank.fa', b'\n\n; nothing\n')) == []
    (latin,) = documents(write(tmp_path / 'latin.fa', b'>a\nAC\xe9\n'))
    assert 'no amino acid' in latin.error


def test_long_sequences_are_cut_or_refused(tmp_path):
    path = write(tmp_path / 'a.fa', b'>a\n' + b'ACDEFGHIKL\n' * 30 + b'>b\n' + b'A' * 400 + b'\n>c\nAC\n')
    assert [len(d.text) for d in documents(path, max_length=100)] == [100, 100, 2]
    found = documents(path, max_bytes=200)
    assert [d.error for d in found] == ['longer than prepare.max_document_bytes = 200'] * 2 + [None]


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / 'a.fasta.gz'
    path.write_bytes(gzip.compress(b'>a\nACD\n' * 1000)[:-30])
    with pytest.raises(MismatchError, match=r'a\.fasta\.gz: damaged behind byte \d+'):
        documents(path)


def test_prepared_stores_count_bad_records_and_hold_the_same_sequences_out(tmp_path):
    rng = np.random.default_rng(0)
    sequences = [''.join(rng.choice(list(STANDARD), size=rng.integers(5, 60))) for _ in range(300)]
    content = ''.join(f'>p{i}\n{s}\n' for i, s in enumerate(sequences)) + '>bad\nAC-D\n>empty\n'
    folder = tmp_path / 'files'
    folder.mkdir()
    write(folder / 'some.fasta', content.encode())
    splits = []
    for name, path in (('folder', folder), ('file', folder / 'some.fasta'), ('pattern', folder / '*.fasta')):
        config = PrepareConfig(
            source=Fasta(path=str(path), validation_fraction=0.2), tokenizer=AminoAcidsConfig(), processes=1
        )
        info = prepare(config, str(tmp_path / name), Console(quiet=True))
        assert sum(split['bad_records'] for split in info['splits'].values()) == 2
        assert info['tokenizer'] | {'sha256': ''} == {
            'file': 'amino_acids.json', 'sha256': '', 'vocab_size': 28, 'eod_id': 0, 'begin_id': None, 'lossless': True,
        }  # fmt: skip
        store = TokenStore.open(str(tmp_path / name))
        texts = {}
        for split in ('train', 'validation'):
            ends = store.document_ends(split)
            tokens = store.read(split, 0, store.tokens(split))
            assert (tokens[ends - 1] == 0).all()
            texts[split] = [store.tokenizer().decode(t) for t in np.split(tokens, ends)[:-1]]
        splits.append(texts)
    assert splits[0] == splits[1] == splits[2]
    assert sorted(splits[0]['train'] + splits[0]['validation']) == sorted(sequences)
    assert 0.1 < len(splits[0]['validation']) / 300 < 0.3
    bad = [json.loads(line)['reason'] for line in (tmp_path / 'file' / 'bad_records.jsonl').read_text().splitlines()]
    assert sorted(bad) == ["'-' is no amino acid", 'empty']
    other = PrepareConfig(source=Fasta(path=str(folder), validation_fraction=0.2))
    with pytest.raises(ConfigError, match=r'tokenizer'):
        prepare(other, str(tmp_path / 'folder'), Console(quiet=True))


@given(st.text(LETTERS))
def test_amino_acids_decode_to_themselves(text):
    tokenizer = AminoAcids(AminoAcidsConfig().contents())
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    np.testing.assert_array_equal(tokenizer.encode(text.lower()), ids)
    assert not set(ids.tolist()) & {tokenizer.eod_id, tokenizer.mask_id}


def test_the_vocabulary_of_amino_acids():
    contents = AminoAcidsConfig().contents()
    tokenizer = tokenizers.from_bytes(contents)
    assert isinstance(tokenizer, AminoAcids)
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.mask_id) == (28, 0, 1)
    assert tokenizer.special_ids == (0, 1)
    assert tokenizer.lossless
    assert [tokenizer.piece(i) for i in (0, 1, 2, 21, 27)] == ['<end>', '<mask>', 'A', 'Y', 'Z']
    assert tokenizer.decode([0, 2, 1, 3, 0]) == 'AC'
    for text in ('AC D', 'AC*', 'Aé', '1', '😀'):
        with pytest.raises(MismatchError, match='is no amino acid'):
            tokenizer.encode(text)
    for damaged in (contents[:-5], contents.replace(b'<end>', b'<fin>'), contents.replace(b'"A"', b'"\xc4\x80"')):
        with pytest.raises(MismatchError, match=r'amino_acids\.json: damaged'):
            tokenizers.from_bytes(damaged)
    with pytest.raises(ConfigError, match='end_of_document'):
        tokenizers.from_bytes(contents, '</s>')
