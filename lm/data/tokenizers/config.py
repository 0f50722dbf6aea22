"""The configurations of tokenizers."""

from lm.config.configurable import Configurable, configurable, field
from lm.data.tokenizers.patterns import PATTERNS


class TokenizerChoice(Configurable):
    """Base of the values of `prepare.tokenizer` (frozen dataclasses made by `@configurable`)."""

    end_of_document: str | None = None
    """The token behind each document; None: the choice of the tokenizer."""

    def settings(self) -> dict[str, object]:
        """Returns all that the tokenizer depends on, for dataset.json; without fields, its name."""
        return {'kind': self.gin_name}

    def contents(self) -> bytes:
        """Returns the contents of its file, which this choice alone decides."""
        raise NotImplementedError


@configurable('tokenizer', resume=True)
class TokenizerConfig(TokenizerChoice):
    """The tokenizer that `lm prepare` trains on a sample of the training split, or an existing one."""

    vocab_size: int = field(
        default=32_000, minimum=261, maximum=2**31 - 1, help='pieces, with 256 bytes and 4 special ones'
    )
    model_type: str = field(default='bpe', choices=('bpe', 'unigram'), help='of SentencePiece')
    sample_bytes: int = field(default=200_000_000, minimum=1, maximum=2**62, help='train on at most so many bytes')
    model_path: str | None = field(
        default=None,
        help='use this SentencePiece model, tokenizer.json or rank file, or the one of an imported run; vocab_size is '
        'then taken from it',
    )
    end_of_document: str | None = field(
        default=None,
        help='the token behind each document, of ranks also its number as text; None: the choice of the tokenizer',
    )
    pattern: str = field(
        default='gpt2', choices=tuple(PATTERNS), help='how text is split where model_path is a file of ranks'
    )

    def settings(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ('vocab_size', 'model_type', 'sample_bytes', 'model_path')}
