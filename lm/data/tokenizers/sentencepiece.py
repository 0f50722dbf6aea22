"""SentencePiece models. Those that are trained here are lossless: decode(encode(text)) == text for every text.

Identity normalisation, no dummy prefix, white space kept, and bytes for characters that have no piece. SentencePiece
itself writes U+2581 for a space, so that a U+2581 in the text would come back as a space; here it is encoded as its
three bytes instead.

Ids of a trained tokenizer: 0 <pad>, 1 </s> (end of document), 2 <unk> (never produced), 3 <s> (never produced),
4…259 the bytes.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece

from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.config import TokenizerConfig
from lm.errors import ConfigError, MismatchError

SPACE = '▁'
"""SentencePiece's own symbol for a space, U+2581."""
NAMED = {'<pad>': 0, '</s>': 1, '<unk>': 2, '<s>': 3}
"""Name → id of the tokens without text in a tokenizer from `train`."""

# Pieces never cross the place before a space that follows something else (a piece may begin with spaces, not contain
# them), so cutting there leaves the tokens as they are. BPE's queue suffers from long inputs: pieces of 256 characters
# are a fifth faster than pieces of 2000, and several times faster than books. Where 2000 characters hold no such place
# the cut is hard.
_PLACE = r'(?:(?<=[^ ])(?= )|\Z)'
_SENTENCES = re.compile(rf'(?s).{{1,2000}}{_PLACE}|.{{1,2000}}')
_CUT = re.compile(rf'(?s).{{1,256}}{_PLACE}|.{{1,2000}}{_PLACE}|.{{1,2000}}')
_CUT_AND_SPACE_SYMBOL = re.compile(rf'(?s)▁|[^▁]{{1,256}}{_PLACE}|[^▁]{{1,2000}}{_PLACE}|[^▁]{{1,2000}}')

MAX_SENTENCE_BYTES = 16_384


class SentencePiece(Tokenizer):
    """A SentencePiece model."""

    what = 'SentencePiece model'
    library = 'sentencepiece'

    def __init__(self, model: bytes, eod: int | str | None = None):
        """
        Args:
            model: the contents of a SentencePiece model file.
            eod: the end-of-document token, by id or name; None: the model's end-of-sentence token.

        Raises:
            MismatchError: `model` is not a SentencePiece model.
            ConfigError: the model has no end-of-sentence token, or none of that name.
        """
        try:
            self._processor = processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            processor.id_to_piece(list(range(processor.vocab_size())))  # each is UTF-8
        except (RuntimeError, UnicodeDecodeError):
            raise MismatchError('tokenizer.model: not a SentencePiece model; restore the file') from None
        self._cuts = False  # until it is known to be lossless
        space = [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE.encode()]
        self._space = np.array(space, np.int32)
        super().__init__(model, self._processor.vocab_size(), self._end(eod))
        control = {i for i in range(self.vocab_size) if processor.is_control(i) or processor.is_unknown(i)}
        self.special_ids = tuple(sorted(control | {self.eod_id}))
        self._cuts = self.lossless

    @classmethod
    def recognises(cls, model: bytes) -> bool:
        """Recognizes a protocol buffer that begins with its pieces (field 1), each a message."""
        return model[:1] == b'\n'

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        chunks, counts = [], []
        for text in texts:
            pieces = self._cut(text)
            chunks += pieces
            counts.append(len(pieces))
        # One thread: `lm prepare` has a process for each core.
        encoded = self._processor.encode_as_numpy(chunks, num_threads=1)
        if self._cuts and any(SPACE in text for text in texts):
            encoded = [self._space if chunk == SPACE else ids for chunk, ids in zip(chunks, encoded, strict=True)]
        ends = np.cumsum(counts)
        return [np.concatenate(encoded[end - n : end]) for end, n in zip(ends, counts, strict=True)]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._processor.decode(np.asarray(ids, np.int64).tolist())

    def piece(self, index: int) -> str:
        """Returns the piece with this id as SentencePiece writes it, such as '▁the' or '<0x0A>'."""
        return self._processor.id_to_piece(index)

    def _end(self, eod: int | str | None) -> int:
        if isinstance(eod, int):
            return eod
        if eod is not None and self._processor.id_to_piece(self._processor.piece_to_id(eod)) != eod:
            raise ConfigError(f'tokenizer.end_of_document = {eod!r}: the tokenizer has no such token')
        found = self._processor.eos_id() if eod is None else self._processor.piece_to_id(eod)
        if found < 0:
            raise ConfigError('tokenizer.model_path: the model has no end-of-sentence token; train it with eos_id ≥ 0')
        return found

    def _cut(self, text: str) -> list[str]:
        if not self._cuts or not text:
            return [text]
        return (_CUT_AND_SPACE_SYMBOL if SPACE in text else _CUT).findall(text)


def check_trained_end(name: str) -> None:
    """Raises ConfigError for an end of documents that a tokenizer from `train` cannot have."""
    if name not in NAMED and not re.fullmatch('<0x[0-9A-F]{2}>', name):
        raise ConfigError(
            f'tokenizer.end_of_document = {name!r}: a trained tokenizer has {", ".join(NAMED)}; delete this'
        )


def train(config: TokenizerConfig, texts: Iterable[str]) -> bytes:
    """Trains a model on `texts` (whole documents; long ones are cut, none is skipped) and returns its file's contents.

    The same texts give the same bytes: the number of threads, on which SentencePiece's results depend, is fixed.

    Args:
        texts: may be read twice: SentencePiece leaves out the rarest characters, and where the space is one of them, as
            in Chinese, it is requested by name. Otherwise its bytes would be the bytes of SPACE, and decode as SPACE.

    Raises:
        ConfigError: `vocab_size` does not fit to the texts.
        MismatchError: there is no text.
    """
    model = _trained(config, texts)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    has_space = processor.piece_to_id(SPACE) != processor.unk_id()
    return model if has_space else _trained(config, texts, required_chars=SPACE)


def _trained(config: TokenizerConfig, texts: Iterable[str], **options: Any) -> bytes:
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
            pad_id=NAMED['<pad>'],
            eos_id=NAMED['</s>'],
            unk_id=NAMED['<unk>'],
            bos_id=NAMED['<s>'],
            num_threads=8,
            train_extremely_large_corpus=config.sample_bytes > 1_000_000_000,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        if 'sentences_.empty()' in str(error):
            raise MismatchError(
                'no usable text to train the tokenizer on; look at the source, --strict stops at the first bad record'
            ) from None
        raise ConfigError(_training_error(config, str(error))) from None
    return output.getvalue()


def sentences(text: str) -> list[str]:
    """Cuts a document into pieces that SentencePiece accepts as sentences for its training; line breaks stay inside."""
    return _SENTENCES.findall(text.replace(SPACE, '').replace('\0', ''))


def _training_error(config: TokenizerConfig, error: str) -> str:
    label = f'tokenizer.vocab_size = {config.vocab_size}'
    if limit := re.search(r'value <= (\d+)', error):
        return f'{label}: the text is too small for it; choose at most {limit[1]} or prepare more text'
    if needed := re.search(r'required_chars.*?(\d+) vs (\d+)', error):
        return f'{label}: too small for the characters of the text; choose more than {needed[2]}'
    return f'{label}: SentencePiece could not train a model: {" ".join(error.split())}'
