"""The directory of a run: what it was told, what it ran on, what it measured.

config.gin      the resolved configuration, complete and re-runnable
run.json        parameter count, fingerprints, and of each start versions, git commit, command, devices (`lm.runs.info`)
metrics.jsonl   one JSON object a logged step (`lm.runs.metrics_file`)
lock.json       while a training is at work: who it is (`lm.runs.lock`)
checkpoints/  evaluations/  tensorboard/
"""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from lm.checkpoint.snapshot import Damaged, Snapshot, committed_steps
from lm.config.configurable import REGISTRY
from lm.config.names import may_change, up_to_date
from lm.config.text import dump
from lm.errors import ConfigError, LmError, MismatchError, writing
from lm.files import is_remote, open_path, write_atomically
from lm.runs.goodput import checked
from lm.runs.info import check_not_imported, next_info, read_raw, to_text
from lm.runs.lock import RunLock
from lm.runs.metrics_file import MetricsFile, read_lines
from lm.runs.process_zero import check_same, on_leader
from lm.trackers.base import RunFacts, Tracker, Trackers
from lm.trackers.tensorboard import CluSummaries

TITLE = '# A complete configuration'
"""How a config.gin begins that `lm train` has written."""
SWEEP = 'sweep.json'
"""What the folder of a sweep holds (`lm.runs.sweep_file`), which is no run itself."""

log = logging.getLogger(__name__)


