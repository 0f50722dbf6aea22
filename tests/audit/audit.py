"""Compares `lm` with public code and prints a table; `scripts/audit.sh` runs it in an environment of its own.

    python tests/audit/audit.py [--markdown] [--only WORD]

It exits with 1 if a difference exceeds its tolerance. Single and double precision run in separate processes.
"""

import argparse
import json
import os
import subprocess
import sys

FILES = ('attention', 'recurrences', 'blocks', 'losses', 'runs')


def measure(bits: int, only: str) -> list[dict]:
    """Returns the rows that this precision can compute."""
    import importlib
    import traceback

    import ledger
    import numpy as np
    import torch

    torch.manual_seed(0)
    sys.argv = sys.argv[:1]  # tokamax reads it
    for name in FILES:
        importlib.import_module(name)
    if bits == 64:
        ledger.widen()
    rows = []
    for one in ledger.COMPARISONS:
        if bits not in one.bits or only not in f'{one.what} {one.against}':
            continue
        try:
            apart, count = ledger.difference(one.pairs(np.dtype(f'float{bits}')))
        except Exception:  # a row that raises an error has failed; the others go on
            traceback.print_exc()
            apart, count = np.inf, 0
        tolerance = 0.0 if one.exact else ledger.TOLERANCES[bits]
        rows.append({'what': one.what, 'against': one.against, 'numbers': count, 'bits': bits,
                     'difference': apart, 'tolerance': tolerance, 'passes': bool(apart <= tolerance)})  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def print_table(rows: list[dict], markdown: bool) -> None:
    """Prints one line per comparison, with its result at each precision."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row['what'], row['against']), {'numbers': f'{row["numbers"]:,}'})
        found = '0' if not row['difference'] else f'{row["difference"]:.1e}'
        line[f'float{row["bits"]}'] = found if row['passes'] else f'{found} FAILS'
    headings = ('ours', 'against', 'numbers', 'float32', 'float64')
    cells = [[*names, *(line.get(name, '') for name in headings[2:])] for names, line in lines.items()]
    widths = [0 if markdown else max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    edge, between = ('| ', ' | ') if markdown else ('', '  ')
    for i, line in enumerate([headings, *cells]):
        print((edge + between.join(f'{c:{w}}' for c, w in zip(line, widths, strict=True)) + edge[::-1]).rstrip())
        if markdown and i == 0:
            print('| --- | --- | ---: | ---: | ---: |')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--markdown', action='store_true', help='the table as in docs/lab/audit.md')
    parser.add_argument('--only', default='', help='comparisons that have this in their names')
    parser.add_argument('--bits', type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bits:
        json.dump(measure(arguments.bits, arguments.only), sys.stdout)
        return 0
    rows = []
    for bits in (32, 64):
        environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_ENABLE_X64': str(int(bits == 64))}
        command = [sys.executable, __file__, '--bits', str(bits), '--only', arguments.only]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        rows += json.loads(done.stdout)
    print_table(rows, arguments.markdown)
    failed = sum(not row['passes'] for row in rows)
    print(f'\n{len(rows)} comparisons, {failed} failed')
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
