"""The evaluation section of a configuration."""

from lm.config.configurable import Configurable, configurable, field


def _check_window(window: str) -> str | None:
    if window == 'disjoint':
        return None
    kind, _, stride = window.partition(':')
    if kind == 'sliding' and stride.isdecimal() and int(stride) > 0:
        return None
    return "must be 'disjoint' or 'sliding:STRIDE', such as 'sliding:512'"


def _check_sets(sets: tuple[tuple[str, str], ...]) -> str | None:
    names = [name for name, _ in sets]
    if twice := [name for i, name in enumerate(names) if name in names[:i] or not name or '/' in name]:
        return f'must name each set once, by a name without a slash, not {twice[0]!r}'
    return None


@configurable('evaluate', resume=True)
class EvaluateConfig(Configurable):
    """The tokens that are scored, and their context."""

    split: str | None = field(default=None, help='None: data.eval_split')
    sets: tuple[tuple[str, str], ...] = field(
        default=(),
        check=_check_sets,
        help="other token stores to score: {'books': 'data/books', 'test': 'data/web@test'}",
    )
    context_length: int | None = field(default=None, minimum=1, help='None: train.context_length')
    window: str = field(default='disjoint', check=_check_window, help="'disjoint' or 'sliding:STRIDE'")
    mask_documents: bool | None = field(default=None, help='no token sees another document; None: data.mask_documents')
    begin_windows: bool | None = field(
        default=None,
        help='the token before each text stands before every window too (data.begin_id); None: data.begin_windows',
    )
    accuracy: bool = field(
        default=False,
        help='how often no token is more probable, too, and what frequencies alone give; @masked(): always',
    )
    batch_size: int = field(default=8, minimum=1, help='windows at a time, rounded up to a multiple of the devices')
    chunk: int | None = field(
        default=None,
        minimum=1,
        help='tokens of a window computed at a time, states or keys carried on; None: the whole window',
    )
