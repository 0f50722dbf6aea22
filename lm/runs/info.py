"""run.json: when a run started, on what, how far it is saved, and how it was rewound.

docs/reference/files.md lists its keys. Each start after the first one holds only its differences from the start
before. Beyond MOST_STARTS the oldest starts after the first one are left out: a year of restarts stays small.
"""

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath

import lm
from lm.errors import ConfigError, LmError
from lm.files import GONE, JsonObject, parse_json, reaching, read_bytes
from lm.secrets import redact
from lm.text import make_all_visible

PACKAGES = ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore', 'numpy', 'sentencepiece')
COMPILERS = ('jax', 'jaxlib', 'libtpu')
"""Packages whose versions change the compiled programs."""
PER_START = ('when', 'first_step', 'version_changes')
"""Keys that belong to one start alone. All other keys hold until a later start has another value."""
TYPES = {
    'started': str,
    'when': str,
    'resumed': list,
    'imported': str,
    'parameters': int,
    'saved_step': int,
    'data': str,
    'tokenizer': str,
    'git_commit': str,
    'device_kind': str,
    'device_count': int,
    'process_count': int,
    'versions': dict,
}
"""Entries of a run or of a start that readers count on; each may be None."""
MOST_STARTS = 100
"""The most starts that run.json lists: it is written anew with each save."""


def read_info(path: epath.Path) -> JsonObject:
    """Returns run.json with the newest start's figures (versions, devices, …) on the top level.

    `resumed` holds the times of all starts after the first one. Files of older versions, without `starts`, have had
    this form. Control characters are visible. Returns {} where the file is missing or damaged; raises LmError as
    `read_raw` does.
    """
    info = make_all_visible(read_raw(path))
    starts = info.get('starts')
    if not starts:
        return info
    newest = {key: value for start in starts for key, value in start.items() if key not in PER_START}
    return {**newest, 'resumed': [str(start.get('when')) for start in starts[1:]], **info}


def read_raw(path: epath.Path) -> JsonObject:
    """Returns run.json as it is; {} if it is missing or damaged. Raises LmError if the storage fails: no new run."""
    try:
        with reaching(path):
            content = read_bytes(path)
        info = parse_json(content)
    except (*GONE, ValueError):
        return {}
    except OSError as error:
        raise LmError(
            f'{path} cannot be read ({error.strerror or error}); allow it, or run the same command again later'
        ) from error
    return info if isinstance(info, dict) and 'started' in info and _is_whole(info) else {}


def _is_whole(info: Mapping[str, Any]) -> bool:
    """Returns whether the entries that readers count on have their types, in each start and rewind too."""
    lists = [info.get(name, []) for name in ('starts', 'rewinds')]
    if not all(isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries) for entries in lists):
        return False
    starts, rewinds = lists
    branch = info.get('branch', {})
    return (
        isinstance(branch, dict)
        and all(_has_types(entry, TYPES) for entry in (info, *starts))
        and _has_types(branch, {'from': str, 'step': int})
        and all(_has_types(rewind, {'to': int, 'changed': list}) for rewind in rewinds)
        and all(isinstance(c, list) and len(c) == 3 for rewind in rewinds for c in rewind.get('changed', []))
    )


def _has_types(entries: Mapping[str, Any], types: Mapping[str, Any]) -> bool:
    return all(
        entries[name] is None or isinstance(entries[name], kind) for name, kind in types.items() if name in entries
    )


