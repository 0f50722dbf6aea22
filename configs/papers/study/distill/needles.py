#!/usr/bin/env python3
"""Scores needles in a haystack of several lengths: what a converted model recalls, beside its teacher.

    python configs/papers/study/distill/needles.py runs/teacher runs/student [--lengths 1024,2048] [--samples 8]
        [--seed 1]

The script prints a Markdown row per run: the right samples, and the nats per token of the numbers
(`lm.inference.needles`).
"""

import argparse
import sys

import lm
from lm.errors import LmError
from lm.inference.needles import describe_needles, find_needles
from lm.text import make_markdown_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='RUN')
    parser.add_argument('--lengths', default='1024,2048,4096,8192', metavar='N,…', help='tokens of a text')
    parser.add_argument('--samples', type=int, default=8, metavar='N', help='of each length; default: 8')
    parser.add_argument('--seed', type=int, default=0, help='of the numbers; default: 0')
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(',')]
    rows = []
    try:
        for name in arguments.runs:
            run = lm.load(name)
            cells = []
            for length in lengths:
                cells.append(describe_needles(find_needles(run, length, arguments.samples, arguments.seed)))
                print(f'{name} {length}: {cells[-1]}', file=sys.stderr, flush=True)
            rows.append([name, *cells])
    except LmError as error:
        print(f'needles: {error}', file=sys.stderr)
        return error.exit_code
    print(make_markdown_table(rows, ['right, nats', *(f'{length:,}' for length in lengths)]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
