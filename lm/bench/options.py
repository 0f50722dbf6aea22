"""The options of the parts of `lm bench`. A field with a help text is a flag of the command line.

None stands for the default of the machine. Importing this module imports nothing heavy.
"""

import dataclasses
from collections.abc import Sequence

from lm.options import option

SAVE = 'also write everything to this file, as JSON'
"""The help of the option that all parts have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of parts that read a configuration."""

    save: str | None = option(SAVE, 'FILE')
    gin_file: Sequence[str] = ()
    gin_param: Sequence[str] = ()
    allow_gin_imports: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedOptions(ModelOptions):
    """The options of parts that compare mechanisms."""

    mechanisms: Sequence[str] | None = option(
        'with commas: registered mechanisms (also scope/name), set by --gin_param, or gin files of them',
        'NAMES',
    )
    contexts: Sequence[int] | None = option('lengths of the sequences in tokens, with commas', 'LENGTHS')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedOptions(ComparedOptions):
    """The options of parts that measure times."""

    repeats: int = option('measure N times, and print the median; default: 5', 'N', 5)
    out: str | None = option('draw pictures (PNG and PDF) in this folder', 'DIR')


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions(TimedOptions):
    """The options of `bench_attention`."""

    tokens: int | None = option('tokens per call: whole sequences, as many as fit, and at least one', 'N')
    heads: int | None = option('query heads; default: of the model of --gin_file; without one 12, and 4 on a CPU', 'N')
    head_dim: int | None = option('channels per head; default: of the model of --gin_file; without one 64', 'N')
    dtype: str | None = option('default: bfloat16, and float32 on a CPU', choices=('float32', 'bfloat16'))
    passes: Sequence[str] = option(
        'what is measured: forward, forward+backward; default: both', 'NAMES', ('forward', 'forward+backward')
    )
    features_given: bool = option(
        'the operation of linear mechanisms alone, without what they make of its arguments, such as sketches',
        default=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(TimedOptions):
    """The options of `bench_step` and `forecast_steps`."""

    tokens_per_step: int | None = option('tokens per step over all devices, the same at all contexts', 'N')
    microbatch_tokens: int | None = option(
        'tokens of one device at a time; default: 16384, with --topology 32768, or a sequence', 'N'
    )
    topology: Sequence[str] | None = option(
        'without a TPU: the step compiled for one chip of v4, v5e, v5p, v6e, v7x (with commas), and the time of '
        'each of its parts by a model',
        'NAMES',
    )
    steps: int | None = option('steps timed together; default: 3, and 1 on a CPU', 'N')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of `bench_data`."""

    save: str | None = option(SAVE, 'FILE')
    text: str | None = option('UTF-8 text to tokenise; default: made from the documentation', 'FILE')
    megabytes: float | None = option('how much text is tokenised; default: the file, or 4', 'X')
    document_bytes: int = option('bytes per document; default: 8192', 'N', 8192)
    vocab_size: int | None = option('pieces of the tokenizer; default: 32000, or what the text gives', 'N')
    path: str | None = option('read batches from this store; prepare is then measured with --text alone', 'STORE')
    context_length: int = option('tokens per window; default: 2048', 'N', 2048)
    tokens: int = option('tokens of the store that is made; default: 67108864', 'N', 2**26)
    tokens_per_step: int = option('tokens per batch; default: 524288', 'N', 2**19)
    repeats: int = option('measure N times, and print the median; default: 5', 'N', 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipOptions(ModelOptions):
    """The options of `bench_chips`."""

    minutes: float = option('how many minutes it takes, half of them for the training step; default: 10', 'X', 10.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ModelOptions):
    """The options of `bench_checkpoint`."""

    folder: str | None = option('the folder that the state is saved in; default: the one of temporary files', 'DIR')