def make_info(
    old: Mapping[str, Any],
    first_step: int,
    facts: Mapping[str, Any],
    rewind: tuple[int, Iterable[tuple[str, str | None, str | None]]] | None = None,
) -> JsonObject:
    """Makes the contents of run.json for a run that has started again.

    Args:
        old: the contents before; {} for a new run.
        first_step: step that the run goes on from.
        facts: parameters, fingerprints, …, `branch` (`lm.runs.branch`) of a run that has no checkpoint of its own, and
            `saved_step` if that is not `first_step`.
        rewind: (newest step before, changes of the configuration) where the run was rewound to `first_step`.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    starts = list(old.get('starts', []))
    if old and not starts:  # of an older version
        machine = {key: old[key] for key in describe_machine() if key in old}
        starts = [{'when': old['started'], **machine}, *({'when': when} for when in old.get('resumed', []))]
    known = {key: value for start in starts for key, value in start.items() if key not in PER_START}
    start = {'when': now, 'first_step': first_step, **describe_machine()}
    if changes := find_version_changes(known.get('versions'), start['versions']):
        start['version_changes'] = changes
    starts.append({key: value for key, value in start.items() if known.get(key) != value})
    left_out = starts_left_out(old)
    while len(starts) > MOST_STARTS:
        # Its values hold until a later start has others.
        kept = {key: value for key, value in starts.pop(1).items() if key not in PER_START}
        starts[1] = starts[1] | {key: value for key, value in kept.items() if key not in starts[1]}
        left_out += 1
    rewinds = list(old.get('rewinds', []))
    if rewind:
        rewinds.append({'when': now, 'to': first_step, 'from': rewind[0], 'changed': [list(c) for c in rewind[1]]})
    return {
        'started': old.get('started', now),
        **{name: old[name] for name in ('branch', 'goodput', 'differences') if name in old},
        **facts,
        # A branch goes on from a checkpoint of another run.
        'saved_step': facts.get('saved_step', None if 'branch' in facts else first_step or None),
        'rewinds': rewinds,
        'starts': starts,
        **({'starts_left_out': left_out} if left_out else {}),
    }


def find_version_changes(before: Any, now: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Package → [version before, version now] of JAX's parts that changed; those not installed do not count."""
    before = before if isinstance(before, dict) else {}
    found = {name: [before.get(name), now.get(name)] for name in COMPILERS}
    return {name: pair for name, pair in found.items() if all(pair) and pair[0] != pair[1]}


def count_fruitless(info: Mapping[str, Any]) -> int:
    """Returns how many starts in a row, the newest ones, have saved no new step."""
    steps = [start.get('first_step') for start in info.get('starts', []) if isinstance(start, dict)]
    if not steps or (info.get('saved_step') or 0) > (steps[-1] or 0):
        return 0
    return sum(1 for _ in itertools.takewhile(lambda step: step == steps[-1], reversed(steps)))


def starts_left_out(info: Mapping[str, Any]) -> int:
    """Returns how many starts run.json does not list any more."""
    number = info.get('starts_left_out', 0)
    return number if type(number) is int else 0


def to_text(info: Mapping[str, object]) -> str:
    """Formats run.json."""
    return json.dumps(info, indent=2) + '\n'


def describe_machine() -> JsonObject:
    """Returns versions, git commit, command and its folder, and devices, for run.json."""
    return {
        'command': shlex.join(map(redact, sys.argv)),
        'folder': os.getcwd(),
        'versions': find_versions(),
        'git_commit': git_commit(),
        'device_kind': jax.devices()[0].device_kind,
        'device_count': jax.device_count(),
        'process_count': jax.process_count(),
    }


def find_versions() -> dict[str, str | None]:
    """Returns package → version; None: it is not installed."""
    versions: dict[str, str | None] = {'lm': lm.__version__, 'python': platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def git_commit() -> str | None:
    """Returns the commit of the checkout of this package, '-dirty' with local changes; None without a checkout."""
    folder = Path(lm.__file__).parent

    def git(*arguments: str) -> str:
        command = ['git', '-C', str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git('ls-files', '--error-unmatch', '__init__.py')  # else it is somebody else's repository around site-packages
        return git('describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
    except (OSError, subprocess.SubprocessError):
        return None


def check_not_imported(info: Mapping[str, object], flag: str, path: object) -> None:
    """Raises ConfigError where `lm import` made the run, without optimizer state. `flag` names its `path`."""
    if 'imported' in info:
        raise ConfigError(
            f'{flag} {path}: was made by lm import and has no optimizer state to go on with; train a new run from it: '
            f'`{write_start_from(path)} …`, with your data'
        )


def write_start_from(path: object) -> str:
    """Returns the command that trains from the import in `path`, without the data."""
    command = ['lm', 'train', '--run_dir', 'NEW', '--gin_file', f'{path}/model.gin', '--set', f'train.init_from={path}']
    return shlex.join(command)
