"""A lossless SentencePiece tokenizer."""

from lm.configurable import configurable, field


@configurable('tokenizer')
class TokenizerConfig:
    """The tokenizer that `lm prepare` trains on a sample of the training split, or an existing one."""

    vocab_size: int = field(32_000, minimum=260, maximum=2**31 - 1, help='pieces, with 256 bytes and 4 special ones')
    model_type: str = field('bpe', choices=('bpe', 'unigram'), help='of SentencePiece')
    sample_bytes: int = field(200_000_000, minimum=1, help='train on at most so many bytes')
    model_path: str | None = field(None, help='use this SentencePiece model; vocab_size is then taken from it')
