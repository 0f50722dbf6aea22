#!/usr/bin/env python3
"""Writes texts whose parts stand twice: data from which a converted model learns to recall.

    python configs/papers/study/distill/copy_texts.py TEXTS COPIES [--characters 2000] [--passage 150]

COPIES gets the folders of TEXTS. Each text of train/ is cut into parts of `--characters`. Behind each part, its
passages of about `--passage` characters stand again, in random order. Other folders are copied as they are.
"""

import argparse
import pathlib
import random
import re
import shutil
import sys


def repeat_passages(text: str, characters: int, passage: int, draws: random.Random) -> str:
    """Returns the text with the passages of each part behind it, in random order."""
    parts = []
    for start in range(0, len(text), characters):
        part = text[start : start + characters]
        again = re.findall(rf'\S.{{{passage},}}?(?=\s)', part, re.DOTALL)
        draws.shuffle(again)
        parts += [part, *again]
    return '\n'.join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('texts', type=pathlib.Path, metavar='TEXTS')
    parser.add_argument('copies', type=pathlib.Path, metavar='COPIES')
    parser.add_argument('--characters', default=2000, type=int, metavar='N', help='of a part; default: 2000')
    parser.add_argument('--passage', default=150, type=int, metavar='N', help='characters of a passage; default: 150')
    arguments = parser.parse_args()
    paths = sorted((arguments.texts / 'train').glob('*.txt'))
    if not paths:
        print(f'copy_texts: {arguments.texts}: has no train/*.txt', file=sys.stderr)
        return 2
    partial = arguments.copies.with_name(f'{arguments.copies.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(arguments.texts, partial)
    draws = random.Random(0)
    for path in paths:
        text = repeat_passages(path.read_text(), arguments.characters, arguments.passage, draws)
        (partial / 'train' / path.name).write_text(text)
    partial.rename(arguments.copies)
    return 0


if __name__ == '__main__':
    sys.exit(main())
