"""When checkpoints are written, and how many of them stay."""

from lm.config.configurable import Configurable, configurable, field


@configurable('checkpoint', resume=True)
class CheckpointConfig(Configurable):
    """When checkpoints are written and which of them stay."""

    save_every_steps: int | None = field(
        default=1000, minimum=1, help='None: only by time, on preemption and at the end'
    )
    save_every_minutes: float | None = field(
        default=15.0, above=0, help='after so long without a checkpoint, one is written'
    )
    keep_last: int = field(
        default=2, minimum=1, help='newest checkpoints that stay; one alone leaves nothing to fall back to'
    )
    keep_every: int | None = field(default=None, minimum=1, help='checkpoints at multiples of this stay for ever')
    keep_best: int = field(
        default=0,
        minimum=0,
        help='checkpoints with the lowest evaluation loss that stay; where evaluations change, of each',
    )
    memory_every: int | None = field(
        default=None,
        minimum=1,
        help='after each so-manieth step, each host keeps the state in its memory (/dev/shm) too: a run goes on from '
        'there after the death of a process; None: never',
    )
    compare_copies: bool = field(
        default=True, help='compare the copies that devices hold before each save; a difference ends with 45'
    )
    on_failed_save: str = field(default='stop', choices=('stop', 'continue'), help="'continue': warn and train on")
