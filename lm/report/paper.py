"""The papers' tables (`lm.report.paper_tables`) beside ours: which cells a run repeats, what differs, both numbers."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lm.report.paper_tables import CONTEXTS, PG19, SOFTMAX, SPEED, TABLES, WIKI40B, PaperTable
from lm.runs.records import Run
from lm.text import digits, markdown_table, short

__all__ = ['CONTEXTS', 'PG19', 'SOFTMAX', 'SPEED', 'TABLES', 'WIKI40B', 'PaperTable']

CORPORA = ('pg19', 'wiki40b', 'c4')
SHORTEST = 100
"""Steps of a run whose perplexity is compared; shorter ones measure speed."""
FEWEST_INTERVALS = 10
"""Logged intervals behind a speed that is compared."""
SIZES = {768: ('Small', 12), 1024: ('Medium', 24), 1280: ('Large', 36)}
"""Width of a model of Tables 1 and 6 → what its group is called, and the layers of rows that name none."""


class Repeats(NamedTuple):
    """A mechanism whose fields have these values repeats this row, in which {field} stands for a field's value."""

    mechanism: str
    fields: dict[str, Any]
    row: str


SKETCH = {'degree': 4, 'per_head': False}
DRAFT_SKETCH = Repeats(
    'polysketch', {'sketch': 'srht', 'sketch_size': 32, 'degree': 4, 'per_head': True, 'local': False}, 'Polysketch'
)
TEXT = (
    Repeats('softmax', {'window': None}, SOFTMAX),
    Repeats('polynomial', {}, 'Polynomial (deg={degree})'),
    Repeats('polysketch', SKETCH, 'Polysketch ({sketch}{local}, r = {sketch_size})'),
    Repeats('performer', {'features': 'positive'}, 'Performer ({n_features} features)'),
)
C4 = (
    Repeats('softmax', {'window': None}, 'Softmax'),
    Repeats('polynomial', {}, 'Polynomial (degree {degree})'),
    Repeats('polysketch', SKETCH, 'Polysketch ({sketch}{local}{layers}, r = {sketch_size})'),
)
DRAFT = (
    Repeats('softmax', {'window': None}, 'Softmax'),
    Repeats('polynomial', {'degree': 4}, 'Polynomial'),
    DRAFT_SKETCH,
)
TASK = (Repeats('softmax', {'window': None}, 'Softmax'), Repeats('polynomial', {}, 'Polynomial (degree={degree})'))
ROWS: dict[str, tuple[Repeats, ...]] = {
    'pg19': TEXT,
    'wiki40b': TEXT,
    'speed': TEXT,
    'c4': C4,
    'c4_speed': C4,
    'copying': (
        *TASK,
        Repeats('polysketch', SKETCH | {'sketch': 'learned', 'sketch_size': 32}, 'Polysketch ({sketch}{local})'),
    ),
    'induction': (
        *TASK,
        Repeats('polysketch', SKETCH | {'sketch': 'learned', 'local': False}, 'Polysketch (r = {sketch_size})'),
    ),
    'recall': (
        Repeats('llops', {'n_features': 256}, 'LLoPS (p = {degree})'),
        Repeats('taylor', {'feature_dim': 16}, 'BASED'),
    ),
    'draft_wiki40b': DRAFT,
    'draft_pg19': DRAFT,
    'draft_speed': (Repeats('softmax', {'window': None}, 'FlashAttention'), *DRAFT[1:]),
}
"""Table → which mechanisms repeat its rows."""
TASKS = {'selective_copying': 'copying', 'induction_heads': 'induction', 'associative_recall': 'recall'}
WORDS = {('sketch', 'gaussian'): 'random', ('local', True): ' + local', ('local', False): ''}
"""(field, value) → what it is called in a row, if that is not the value."""
AXES = {'context': 'train.context_length', 'steps': 'train.steps', 'width': 'model.d_model'}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of the table `lm.report.paper_tables.TABLES[table]`."""

    table: str
    group: str
    row: str
    column: int


# ------------------------------------------------------------------------------------------------ what a run repeats


def label_of(run: Run) -> str | None:
    """The attention of a run in the words of Tables 2 to 4, for the mechanisms that they have, of any size."""
    return _row(run, TEXT)


def row_of(run: Run) -> str | None:
    """The row of Tables 2 to 4 whose attention a run has, as they print it; None for all others."""
    label = label_of(run)
    return label if any(label in rows for rows in PG19.groups.values()) else None


def corpus_of(run: Run) -> str | None:
    """The corpus among CORPORA that a run was trained on, by the name of its store or its source."""
    hints = ' '.join(run.config.get(name, '') for name in ('data.path', 'tfds.name', 'text_files.path', 'jsonl.path'))
    hints = hints.lower().replace('-', '').replace('_', '')
    return next((corpus for corpus in CORPORA if corpus in hints), None)


def cells_of(run: Run, corpus: str | None = None, draft: bool = False) -> list[Cell]:
    """The cells whose attention, task or text, and column a run has; `differences` says whether it repeats them.

    Args:
        corpus: the text that the run was trained on; None: see `corpus_of`.
        draft: whether runs with the batches of PolySketchFormer's first draft belong to its tables.
    """
    task = run.config.get('data.task', 'None').strip('@()').rpartition('/')[2]
    corpus = corpus or corpus_of(run)
    if task != 'None':
        keys = [TASKS.get(task)]
    elif draft and run.value('train.tokens_per_step') == draft_tokens(run.value('train.context_length')):
        keys = [f'draft_{corpus}', 'draft_speed']
    else:
        keys = ['c4', 'c4_speed'] if corpus == 'c4' else [corpus, 'speed']
    found = []
    for key in keys:
        table = TABLES.get(key)
        if table is None or (table.measure == 'perplexity' and run.total_steps < SHORTEST):
            continue
        column, size = run.value(AXES[table.axis]), SIZES.get(run.value('model.d_model'), ('no',))[0]
        for group, rows in table.groups.items():
            row = _row(run, ROWS[key])
            sized = any(name in group for name, _ in SIZES.values())
            if row not in rows and sized:  # a model of other layers than the rows name stands apart
                row = _row(run, ROWS[key], layers='')
            if row in rows and column in table.columns and (not sized or size in group):
                found.append(Cell(key, group, row, column))
    return found


def differences(run: Run, cell: Cell, corpus: str | None = None) -> list[str]:
    """In what a run differs from those of a cell, each as 'layers 1 (paper: 12)'; empty: it repeats the cell."""
    table = TABLES[cell.table]
    wanted = dict(table.settings)
    if layers := re.search(r'(\d+) layers', cell.row) or re.search(r'(\d+) layers', cell.group):
        wanted['model.n_layers'] = int(layers[1])
    if context := re.search(r'context (\d+)', cell.group):
        wanted['train.context_length'] = int(context[1])
    found = []
    for binding, value in wanted.items():
        own = run.value(binding)
        if own != value:
            found.append(f'{SETTINGS[binding]} {own if own is None else format(own, ",")} (paper: {value:,})')
    text = next((name for name in CORPORA if cell.table in (name, f'draft_{name}')), None)
    own = corpus_of(run)
    if text and own != text and (own or corpus != text):
        found.append(f'data {run.config.get("data.path")} (paper: {text})')
    return found


SETTINGS = {
    'model.n_layers': 'layers',
    'model.d_model': 'width',
    'model.n_heads': 'heads',
    'train.context_length': 'context',
    'train.tokens_per_step': 'tokens a step',
    'train.steps': 'steps',
}


def draft_tokens(context: int) -> int:
    """Tokens a step in the draft: 32 devices with 8, 4, 2, 1 windows at 512, 1k, 2k, 4k, and one from there on (§5)."""
    return 32 * max(context, 4096)


def is_draft_sketch(run: Run) -> bool:
    """Whether a run has the draft's polysketch attention: SRHT, r = 32, a sketch a head, no exact blocks."""
    return _row(run, (DRAFT_SKETCH,)) is not None


