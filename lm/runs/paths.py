"""The paths of a run: which names are allowed, and where the files of a run directory lie."""

import os
import pathlib
import re
import shlex

from etils import epath

from lm.errors import ConfigError
from lm.files import AnyPath, is_remote, open_path, read_bytes, refuse_special_files


class RunPaths:
    """The files of the run in `path`: a local folder or an address such as gs://bucket/run.

    Raises ConfigError for a path that `check_path` refuses. With `found` it only raises the errors of `open_path`: a
    folder that exists is read under any name. Raises MismatchError if a pipe or a device lies in the place of a file.
    """

    def __init__(self, path: epath.PathLike, found: bool = False):
        self.path = epath.Path(open_path(path) if found else check_path(path))
        if not is_remote(self.path):
            self.path = self.path.absolute()
            refuse_special_files(pathlib.Path(self.path))
        self.config = self.path / 'config.gin'
        self.info = self.path / 'run.json'
        self.metrics_file = self.path / 'metrics.jsonl'
        self.checkpoints = self.path / 'checkpoints'
        self.evaluations = self.path / 'evaluations'


def check_name(name: str) -> str:
    """Returns the name of a run. Raises ConfigError unless it is plain and stays where it is put."""
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}', name) or '..' in name:
        raise ConfigError(
            f'run name {name[:150]!r}: must be 1 to 128 letters, digits, ".", "_" or "-", begin with a letter or '
            'digit, and not contain ".."'
        )
    return name


def check_path(path: epath.PathLike) -> AnyPath:
    """Returns `open_path`'s path. Raises its ConfigError, also for '..', control characters, a file in the way, and no
    path at all."""
    text = os.fspath(path)
    if not text.strip():
        raise ConfigError(f'--run_dir {text!r}: name a directory')
    opened = open_path(text, '--run_dir')
    parts = re.split(r'[/\\]', text)
    if '..' in parts:
        raise ConfigError(f"--run_dir {text!r}: must not contain '..'; write {_write_out(text)}")
    if any(ord(character) < 32 or ord(character) == 127 for character in text) or max(map(len, parts)) > 255:
        raise ConfigError(f'--run_dir {text[:150]!r}: must not contain control characters or parts over 255 characters')
    if not is_remote(opened) and (place := _find_file(os.path.abspath(text))):
        raise ConfigError(f'--run_dir {text}: {place} is a file; name a new folder or the folder of a run')
    return opened


def _find_file(path: str) -> str | None:
    """Returns the part of an absolute path that is there and no folder; None: a folder can be made there."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path if os.path.exists(path) and not os.path.isdir(path) else None


def _write_out(text: str) -> str:
    """Returns a path without '..', or says so where this is not certain."""
    is_plain = not is_remote(text) and '\\' not in text and text.isprintable()
    return repr(os.path.abspath(text)) if is_plain else 'the path without it'


def explain_absence(path: AnyPath) -> str:
    """Returns why `path` is no run, with the remedy."""
    if command := find_import(path):
        return f'holds weights and no run; make a run of them: `{command}`'
    return 'holds no config.gin, so it is not a run of lm train; name one, such as runs/quickstart'


def find_import(path: AnyPath) -> str | None:
    """Returns the command that makes a run of an export, or of another program's checkpoint; None: `path` is none."""
    if is_remote(path):
        return None
    is_file = path.suffix == '.gguf' and path.is_file()
    if not is_file and ((path / 'run.json').exists() or not any(path.glob('*.safetensors'))):
        return None
    name = re.sub(r'[^A-Za-z0-9_-]+', '-', path.stem if is_file else path.name).strip('-') or 'imported'
    return shlex.join(['lm', 'import', str(path), '--run_dir', f'runs/{name}'])


def read_text(path: epath.Path) -> str:
    """Returns the text of a file, or '' where the file is missing or not UTF-8."""
    try:
        return read_bytes(path).decode()
    except (OSError, ValueError):
        return ''
