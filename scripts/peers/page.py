"""The page of `scripts.peers.compare`."""

from collections.abc import Sequence

from lm.text import make_markdown_table
from scripts.peers.operations import OPERATIONS
from scripts.peers.rows import OURS, Row

HEADING = """# Peers: TPU kernels of other packages beside ours

Nothing here was measured on a TPU. Each call was compiled for one core of a described chip, forward and backward. Its
costs were read from the compiled program. `python -m scripts.peers.compare --help` says how to repeat a row.

- **kernels**: static cycles inside hand-written kernels per token and head, without waits for memory.
- **around**: cycles outside of them. The first number is our model, bytes ÷ bandwidth or products ÷ peak. The second
  one has XLA's estimates where these are more.
- **peer ÷ lm**: first kernels and our model around them, then kernels and XLA's estimates. Above 1 we are ahead.
- **Inputs**: one sequence, [B, L, H, D] in bfloat16, with log factors and gates in float32 given. A package that wants
  another order pays for it around its kernels. Queries and keys of delta rules are normalized by the package.
- **work**: how the peer's work differs from ours; empty: equal work.
- A kernel with loops inside counts each loop once. Its cycles are too few then, and the row says so.
- On v7x SparseCores copy arrays to other layouts. XLA estimates no cycles of these, so both numbers have their bytes.
- A call that is compiled alone has its arguments in JAX's usual order: with heads of 128 the channel is last, and our
  kernels read tokens last. In a compiled step (`v6e-qwen3.5-9b` of `published_steps.py`) they read what short
  convolutions wrote, without such copies.
- XMA has no package. A file for `--adapter` called its sources, and is not in the tree.
"""
COLUMNS = ['chip', 'heads', 'tokens', 'package', 'kernels', 'around', 'MiB', 'HBM bytes', 'peer ÷ lm', 'work']


def make_page(rows: Sequence[Row]) -> str:
    """Returns Markdown: a table per operation, and the versions."""
    parts = [HEADING]
    for name, operation in OPERATIONS.items():
        if found := [row for row in rows if row.operation == name]:
            parts += [f'\n## {operation.title[0].upper()}{operation.title[1:]}\n', make_table(found)]
    parts += ['\n## Where a peer of equal work is ahead\n', *(list_behind(rows) or ['In no row.'])]
    versions = sorted({f'{row.peer} {row.version}' for row in rows if row.version})
    compilers = '; '.join(sorted({row.compiler for row in rows}))
    return '\n'.join([*parts, f'\nCompilers: {compilers}. Versions:\n', *(f'- {version}' for version in versions), ''])


def list_behind(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each row of equal work whose peer needs fewer cycles by one of the two sums."""
    lines = []
    for row, ours in pair_rows(rows):
        theirs, base = row.figures, ours.figures
        if theirs is None or base is None or row.differs or theirs.looping or theirs.uncounted:
            continue
        sums = {
            'with our model': (theirs.kernels + theirs.model) / (base.kernels + base.model),
            "with XLA's estimates": theirs.total / base.total,
        }
        if found := [f'{ratio:.2f} {how}' for how, ratio in sums.items() if ratio < 1]:
            costs = {'inside kernels': theirs.kernels - base.kernels, 'around them': theirs.estimate - base.estimate}
            where = ' and '.join(place for place, more in costs.items() if more < 0)
            call = f'{OPERATIONS[row.operation].title}, {row.heads.replace("x", " × ")}, {row.length:,} tokens'
            lines.append(f'- {row.peer}, {call}, {row.generation}: {", ".join(found)}. It has less {where}.')
    return lines


def pair_rows(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Returns each row of a peer beside our row of the same call, by the same compiler."""
    ours = {(row.call, row.compiler): row for row in rows if row.peer == OURS}
    peers = (row for row in rows if row.peer != OURS)
    return [(row, ours[row.call, row.compiler]) for row in peers if (row.call, row.compiler) in ours]


def make_table(rows: Sequence[Row]) -> str:
    """Returns the table of one operation: our row of each call, and the peers' rows below it."""
    ours = {(row.call, row.compiler): row for row in rows if row.peer == OURS}
    calls = dict.fromkeys((row.call, row.compiler) for row in sorted(rows, key=lambda row: (row.generation, row.call)))
    lines = []
    for call in calls:
        of_call = [row for row in rows if (row.call, row.compiler) == call]
        for row in sorted(of_call, key=lambda row: row.peer != OURS):
            lines.append(make_line(row, ours.get(call)))
    return make_markdown_table(lines, COLUMNS)


def make_line(row: Row, ours: Row | None) -> list[str]:
    """Returns the cells of a row, beside our row of the same call."""
    begin = [row.generation, row.heads.replace('x', ' × '), f'{row.length:,}', row.peer]
    found = row.figures
    if found is None:
        return [*begin, '', '', '', '', '', row.reason.replace('|', '/')]
    work = [row.differs] if row.differs else []
    work += [f'not counted: {", ".join(found.uncounted)}'] if found.uncounted else []
    work += [f'loops inside: {", ".join(found.looping)}'] if found.looping else []
    ratio = ''
    is_counted = not found.uncounted and not found.looping
    if row.peer != OURS and is_counted and ours is not None and ours.figures is not None:
        base = ours.figures
        ratio = f'{(found.kernels + found.model) / (base.kernels + base.model):.2f}, {found.total / base.total:.2f}'
    around = f'{found.model:.1f} to {found.estimate:.1f}'
    memory = f'{found.temporaries_mib:,.0f}'
    return [*begin, f'{found.kernels:.1f}', around, memory, f'{found.hbm_bytes:,.0f}', ratio, '; '.join(work)]
