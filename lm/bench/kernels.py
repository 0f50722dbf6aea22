"""`lm bench kernels`: the cycles of the TPU kernels on one generation or several, without a TPU."""

from lm.bench import results
from lm.bench.candidates import BASELINE
from lm.bench.options import KernelOptions
from lm.cost_model.kernels import HEAD_DIM, HEADS, LENGTH, KernelRow, Refused, find_generation, measure_kernels
from lm.errors import ConfigError


def bench_kernels(options: KernelOptions) -> None:
    """Prints a table with a heading, and writes JSON that says with which versions it was made."""
    output = results.Output(options.save)
    for topology in options.topology:  # all names, before minutes pass
        find_generation(topology)
    rows: list[KernelRow] = []
    refused: list[str] = []
    for topology in options.topology:
        try:
            rows += measure_kernels(topology, options.cases or None, options.parts)
        except Refused as error:
            rows += error.rows
            refused.append(str(error))
    if not rows:
        raise ConfigError('; '.join(refused))
    machine = results.machine()
    printer = results.Printer()
    printer.line(results.heading('lm bench kernels', machine, ('jax', 'jaxlib', 'libtpu')))
    window = '' if options.parts == 1 else f', one of {options.parts} parts of a window'
    printer.line(f'compiled, not run: {LENGTH:,} tokens{window}, {HEADS} heads of {HEAD_DIM}, bfloat16\n')
    printer.line(table(rows))
    settings = {'topologies': list(options.topology), 'length': LENGTH, 'heads': HEADS, 'head_dim': HEAD_DIM}
    settings |= {'parts': options.parts}
    output.write('kernels', machine, settings, rows)
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
