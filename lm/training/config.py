"""The training section of a configuration."""

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.model.adapters import Lora
from lm.trackers import Tracker
from lm.training.objectives import Objective
from lm.training.objectives.next_token import NextToken


def _check_traced(steps: tuple[int, int]) -> str | None:
    return (
        None if 1 <= steps[0] <= steps[1] else 'must be the first and the last step, such as (10, 12), counted from 1'
    )


@configurable('train')
class TrainConfig(Configurable):
    """The length of a training, the size of its steps, and its records."""

    steps: int = field(default=125_000, minimum=1, inherit=True, help='optimizer steps of the whole run')
    tokens_per_step: int = field(
        default=2**20, minimum=1, inherit=True, help='tokens predicted per optimizer step, over all devices'
    )
    context_length: int = field(default=1024, minimum=1, inherit=True, help='tokens that each window predicts')
    microbatches: int = field(
        default=1,
        minimum=1,
        resume=True,
        inherit=True,
        help='gradient accumulation: parts that a batch is processed in',
    )
    objective: Objective = field(
        default=NextToken(),
        inherit=False,
        help='what is asked for: @next_token(), or @masked() where model.causal = False',
    )
    seed: int = field(
        default=0,
        minimum=0,
        maximum=2**63 - 1,
        inherit=True,
        help='of the initial parameters and the order of the data',
    )
    log_every: int = field(default=10, minimum=1, resume=True, inherit=True, help='steps per line of metrics.jsonl')
    eval_every: int | None = field(default=1000, minimum=1, resume=True, inherit=True, help='None: only at the end')
    eval_tokens: int | None = field(
        default=None,
        minimum=1,
        maximum=2**62,
        resume=True,
        inherit=True,
        help='only so many of each text are scored while training; None: all of them',
    )
    max_nonfinite_steps: int = field(
        default=10, minimum=1, resume=True, inherit=True, help='stop (exit code 43) after so many in a row'
    )
    hang_minutes: float | None = field(
        default=10.0,
        minimum=0.01,
        resume=True,
        inherit=True,
        help='a step that takes so long, and 20 median steps, ends with 42; evaluations, saves and replays '
        'have 6 times as long; None: never',
    )
    replay_every: int | None = field(
        default=None,
        minimum=1,
        resume=True,
        inherit=True,
        help='before each so-manieth step, all groups of devices compute the gradients of the same windows, which must '
        'agree to the bit; a difference ends with 45; None: never',
    )
    skip_batches: tuple[tuple[int, int], ...] = field(
        default=(), resume=True, inherit=False, help='half-open ranges of batches to leave out'
    )
    init_from: str | None = field(default=None, inherit=False, help='run directory whose weights this run starts from')
    adapters: Lora | None = field(
        default=None,
        inherit=False,
        omit_default=True,
        help='small matrices that learn in place of the weights, which stay: @lora(); None: the weights learn',
    )
    profile: tuple[int, int] | None = field(
        default=None,
        resume=True,
        check=_check_traced,
        inherit=False,
        help='first and last step of a profiler trace, in RUN_DIR/profile',
    )
    tensorboard: bool = field(
        default=True, resume=True, inherit=True, help="write summaries when the 'tensorboard' extra is installed"
    )
    trackers: tuple[Tracker, ...] = field(
        default=(), resume=True, inherit=False, help='what follows the run from outside: [@webhook(), …]'
    )

    def __post_init__(self):
        if self.tokens_per_step % self.context_length:
            raise ConfigError(
                f'train.tokens_per_step = {self.tokens_per_step}: '
                f'must be a multiple of train.context_length = {self.context_length}'
            )
        if self.batch_size % self.microbatches:
            raise ConfigError(
                f'train.microbatches = {self.microbatches}: must divide the {self.batch_size} windows of a step'
            )

    @property
    def batch_size(self) -> int:
        """The number of windows in a global batch."""
        return self.tokens_per_step // self.context_length

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """The shape of the tokens of a step: microbatches, windows of a microbatch, context_length + 1."""
        return self.microbatches, self.batch_size // self.microbatches, self.context_length + 1

    def check_parts(self, parts: int) -> None:
        """Raises ConfigError unless this number of devices (`mesh.sequence`) can share a window equally."""
        if self.context_length % parts:
            raise ConfigError(f'mesh.sequence = {parts}: must divide train.context_length = {self.context_length}')

    def check_divides(self, devices: int) -> None:
        """Raises ConfigError unless the windows of a microbatch can be split over the devices."""
        rows = self.batch_size // self.microbatches
        if rows % devices:
            raise ConfigError(
                f'train.tokens_per_step = {self.tokens_per_step}: a microbatch has {rows} windows of '
                f'{self.context_length} tokens, which {devices} devices cannot share equally; '
                'change tokens_per_step, context_length or microbatches'
            )
