"""What a run directory holds."""

import datetime
import math
from typing import Any

from etils import epath

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import Damaged, Snapshot
from lm.errors import LmError
from lm.experiment import load
from lm.runs.records import Run
from lm.training.step import count_parameters, part_of


def inspect_run(path: epath.PathLike, verify: bool = False) -> dict[str, Any]:
    """What the run in `path` was told, how far it is, and its checkpoints.

    Args:
        verify: read every checkpoint whole and compare checksums.
    """
    run = Run.read(path)
    checkpoints = []
    for step in saved_steps(run.directory.checkpoints):
        try:
            found = inspect_checkpoint(run, step, verify)
        except FileNotFoundError:
            continue  # a run that goes on deletes old checkpoints
        if (run.directory.checkpoints / str(step)).exists():
            checkpoints.append(found)
    return {
        'kind': 'run',
        'path': str(run.directory.path),
        'status': 'finished' if run.is_finished() else 'not finished',
        'step': run.step,
        'steps': run.total_steps,
        'last_train': run.train[-1] if run.train else None,
        'tokens_per_second': run.tokens_per_second,
        'last_eval': run.last_evaluation,
        'evaluations': len(run.evaluations),
        'parameters': parameters(run),
        'checkpoints': checkpoints,
        'set_aside': set_aside(run.directory.checkpoints),
        'fingerprints': {name: run.info.get(name) for name in ('data', 'tokenizer')},
        'configuration': run.config,
        'attention': run.attention,
        'info': run.info,
        'damage': [f'checkpoint step {c["step"]}: {c["health"]}' for c in checkpoints if not c['sound']],
    }


def saved_steps(directory: epath.Path) -> list[int]:
    """The steps in a folder of checkpoints, damaged ones too."""
    if not directory.exists():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def set_aside(directory: epath.Path) -> list[str]:
    """What is no step: damaged and abandoned steps that were renamed, and saves that are going on or were cut off."""
    if not directory.exists():
        return []
    return sorted(p.name for p in directory.iterdir() if not p.name.isdigit())


def inspect_checkpoint(run: Run, step: int, verify: bool) -> dict[str, Any]:
    """Step, size, time, health, and the loss of its evaluation."""
    path = run.directory.checkpoints / str(step)
    snapshot = Snapshot(run.directory.checkpoints, step)
    health, sound, record = 'complete', True, {}
    try:
        record = snapshot.record()
        if verify:
            with Checkpointer(run.directory.checkpoints) as checkpointer:
                checkpointer.verify(step)
            health = 'verified'
    except (Damaged, LmError) as damage:
        health, sound = ' '.join(str(damage).split()), False
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
    }


def size_of(path: epath.Path) -> int:
    """Bytes of all files below `path`."""
    total = 0
    for entry in path.iterdir():
        total += size_of(entry) if entry.is_dir() else entry.stat().length
    return total


def parameters(run: Run) -> dict[str, int]:
    """Trainable parameters by part: from the newest checkpoint, or, before there is one, from the configuration."""
    for step in reversed(saved_steps(run.directory.checkpoints)):
        try:
            leaves = Snapshot(run.directory.checkpoints, step).record()['leaves']
        except (Damaged, LmError):
            continue
        counts = dict.fromkeys(('embedding', 'attention', 'mechanism', 'glu', 'norms'), 0)
        for name, leaf in leaves.items():
            if name.startswith('params.'):
                counts[part_of(name.split('.')[1:])] += math.prod(leaf['shape'])
        return counts
    return count_parameters(load([str(run.directory.config)]).model)
