#!/usr/bin/env python3
"""Damages files of a format where that reaches new code of its reader, and fails at an answer that is not one line.

libFuzzer chooses the damage by the branches of `lm` that earlier damage reached; tests/damage.py draws it at random.
Needs the packages of the tests and `pip install atheris`. The file of a wrong answer lies in the folder of `--wrong`.

    python scripts/fuzz.py gguf --seconds 600
"""

import argparse
import os
import pathlib
import shutil
import sys
import tempfile

import atheris

TESTS = pathlib.Path(__file__).resolve().parents[1] / 'tests'
sys.path += [str(TESTS), *(str(TESTS / name) for name in ('data', 'interop'))]
READERS = ['lm.interop', 'lm.data', 'lm.errors']
"""The packages whose branches count."""
HEAD = 4096
"""The first bytes of a file, which are damaged: headers hold what matters."""
SECONDS, BYTES = 60, 6_000_000_000
"""The most that reading a small file may take."""

with atheris.instrument_imports(include=READERS, enable_loader_override=False):
    import test_damaged_files as checkpoints
    import test_damaged_sources as sources
from damage import tell_damage  # noqa: E402


def make_subject(kind: str, folder: pathlib.Path):
    """Writes a sound file or folder of a format; returns its path and the function that reads it."""
    path = folder / kind.replace(' ', '_')
    if kind in sources.SOURCES:
        write, make = sources.SOURCES[kind]
        path.mkdir()
        write(path)
        return path, lambda found: sources.read_documents(make(found))
    if kind in sources.TOKENIZERS:
        path.write_bytes(sources.TOKENIZERS[kind]())
        return path, sources.read_tokenizer
    return checkpoints.FORMATS[kind](path), checkpoints.read_all


def main() -> None:
    kinds = sorted([*sources.SOURCES, *sources.TOKENIZERS, *checkpoints.FORMATS])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('format', choices=kinds)
    parser.add_argument('--seconds', type=int, default=60, help='of the clock; default: 60')
    parser.add_argument('--wrong', default='.', help='the folder for a file with a wrong answer')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        # libFuzzer ends its process, and cleans up nothing.
        if not (child := os.fork()):
            run(arguments, pathlib.Path(name))
        status = os.waitpid(child, 0)[1]
    sys.exit(os.waitstatus_to_exitcode(status))


def run(arguments: argparse.Namespace, scratch: pathlib.Path) -> None:
    """Damages the files of a format, one at a time, for the given time."""
    for name in ('whole', 'copy', 'corpus'):
        (scratch / name).mkdir()
    whole, read = make_subject(arguments.format, scratch / 'whole')
    copy = scratch / 'copy' / whole.name
    shutil.copytree(whole, copy) if whole.is_dir() else shutil.copy(whole, copy)
    paths = sorted(path for path in copy.rglob('*') if path.is_file()) or [copy]
    contents = [path.read_bytes() for path in paths]
    for i, sound in enumerate(contents):
        (scratch / 'corpus' / str(i)).write_bytes(bytes([i]) + sound[:HEAD])

    def check(damage: bytes) -> None:
        """Reads the format with the file that the first byte names, whose head the others are."""
        if not damage:
            return
        which = damage[0] % len(paths)
        paths[which].write_bytes(damage[1:] + contents[which][HEAD:])
        said = tell_damage(read, copy)
        assert said is None or (said and '\n' not in said), said
        paths[which].write_bytes(contents[which])

    options = {
        'max_total_time': arguments.seconds,
        'timeout': 2 * SECONDS,
        'rss_limit_mb': BYTES // 10**6,
        'max_len': 2 * HEAD,
        'len_control': 0,
        'artifact_prefix': f'{arguments.wrong}/',
    }
    atheris.Setup([sys.argv[0], str(scratch / 'corpus'), *(f'-{k}={v}' for k, v in options.items())], check)
    atheris.Fuzz()


if __name__ == '__main__':
    main()
