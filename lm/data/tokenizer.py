"""A lossless SentencePiece tokenizer: decode(encode(text)) == text for every text.

Identity normalisation, no dummy prefix, white space kept, and bytes for characters that have no piece. SentencePiece
itself writes U+2581 for a space, so that a U+2581 in the text would come back as a space; here it is encoded as its
three bytes instead.

Ids of a trained tokenizer: 0 <pad>, 1 </s> (end of document), 2 <unk> (never produced), 3 <s> (never produced),
4…259 the bytes.
"""

import hashlib
import io
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece

from lm.config.configurable import configurable, field
from lm.errors import ConfigError, MismatchError

SPACE = '▁'
"""SentencePiece's own symbol for a space, U+2581."""

# Pieces never cross the place before a space that follows something else (a piece may begin with spaces, not contain
# them), so cutting there leaves the tokens as they are. BPE's queue suffers from long inputs: pieces of 256 characters
# are a fifth faster than those of 2000, and several times faster than books. Where 2000 characters hold no such place
# the cut is hard.
_PLACE = r'(?:(?<=[^ ])(?= )|\Z)'
_SENTENCES = re.compile(rf'(?s).{{1,2000}}{_PLACE}|.{{1,2000}}')
_CUT = re.compile(rf'(?s).{{1,256}}{_PLACE}|.{{1,2000}}{_PLACE}|.{{1,2000}}')
_CUT_AND_SPACE_SYMBOL = re.compile(rf'(?s)▁|[^▁]{{1,256}}{_PLACE}|[^▁]{{1,2000}}{_PLACE}|[^▁]{{1,2000}}')
_PROBE = ' a  b\n\n\tc\r\n\x00 ﬀ é Å 😀 </s> <0x41> '

MAX_SENTENCE_BYTES = 16_384


@configurable('tokenizer', resume=True)
class TokenizerConfig:
    """The tokenizer that `lm prepare` trains on a sample of the training split, or an existing one."""

    vocab_size: int = field(32_000, minimum=261, maximum=2**31 - 1, help='pieces, with 256 bytes and 4 special ones')
    model_type: str = field('bpe', choices=('bpe', 'unigram'), help='of SentencePiece')
    sample_bytes: int = field(200_000_000, minimum=1, help='train on at most so many bytes')
    model_path: str | None = field(None, help='use this SentencePiece model; vocab_size is then taken from it')


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds the ids of a vocabulary: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class Tokenizer:
    """Text ↔ token ids."""

    def __init__(self, model: bytes, eod_id: int | None = None):
        """
        Args:
            model: the contents of a SentencePiece model file.
            eod_id: the end-of-document token; None: the model's end-of-sentence token.

        Raises:
            MismatchError: `model` is not a SentencePiece model.
            ConfigError: the model has no end-of-sentence token.
        """
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise MismatchError('tokenizer.model: not a SentencePiece model; restore the file') from None
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id() if eod_id is None else eod_id
        if self.eod_id < 0:
            raise ConfigError('tokenizer.model_path: the model has no end-of-sentence token; train it with eos_id ≥ 0')
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.dtype = token_dtype(self.vocab_size)
        space = [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE.encode()]
        self._space = np.array(space, np.int32)
        self.lossless: bool = self._processor.decode(self._processor.encode(_PROBE)) == _PROBE

    @classmethod
    def load(cls, path: str | pathlib.Path) -> 'Tokenizer':
        """Reads a model file. Raises ConfigError if there is none."""
        try:
            return cls(pathlib.Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(
                f'tokenizer.model_path = {str(path)!r}: {error.strerror}; name a SentencePiece model'
            ) from None
        except MismatchError:
            raise ConfigError(f'tokenizer.model_path = {str(path)!r}: not a SentencePiece model') from None

    def encode(self, text: str) -> np.ndarray:
        """Token ids [tokens] of `text`, without an end-of-document token."""
        return self.encode_documents([text])[0][:-1]

    def encode_documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Many documents at once, which is the fast way.

        Returns:
            The ids of all documents [tokens], uint16 or uint32, the end-of-document token behind each; and the number
            of tokens of each document, that one included [documents], int64.
        """
        chunks, counts = [], []
        for text in texts:
            pieces = self._cut(text)
            chunks += pieces
            counts.append(len(pieces))
        # One thread: `lm prepare` has a process for each core.
        encoded = self._processor.encode_as_numpy(chunks, num_threads=1)
        if self.lossless and any(SPACE in text for text in texts):
            encoded = [self._space if chunk == SPACE else ids for chunk, ids in zip(chunks, encoded, strict=True)]
        eod = np.array([self.eod_id], np.int32)
        parts, lengths, first = [], [], 0
        for count in counts:
            own = encoded[first : first + count]
            first += count
            parts += own
            parts.append(eod)
            lengths.append(sum(map(len, own)) + 1)
        return np.concatenate(parts).astype(self.dtype), np.array(lengths, np.int64)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of token ids; end-of-document and other control tokens have none."""
        return self._processor.decode(np.asarray(ids, np.int64).tolist())

    def piece(self, index: int) -> str:
        """The piece with this id as SentencePiece writes it, such as '▁the' or '<0x0A>'."""
        return self._processor.id_to_piece(index)

    def _cut(self, text: str) -> list[str]:
        if not self.lossless or not text:
            return [text]
        return (_CUT_AND_SPACE_SYMBOL if SPACE in text else _CUT).findall(text)


def train(config: TokenizerConfig, texts: Iterable[str]) -> bytes:
    """Trains a model on `texts` (whole documents; long ones are cut, none is skipped) and returns its file's contents.

    The same texts give the same bytes: the number of threads, on which SentencePiece's results depend, is fixed.

    Raises:
        ConfigError: `vocab_size` does not fit to the texts.
    """
    if config.model_path is not None:
        return Tokenizer.load(config.model_path).model
    output, failures = io.BytesIO(), []

    def pieces() -> Iterator[str]:
        try:
            for text in texts:
                yield from sentences(text)
        except Exception as error:  # SentencePiece would raise another one, with this one's text inside
            failures.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces(),
            model_writer=output,
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            max_sentence_length=MAX_SENTENCE_BYTES,
            normalization_rule_name='identity',
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=3,
            num_threads=8,
            train_extremely_large_corpus=config.sample_bytes > 1_000_000_000,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise ConfigError(_training_error(config, str(error))) from None
    return output.getvalue()


def sentences(text: str) -> list[str]:
    """Pieces of a document, newlines inside, that SentencePiece accepts as sentences to train on."""
    return _SENTENCES.findall(text.replace(SPACE, '').replace('\0', ''))


def _training_error(config: TokenizerConfig, error: str) -> str:
    label = f'tokenizer.vocab_size = {config.vocab_size}'
    if limit := re.search(r'value <= (\d+)', error):
        return f'{label}: the text is too small for it; choose at most {limit[1]} or prepare more text'
    if needed := re.search(r'required_chars.*?(\d+) vs (\d+)', error):
        return f'{label}: too small for the characters of the text; choose more than {needed[2]}'
    return f'{label}: SentencePiece could not train a model: {" ".join(error.split())}'
