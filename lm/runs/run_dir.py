"""The directory of a run: its configuration, its machines, its measurements.

It holds these files and folders:

     config.gin      the resolved configuration, complete and re-runnable
     run.json        parameter count, fingerprints, and for each start versions, git commit, command and devices
                     (`lm.runs.info`)
     metrics.jsonl   one JSON object per logged step (`lm.runs.metrics_file`)
     lock.json       the process of a training at work (`lm.runs.lock`)
     checkpoints/  evaluations/  tensorboard/
"""

import datetime
import logging
from collections.abc import Mapping, Sequence

import jax
from etils import epath

from lm.checkpoint.snapshot import find_committed_steps
from lm.config.text import dump
from lm.errors import LmError, writing
from lm.files import JsonObject, is_remote, write_atomically
from lm.runs.config_diff import compare_texts, parse_bindings
from lm.runs.goodput import parse_ledger
from lm.runs.identity import check_identity
from lm.runs.info import make_info, read_raw, to_text
from lm.runs.lock import RunLock
from lm.runs.metrics_file import MetricsFile
from lm.runs.paths import RunPaths, read_text
from lm.runs.process_zero import broadcast_text, check_same, run_on_process_zero
from lm.text import parse_whole
from lm.trackers.base import RunFacts, Tracker, Trackers
from lm.trackers.tensorboard import CluSummaries

MOST_DIFFERENCES = 99
"""The most earlier differences that run.json keeps."""

log = logging.getLogger(__name__)


