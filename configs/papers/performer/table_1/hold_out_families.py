#!/usr/bin/env python3
"""Splits TrEMBL as Performer does (App. C.1, Table 1): families of Pfam are held out, and copies left out.

    python configs/papers/performer/table_1/hold_out_families.py trembl.fasta.gz regions.tsv.gz data/trembl

    lm prepare --gin_file data/proteins.gin --set fasta.path=data/trembl/known --set data.path=data/proteins

    lm prepare --gin_file data/proteins.gin --set fasta.path=data/trembl/held_out --set data.path=data/held_out

UniProt and Pfam distribute both files, uniprot_trembl.fasta.gz and Pfam-A.regions.uniprot.tsv.gz. The second says
which protein has regions of which family. The script writes known/{train,validation,test}.fasta and
held_out/test.fasta, and prints Table 1 with the paper's numbers. With `evaluate.sets = {'ood': 'data/held_out@test'}`
runs are evaluated on the held-out families. A hash of its letters puts a sequence into its split, so the order of the
file does not matter. The hashes of all different sequences stay in memory: by estimate 10 GB for TrEMBL.
"""

import argparse
import array
import contextlib
import gzip
import hashlib
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from lm.text import make_markdown_table

FAMILIES = frozenset(
    f'PF{number}'
    for number in (
        *('18369', '04680', '17988', '12325', '03272', '03938', '17724', '10696', '11968', '04153'),
        *('06173', '12378', '04420', '10841', '06917', '03492', '06905', '15340', '17055', '05318'),
    )
)
"""The families that the paper holds out (App. C.1)."""
PUBLISHED = {  # split → sequences; shortest, longest, mean, standard deviation and median of their lengths (Table 1)
    'train': (104_863_744, 2, 74_488, 353.09, 311.16, 289.0),
    'validation': (102_400, 7, 11_274, 353.62, 307.42, 289.0),
    'test': (1_033_216, 8, 32_278, 353.96, 312.23, 289.0),
    'held out': (29_696, 24, 4_208, 330.96, 269.86, 200.0),
}
KNOWN = ('validation', 'test', 'train')
LONG = 8192
"""Tokens of a window of the long task; a token ends each sequence."""


def read_fasta(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields name and letters of each sequence."""
    name, letters = '', []
    for line in (line.strip() for line in lines):
        if line.startswith('>'):
            if letters:
                yield name, ''.join(letters)
            name, letters = line[1:], []
        elif line:
            letters.append(line.upper())
    if letters:
        yield name, ''.join(letters)


def read_held_out(lines: Iterable[str]) -> set[str]:
    """Returns the accessions of proteins with a region of a held-out family. Raises ValueError for another table."""
    rows = (line.rstrip('\n').split('\t') for line in lines)
    heading = next(rows, [])
    try:
        accession, family = heading.index('uniprot_acc'), heading.index('pfamA_acc')
    except ValueError:
        raise ValueError('its first line names no columns uniprot_acc and pfamA_acc') from None
    return {row[accession] for row in rows if row[family].partition('.')[0] in FAMILIES}


def choose_split(letters: str) -> str:
    """Returns the split of a known sequence, in the shares of the paper."""
    place = int.from_bytes(hashlib.sha256(letters.encode()).digest()[:8], 'big') / 2**64
    counts = [PUBLISHED[split][0] for split in KNOWN]
    edges = np.cumsum(counts) / sum(counts)
    return KNOWN[int(np.searchsorted(edges, place, side='right'))]


def split(sequences: Iterable[tuple[str, str]], held_out: set[str], out: pathlib.Path) -> Mapping[str, Sequence[int]]:
    """Writes the sequences, each once, and returns split → their lengths."""
    lengths, seen = {name: array.array('I') for name in PUBLISHED}, set()
    with contextlib.ExitStack() as stack:
        files = {}
        for name in PUBLISHED:
            path = out / ('held_out/test.fasta' if name == 'held out' else f'known/{name}.fasta')
            path.parent.mkdir(parents=True, exist_ok=True)
            files[name] = stack.enter_context(path.open('w'))
        for name, letters in sequences:
            digest = hashlib.blake2b(letters.encode(), digest_size=8).digest()
            if digest in seen:
                continue
            seen.add(digest)
            accession = (name.split('|')[1:2] or name.split()[:1] or [''])[0]
            chosen = 'held out' if accession in held_out else choose_split(letters)
            lengths[chosen].append(len(letters))
            files[chosen].write(f'>{name}\n{letters}\n')
    return lengths


def describe(lengths: Mapping[str, Sequence[int]]) -> str:
    """Returns Table 1: a row of ours below each row of the paper."""
    rows = []
    for name, published in PUBLISHED.items():
        n = np.array(lengths[name] or [0], np.int64)
        ours = len(lengths[name]), int(n.min()), int(n.max()), n.mean(), n.std(), np.median(n)
        for who, (count, low, high, *figures) in (('the paper', published), ('ours', ours)):
            texts = [f'{figure:.2f}' for figure in figures]
            rows.append([name, who, f'{count:,}', f'{low:,}', f'{high:,}', *texts])
    headings = ['split', '', 'sequences', 'shortest', 'longest', 'mean', 'deviation', 'median']
    windows = {name: (sum(lengths[name]) + len(lengths[name])) // LONG for name in ('train', 'validation')}
    return (
        f'{make_markdown_table(rows, headings, left=2)}\n\nwindows of {LONG:,}: {windows["train"]:,} (the paper: '
        f'4,532,224) for training, {windows["validation"]:,} (4,096) for validation'
    )


def open_text(path: pathlib.Path) -> Iterable[str]:
    """Opens a text file, plain or gzipped."""
    return gzip.open(path, 'rt') if path.suffix == '.gz' else path.open()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('trembl', type=pathlib.Path, help='uniprot_trembl.fasta[.gz]')
    parser.add_argument('regions', type=pathlib.Path, help='Pfam-A.regions.uniprot.tsv[.gz]')
    parser.add_argument('out', type=pathlib.Path, help='the folder to write')
    arguments = parser.parse_args(argv)
    try:
        held_out = read_held_out(open_text(arguments.regions))
        if not held_out:
            parser.error(f'{arguments.regions}: no protein has a region of the 20 families; take the whole file')
        lengths = split(read_fasta(open_text(arguments.trembl)), held_out, arguments.out)
    except OSError as error:
        parser.error(f'{error.filename}: {error.strerror or error}')
    except ValueError as error:
        parser.error(f'{arguments.regions}: {error}')
    print(describe(lengths))
    return 0


if __name__ == '__main__':
    sys.exit(main())
