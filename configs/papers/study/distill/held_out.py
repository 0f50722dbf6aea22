#!/usr/bin/env python3
"""Scores texts that no model has seen: what a converted model lost, beside its teacher.

    python configs/papers/study/distill/held_out.py runs/teacher runs/student --texts FOLDER [--length 512]

The script prints a Markdown row per run, with the nats per token of each file of FOLDER. A text is cut into windows of
`--length` tokens, as `lm evaluate` cuts a split.
"""

import argparse
import pathlib
import sys

import lm
from lm.errors import LmError
from lm.text import make_markdown_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='RUN')
    parser.add_argument('--texts', required=True, type=pathlib.Path, metavar='FOLDER', help='holds .txt files')
    parser.add_argument('--length', default=512, type=int, metavar='N', help='tokens of a window; default: 512')
    arguments = parser.parse_args()
    files = sorted(arguments.texts.glob('*.txt'))
    if not files:
        print(f'held_out: --texts {arguments.texts}: has no .txt files', file=sys.stderr)
        return 2
    rows, windows = [], [f'evaluate.context_length = {arguments.length}', 'evaluate.batch_size = 1']
    try:
        for name in arguments.runs:
            run = lm.load(name, gin_params=windows)
            rows.append([name, *(f'{run.score(file.read_text()).nats.mean():.3f}' for file in files)])
    except LmError as error:
        print(f'held_out: {error}', file=sys.stderr)
        return error.exit_code
    print(make_markdown_table(rows, ['nats per token', *(file.stem for file in files)]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