class RunDir(RunPaths):
    """Writes the files of a run, whose paths `RunPaths` describes. Making one writes nothing."""

    def create_or_resume(
        self, experiment: object, info: Mapping[str, object], first_step: int = 0, rewound: bool = False
    ) -> bool:
        """Writes config.gin and run.json. Process 0 does the work, and all processes share its outcome.

        Args:
            experiment: an `lm.experiment.Experiment`, or its gin text.
            info: the contents of run.json besides the machine (parameters, fingerprints, …).
            first_step: step of the checkpoint that the run goes on from.
            rewound: the run goes back to `first_step`, and run.json notes it.

        Returns:
            True when the directory held a run already.

        Raises:
            MismatchError, ConfigError: as `check_unchanged`; ConfigError too where processes have different `info`.
            LmError: the directory cannot be written to.
        """
        text = _to_text(experiment)
        check_same(info)
        return run_on_process_zero(lambda: self._create_or_resume(text, info, first_step, rewound))

    def check_unchanged(self, experiment: object, rewound: bool = False) -> None:
        """Refuses to continue as another run, or from less than there was, without writing anything.

        It is compared with config.gin, and with the record of the newest checkpoint: config.gin may have been edited
        or lost.

        Raises:
            MismatchError: a binding differs that may not (`lm.runs.config_diff.is_permitted`), the run was saved but
                its checkpoints are gone, or a file of the run cannot be read.
            ConfigError: `path` is a file, holds files that are not of a run, or imported weights; or processes
                of the job have been given different configurations.
        """
        text = _to_text(experiment)
        # Each host may have the data in another place: their fingerprints are compared.
        check_same({name: value for name, value in parse_bindings(text).items() if name != 'data.path'})
        run_on_process_zero(lambda: check_identity(self, text, rewound).resumed)

    def is_rewound(self, step: int, experiment: object) -> bool:
        """Returns whether the newest rewind was to `step` with this very configuration.

        The same command, repeated after a preemption, then continues instead of throwing away the later steps.
        """

        def compare() -> bool:
            rewinds = read_raw(self.info).get('rewinds') or [{}]
            return rewinds[-1].get('to') == step and not compare_texts(read_text(self.config), _to_text(experiment))

        return run_on_process_zero(compare)

    def has_checkpoint(self) -> bool:
        """Returns whether there is a checkpoint to go on from. It may still turn out to be damaged."""
        return bool(find_committed_steps(self.checkpoints))

    def read_id(self) -> str:
        """Returns a text that no other run has had in this directory; empty before the first start.

        A rewind changes it: states that the run has left must not come back.
        """

        def read() -> str:
            info = read_raw(self.info)
            rewinds = len(info.get('rewinds') or ())
            return f'{info.get("started", "")}{f" rewound {rewinds}" if rewinds else ""}'

        return broadcast_text(read() if jax.process_index() == 0 else '')

    def record_saved(self, step: int) -> None:
        """Notes in run.json that the checkpoint of `step` is complete, as `record_facts` does."""
        self.record_facts({'saved_step': step})

    def record_facts(self, facts: Mapping[str, object]) -> None:
        """Puts facts about the run into run.json, on process 0. A failure is only a warning."""
        if jax.process_index() == 0:
            try:
                if info := read_raw(self.info):
                    write_atomically(self.info, to_text({**info, **facts}))
            except (OSError, LmError) as error:
                log.warning('%s could not be written: %s', self.info, error)

    def record_difference(self, record: Mapping[str, object]) -> None:
        """Adds a difference between chips (`lm.pod.votes`) to run.json. A failure is only a warning."""
        try:
            before = read_raw(self.info).get('differences')
        except LmError:
            before = None
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        kept = before[-MOST_DIFFERENCES:] if isinstance(before, list) else []
        self.record_facts({'differences': [*kept, {'when': now, **record}]})

    def read_goodput(self) -> JsonObject | None:
        """Returns the ledger of earlier starts (`lm.runs.goodput`); None where there is none."""
        return parse_ledger(read_raw(self.info).get('goodput'))

    def write_goodput(self, record: Mapping[str, object]) -> None:
        """Puts the ledger into run.json, as `record_facts` does."""
        self.record_facts({'goodput': record})

    def lock(self) -> RunLock:
        """Returns the context in which this job alone writes the directory. Enter it before the first write."""
        return RunLock(self.path)

    def metrics(self, resume_at: int = 0, trackers: Trackers | None = None, lock: RunLock | None = None) -> MetricsFile:
        """Opens metrics.jsonl, without the lines of steps after `resume_at`.

        `trackers` get each record. Once `lock` is lost, an object store gets no more lines.
        """
        return MetricsFile(self.metrics_file, resume_at, trackers, lambda: lock is None or not lock.is_lost)

    def track(
        self, trackers: Sequence[Tracker], text: str, enabled: bool, tensorboard: bool = False, start: int = 0
    ) -> Trackers:
        """Returns the trackers of this run (`lm.trackers.base.Trackers`).

        Args:
            enabled: False for processes other than the first.
            tensorboard: write summaries too, if their packages are installed and no tracker writes them.
            start: the step that the run goes on from.
        """
        if tensorboard and not any(tracker.summaries for tracker in trackers):
            trackers = [*trackers, CluSummaries()]
        rewinds = len(read_raw(self.info).get('rewinds') or ())
        facts = RunFacts(self.path.name, self.path, parse_bindings(text), start, rewinds)
        return Trackers(trackers, facts, enabled)

    def _create_or_resume(self, text: str, info: Mapping[str, object], first_step: int, rewound: bool) -> bool:
        found = check_identity(self, text, rewound)
        for note in found.notes:
            log.warning('%s', note)
        if found.resumed and not first_step and found.logged:
            log.warning('%s starts at step 0 again: no checkpoint was written yet', self.path)
        rewind = None
        if rewound:
            rewind = found.logged, compare_texts(read_text(self.config), text)
        new = make_info(found.info, first_step, info, rewind)
        if changes := new['starts'][-1].get('version_changes'):
            log.warning(
                '%s: %s; programs are compiled anew and losses may differ in their last digits; '
                'install the old versions to repeat the run exactly',
                *(self.path, ', '.join(f'{name} was {old}, now {now}' for name, (old, now) in changes.items())),
            )
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not is_remote(self.path):  # before any step is logged, so that its absence means a loss
                self.checkpoints.mkdir(exist_ok=True)
            if rewound:
                self._abandon_evaluations(first_step)
            # The changes of a rewind come from comparing with config.gin: a kill after writing it would lose them.
            write_atomically(self.info, to_text(new))
            write_atomically(self.config, text)
        return found.resumed

    def keep_file(self, name: str, contents: bytes) -> None:
        """Writes a file beside config.gin, on process 0, unless it is there. Raises LmError where that fails."""
        path = self.path / name
        if jax.process_index() == 0 and not path.exists():
            with writing(path):
                write_atomically(path, contents)

    def keep_evaluation(self, path: epath.Path, text: str) -> None:
        """Writes a file below `evaluations`. Raises LmError where that fails, as in the run of another user."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)

    def _abandon_evaluations(self, step: int) -> None:
        """Moves the evaluations of later steps aside. A bucket cannot rename: there they are deleted."""
        folders = [f for f in (self.evaluations, self.evaluations / 'harness') if f.exists()]
        for path in [path for folder in folders for path in folder.glob('step-*.json')]:
            number = parse_whole(path.name.removeprefix('step-').partition('_')[0])
            if number is not None and number > step:
                if is_remote(path):
                    path.unlink()
                else:
                    path.rename(f'{path}.abandoned')


def _to_text(experiment: object) -> str:
    return experiment if isinstance(experiment, str) else dump(experiment)
