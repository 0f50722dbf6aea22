"""The papers' tables (`lm.report.paper_tables`) beside ours: which cells a run repeats, and both numbers."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm.plots import short
from lm.report.paper_tables import CONTEXTS, PG19, SOFTMAX, SPEED, TABLES, WIKI40B, PaperTable
from lm.runs.records import Run

__all__ = ['CONTEXTS', 'PG19', 'SOFTMAX', 'SPEED', 'TABLES', 'WIKI40B', 'PaperTable']

CORPORA = ('pg19', 'wiki40b', 'c4')
SHORTEST = 100
"""Steps of a run whose perplexity is compared; shorter ones measure speed."""
SIZES = {768: ('Small', 12), 1024: ('Medium', 24), 1280: ('Large', 36)}
"""Width of a model of Tables 1 and 6 → how its group begins, and the layers that its rows have where none are named."""


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
    if len(run.mechanisms()) != 1:
        return None
    (name,) = run.mechanisms()

    def value(field: str):
        return run.value(f'{name}.{field}')

    match name.rpartition('/')[2]:
        case 'softmax' if value('window') is None:
            return SOFTMAX
        case 'polynomial':
            return f'Polynomial (deg={value("degree")})'
        case 'polysketch' if value('degree') == 4 and not value('per_head'):
            kind = {'gaussian': 'random', 'learned': 'learned'}.get(value('sketch'), value('sketch'))
            return f'Polysketch ({kind}{" + local" if value("local") else ""}, r = {value("sketch_size")})'
        case 'performer' if value('features') == 'positive':
            return f'Performer ({value("n_features")} features)'
    return None


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
    """The cells that a run repeats.

    Args:
        corpus: the text that the run was trained on; None: see `corpus_of`.
        draft: whether runs with the batches of PolySketchFormer's first draft belong to its tables.
    """
    task = run.config.get('data.task', 'None')
    if task != 'None':
        places = _task_places(run, task.strip('@()').rpartition('/')[2])
    elif draft and run.value('train.tokens_per_step') == draft_tokens(run.value('train.context_length')):
        places = _draft_places(run, corpus or corpus_of(run))
    elif (corpus or corpus_of(run)) == 'c4':
        places = _c4_places(run)
    else:
        places = _text_places(run, corpus or corpus_of(run))
    found = []
    for key, begins, row, column in places:
        table = TABLES[key]
        if table.measure != 'perplexity' or run.total_steps >= SHORTEST:
            groups = [g for g, rows in table.groups.items() if g.startswith(begins) and row in rows]
            found += [Cell(key, group, row, column) for group in groups if column in table.columns]
    return found


def draft_tokens(context: int) -> int:
    """Tokens a step in the draft: 32 devices with 8, 4, 2, 1 windows at 512, 1k, 2k, 4k, and one from there on (§5)."""
    return 32 * max(context, 4096)


def is_draft_sketch(run: Run) -> bool:
    """Whether a run has the draft's polysketch attention: SRHT, r = 32, a sketch a head, no exact blocks."""
    wanted = {'sketch': 'srht', 'sketch_size': 32, 'degree': 4, 'per_head': True, 'local': False}
    return [n.rpartition('/')[2] for n in run.mechanisms()] == ['polysketch'] and all(
        run.value(f'{run.mechanisms()[0]}.{field}') == value for field, value in wanted.items()
    )


Places = list[tuple[str, str, str, int]]
"""Table, beginning of the group, row, column; those that a table does not have are dropped."""


def _text_places(run: Run, corpus: str | None) -> Places:
    row, context = row_of(run), run.value('train.context_length')
    return [(key, '', row, context) for key in (corpus, 'speed') if row and key]


def _c4_places(run: Run) -> Places:
    size, layers = SIZES.get(run.value('model.d_model'), ('no', 0))
    own, context = run.value('model.n_layers'), run.value('train.context_length')
    label = (label_of(run) or '').replace('deg=', 'degree ').replace(SOFTMAX, 'Softmax')
    if own != layers:
        label = label.replace(', r', f', {own} layers, r') if 'learned' in label else ''
    if context != (2048 if size == 'Large' else 8192):
        return []
    group = f'GPT-2 {size}'
    return [('c4', group, label, run.total_steps), ('c4_speed', group, label, context)]


