"""A run that begins as a branch of another run (`lm train --branch_from RUN --step N`). It starts from a checkpoint,
with its parameters, optimizer state, step count and position in the data. Its schedule, steps or data may differ.

run.json records it: {"branch": {"from": the other run, "step": N, "changed": [[binding, old, new], …]}}. metrics.jsonl
begins with the other run's lines up to step N, so that curves are whole.
"""

import dataclasses
from collections.abc import Mapping

import jax

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import list_last
from lm.errors import AbsentError, ConfigError, MismatchError, writing
from lm.files import JsonObject, write_atomically
from lm.runs.base import check_start
from lm.runs.config_diff import compare_texts
from lm.runs.info import check_not_imported, read_raw
from lm.runs.metrics_file import read_records
from lm.runs.paths import read_text
from lm.runs.process_zero import run_on_process_zero
from lm.runs.run_dir import RunDir

FIXED = ('train.tokens_per_step', 'train.context_length', 'train.seed')
"""The bindings that fix the position of a step in the data: the branch keeps their values."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """Checkpoint `step` of the run in `parent`, from which the run in `run` goes on."""

    run: RunDir
    parent: RunDir
    step: int

    def check(self, text: str, steps: int) -> None:
        """Raises AbsentError, MismatchError or ConfigError where a run of `steps` with the configuration `text` cannot
        go on from there. `lm.checkpoint.checkpointer.Checkpointer.restore` checks the arrays."""
        run_on_process_zero(lambda: self._check(text, steps))

    def checkpointer(self, fingerprints: Mapping[str, str]) -> Checkpointer:
        """Opens the checkpoints of the parent. Its tokenizer must be the one in `fingerprints`; its data may differ."""
        tokenizer = {name: value for name, value in fingerprints.items() if name == 'tokenizer'}
        return Checkpointer(self.parent.checkpoints, fingerprints=tokenizer)

    def record(self, text: str) -> JsonObject:
        """Describes the branch for run.json; `text` is its configuration."""
        changed = compare_texts(self._config(), text)
        return {'from': str(self.parent.path), 'step': self.step, 'changed': [list(change) for change in changed]}

    def copy_metrics(self) -> None:
        """Writes metrics.jsonl with the parent's lines up to the step; process 0 does it."""
        if jax.process_index() == 0:
            past = [
                line
                for line, record in read_records(self.parent.path / 'metrics.jsonl')
                if record and record['step'] <= self.step and line.endswith(b'\n')
            ]
            path = self.run.path / 'metrics.jsonl'
            with writing(path):
                write_atomically(path, b''.join(past))

    def _check(self, text: str, steps: int) -> bool:
        check_not_imported(read_raw(self.parent.info), '--branch_from', self.parent.path)
        with Checkpointer(self.parent.checkpoints) as checkpointer:
            known = checkpointer.all_steps()
        if self.step not in known:
            wrong = ConfigError if known else AbsentError
            raise wrong(
                f'--branch_from {self.parent.path} --step {self.step}: it has checkpoints of {list_last(known)}; '
                'choose one of these'
            )
        if self.step >= steps:
            raise ConfigError(
                f'--step {self.step}: train.steps = {steps} leaves nothing to train; set train.steps higher'
            )
        for name, old, new in compare_texts(self._config(), text):
            if name in FIXED:
                raise MismatchError(
                    f'--branch_from {self.parent.path}: {name} was {old}, now {new}, so that step {self.step} would '
                    'stand elsewhere in the data; give the old value'
                )
        return True

    def _config(self) -> str:
        """Returns the configuration in the parent's checkpoint, or in config.gin where an old checkpoint has none."""
        with Checkpointer(self.parent.checkpoints) as checkpointer:
            text = checkpointer.read_record(self.step)['metadata'].get('config')
        return text or read_text(self.parent.config)


def find_branch(run: RunDir, parent: str | None, step: int | None, rewind_to: int | None = None) -> Branch | None:
    """Returns the requested branch as which `run` starts, or the branch that run.json records.

    Returns None for a run that is no branch, or that has checkpoints of its own. Raises ConfigError where `parent` is
    the run itself, has no `step`, or the run is also to be rewound. Raises MismatchError where the run has begun
    otherwise.
    """
    check_start(parent, step, rewind_to)
    recorded = read_raw(run.info).get('branch') or {}
    recorded = recorded if {'from', 'step'} <= recorded.keys() else {}
    if parent is not None:
        requested = {'from': str(RunDir(parent, found=True).path), 'step': step}
        if requested['from'] == str(run.path):
            raise ConfigError(f'--branch_from {parent}: is the run itself; name a new --run_dir, or use --rewind_to')
        if run.config.exists() and not (recorded and recorded | requested == recorded):
            was = f'a branch of {recorded["from"]} at step {recorded["step"]}' if recorded else 'not a branch'
            raise MismatchError(
                f'--run_dir {run.path}: holds a run that has begun, {was}; name a new --run_dir for the branch'
            )
        recorded = requested
    with Checkpointer(run.checkpoints) as own:
        if not recorded or own.all_steps():
            return None
    return Branch(run, RunDir(recorded['from'], found=True), recorded['step'])
