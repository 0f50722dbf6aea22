"""Prints the cycles of the TPU kernels on one generation or several, without a TPU. It needs libtpu.

python -m scripts.kernels.cycles --topology v5e,v6e --save tests/data/kernels.json
"""

import argparse
import sys
from collections.abc import Sequence

from lm.bench import results
from lm.bench.candidates import BASELINE
from lm.errors import ConfigError, LmError
from scripts.kernels.measure import HEAD_DIM, HEADS, LENGTH, KernelRow, Refused, find_generation, measure_kernels


def print_cycles(topologies: Sequence[str], cases: Sequence[str], parts: int, save: str | None) -> None:
    """Prints a table with a heading, and writes JSON that says with which versions it was made.

    Raises ConfigError for an unknown name, before minutes pass, and at the end for cases that do not compile.
    """
    output = results.Output(save)
    for topology in topologies:
        find_generation(topology)
    rows: list[KernelRow] = []
    refused: list[str] = []
    for topology in topologies:
        try:
            rows += measure_kernels(topology, cases or None, parts)
        except Refused as error:
            rows += error.rows
            refused.append(str(error))
    if not rows:
        raise ConfigError('; '.join(refused))
    machine = results.machine()
    printer = results.Printer()
    printer.line(results.heading('cycles of kernels', machine, ('jax', 'jaxlib', 'libtpu')))
    window = '' if parts == 1 else f', one of {parts} parts of a window'
    printer.line(f'compiled, not run: {LENGTH:,} tokens{window}, {HEADS} heads of {HEAD_DIM}, bfloat16\n')
    printer.line(table(rows))
    settings = {'topologies': list(topologies), 'length': LENGTH, 'heads': HEADS, 'head_dim': HEAD_DIM}
    output.write('kernels', machine, settings | {'parts': parts}, rows)
    if refused:
        raise ConfigError('; '.join(refused))


def table(rows: list[KernelRow]) -> str:
    """Returns the rows as text, with the sums of forward and backward and their ratios to the baseline."""
    lines = [f'{"":32}{"gen":5}{"kernel":10}{"cycles":>9}{"matrix":>8}{"vector":>8}{"spills":>8}{"VMEM":>8}{"temp":>9}']
    for row in rows:
        lines.append(
            f'{row.case:32}{row.generation:5}{row.kernel:10}{row.cycles:9.2f}{row.matrix_unit:8.0%}{row.vector_unit:8.0%}'
            f'{row.spills:8}{row.vmem_mib:8.1f}{row.temporaries_mib:9.1f}'
        )
    lines.append(f'\n{"cycles per token and head":32}{"gen":5}{"sum":>10}{f"{BASELINE} / sum":>16}')
    sums = sum_cycles(rows)
    for (case, generation), cycles in sums.items():
        base = sums.get((BASELINE, generation))
        lines.append(f'{case:32}{generation:5}{cycles:10.2f}{f"{base / cycles:.1f}" if base else "":>16}')
    return '\n'.join(lines)


def sum_cycles(rows: list[KernelRow]) -> dict[tuple[str, str], float]:
    """Returns (case, generation) → cycles per token and head, forward plus backward."""
    result: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.case, row.generation)
        result[key] = result.get(key, 0.0) + row.cycles
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--topology', default='v5e', help='v4, v5e, v5p, v6e, v7x; with commas', metavar='NAMES')
    parser.add_argument('--parts', type=int, default=1, help='chips that share a window; default: 1', metavar='N')
    parser.add_argument('--save', help='also write everything to this file, as JSON', metavar='FILE')
    parser.add_argument('cases', nargs='*', help='which kernels; default: all', metavar='CASE')
    arguments = parser.parse_args(argv)
    try:
        print_cycles(arguments.topology.split(','), arguments.cases, arguments.parts, arguments.save)
    except LmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == '__main__':
    sys.exit(main())
