"""Reads run directories for `lm inspect`, `lm sweep` and `lm report`.

Reading changes nothing and needs no device. A run that is being written is read as it is at that moment.
"""

import ast
import contextlib
import dataclasses
import functools
import glob
import json
import math
import os
import re
import statistics
from collections.abc import Iterable
from typing import Any

from etils import epath

from lm.attention import mechanisms
from lm.checkpoint.snapshot import Damaged, Snapshot, find_committed_steps
from lm.config.names import is_omitted
from lm.config.text import format_value
from lm.errors import ConfigError, LmError
from lm.files import JsonObject, is_remote, open_path, parse_json, read_bytes
from lm.runs.config_diff import parse_bindings
from lm.runs.goodput import parse_ledger
from lm.runs.info import read_info
from lm.runs.metrics_file import find_change, read_lines, read_records, to_plain
from lm.runs.paths import explain_absence, find_import, read_text
from lm.runs.run_dir import RunDir
from lm.text import make_all_visible, make_visible

OWN_BINDINGS = {'model.attention', 'train.steps', 'train.context_length'}
"""Bindings that every config.gin of `lm train` has."""
NUMBERS = ('train.steps', 'train.context_length', 'train.tokens_per_step', 'train.seed', 'model.n_layers')
"""Bindings whose values are numbers in every config.gin of `lm train`."""
NEEDED = {'train': ('loss', 'grad_norm', 'tokens', 'seconds'), 'eval': ('loss',)}
"""Kind of a record → its numbers that readers count on, besides the step."""
OPTIONAL = (
    *('tokens_per_second', 'mfu', 'skipped_steps', 'kept_numbers', 'balance_loss', 'expert_load_max'),
    *('expert_load_layer', 'idle_experts'),
    *('perplexity', 'word_perplexity', 'bits_per_byte', 'accuracy'),
)
"""More numbers of records, which not every record has."""
NOT_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run directory.

    Attributes:
        directory: where it lies.
        config: binding → gin text of its value, from config.gin.
        info: run.json as `lm.runs.info.read_info` gives it.
        train, evals: the records of metrics.jsonl, by kind, in the order of the steps.
        evaluations: the files that `lm evaluate` wrote.
    """

    directory: RunDir
    config: dict[str, str]
    info: JsonObject
    train: list[JsonObject]
    evals: list[JsonObject]
    evaluations: list[JsonObject]

    @classmethod
    def read(cls, path: epath.PathLike) -> 'Run':
        """Raises ConfigError when `path` is no run directory."""
        directory = RunDir(path, found=True)
        if not is_run(directory.path) or find_import(directory.path):
            raise ConfigError(f'{path}: {explain_absence(directory.path)}')
        bindings = make_all_visible(parse_bindings(read_text(directory.config)))
        config = {name: text for name, text in bindings.items() if not is_omitted(name, text)}
        numbers = [config[name] for name in NUMBERS if name in config]
        if not config.keys() >= OWN_BINDINGS or not all(re.fullmatch(r'\d{1,18}', number) for number in numbers):
            raise ConfigError(f'{path}: its config.gin is not one of lm train; name a run directory')
        records = read_jsonl(directory.path / 'metrics.jsonl')
        found = sorted(directory.evaluations.glob('*.json')) if directory.evaluations.exists() else []
        return cls(
            directory=directory,
            config=config,
            info=read_info(directory.info),
            train=[r for r in records if r['kind'] == 'train'],
            evals=[r for r in records if r['kind'] == 'eval'],
            evaluations=[r for r in map(read_json, found) if isinstance(r, dict) and _is_whole(r | {'kind': 'eval'})],
        )

    @functools.cached_property
    def changed_metrics(self) -> str | None:
        """The lines of metrics.jsonl that are not what the checkpoints sealed, in words; None: all are as they were."""
        seals: dict[int, JsonObject] = {}
        for step in [] if self.imported else find_committed_steps(self.directory.checkpoints):
            with contextlib.suppress(Damaged, LmError):  # lm inspect tells of those
                seals[step] = Snapshot(self.directory.checkpoints, step).record()['metadata']
        return find_change(read_lines(self.directory.metrics_file), seals)

    @property
    def name(self) -> str:
        """The name of its folder, with control characters as their escapes."""
        return make_visible(self.directory.path.name)

    def value(self, binding: str, default: Any = None) -> Any:
        """Returns the value of a binding of config.gin as Python; gin's references stay text."""
        text = self.config.get(binding)
        return default if text is None else _parse_value(text)

    def refer(self, binding: str) -> str:
        """Returns the scope/name that a binding refers to, without gin's `@` and brackets; '' without the binding."""
        return self.config.get(binding, '').strip('@()')

    @property
    def objective(self) -> str:
        """The objective of the training, as scope/name."""
        return self.refer('train.objective')

    @property
    def total_steps(self) -> int:
        return self.value('train.steps', 0)

    @property
    def step(self) -> int:
        """The newest step that was logged or saved: Ctrl-C also saves between two lines of the log."""
        saved = self.info.get('saved_step') or 0
        is_there = saved and Snapshot(self.directory.checkpoints, saved).is_committed()
        return max((saved if is_there else 0, *(r['step'] for r in [*self.train, *self.evals])))

    @property
    def branched_at(self) -> int:
        """The last step whose records come from the run that it branched from; 0: it is no branch."""
        branch = self.info.get('branch')
        return branch['step'] if isinstance(branch, dict) and isinstance(branch.get('step'), int) else 0

    @property
    def imported(self) -> str | None:
        """The checkpoint that `lm import` made it of; None: it is trained."""
        return self.info.get('imported')

    def is_finished(self) -> bool:
        """Returns whether the last step was evaluated and its checkpoint is complete on disk.

        A run that is stopped during its last evaluation has the checkpoint alone; `lm train` then makes up for it.
        """
        evaluated = bool(self.evals) and self.evals[-1]['step'] == self.total_steps
        return evaluated and Snapshot(self.directory.checkpoints, self.total_steps).is_committed()

    @functools.cached_property
    def speeds(self) -> list[float]:
        """Tokens a second of the logged intervals, but the first, which contains warming up, if there are others."""
        start = self.branched_at
        own = [r for r in self.train if r['step'] > start]
        rates = [r['tokens_per_second'] for r in own if r.get('tokens_per_second')]
        return rates[1:] or rates

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the run."""
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """The quartiles of the tokens per second, over at least four intervals."""
        if len(self.speeds) < 4:
            return None
        low, _, high = statistics.quantiles(self.speeds, n=4, method='inclusive')
        return low, high

    @property
    def goodput(self) -> JsonObject | None:
        """The ledger of its wall clock (`lm.runs.goodput`)."""
        return parse_ledger(self.info.get('goodput'))

    @property
    def last_evaluation(self) -> JsonObject | None:
        """The periodic evaluation of the newest step."""
        return self.evals[-1] if self.evals else None

    def mechanisms(self) -> list[str]:
        """Returns the attention of the layers, as scope/name, in the order of the pattern."""
        text = self.config.get('model.attention', '')
        return [part.strip(' @()[]') for part in text.split(',') if part.strip(' ,[]')]

    @functools.cached_property
    def attention(self) -> str:
        """The attention of the model in short: 'polynomial (degree 8)'; what is the mechanism's default is left out."""
        return ' + '.join(self._describe(name) for name in self.mechanisms()) or '?'

    def _describe(self, reference: str) -> str:
        name = reference.rpartition('/')[2]
        changed = []
        for field, default in _defaults(name).items():
            text = self.config.get(f'{reference}.{field}')
            if text is not None and text != default:
                changed.append(field if text == 'True' else f'{field} {text.strip(chr(39))}')
        return f'{name} ({", ".join(changed)})' if changed else name