def _row(run: Run, entries: Sequence[Repeats], layers: str | None = None) -> str | None:
    """The row that a run's attention has by these entries; `layers`: in place of the model's own in such a row."""
    if len(run.mechanisms()) != 1:
        return None
    (scoped,) = run.mechanisms()
    for mechanism, fields, row in entries:
        if scoped.rpartition('/')[2] == mechanism and all(run.value(f'{scoped}.{f}') == v for f, v in fields.items()):
            names = re.findall(r'{(\w+)}', row)
            values = {name: run.value(f'{scoped}.{name}') for name in names}
            values = {name: WORDS.get((name, value), value) for name, value in values.items()}
            own = run.value('model.n_layers')
            usual = own == SIZES.get(run.value('model.d_model'), ('', own))[1]
            return row.format(
                **values | {'layers': layers if layers is not None else '' if usual else f', {own} layers'}
            )
    return None


# --------------------------------------------------------------------------------------------------- both numbers


def compare(
    runs: Sequence[Run], measures: Mapping[str, Callable[[Run], float | None]], corpus: str | None = None
) -> list[dict[str, Any]]:
    """The cells of every table of which one is repeated: the paper's number, and the mean of the runs that repeat it.
    Then, a row each, the runs that come near a cell, with what differs; speeds of other devices than most are among
    them.

    Args:
        measures: what the perplexity and the accuracy, in percent, of a run are.
        corpus: see `cells_of`.
    """
    same: dict[Cell, list[Run]] = {}
    apart: list[tuple[Cell, Run, list[str]]] = []
    draft = any(map(is_draft_sketch, runs))
    found = [(run, cell, _obstacles(run, cell, corpus)) for run in runs for cell in cells_of(run, corpus, draft)]
    kinds: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for run, cell, obstacles in found:
        if not obstacles:
            kinds[cell.table][devices_of(run)] += 1
    for run, cell, obstacles in found:
        is_speed = TABLES[cell.table].measure == 'steps_per_second'
        if not obstacles and is_speed and devices_of(run) != kinds[cell.table].most_common(1)[0][0]:
            obstacles = ['other devices than most runs']
        if obstacles:
            apart.append((cell, run, obstacles))
        else:
            same.setdefault(cell, []).append(run)
    rows = []
    for key, table in TABLES.items():
        measure = measures.get(table.measure) or (lambda run, key=key: _steps_per_second(run, key))
        if any(cell.table == key for cell in same):
            for group, labels in table.groups.items():
                for cell in (Cell(key, group, row, column) for row in labels for column in table.columns):
                    rows.append(_row_of_csv(cell, same.get(cell, []), measure, ''))
        for cell, run, obstacles in apart:
            if cell.table == key:
                rows.append(_row_of_csv(cell, [run], measure, '; '.join(obstacles)))
    return rows


