"""Decides whether a run directory holds the run that a configuration describes, and explains why not."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from lm.checkpoint.snapshot import Damaged, Snapshot, find_committed_steps
from lm.config.names import may_change
from lm.errors import ConfigError, MismatchError
from lm.files import JsonObject, is_remote
from lm.folders import check_unshared
from lm.runs.config_diff import Change, compare_bindings, is_permitted, parse_bindings
from lm.runs.info import check_not_imported, read_raw
from lm.runs.metrics_file import read_records
from lm.runs.paths import RunPaths, find_import, read_text

TITLE = '# A complete configuration'
"""The beginning of a config.gin that `lm train` has written."""


@dataclasses.dataclass
class Contents:
    """The contents of a run directory.

    Attributes:
        resumed: it holds a run.
        info: run.json, {} where it is missing or damaged.
        logged: the newest logged step.
        notes: warnings for people.
    """

    resumed: bool
    info: JsonObject
    logged: int
    notes: list[str]


def check_identity(run: RunPaths, text: str, rewound: bool) -> Contents:
    """Reads the directory, and raises MismatchError or ConfigError if the configuration `text` would make it another
    run. `rewound`: the run goes back to an earlier step, so that its optimizer may change."""
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f'--run_dir {run.path}: is a file; name a directory')
    _check_kinds(run)
    steps = find_committed_steps(run.checkpoints)
    info = read_raw(run.info)
    check_not_imported(info, '--run_dir', run.path)
    config = read_text(run.config)
    files = [path for path in (run.config, run.info, run.metrics_file) if path.exists()]
    if not info and (command := find_import(run.path)):
        raise ConfigError(
            f'--run_dir {run.path}: holds weights and no run; make a run of them and train from it: `{command}`'
        )
    if files and not info and not steps and not config.startswith(TITLE):
        raise ConfigError(
            f'--run_dir {run.path}: its {files[0].name} is not of a run of lm train; name another directory'
        )
    if not files:
        check_unshared(run.path, f'--run_dir {run.path}')
    logged = max((record['step'] for _, record in read_records(run.metrics_file) if record), default=0)
    old, new = parse_bindings(config), parse_bindings(text)
    found = Contents(bool(files), info, logged, [])
    if files and not info:
        found.notes.append(f'{run.info} could not be read and is written anew')
    if files and not old:
        found.notes.append(f'{run.config} could not be read and is written anew')
    if files:
        _check_progress(run, found, steps, old, rewound)
    # A config.gin without bindings cannot be compared: then the checkpoint alone decides.
    if old:
        _check_changes(run, run.config, old, new, found, rewound, steps)
    if recorded := _read_configuration_of_checkpoint(run, steps, info):
        step, old = recorded
        _check_changes(run, run.checkpoints / str(step), old, new, found, rewound, steps)
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _check_kinds(run: RunPaths) -> None:
    """Raises MismatchError where a file or folder of the run is of the other kind, or cannot be read."""
    for path in (run.config, run.info, run.metrics_file, run.checkpoints):
        kind = 'folder' if path == run.checkpoints else 'file'
        try:
            wrong = path.exists() and path.is_dir() != (kind == 'folder')
            if not wrong and kind == 'file' and path.exists() and not is_remote(path):
                path.open('rb').close()
        except OSError as error:
            raise MismatchError(f'{path} cannot be read ({error.strerror}); allow it, then run it again') from None
        if wrong:
            raise MismatchError(f'{path}: must be a {kind}; move it away, then run it again')


def _check_progress(run: RunPaths, found: Contents, steps: list[int], old: Mapping[str, str], rewound: bool) -> None:
    """Raises MismatchError where the run is known to have been saved and no checkpoint is there.

    A process that is killed between a commit and its note in run.json leaves no `saved_step`. Then the folder, which
    is made before the first step, decides.
    """
    saved = found.info.get('saved_step')
    if 'saved_step' not in found.info:
        # A run of an older version: each save has waited for the one before.
        every = old.get('checkpoint.save_every_steps', '')
        saved = found.logged // int(every) * int(every) - int(every) if every.isdigit() and int(every) else None
    elif found.logged and not saved and not is_remote(run.path) and not run.checkpoints.exists():
        raise MismatchError(
            f'--run_dir {run.path}: the run had reached step {found.logged}, but {run.checkpoints} is gone; '
            'mount or restore that folder, or start again in a new --run_dir'
        )
    if not saved or saved <= 0 or (steps and steps[-1] >= saved):
        return
    if not steps:
        raise MismatchError(
            f'--run_dir {run.path}: the run was saved at step {saved}, but {run.checkpoints} holds no '
            'checkpoint; mount or restore that folder, or start again in a new --run_dir'
        )
    if not rewound:
        found.notes.append(f'{run.checkpoints}: step {saved} was saved but is gone; going on from step {steps[-1]}')


def _read_configuration_of_checkpoint(
    run: RunPaths, steps: list[int], info: Mapping[str, Any]
) -> tuple[int, dict[str, str]] | None:
    """Returns (step, bindings) of the newest checkpoint whose record can be read, with the changes of later rewinds.
    None for a checkpoint of an older version, which kept no configuration."""
    for step in reversed(steps):
        try:
            text = Snapshot(run.checkpoints, step).record()['metadata'].get('config')
        except Damaged:
            continue
        if not text:
            break
        bindings = parse_bindings(text)
        for rewind in info.get('rewinds', []):
            if rewind['to'] >= step:
                bindings |= {name: new for name, _, new in rewind['changed'] if new is not None}
            else:  # the step was saved after this rewind, so its record has the changes of this and earlier ones
                bindings = parse_bindings(text)
        return step, bindings
    return None


def _check_changes(
    run: RunPaths,
    source: epath.Path,
    old: Mapping[str, str],
    new: Mapping[str, str],
    found: Contents,
    rewound: bool,
    steps: Sequence[int],
) -> None:
    """Raises MismatchError where a binding has changed that may not change; notes fields that came or went."""
    refused: list[Change] = []
    for change in compare_bindings(old, new):
        if is_permitted(change, old, new, rewound):
            continue
        if change.old is None or change.new is None:
            # Another version of the program added or removed the field, or its mechanism was not used before.
            found.notes.append(
                f'{run.path}: {change.binding} was {change.old or "absent"}, now {change.new or "absent"}'
            )
        else:
            refused.append(change)
    if refused:
        first, more = refused[0], f' (and {len(refused) - 1} more)' if len(refused) > 1 else ''
        where = '' if source == run.config else f' (by the record of {source.name} in checkpoints)'
        raise MismatchError(
            f'--run_dir {run.path} holds a run of another configuration{where}: {first.binding} was {first.old}, now '
            f'{first.new}{more}; {_find_remedy(run, refused, steps)}'
        )


def _find_remedy(run: RunPaths, refused: Sequence[Change], steps: Sequence[int]) -> str:
    """Returns what to do about refused changes: checkpoints allow more than a new run."""
    changed = {change.binding: change.new for change in refused}
    wanted = changed.get('train.steps')
    if steps and all(name == 'train.steps' or may_change(name, rewound=True) for name in changed):
        if wanted is None:
            return f'give the old value, or go back to a checkpoint: --rewind_to {steps[-1]}; or give a new --run_dir'
        if earlier := [step for step in steps if step < int(wanted)]:
            command = ['lm', 'train', '--run_dir', f'{run.path}-{wanted}', '--branch_from', str(run.path)]
            command += ['--step', str(earlier[-1])]
            for name, value in changed.items():
                command += ['--set', f'{name}={value}']
            return f'give the old value, or train on in a new run: `{shlex.join(command)}`'
    return 'give the old value, or a new --run_dir'
