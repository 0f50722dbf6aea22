import io

import numpy as np
import pytest
import sentencepiece
from corpora import words
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.data import tokenizers
from lm.data.prepare.shards import count_words
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.sentencepiece import SPACE, SentencePiece, sentences, train
from lm.errors import ConfigError, MismatchError

TEXT = words(20_000, seed=1)
MODELS = {kind: train(TokenizerConfig(vocab_size=700, model_type=kind), [TEXT]) for kind in ('bpe', 'unigram')}
TOKENIZERS = {kind: SentencePiece(model) for kind, model in MODELS.items()}

texts = st.text(st.characters(codec='utf-8')) | st.text(alphabet='ab \n\t\r\0▁▅é😀</s>')


@pytest.mark.smoke
@pytest.mark.parametrize('kind', MODELS)
@settings(max_examples=300)
@given(text=texts)
@example(text='')
@example(text=SPACE)
@example(text=f' {SPACE}{SPACE} a{SPACE} ')
@example(text='\x00\r\n\t \u2028\ufeff 👩‍👩‍👧 ﬀ Å ⁇ <unk></s><s><0x41>')
@example(text='x' * 5000 + SPACE + ' y' * 5000 + ' ' * 5000)
def test_decoding_gives_the_text_back(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids
    assert len(ids) == 0 or ids.max() < tokenizer.vocab_size


@settings(max_examples=50)
@given(st.lists(texts, min_size=1, max_size=6))
def test_encoding_in_bulk_equals_encoding_one_by_one(documents):
    tokenizer = TOKENIZERS['bpe']
    tokens, lengths = tokenizer.encode_documents(documents)
    assert tokens.dtype == np.uint16
    pieces = np.split(tokens, np.cumsum(lengths))[:-1]
    for document, ids in zip(documents, pieces, strict=True):
        assert ids[-1] == tokenizer.eod_id
        np.testing.assert_array_equal(ids[:-1], tokenizer.encode(document))


def test_cutting_long_texts_does_not_change_the_tokens():
    whole = sentencepiece.SentencePieceProcessor(model_proto=MODELS['bpe']).encode(TEXT)
    np.testing.assert_array_equal(TOKENIZERS['bpe'].encode(TEXT), whole)


def test_training_loses_no_text_and_is_reproducible():
    long_line = 'no_space' * 10_000
    assert ''.join(sentences(TEXT + long_line)) == TEXT + long_line
    assert all(len(piece.encode()) <= 16_384 for piece in sentences('𝔘' * 9000))
    for kind, model in MODELS.items():
        assert train(TokenizerConfig(vocab_size=700, model_type=kind), [TEXT]) == model


def test_special_ids():
    tokenizer = TOKENIZERS['bpe']
    assert [tokenizer.piece(i) for i in (0, 1, 2, 3, 4, 259)] == ['<pad>', '</s>', '<unk>', '<s>', '<0x00>', '<0xFF>']
    assert (tokenizer.eod_id, tokenizer.vocab_size, tokenizer.lossless) == (1, 700, True)
    assert tokenizer.decode([tokenizer.eod_id]) == ''


@pytest.mark.parametrize(('size', 'text', 'remedy'), [(5000, 'a few words', 'at most 2'), (261, TEXT, 'more than 2')])
def test_vocabulary_that_does_not_fit(size, text, remedy):
    with pytest.raises(ConfigError, match=rf'tokenizer.vocab_size = {size}: .*{remedy}'):
        train(TokenizerConfig(vocab_size=size), [text])


def test_an_existing_model(tmp_path):
    def existing(**options):
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()), model_writer=out, vocab_size=300, minloglevel=2, **options
        )
        return out.getvalue()

    (tmp_path / 'lossy.model').write_bytes(existing())
    config = TokenizerConfig(model_path=str(tmp_path / 'lossy.model'))
    tokenizer = tokenizers.load(config.model_path)
    assert not tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode('the  end')) == 'the end'
    (tmp_path / 'no_end.model').write_bytes(existing(eos_id=-1))
    with pytest.raises(ConfigError, match=r'no end-of-sentence token'):
        tokenizers.load(tmp_path / 'no_end.model')
    with pytest.raises(ConfigError, match=r"tokenizer.model_path = '.*absent.model': No such file"):
        tokenizers.load(tmp_path / 'absent.model')
    (tmp_path / 'text.model').write_text('not a model')
    with pytest.raises(ConfigError, match=r'text.model.: none of .*tokenizer.json of .*, SentencePiece model'):
        tokenizers.load(tmp_path / 'text.model')
    with pytest.raises(MismatchError):
        SentencePiece(b'not a model')


@settings(max_examples=500)
@given(texts.filter(bool) | st.text(alphabet='a \x85\xa0\u1680\u2003\u2028\u3000\x1c\x1f\v\f\u200bé', min_size=1))
def test_count_words_is_split(text):
    assert count_words(text, text.encode()) == len(text.split())


def test_model_paths_that_cannot_exist_are_refused():
    for path, message in (('http://x/y', 'http:// is not supported'), ('~nosuchuser/x', 'no such user')):
        with pytest.raises(ConfigError, match=f"tokenizer.model_path = '{path}': {message}"):
            tokenizers.load(path)


def test_special_tokens_are_known():
    tokenizer = SentencePiece(MODELS['bpe'])
    assert (tokenizer.special_ids, tokenizer.mask_id) == ((0, 1, 2, 3), None)


@pytest.mark.parametrize(
    'texts', [['日本語中文字測試漢字天地人' * 400] * 3 + ['a b'], ['bb\n']], ids=['few spaces', 'none']
)
def test_spaces_are_restored_in_texts_with_few_spaces(texts):
    """Chinese text has few: SentencePiece leaves the rarest characters out of the pieces."""
    tokenizer = SentencePiece(train(TokenizerConfig(vocab_size=280 if texts[1:] else 262), texts))
    assert tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode('日 本  ▁ \n')) == '日 本  ▁ \n'
