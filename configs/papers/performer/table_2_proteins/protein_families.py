#!/usr/bin/env python3
"""Writes made-up proteins as FASTA: families of sequences that share a profile and conserved motifs.

    python configs/papers/performer/table_2_proteins/protein_families.py data/families.fasta
    lm prepare --gin_file configs/papers/performer/table_2_proteins/proteins_small.gin

The output is a pure function of the arguments. Each family is a profile model: a distribution over the 20 standard
amino acids at every position. Most distributions are near the frequencies of real proteins. The distributions of the
motifs are nearly certain: runs of 4 to 8 positions that all members have. The script draws a member position by
position. Between the motifs it leaves out or adds amino acids with the probability --indels, so that members differ
in length. Names look like UniProt's names and hold the family: >tr|F003M000127|F003_TOY Made-up family 3.

Models can learn three things: frequencies (which the empirical baseline knows, too), motifs from their beginnings,
and profiles from the family that the rest of a sequence shows. The sequences are no proteins: nothing folds, nothing
evolved.
"""

import argparse
import pathlib
import sys

import numpy as np

LETTERS = 'ACDEFGHIKLMNPQRSTVWY'
PER_CENT = '8.25 1.38 5.46 6.72 3.86 7.07 2.27 5.91 5.80 9.65 2.41 4.06 4.74 3.93 5.53 6.65 5.36 6.86 1.10 2.92'
BACKGROUND = np.array([float(number) for number in PER_CENT.split()])
BACKGROUND /= BACKGROUND.sum()
"""Share of each letter in UniProtKB/Swiss-Prot, by its published statistics."""
WIDTH = 60
"""Letters in a line, as in UniProt's files."""


class Family:
    """A profile model: the distribution of each position [positions, 20], and which positions belong to motifs."""

    def __init__(self, rng: np.random.Generator, length: int, motifs: int, sharpness: float):
        """`sharpness`: 0 leaves all positions outside motifs at the background, larger values spread them apart."""
        profile = BACKGROUND * np.exp(sharpness * rng.normal(size=(length, 20)))
        self.is_motif = np.zeros(length, bool)
        room = length // motifs
        for i in range(motifs):
            size = min(int(rng.integers(4, 9)), room)
            start = i * room + int(rng.integers(0, room - size + 1))
            self.is_motif[start : start + size] = True
            chosen = rng.choice(20, size=size, p=BACKGROUND)
            profile[start : start + size] = 0.05 * BACKGROUND + 0.95 * np.eye(20)[chosen]
        self.profile = profile / profile.sum(axis=1, keepdims=True)

    def member(self, rng: np.random.Generator, indels: float) -> str:
        """A sequence; each position outside motifs is left out, or followed by another letter, so often."""
        lots = rng.random((len(self.profile), 4))
        background = np.cumsum(BACKGROUND)
        own = np.minimum((np.cumsum(self.profile, axis=1) < lots[:, :1]).sum(axis=1), 19)
        other = np.minimum(np.searchsorted(background, lots[:, 1]), 19)
        letters = []
        for i, is_motif in enumerate(self.is_motif):
            if is_motif or lots[i, 2] >= indels:
                letters.append(LETTERS[own[i]])
            if not is_motif and lots[i, 3] < indels:
                letters.append(LETTERS[other[i]])
        return ''.join(letters)


def families(count: int, seed: int, sharpness: float = 0.8) -> list[Family]:
    """So many families of 60 to 140 positions with 2 to 4 motifs."""
    rng = np.random.default_rng([seed, 0])
    return [Family(rng, int(rng.integers(60, 141)), int(rng.integers(2, 5)), sharpness) for _ in range(count)]


def write(path: pathlib.Path, count: int, sequences: int, seed: int, indels: float, sharpness: float) -> int:
    """Writes `sequences` members of `count` families, in an order that mixes them; returns their amino acids."""
    models, rng, total = families(count, seed, sharpness), np.random.default_rng([seed, 1]), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', encoding='ascii') as file:
        for i, family in enumerate(rng.integers(0, count, size=sequences)):
            member = models[family].member(rng, indels)
            total += len(member)
            file.write(f'>tr|F{family:03}M{i:06}|F{family:03}_TOY Made-up family {family}\n')
            file.writelines(f'{member[at : at + WIDTH]}\n' for at in range(0, len(member), WIDTH))
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description='Writes made-up proteins as FASTA.')
    parser.add_argument('path', type=pathlib.Path, help='the file to write, such as data/families.fasta')
    parser.add_argument('--families', type=int, default=24, help='default: 24')
    parser.add_argument('--sequences', type=int, default=12_000, help='of all families together; default: 12,000')
    parser.add_argument('--seed', type=int, default=0, help='default: 0')
    parser.add_argument('--indels', type=float, default=0.05, help='insertions and deletions a position; default: 0.05')
    parser.add_argument('--sharpness', type=float, default=0.8, help='of profiles outside motifs; default: 0.8')
    arguments = parser.parse_args(argv)
    if min(arguments.families, arguments.sequences) < 1 or not 0 <= arguments.indels < 1 or arguments.sharpness < 0:
        parser.error('--families and --sequences must be at least 1, --indels in [0, 1), --sharpness at least 0')
    total = write(
        arguments.path, arguments.families, arguments.sequences, arguments.seed, arguments.indels, arguments.sharpness
    )
    print(
        f'{arguments.path}: {arguments.sequences:,} sequences of {arguments.families} families, {total:,} amino acids'
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