def _obstacles(run: Run, cell: Cell, corpus: str | None) -> list[str]:
    """Why a run does not count for a cell: settings that differ, or too little measured."""
    found = differences(run, cell, corpus)
    if TABLES[cell.table].measure != 'steps_per_second':
        if run.step < run.total_steps:
            found.append(f'at step {run.step:,} of {run.total_steps:,}')
    elif len(run.speeds) < FEWEST_INTERVALS:
        found.append(f'{len(run.speeds)} logged intervals (at least {FEWEST_INTERVALS})')
    return found


def _row_of_csv(
    cell: Cell, members: Sequence[Run], measure: Callable[[Run], float | None], differs: str
) -> dict[str, Any]:
    table = TABLES[cell.table]
    values = [value for run in members if (value := measure(run)) is not None]
    return {
        'table': cell.table,
        'group': cell.group,
        'row': cell.row,
        'axis': table.axis,
        'column': cell.column,
        'measure': table.measure,
        'paper': table.value(cell.group, cell.row, cell.column),
        'ours': statistics.fmean(values) if values else None,
        'runs': ' '.join(run.name for run in members),
        'devices': '; '.join(sorted({devices_of(run) for run in members})),
        'differs': differs,
    }


def without_match(rows: Sequence[dict[str, Any]], corpus: str | None) -> str:
    """A line where no run repeats the table of the text `corpus` that was asked for, else ''."""
    if corpus not in TABLES or any(row['table'] == corpus and not row['differs'] for row in rows):
        return ''
    apart = sum(row['table'] == corpus for row in rows)
    near = f'; {apart} stand apart in report.md, with what differs' if apart else ''
    return f'No run repeats a cell of {TABLES[corpus].title}{near}.'


def markdown(rows: Sequence[dict[str, Any]], corpus: str | None = None) -> list[str]:
    """The tables in the papers' form, as lines: each cell the paper's number and ours; apart, what differs.

    Args:
        corpus: whose table was asked for; where no run repeats it, a line says so.
    """
    text = [missing, ''] if (missing := without_match(rows, corpus)) else []
    if not rows:
        return text
    text = ['## Beside the paper', '', *text]
    text += [
        'Each cell: the paper\'s number / ours, "–" where there is none. Ours are the runs above that have its '
        'layers, width, data, tokens a step and steps; the others stand apart, with what differs. Where a table says '
        "nothing else, the paper's models have 110M to 120M parameters.",
        '',
    ]
    for key in dict.fromkeys(row['table'] for row in rows):
        table = TABLES[key]
        same = [row for row in rows if row['table'] == key and not row['differs']]
        apart = [row for row in rows if row['table'] == key and row['differs']]
        text += [f'**{table.title}**, {table.unit}', '']
        if same:
            lines = []
            for group, labels in table.groups.items():
                lines.append([f'*{group}*', *[''] * len(table.columns)])
                for label in labels:
                    cells = [r for r in same if (r['group'], r['row']) == (group, label)]
                    lines.append(
                        [label, *(f'{_number(c["paper"], table.absent)} / {_number(c["ours"], "–")}' for c in cells)]
                    )
            text += [markdown_table(lines, ['', *map(short, table.columns)]), '']
            if table.measure == 'steps_per_second':
                text += [f'Ours on {"; ".join(sorted({row["devices"] for row in same} - {""}))}.', '']
        if apart:
            text += ['Apart, as they are not what the paper ran:', '']
            lines = [
                [
                    *(r[key] for key in ('runs', 'devices', 'differs', 'row')),
                    *(short(r['column']), _number(r['paper'], table.absent), _number(r['ours'], '–')),
                ]
                for r in apart
            ]
            text += [markdown_table(lines, ['run', 'on', 'differs', 'row', table.axis, 'paper', 'ours'], left=4), '']
    return text


def devices_of(run: Run) -> str:
    """'32 × TPU v5 lite'."""
    return f'{run.info.get("device_count", "?")} × {run.info.get("device_kind", "?")}'


def _steps_per_second(run: Run, key: str) -> float | None:
    """Of the size that the steps of a table of speeds have."""
    size = TABLES[key].settings.get('train.tokens_per_step') or draft_tokens(run.value('train.context_length'))
    rate = run.tokens_per_second
    return rate / size if rate else None


def _number(value: float | None, absent: str) -> str:
    return absent if value is None else f'{value:.2f}' if value >= 0.1 else digits(value)