def is_run(path: epath.Path) -> bool:
    """Returns whether `path` is a run directory."""
    return (path / 'config.gin').exists()


def find_runs(patterns: Iterable[str]) -> list[Run]:
    """The runs that the patterns name, each once, in their order: run directories, folders of them such as the root
    of a sweep, and globs of either. A run that a link leads to is named by the first of its paths.

    Raises ConfigError for a pattern without a run."""
    found: dict[str, Run] = {}
    for pattern in patterns:
        paths = _expand(pattern)
        named = paths if len(paths) == 1 else ()
        runs = [run for p in find_run_paths(pattern) if (run := _read_run(p, p in named))]
        if not runs:
            raise ConfigError(f'{pattern}: no run is there; name run directories, sweeps or globs of them')
        for run in runs:
            found.setdefault(_find_place(run.directory.path), run)
    return list(found.values())


def _find_place(path: epath.Path) -> str:
    """Returns the address of a folder, or its local path without links and '..'."""
    return str(path) if is_remote(path) else os.path.realpath(path)


def find_run_paths(pattern: str) -> list[epath.Path]:
    """Returns the run directories that a pattern of `find_runs` names, without reading them."""
    paths = _expand(pattern)
    inside = [p for path in paths if not is_run(path) and path.is_dir() for p in sorted(path.iterdir())]
    return [path for path in [*paths, *inside] if is_run(path)]


