"""The directory of a run: what it was told, what it ran on, what it measured.

config.gin      the resolved configuration, complete and re-runnable
run.json        versions, git commit, command, devices, parameter count, fingerprints, when it started and resumed
metrics.jsonl   one JSON object a logged step (`lm.runs.metrics_file`)
lock.json       while a training is at work: who it is (`lm.runs.lock`)
checkpoints/  evaluations/  tensorboard/
"""

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath

import lm
from lm.config.text import dump
from lm.errors import ConfigError, MismatchError
from lm.files import write_atomically
from lm.runs.leader import on_leader
from lm.runs.lock import RunLock
from lm.runs.metrics_file import MetricsFile

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore', 'numpy', 'sentencepiece')

log = logging.getLogger(__name__)


class RunDir:
    """The files of the run in `path`: a local folder or an address such as gs://bucket/run. Making one writes nothing.

    Raises ConfigError for a path that `check_path` refuses.
    """

    def __init__(self, path: epath.PathLike):
        check_path(path)
        self.path = epath.Path(path)
        if '://' not in str(self.path):
            self.path = self.path.expanduser().absolute()
        self.config = self.path / 'config.gin'
        self.info = self.path / 'run.json'
        self.checkpoints = self.path / 'checkpoints'
        self.evaluations = self.path / 'evaluations'

    def create_or_resume(self, experiment: Any, info: Mapping[str, Any], may_change: Iterable[str] = ()) -> bool:
        """Writes config.gin and run.json; process 0 works and all processes share its outcome.

        Args:
            experiment: an `lm.experiment.Experiment`, or its gin text.
            info: what run.json holds besides the machine (parameters, fingerprints, …).
            may_change: bindings that may differ from those of the run; 'checkpoint.' allows the whole section.

        Returns:
            True when the directory held a run already.

        Raises:
            MismatchError: another binding differs: this would be a different run.
            ConfigError: `path` is a file.
        """
        text = experiment if isinstance(experiment, str) else dump(experiment)
        return on_leader(lambda: self._create_or_resume(text, info, tuple(may_change)))

    def check_unchanged(self, experiment: Any, may_change: Iterable[str] = ()) -> None:
        """What `create_or_resume` refuses, without writing anything."""
        text = experiment if isinstance(experiment, str) else dump(experiment)
        on_leader(lambda: self._check(text, tuple(may_change)))

    def lock(self) -> RunLock:
        """The context in which this job alone writes the directory; enter it before the first write."""
        return RunLock(self.path)

    def metrics(self, resume_at: int = 0, tensorboard: bool = False) -> MetricsFile:
        """Opens metrics.jsonl, without the lines of steps after `resume_at`; with `tensorboard`, summaries are written
        to tensorboard/ too, if the packages for it are installed."""
        folder = self.path / 'tensorboard' if tensorboard else None
        return MetricsFile(self.path / 'metrics.jsonl', resume_at, folder)

    def _create_or_resume(self, text: str, info: Mapping[str, Any], may_change: tuple[str, ...]) -> bool:
        resumed = self._check(text, may_change)
        self.path.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        times = {'started': now, 'resumed': []}
        if resumed and self.info.exists():
            try:
                old = json.loads(self.info.read_text())
                times = {'started': old['started'], 'resumed': [*old['resumed'], now]}
            except (ValueError, KeyError, TypeError):
                log.warning('%s could not be read and is written anew', self.info)
        write_atomically(self.config, text)
        write_atomically(self.info, json.dumps({**times, **describe_machine(), **info}, indent=2) + '\n')
        return resumed

    def _check(self, text: str, may_change: tuple[str, ...]) -> bool:
        """Whether there is a run already; raises if `text` would make it another one."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f'--run_dir {self.path}: is a file; name a directory')
        resumed = self.config.exists()
        if resumed:
            self._check_unchanged(self.config.read_text(), text, may_change)
        return resumed

    def _check_unchanged(self, old: str, new: str, may_change: tuple[str, ...]) -> None:
        refused = []
        for name, before, after in config_differences(old, new):
            allowed = any(name == entry or (entry.endswith('.') and _section(name) == entry) for entry in may_change)
            if before is None or after is None:
                # a field that another version of the program added or removed, or that of a mechanism not used before
                log.warning('%s: %s was %s, now %s', self.config, name, before or 'absent', after or 'absent')
            elif not allowed:
                refused.append(f'{name} was {before}, now {after}')
        if refused:
            more = f' (and {len(refused) - 1} more)' if len(refused) > 1 else ''
            raise MismatchError(
                f'--run_dir {self.path} holds a run of another configuration: {refused[0]}{more}; '
                'give the old value, or a new --run_dir'
            )


def config_differences(old: str, new: str) -> list[tuple[str, str | None, str | None]]:
    """(binding, old value, new value) for each that differs between two dumped configurations; None: absent."""
    before, after = bindings(old), bindings(new)
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


def check_path(path: epath.PathLike) -> None:
    """Raises ConfigError for a path with '..' components or control characters, or none at all."""
    text = os.fspath(path)
    if not text.strip():
        raise ConfigError(f'--run_dir {text!r}: name a directory')
    parts = re.split(r'[/\\]', text)
    if '..' in parts:
        raise ConfigError(f"--run_dir {text!r}: must not contain '..'; write the path without it")
    if any(ord(character) < 32 or ord(character) == 127 for character in text) or max(map(len, parts)) > 255:
        raise ConfigError(f'--run_dir {text[:150]!r}: must not contain control characters or parts over 255 characters')


def describe_machine() -> dict[str, Any]:
    """Versions, git commit, command and devices, for run.json."""
    versions = {'lm': lm.__version__, 'python': platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        'command': shlex.join(sys.argv),
        'versions': versions,
        'git_commit': git_commit(),
        'device_kind': jax.devices()[0].device_kind,
        'device_count': jax.device_count(),
        'process_count': jax.process_count(),
    }


def git_commit() -> str | None:
    """The commit of the checkout that holds this package, '-dirty' with local changes; None when there is none."""
    folder = Path(lm.__file__).parent

    def git(*arguments: str) -> str:
        command = ['git', '-C', str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git('ls-files', '--error-unmatch', '__init__.py')  # else it is somebody else's repository around site-packages
        return git('describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
    except (OSError, subprocess.SubprocessError):
        return None


def bindings(text: str) -> dict[str, str]:
    """Binding → value of dumped gin text. Comments and blank lines are skipped, wrapped values joined."""
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        match = re.match(r'([\w./]+) = (.*)', line)
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip() and not line.lstrip().startswith('#'):
            found[name] = f'{found[name]} {line.strip()}'.strip()
    return found


def _section(name: str) -> str:
    """'a/model.depth' → 'model.'"""
    return name.rpartition('/')[2].partition('.')[0] + '.'
