"""The contents of a run directory."""

import datetime
import re
import time

from etils import epath

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import Damaged, Snapshot, find_committed_steps
from lm.errors import ConfigError, MismatchError
from lm.experiment import load
from lm.files import JsonObject
from lm.model.functions import count_parameters
from lm.runs.metrics_file import find_change, read_lines
from lm.runs.paths import read_text
from lm.runs.records import Run

DELETION_SECONDS = 1.0
"""The wait before a step that looked damaged is read again; it counts as damaged if it still exists."""


def inspect_run(path: epath.PathLike, verify: bool = False, allow_imports: bool = False) -> JsonObject:
    """Returns the configuration, the progress and the checkpoints of the run in `path`.

    Args:
        verify: read every checkpoint whole and compare checksums.
        allow_imports: as in `lm.config.load.load`.
    """
    run = Run.read(path)
    steps, others = saved_steps(run.directory.checkpoints)
    checkpoints = [found for step in steps if (found := inspect_checkpoint(run, step, verify))]
    seals = {} if run.imported else {found['step']: found['metrics'] for found in checkpoints}
    changed = find_change(read_lines(run.directory.metrics_file), seals)
    counts, idle = _count_parameters(run, allow_imports)
    damage = [f'checkpoint step {c["step"]}: {c["health"]}' for c in checkpoints if not c['sound']]
    return {
        'kind': 'run',
        'path': str(run.directory.path),
        'status': 'imported' if run.imported else 'finished' if run.is_finished() else 'not finished',
        'step': run.step,
        'steps': run.total_steps,
        'last_train': run.train[-1] if run.train else None,
        'tokens_per_second': run.tokens_per_second,
        'goodput': run.goodput,
        'last_eval': run.last_evaluation,
        'evaluations': len(run.evaluations),
        'parameters': counts,
        'trained_parameters': run.info.get('trained_parameters'),
        'idle_parameters': idle,
        'checkpoints': checkpoints,
        'set_aside': others,
        'fingerprints': {name: run.info.get(name) for name in ('data', 'tokenizer')},
        'configuration': run.config,
        'attention': run.attention,
        'info': run.info,
        'damage': [*damage, *([f'metrics.jsonl: {changed}'] if changed else [])],
    }


def saved_steps(directory: epath.Path) -> tuple[list[int], list[str]]:
    """Lists a folder of checkpoints.

    Returns:
        steps: the steps whose save was completed, damaged ones too.
        others: renamed steps (damaged or abandoned); saves and deletions that continue or were cut off.
    """
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    steps = find_committed_steps(directory)
    return steps, [name for name in names if name not in set(map(str, steps))]


def inspect_checkpoint(run: Run, step: int, verify: bool) -> JsonObject | None:
    """Returns size, time, health and evaluation loss of a step; None: a continuing run has deleted it meanwhile."""
    try:
        found = _read_checkpoint(run, step, verify)
        if not found['sound']:  # a step that is being deleted looks damaged
            time.sleep(DELETION_SECONDS)
            found = _read_checkpoint(run, step, verify)
    except FileNotFoundError:
        return None
    return found if Snapshot(run.directory.checkpoints, step).is_committed() else None


def _read_checkpoint(run: Run, step: int, verify: bool) -> dict[str, object]:
    path = run.directory.checkpoints / str(step)
    snapshot = Snapshot(run.directory.checkpoints, step)
    health, sound, record = 'complete', True, {}
    try:
        record = snapshot.record()
        if verify:
            with Checkpointer(run.directory.checkpoints) as checkpointer:
                checkpointer.verify(step)
            health = 'verified'
    except (Damaged, MismatchError) as damage:
        health, sound = ' '.join(str(damage).split()), False
    metadata = record.get('metadata', {})
    committed = path / 'commit_success.txt'
    saved = committed.stat().mtime if committed.exists() else None
    return {
        'step': step,
        'bytes': size_of(path),
        'saved': saved and datetime.datetime.fromtimestamp(saved, datetime.UTC).isoformat(timespec='seconds'),
        'health': health,
        'sound': sound,
        'loss': record.get('metrics', {}).get('loss'),
        'arrays': len(record.get('leaves', ())),
        'fingerprints': record.get('fingerprints', {}),
        'metrics': {name: metadata[name] for name in ('metrics_lines', 'metrics_sha256') if name in metadata},
    }


def size_of(path: epath.Path) -> int:
    """Returns the bytes of all files below `path`."""
    return sum(size_of(entry) if entry.is_dir() else entry.stat().length for entry in path.iterdir())


def _count_parameters(run: Run, allow_imports: bool) -> tuple[dict[str, int], int | None]:
    """Returns the trainable parameters by part of the model, and how many a token does not use.

    If the model needs imports, only the sum of the first is known, and None of the second.
    """
    try:
        model = load([str(run.directory.config)], allow_imports=allow_imports).model
        return count_parameters(model), model.idle_parameters
    except ConfigError:
        total = run.info.get('parameters')
        if total is None or not re.search(r'^import ', read_text(run.directory.config), re.MULTILINE):
            raise
        return {'in all': total}, None
