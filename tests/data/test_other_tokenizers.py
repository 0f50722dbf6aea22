"""Tokenizers of Hugging Face and of tiktoken: their libraries make the same tokens, text is restored, stores are the
same."""

import base64
import collections
import dataclasses
import io
import json

import numpy as np
import pytest
from corpora import CORPORA, needs_corpora, words, write_text
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from lm.config.configurable import REGISTRY
from lm.data import tokenizers
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.text_files import TextFiles
from lm.data.store import TokenStore
from lm.data.tokenizers import Tokenizer, TokenizerChoice, TokenizerConfig
from lm.data.tokenizers.patterns import PATTERNS
from lm.errors import ConfigError, MismatchError

hf = pytest.importorskip('tokenizers')
tiktoken = pytest.importorskip('tiktoken')
tiktoken_load = pytest.importorskip('tiktoken.load')

TEXT = words(20_000, seed=3) + "It's 1234 o'clock, WE'LL see…\r\n\n  Größe: 12 €\n"


def hugging_face(normalizer=None, end='<|endoftext|>', special=()) -> bytes:
    """Returns a tokenizer.json of byte-level BPE, as GPT-2 has."""
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=700, special_tokens=[end, '<pad>', *special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    made.enable_padding(length=64)
    made.enable_truncation(8)
    return made.to_str().encode()


def rank_file() -> bytes:
    """Returns ranks of bytes, their commonest pairs, and the commonest pairs of these."""
    ranks = {bytes([i]): i for i in range(256)}
    raw = TEXT.encode()
    for length, count in ((2, 200), (4, 100)):
        found = collections.Counter(raw[i : i + length] for i in range(len(raw) - length))
        for piece, _ in found.most_common(count):
            if length == 2 or (piece[:2] in ranks and piece[2:] in ranks):
                ranks[piece] = len(ranks)
    return b''.join(base64.b64encode(piece) + b' %d\n' % rank for piece, rank in ranks.items())


def rank_file_of_bytes() -> bytes:
    return b''.join(base64.b64encode(bytes([i])) + b' %d\n' % i for i in range(256))


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tokenizers')
    (folder / 'tokenizer.json').write_bytes(hugging_face())
    (folder / 'lower.json').write_bytes(hugging_face(hf.normalizers.Lowercase(), end='<stop>'))
    (folder / 'own.tiktoken').write_bytes(rank_file())
    return folder


@pytest.fixture(scope='module', params=['tokenizer.json', 'own.tiktoken'])
def tokenizer(request, files):
    return tokenizers.load(files / request.param)


texts = st.text(st.characters(codec='utf-8')) | st.text(alphabet="ab'sLL1234 \n\t\r\0▁é😀<|endoftext|>")


@pytest.mark.parametrize('text', ['a' + ' ' * 1_500_000 + '\nb', '\n' * 2_100_000, ' \n' * 999_900])
def test_white_space_of_any_length_is_restored(files, text):
    """tiktoken panics at a million spaces in a row, and no process can pass that panic to another process."""
    ranks = tokenizers.load(files / 'own.tiktoken')
    assert ranks.decode(ranks.encode(text)) == text


@settings(max_examples=200)
@given(text=texts)
@example(text='')
@example(text='<|endoftext|><pad> \x00\r\n\t \u2028\ufeff 👩‍👩‍👧 ﬀ Å ')
@example(text='x' * 5000 + ' y' * 5000 + ' ' * 5000)
def test_decoding_gives_the_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids
    assert len(ids) == 0 or ids.max() < tokenizer.vocab_size
    assert tokenizer.lossless


def test_tokens_equal_the_tokens_of_the_libraries(files):
    ours = tokenizers.load(files / 'tokenizer.json')
    theirs = hf.Tokenizer.from_file(str(files / 'tokenizer.json'))
    theirs.no_truncation()
    theirs.no_padding()
    assert ours.encode(TEXT).tolist() == theirs.encode(TEXT).ids
    assert (ours.eod_id, ours.vocab_size, ours.piece(0)) == (0, theirs.get_vocab_size(), '<|endoftext|>')
    for name, pattern in PATTERNS.items():
        ours = tokenizers.load(files / 'own.tiktoken', TokenizerConfig(pattern=name))
        ranks = tiktoken_load.load_tiktoken_bpe(str(files / 'own.tiktoken'))
        theirs = tiktoken.Encoding('x', pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        assert ours.encode(TEXT).tolist() == theirs.encode(TEXT)
        assert (ours.eod_id, ours.vocab_size) == (len(ranks), len(ranks) + 1)
        assert ours.piece(ord('a')) == 'a'


def test_the_named_patterns_split_like_the_patterns_of_tiktoken(monkeypatch):
    """tiktoken downloads its encodings with their ranks: the test reads only the patterns."""
    import regex
    import tiktoken_ext.openai_public as public

    monkeypatch.setattr(public, 'load_tiktoken_bpe', lambda *_, **__: {})
    shipped = {'gpt2': public.r50k_base(), 'cl100k': public.cl100k_base(), 'o200k': public.o200k_base()}
    hard = TEXT[-300:] + "  we're WE'RE 12345 !!\n\n  \t x\r\n(é)ǅ日本 𝔘’s \u00a0\u3000y   "
    for name, theirs in shipped.items():
        assert regex.findall(PATTERNS[name], hard) == regex.findall(theirs['pat_str'], hard), name


def test_a_published_vocabulary_has_its_own_end_of_document(files):
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(3, 'big'): i for i in range(256, 50_256)}
    gpt2 = b''.join(base64.b64encode(piece) + b' %d\n' % rank for piece, rank in ranks.items())
    (files / 'gpt2.tiktoken').write_bytes(gpt2)
    found = tokenizers.load(files / 'gpt2.tiktoken')
    assert (found.eod_id, found.vocab_size, found.dtype) == (50_256, 50_257, np.uint16)


def test_the_whole_tokenizer_is_kept(tokenizer, files):
    again = tokenizers.from_bytes(tokenizer.model, tokenizer.eod_id)
    assert (again.sha256, again.eod_id) == (tokenizer.sha256, tokenizer.eod_id)
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    other = tokenizers.load(files / 'own.tiktoken', TokenizerConfig(pattern='cl100k'))
    assert other.sha256 != tokenizer.sha256


FIXED = [cls() for cls in REGISTRY.values() if issubclass(cls, TokenizerChoice) and cls is not TokenizerConfig]


@pytest.mark.parametrize('choice', FIXED, ids=lambda choice: choice.gin_name)
def test_every_tokenizer_without_training_restores_its_text(choice):
    tokenizer = tokenizers.from_bytes(choice.contents())
    assert [kind for kind in Tokenizer.__subclasses__() if kind.recognises(choice.contents())] == [type(tokenizer)]
    assert tokenizer.file_name in tokenizers.FILE_NAMES
    assert tokenizer.lossless
    ids, lengths = tokenizer.encode_documents([tokenizer.probe, '', tokenizer.probe[:3]])
    assert lengths.sum() == len(ids)
    assert (ids < tokenizer.vocab_size).all()
    assert (ids[lengths.cumsum() - 1] == tokenizer.eod_id).all()
    assert tokenizer.decode(ids) == tokenizer.probe + tokenizer.probe[:3]
    assert all(tokenizer.piece(int(i)) for i in ids)


@pytest.mark.parametrize('name', ['tokenizer.json', 'own.tiktoken'])
def test_prepared_and_read_back(name, files, tmp_path):
    corpus = write_text(tmp_path / 'text', files=3, n=2000)
    (corpus / 'train' / '9.txt').write_text('A text <|endoftext|> of ﬀ 👩‍👩‍👧.\n')
    output = io.StringIO()
    source = TextFiles(path=str(corpus))
    config = PrepareConfig(source=source, processes=1, tokenizer=TokenizerConfig(model_path=str(files / name)))
    info = prepare(config, str(tmp_path / 'store'), Console(file=output, width=200))
    assert '100 % of 6 documents that were compared decode to themselves' in output.getvalue()
    assert 'not lossless' not in output.getvalue()
    store, tokenizer = TokenStore.open(str(tmp_path / 'store')), tokenizers.load(files / name)
    found = store.tokenizer()
    assert (tmp_path / 'store' / found.file_name).read_bytes() == tokenizer.model
    assert store.fingerprints['tokenizer'] == tokenizer.sha256 == found.sha256
    assert found.eod_id == tokenizer.eod_id
    documents = np.split(store.read('train', 0, store.tokens('train')), store.document_ends('train'))[:-1]
    expected = [path.read_text() for path in sorted((corpus / 'train').iterdir())]
    assert [found.decode(ids[:-1]) for ids in documents] == expected
    assert all(ids[-1] == found.eod_id and found.eod_id not in ids[:-1] for ids in documents)
    assert store.bytes('train') == sum(len(text.encode()) for text in expected)
    assert info['created_with'].keys() == {'lm', found.library}
    prepare(config, str(tmp_path / 'store'), Console(file=output, width=200))
    assert 'is already prepared' in output.getvalue()


def test_a_tokenizer_that_loses_text_is_reported(files, tmp_path):
    (tmp_path / 'text.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in ('low', 'High', 'low', 'x')))
    told = TokenizerConfig(model_path=str(files / 'lower.json'), end_of_document='<stop>')
    source, output = Jsonl(path=str(tmp_path / 'text.jsonl')), io.StringIO()
    config = PrepareConfig(source=source, processes=1, tokenizer=told, splits=('train',))
    info = prepare(config, str(tmp_path / 'store'), Console(file=output, width=200))
    assert 'not lossless' in output.getvalue()
    assert '75 % of 4 documents that were compared decode to themselves' in output.getvalue()
    assert (info['splits']['train']['decoded'], info['splits']['train']['unchanged']) == (4, 3)
    other = dataclasses.replace(config, tokenizer=dataclasses.replace(told, end_of_document='<pad>'))
    with pytest.raises(ConfigError, match=r"end_of_document = '<stop>', not '<pad>'; choose another"):
        prepare(other, str(tmp_path / 'store'), Console(file=output))


def test_wrong_tokenizers_are_refused_with_a_remedy(files, tmp_path):
    with pytest.raises(ConfigError, match=r'end_of_document = None: the tokenizer has none of <\|endoftext\|>, .*name'):
        tokenizers.load(files / 'lower.json')
    with pytest.raises(ConfigError, match=r"end_of_document = '</s>': the tokenizer has no such token"):
        tokenizers.load(files / 'lower.json', TokenizerConfig(end_of_document='</s>'))
    (tmp_path / 'bad.json').write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"model_path = '.*bad.json': tokenizer.json: "):
        tokenizers.load(tmp_path / 'bad.json')
    hf.Tokenizer(hf.models.WordLevel({'<|endoftext|>': 0, 'the': 1})).save(str(tmp_path / 'words.json'))
    with pytest.raises(ConfigError, match=r"words.json': tokenizer.json: cannot encode every text .*; give it a token"):
        tokenizers.load(tmp_path / 'words.json')
    (tmp_path / 'few.tiktoken').write_bytes(rank_file().partition(b'\n')[2])
    with pytest.raises(ConfigError, match=r"few.tiktoken': .* damaged: without the byte 0; every byte needs"):
        tokenizers.load(tmp_path / 'few.tiktoken')
    (tmp_path / 'cut.tiktoken').write_bytes(rank_file()[:-3] + b'!!')
    with pytest.raises(ConfigError, match=r"cut.tiktoken': ranks of byte pairs: damaged"):
        tokenizers.load(tmp_path / 'cut.tiktoken')
    with pytest.raises(ConfigError, match=r"tokenizer.pattern = 'gpt9': must be one of gpt2, cl100k, o200k"):
        TokenizerConfig(pattern='gpt9')
    with pytest.raises(MismatchError, match=r'tokenizer.json: none of'):
        tokenizers.from_bytes(b'anything', name='tokenizer.json')


@pytest.mark.parametrize('end', ['<|im_end|>', '<|endoftext|>'])
def test_an_end_token_inside_a_document_is_text(end, tmp_path):
    """This holds even if the file does not call the token special."""
    made = hf.Tokenizer.from_str(hugging_face().decode())
    made.add_tokens([hf.AddedToken('<|im_end|>', special=False), hf.AddedToken('[MASK]', special=False)])
    made.save(str(tmp_path / 'tokenizer.json'))
    found = tokenizers.load(tmp_path / 'tokenizer.json', TokenizerConfig(end_of_document=end))
    text = f'a {end} b [MASK]'
    ids = found.encode(text)
    assert not {found.eod_id, found.mask_id} & set(ids.tolist())
    assert {found.eod_id, found.mask_id} <= set(found.special_ids)
    assert found.decode([*ids, found.eod_id, found.mask_id]) == text


def test_a_name_ends_documents_only_as_a_special_token():
    """Gemma has `</s>` for text in HTML. A file without any special token cannot tell such names apart."""
    made = hf.Tokenizer.from_str(hugging_face(end='<eos>').decode())
    made.add_tokens([hf.AddedToken('</s>', special=False)])
    found = tokenizers.from_bytes(made.to_str().encode())
    assert (found.piece(found.eod_id), found.end_ids) == ('<eos>', (0,))
    assert found.decode(found.encode('a</s>b')) == 'a</s>b'
    made = hf.Tokenizer.from_str(hugging_face(end='<stop>').decode())
    made.add_tokens([hf.AddedToken('</s>', special=False)])
    with pytest.raises(ConfigError, match=r'has none of .*, </s>, .* as a special token; name the token that'):
        tokenizers.from_bytes(made.to_str().encode())
    plain = hf.ByteLevelBPETokenizer()
    plain.train_from_iterator([TEXT], 300, show_progress=False)
    plain.add_tokens(['</s>'])
    found = tokenizers.from_bytes(plain.to_str().encode())
    assert found.piece(found.eod_id) == '</s>'


def test_generated_text_is_printed_once_characters_are_complete(tokenizer):
    """A character of several tokens appears once all of them are there."""
    from lm.inference.continuation import TextStream

    text = 'Größe 👩‍👩‍👧 12 €, WE see.\n'
    stream, ids = TextStream(tokenizer.decode), [*tokenizer.encode(text), tokenizer.eod_id]
    parts = [stream([i]) for i in ids] + [stream([], last=True)]
    assert ''.join(parts) == text
    assert sum(map(bool, parts)) > 5


@needs_corpora
def test_real_text_comes_back(tokenizer):
    lines = (CORPORA / 'wiki40b_en' / 'validation.jsonl').read_text().splitlines()[:30]
    found = [json.loads(line)['text'] for line in lines]
    tokens, lengths = tokenizer.encode_documents(found)
    documents = np.split(tokens, np.cumsum(lengths))[:-1]
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == found


def test_ids_between_ranks_and_special_tokens_have_no_text():
    ranks = b'{"ranks": {"pattern": "[a-z]+|[^a-z]+", "special": {"<|endoftext|>": 258}}}\n' + rank_file_of_bytes()
    tokenizer = tokenizers.from_bytes(ranks)
    assert tokenizer.decode([97, 256, 257, 98, 258]) == 'ab'
    assert [tokenizer.piece(i) for i in (97, 256, 257, 258)] == ['a', '', '', '<|endoftext|>']


def test_a_token_is_found_among_ids_without_a_piece():
    from lm.inference.continuation import Stops

    ranks = b'{"ranks": {"pattern": "[a-z]+", "special": {"<|endoftext|>": 258, "<|eot_id|>": 261}}}\n'
    tokenizer = tokenizers.from_bytes(ranks + rank_file_of_bytes(), 260)
    assert Stops.find(tokenizer, ['<|eot_id|>', 'a']).ids == {261: '<|eot_id|>', 97: 'a'}


def test_special_tokens_and_masks_are_known(files):
    """The test covers tokens that must not be hidden, and the token that hides others."""
    masked = tokenizers.from_bytes(hugging_face(special=['[MASK]']))
    assert (masked.eod_id, masked.mask_id, masked.special_ids) == (0, 2, (0, 1, 2))
    plain, ranks = (tokenizers.load(files / name) for name in ('tokenizer.json', 'own.tiktoken'))
    assert (plain.mask_id, plain.special_ids) == (None, (0, 1))
    assert (ranks.mask_id, ranks.special_ids) == (None, (ranks.eod_id,))


@pytest.mark.parametrize('pattern', ['', '[a-z]*', '(?=a)'])
def test_a_pattern_that_finds_empty_parts_is_one_line(pattern):
    """tiktoken would panic, which is no Exception."""
    head = json.dumps({'ranks': {'pattern': pattern, 'special': {'<|endoftext|>': 256}}}).encode()
    with pytest.raises(MismatchError, match='its pattern finds empty parts; restore the file'):
        tokenizers.from_bytes(head + b'\n' + rank_file_of_bytes())