def _draft_places(run: Run, corpus: str | None) -> Places:
    rows = {SOFTMAX: ('Softmax', 'FlashAttention'), 'Polynomial (deg=4)': ('Polynomial', 'Polynomial')}
    row, speed_row = ('Polysketch', 'Polysketch') if is_draft_sketch(run) else rows.get(label_of(run), ('', ''))
    context = run.value('train.context_length')
    perplexity = [(f'draft_{corpus}', '', row, context)] if corpus in ('pg19', 'wiki40b') else []
    return [*perplexity, ('draft_speed', '', speed_row, context)]


def _task_places(run: Run, task: str) -> Places:
    label = (label_of(run) or '').replace('deg=', 'degree=').replace(SOFTMAX, 'Softmax')
    context = run.value('train.context_length')
    if task == 'selective_copying':
        return [('copying', '', label.replace(' + local, r = 32', ' + local'), context)]
    if task == 'induction_heads':
        return [('induction', '', label.replace('learned, ', ''), context)]
    if task != 'associative_recall' or len(run.mechanisms()) != 1:
        return []
    (name,) = run.mechanisms()
    row = ''
    if name.rpartition('/')[2] == 'llops' and run.value(f'{name}.n_features') == 256:
        row = f'LLoPS (p = {run.value(f"{name}.degree")})'
    elif name.rpartition('/')[2] == 'taylor' and run.value(f'{name}.feature_dim') == 16:
        row = 'BASED'
    return [('recall', '', row, run.value('model.d_model'))]


# --------------------------------------------------------------------------------------------------- both numbers


def compare(
    runs: Sequence[Run], measures: Mapping[str, Callable[[Run], float | None]], corpus: str | None = None
) -> list[dict[str, Any]]:
    """The cells of every table of which one is repeated: the paper's number, and the mean of the runs that repeat it.

    Args:
        measures: what the perplexity and the accuracy, in percent, of a run are.
        corpus: see `cells_of`.
    """
    ours: dict[Cell, list[Run]] = {}
    draft = any(map(is_draft_sketch, runs))
    for run in runs:
        for cell in cells_of(run, corpus, draft):
            ours.setdefault(cell, []).append(run)
    rows = []
    for key in (key for key in TABLES if any(cell.table == key for cell in ours)):
        table = TABLES[key]
        measure = measures.get(table.measure) or (lambda run, key=key: _steps_per_second(run, key))
        for cell in (
            Cell(key, g, row, c) for g, labels in table.groups.items() for row in labels for c in table.columns
        ):
            members = ours.get(cell, [])
            values = [value for run in members if (value := measure(run)) is not None]
            rows.append(
                {
                    'table': key,
                    'group': cell.group,
                    'row': cell.row,
                    'axis': table.axis,
                    'column': cell.column,
                    'measure': table.measure,
                    'paper': table.value(cell.group, cell.row, cell.column),
                    'ours': statistics.fmean(values) if values else None,
                    'runs': ' '.join(run.name for run in members),
                }
            )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The tables in the papers' form, as lines: each cell the paper's number and ours."""
    if not rows:
        return []
    text = ['## Beside the paper', '']
    text += [
        'Each cell: the paper\'s number / ours, "–" where there is none. Where a table says nothing else, the paper\'s '
        'models have 110M to 120M parameters in 12 or 13 layers and were trained for 125k steps of 1M tokens; Tables 2 '
        'and 3 are of the test split. Ours are the runs of the table above: compare where the settings agree.',
        '',
    ]
    for key in dict.fromkeys(row['table'] for row in rows):
        table = TABLES[key]
        text += [f'**{table.title}**, {table.unit}', '']
        text += [_line(['', *map(short, table.columns)]), _line(['---', *['---:'] * len(table.columns)])]
        for group, labels in table.groups.items():
            text.append(_line([f'*{group}*', *[''] * len(table.columns)]))
            for label in labels:
                cells = [r for r in rows if (r['table'], r['group'], r['row']) == (key, group, label)]
                shown = [f'{_number(c["paper"], table.absent)} / {_number(c["ours"], "–")}' for c in cells]
                text.append(_line([label, *shown]))
        text.append('')
    return text


def _steps_per_second(run: Run, key: str) -> float | None:
    """Of the size that the steps of a table of speeds have."""
    size = {'speed': 2**20, 'c4_speed': 2**19}.get(key) or draft_tokens(run.value('train.context_length'))
    rate = run.tokens_per_second
    return rate / size if rate else None


def _line(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cells)} |'


def _number(value: float | None, absent: str) -> str:
    return absent if value is None else f'{value:.2f}' if value >= 0.1 else f'{value:.2g}'