class RunDir:
    """The files of the run in `path`: a local folder or an address such as gs://bucket/run. Making one writes nothing.

    Raises ConfigError for a path that `check_path` refuses.
    """

    def __init__(self, path: epath.PathLike):
        self.path = epath.Path(check_path(path))
        if not is_remote(self.path):
            self.path = self.path.absolute()
        self.config = self.path / 'config.gin'
        self.info = self.path / 'run.json'
        self.checkpoints = self.path / 'checkpoints'
        self.evaluations = self.path / 'evaluations'

    def create_or_resume(
        self,
        experiment: Any,
        info: Mapping[str, Any],
        first_step: int = 0,
        rewound: bool = False,
    ) -> bool:
        """Writes config.gin and run.json; process 0 works and all processes share its outcome.

        Args:
            experiment: an `lm.experiment.Experiment`, or its gin text.
            info: what run.json holds besides the machine (parameters, fingerprints, …).
            first_step: step of the checkpoint that the run goes on from.
            rewound: it goes back to `first_step`, which run.json then says.

        Returns:
            True when the directory held a run already.

        Raises:
            MismatchError, ConfigError: as `check_unchanged`; ConfigError too where processes have different `info`.
            LmError: the directory cannot be written to.
        """
        text = experiment if isinstance(experiment, str) else dump(experiment)
        check_same(info)
        return on_leader(lambda: self._create_or_resume(text, info, first_step, rewound))

    def check_unchanged(self, experiment: Any, rewound: bool = False) -> None:
        """Refuses to continue as another run, or from less than there was, without writing anything.

        Compared with config.gin and, since that may have been edited or lost, with the newest checkpoint's record.

        Raises:
            MismatchError: a binding differs that may not (`lm.config.names.may_change`; where the run is rewound, those
                of the optimizer, its rules and schedules may too), the run was saved but its checkpoints are gone, or
                a file of the run cannot be read.
            ConfigError: `path` is a file, holds files that are not of a run, or imported weights; or processes
                of the job have been given different configurations.
        """
        text = experiment if isinstance(experiment, str) else dump(experiment)
        # Where the data lie may be a host's own affair: their fingerprints are compared.
        check_same({name: value for name, value in bindings(text).items() if name != 'data.path'})
        on_leader(lambda: self._check(text, rewound).resumed)

    def is_rewound(self, step: int, experiment: Any) -> bool:
        """Whether the newest rewind was to `step` with this very configuration: the same command, repeated after a
        preemption, then continues instead of throwing away what has been done since."""

        def compare() -> bool:
            rewinds = read_raw(self.info).get('rewinds') or [{}]
            text = experiment if isinstance(experiment, str) else dump(experiment)
            return rewinds[-1].get('to') == step and not config_differences(read_text(self.config), text)

        return on_leader(compare)

    def has_checkpoint(self) -> bool:
        """Whether there is a step to go on from; it may still turn out to be damaged."""
        return bool(committed_steps(self.checkpoints))

    def record_saved(self, step: int) -> None:
        """Notes in run.json that the checkpoint of `step` is complete. Only warns where that fails."""
        self._note({'saved_step': step})

    def read_goodput(self) -> dict[str, Any] | None:
        """The ledger of the starts before (`lm.runs.goodput`); None for a new run, or one that has none."""
        return checked(read_raw(self.info).get('goodput'))

    def write_goodput(self, record: Mapping[str, Any]) -> None:
        """Puts the ledger into run.json. Only warns where that fails."""
        self._note({'goodput': record})

    def lock(self) -> RunLock:
        """The context in which this job alone writes the directory; enter it before the first write."""
        return RunLock(self.path)

    def metrics(self, resume_at: int = 0, trackers: Trackers | None = None) -> MetricsFile:
        """Opens metrics.jsonl, without the lines of steps after `resume_at`; `trackers` get each record."""
        return MetricsFile(self.path / 'metrics.jsonl', resume_at, trackers)

    def track(
        self, trackers: Sequence[Tracker], text: str, enabled: bool, tensorboard: bool = False, start: int = 0
    ) -> Trackers:
        """The trackers of this run, whose configuration is `text` and which goes on from `start`; see
        `lm.trackers.base.Trackers`. With `tensorboard` summaries are written too, if the packages for it are installed
        and none of `trackers` does that."""
        if tensorboard and not any(tracker.summaries for tracker in trackers):
            trackers = [*trackers, CluSummaries()]
        return Trackers(trackers, RunFacts(self.path.name, self.path, bindings(text), start), enabled)

    def _note(self, what: Mapping[str, Any]) -> None:
        if jax.process_index() == 0:
            try:
                if info := read_raw(self.info):
                    write_atomically(self.info, to_text({**info, **what}))
            except (OSError, LmError) as error:
                log.warning('%s could not be written: %s', self.info, error)

    def _create_or_resume(self, text: str, info: Mapping[str, Any], first_step: int, rewound: bool) -> bool:
        found = self._check(text, rewound)
        for note in found.notes:
            log.warning('%s', note)
        if found.resumed and not first_step and found.logged:
            log.warning('%s starts at step 0 again: no checkpoint was written yet', self.path)
        rewind = None
        if rewound:
            rewind = found.logged, config_differences(read_text(self.config), text)
        new = next_info(found.info, first_step, info, rewind)
        if changes := new['starts'][-1].get('version_changes'):
            log.warning(
                '%s: %s; programs are compiled anew and losses may differ in their last digits; '
                'install the old versions to repeat the run exactly',
                *(self.path, ', '.join(f'{name} was {old}, now {now}' for name, (old, now) in changes.items())),
            )
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not is_remote(self.path):  # there before any step is logged, so that its absence says something
                self.checkpoints.mkdir(exist_ok=True)
            if rewound:
                self._abandon_evaluations(first_step)
            # What a rewind changes is told by comparing with config.gin: written first, a kill would lose it.
            write_atomically(self.info, to_text(new))
            write_atomically(self.config, text)
        return found.resumed

    def keep_evaluation(self, path: epath.Path, text: str) -> None:
        """Writes a file below `evaluations`; raises LmError where it cannot be, as in the run of somebody else."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)

    def _abandon_evaluations(self, step: int) -> None:
        """Moves aside what later weights were worth, which are thrown away; a bucket cannot rename: it is deleted."""
        folders = [f for f in (self.evaluations, self.evaluations / 'harness') if f.exists()]
        for path in [path for folder in folders for path in folder.glob('step-*.json')]:
            number = path.name.removeprefix('step-').partition('_')[0]
            if number.isdigit() and int(number) > step:
                if is_remote(path):
                    path.unlink()
                else:
                    path.rename(f'{path}.abandoned')

    def _check(self, text: str, rewound: bool) -> '_Found':
        """What is there; raises if `text` would make it another run."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f'--run_dir {self.path}: is a file; name a directory')
        self._check_kinds()
        steps = committed_steps(self.checkpoints)
        info = read_raw(self.info)
        check_not_imported(info, '--run_dir', self.path)
        config = read_text(self.config)
        held = [p for p in (self.config, self.info, self.path / 'metrics.jsonl') if p.exists()]
        if held and not info and not steps and not config.startswith(TITLE):
            raise ConfigError(
                f'--run_dir {self.path}: its {held[0].name} is not of a run of lm train; name another directory'
            )
        if not held and (self.path / SWEEP).exists():
            raise ConfigError(f'--run_dir {self.path}: holds a sweep, which a run would hide; name another directory')
        notes = []
        if held and not info:
            notes.append(f'{self.info} could not be read and is written anew')
        if held and not bindings(config):
            notes.append(f'{self.config} could not be read and is written anew')
        logged = max((record['step'] for _, record in read_lines(self.path / 'metrics.jsonl') if record), default=0)
        if held:
            self._check_progress(info, steps, logged, config, notes, rewound)
        # A config.gin without bindings says nothing: then the checkpoint alone tells.
        known = [(self.config, before)] if (before := bindings(config)) else []
        known += self._configuration_of_checkpoint(steps, info)
        for source, before in known:
            self._compare(source, before, bindings(text), notes, rewound)
        return _Found(bool(held), info, logged, list(dict.fromkeys(notes)))

    def _check_kinds(self) -> None:
        for path, wanted in (
            (self.config, 'file'),
            (self.info, 'file'),
            (self.path / 'metrics.jsonl', 'file'),
            (self.checkpoints, 'folder'),
        ):
            try:
                wrong = path.exists() and path.is_dir() != (wanted == 'folder')
                if not wrong and wanted == 'file' and path.exists() and not is_remote(path):
                    path.open('rb').close()
            except OSError as error:
                raise MismatchError(f'{path} cannot be read ({error.strerror}); allow it, then run it again') from None
            if wrong:
                raise MismatchError(f'{path}: must be a {wanted}; move it away, then run it again')

    def _check_progress(
        self, info: Mapping[str, Any], steps: list[int], logged: int, config: str, notes: list[str], rewound: bool
    ) -> None:
        """Raises MismatchError where the run is known to have been saved and no checkpoint is there.

        A process that is killed between a commit and its note in run.json leaves no `saved_step`; then the folder,
        which is made before the first step, tells.
        """
        saved = info.get('saved_step')
        if 'saved_step' not in info:
            # A run of an older version: each save has waited for the one before.
            every = bindings(config).get('checkpoint.save_every_steps', '')
            saved = logged // int(every) * int(every) - int(every) if every.isdigit() and int(every) else None
        elif logged and not saved and not is_remote(self.path) and not self.checkpoints.exists():
            raise MismatchError(
                f'--run_dir {self.path}: the run had reached step {logged}, but {self.checkpoints} is gone; '
                'mount or restore that folder, or start again in a new --run_dir'
            )
        if not saved or saved <= 0 or (steps and steps[-1] >= saved):
            return
        if not steps:
            raise MismatchError(
                f'--run_dir {self.path}: the run was saved at step {saved}, but {self.checkpoints} holds no '
                'checkpoint; mount or restore that folder, or start again in a new --run_dir'
            )
        if not rewound:
            notes.append(f'{self.checkpoints}: step {saved} was saved but is gone; going on from step {steps[-1]}')

    def _configuration_of_checkpoint(
        self, steps: list[int], info: Mapping[str, Any]
    ) -> list[tuple[epath.Path, dict[str, str]]]:
        """(path, bindings) of the newest checkpoint whose record can be read, with what rewinds to it have changed;
        none of an older version, which kept no configuration."""
        for step in reversed(steps):
            try:
                text = Snapshot(self.checkpoints, step).record()['metadata'].get('config')
            except Damaged:
                continue
            if not text:
                break
            before = bindings(text)
            for rewind in info.get('rewinds', []):
                if rewind['to'] >= step:
                    before |= {name: new for name, _, new in rewind['changed'] if new is not None}
            return [(self.checkpoints / str(step), before)]
        return []

    def _compare(
        self,
        source: epath.Path,
        old: Mapping[str, str],
        new: Mapping[str, str],
        notes: list[str],
        rewound: bool,
    ) -> None:
        refused = []
        for name, before, after in _differences(old, new):
            if may_change(name) or (rewound and _is_of_optimizer(name)) or _is_longer(name, old, new):
                continue
            if before is None or after is None:
                # a field that another version of the program added or removed, or that of a mechanism not used before
                notes.append(f'{self.path}: {name} was {before or "absent"}, now {after or "absent"}')
            else:
                refused.append(f'{name} was {before}, now {after}')
        if refused:
            more = f' (and {len(refused) - 1} more)' if len(refused) > 1 else ''
            where = '' if source == self.config else f' (by the record of {source.name} in checkpoints)'
            raise MismatchError(
                f'--run_dir {self.path} holds a run of another configuration{where}: {refused[0]}{more}; '
                'give the old value, or a new --run_dir'
            )