def _read_run(path: epath.Path, named: bool) -> Run | None:
    """Returns the run, or None for another program's folder that was not named itself."""
    try:
        return Run.read(path)
    except ConfigError:
        if named:
            raise
        return None


def _expand(pattern: str) -> list[epath.Path]:
    if not any(character in pattern for character in '*?['):
        return [epath.Path(open_path(pattern))]
    if is_remote(pattern):
        open_path(pattern)  # which refuses what cannot be read
        scheme, _, rest = pattern.partition('://')
        bucket, _, inner = rest.partition('/')
        return sorted(epath.Path(f'{scheme}://{bucket}').glob(inner))
    return [epath.Path(path) for path in sorted(glob.glob(open_path(pattern).as_posix()))]


def read_json(path: epath.Path) -> Any:
    """Reads a JSON file. Returns None where it is missing or unreadable."""
    try:
        return _restore_numbers(parse_json(read_bytes(path)))
    except (OSError, ValueError):
        return None


def read_jsonl(path: epath.Path) -> list[JsonObject]:
    """Reads the whole records of metrics.jsonl. A line that is being written, or was cut off, is left out."""
    records = (_restore_numbers(record) for _, record in read_records(path) if record)
    return [record for record in records if _is_whole(record)]


def _is_whole(record: JsonObject) -> bool:
    """Returns whether a record has the numbers that its readers need."""
    kind = record.get('kind')
    needed = NEEDED.get(kind, ()) if isinstance(kind, str) else ()
    numbers = (*needed, *(name for name in OPTIONAL if record.get(name) is not None))
    return type(record.get('step')) is int and bool(needed) and all(_is_number(record.get(name)) for name in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_json(value: object) -> str:
    """Formats JSON text, in which numbers that are not finite are written as in metrics.jsonl."""
    return json.dumps(to_plain(value), indent=2)


def _restore_numbers(value: object) -> Any:
    """Restores the numbers whose names `lm.runs.metrics_file.to_plain` writes, and makes control characters visible."""
    if isinstance(value, dict):
        return {_make_key(k): v if isinstance(v, int | float) else _restore_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore_numbers(v) for v in value]
    if not isinstance(value, str):
        return value
    return NOT_FINITE[value] if value in NOT_FINITE else make_visible(value)


@functools.lru_cache(10_000)
def _make_key(name: str) -> str:
    """Returns the one copy of a key: a million records have the same ones."""
    return make_visible(name)


@functools.lru_cache(10_000)
def _parse_value(text: str) -> Any:
    """Returns a gin text as Python: the one copy, since runs of a sweep share most values and readers ask often."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@functools.cache
def _defaults(name: str) -> dict[str, str]:
    """Returns field → gin text of its default, of a registered mechanism."""
    if (mechanism := mechanisms().get(name)) is None:
        return {}
    defaults = {}
    for f in dataclasses.fields(mechanism):
        try:
            defaults[f.name] = format_value(f.default)
        except ConfigError:  # no default, or a configurable
            defaults[f.name] = ''
    return defaults
