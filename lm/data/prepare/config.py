"""The configuration of `lm prepare`."""

from lm.config.configurable import Configurable, configurable, field
from lm.data.prepare.cleaning import CLEANINGS
from lm.data.sources import Source
from lm.data.tokenizers import TokenizerChoice, TokenizerConfig
from lm.errors import ConfigError


@configurable('prepare', resume=True)
class PrepareConfig(Configurable):
    """How `lm prepare` makes the token store `data.path`."""

    source: Source | None = field(
        default=None, help='where the documents come from: @tfds(), @text_files(), @jsonl() …'
    )
    splits: tuple[str, ...] | None = field(default=None, help='the splits to prepare; None: all that the source has')
    cleaning: str = field(
        default='none', choices=tuple(CLEANINGS), help='what is done to the text before it is tokenised'
    )
    tokenizer: TokenizerChoice = field(default=TokenizerConfig(), help='@tokenizer(), or @amino_acids() for proteins')
    special_tokens: bool = field(
        default=False,
        help='names of special tokens in the text become these tokens: for text that was made for them, such as '
        'conversations, and not for text of others',
    )
    max_document_bytes: int = field(
        default=100_000_000, minimum=1, maximum=2**62, help='longer documents are bad records'
    )
    strict: bool = field(default=False, help='stop at the first bad record instead of listing it in bad_records.jsonl')
    processes: int | None = field(default=None, minimum=1, help='worker processes; None: one per CPU core')

    def require_source(self) -> Source:
        """Returns the source. Raises ConfigError where none is chosen."""
        if self.source is None:
            raise ConfigError('prepare.source = None: choose a source, for example with --gin_file data/text.gin')
        return self.source.settle(getattr(self.tokenizer, 'model_path', None))