@dataclasses.dataclass(frozen=True)
class _Found:
    """What lies in a run directory: whether there is a run, run.json, the newest logged step, what people should
    know."""

    resumed: bool
    info: dict[str, Any]
    logged: int
    notes: list[str]


def config_differences(old: str, new: str) -> list[tuple[str, str | None, str | None]]:
    """(binding, old value, new value) for each that differs between two dumped configurations, those of another
    version in the names of today; None: absent."""
    return _differences(bindings(old), bindings(new))


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    names = sorted(before.keys() | after.keys(), key=lambda name: (name not in before, name))
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]


def check_name(name: str) -> str:
    """The name of a run as part of a path. Raises ConfigError unless it is plain and stays where it is put."""
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}', name) or '..' in name:
        raise ConfigError(
            f'run name {name[:150]!r}: must be 1 to 128 letters, digits, ".", "_" or "-", begin with a letter or '
            'digit, and not contain ".."'
        )
    return name


def check_path(path: epath.PathLike) -> Any:
    """The path as `open_path` gives it, which raises ConfigError; so do '..' components, control characters, and no
    path at all."""
    text = os.fspath(path)
    if not text.strip():
        raise ConfigError(f'--run_dir {text!r}: name a directory')
    opened = open_path(text, '--run_dir')
    parts = re.split(r'[/\\]', text)
    if '..' in parts:
        raise ConfigError(f"--run_dir {text!r}: must not contain '..'; write the path without it")
    if any(ord(character) < 32 or ord(character) == 127 for character in text) or max(map(len, parts)) > 255:
        raise ConfigError(f'--run_dir {text[:150]!r}: must not contain control characters or parts over 255 characters')
    return opened


def bindings(text: str) -> dict[str, str]:
    """Binding → value of dumped gin text, in the names of today. Comments and blank lines are skipped, wrapped values
    joined."""
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        match = re.match(r'([\w./]+) = (.*)', line)
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip() and not line.lstrip().startswith('#'):
            found[name] = f'{found[name]} {line.strip()}'.strip()
    return up_to_date(found)


def read_text(path: epath.Path) -> str:
    """The text of a file; '' where it is missing or not UTF-8."""
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return ''


def _is_longer(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether `name` are steps that grow, under a schedule that does not depend on them."""
    schedule = new.get('optimizer.schedule', '')
    if name != 'train.steps' or old.get('optimizer.schedule') != schedule or int(new[name]) <= int(old[name]):
        return False
    return getattr(REGISTRY.get(schedule.strip('@()').rpartition('/')[2]), 'is_open_ended', False)


def _is_of_optimizer(name: str) -> bool:
    """Whether `a/adamw.b2` belongs to the optimizer, its rules or its schedules."""
    return getattr(REGISTRY.get(name.rpartition('/')[2].partition('.')[0]), 'is_of_optimizer', False)
