"""The tables of a report, and the files that it writes."""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm.evaluation.conditioning import Conditioning
from lm.evaluation.sets import FIGURES, flatten_result
from lm.files import write_atomically
from lm.report import paper
from lm.report.curves import MOST_NAMED, describe_settings, find_differing_bindings, name_bindings
from lm.report.ladder import Ladder, Speedup, format_power
from lm.report.ladder_table import make_ladder_table
from lm.report.measures import Measures, get_status, is_conditioned, measure_microseconds_per_token
from lm.report.out_folder import HEAD, PAGE, TEXT, check_folder
from lm.report.page import SortableTable, TableCell, compare_configurations, format_page, link_run, make_cell
from lm.report.pictures import Pictures
from lm.report.search import SearchResult, make_search_pictures, make_search_table
from lm.report.students import find_students, make_position_table, make_student_pictures, make_student_table
from lm.runs.goodput import describe
from lm.runs.records import Run
from lm.runs.sweep_file import MEASURES, describe_status
from lm.text import escape_markdown, format_count, format_digits, make_visible, shorten

HAVE_COLUMNS = ('train.seed', 'train.steps', 'train.context_length', 'model.n_layers')
"""Bindings with a column of their own, by this or another name."""
LEFT = ('run', 'status', 'attention', 'settings')
"""Columns of words, which come first."""
TABLES = ('runs.csv', 'curves.csv', 'paper.csv', 'ladder.csv')
"""The files of figures; most reports have some of them."""
PREFIXES = tuple(f'{figure}/' for figure in FIGURES)
"""How figures of the named sets of an evaluation begin."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table of runs.

    Attributes:
        key: of the figure that it shows.
        form: figure → text.
        sorted_by: key of the figure that it is sorted by; '': the shown one.
    """

    key: str
    title: str
    form: Callable[[Any], str] = str
    sorted_by: str = ''


class Report:
    """The report on `runs` in the folder `out`.

    Args:
        split: which evaluations count; None: the split of training.
        corpus: pg19 or wiki40b, the text whose tables of the paper are compared with; None: by the data of each run;
            none: no comparison.
        absent: rows of sweep.json of points that have no run directory.
        ladder: a baseline that the runs are compared with; None: no comparison.
        searches: searches whose trials are among the runs.
        conditioning: as in `lm.report.measures.Measures`.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        out: Path,
        split: str | None = None,
        corpus: str | None = None,
        absent: Sequence[dict[str, Any]] = (),
        ladder: Ladder | None = None,
        searches: Sequence[SearchResult] = (),
        conditioning: Conditioning | None = None,
    ):
        self.runs, self.out, self.corpus, self.absent = list(runs), out, corpus, list(absent)
        self.ladder, self.searches = ladder, list(searches)
        self.measures = Measures(split, conditioning)
        self.swept = [name for name in find_differing_bindings(self.runs) if name not in HAVE_COLUMNS]
        measured = [flatten_result(self.measures.find_newest(run)) for run in self.runs]
        self.of_sets = sorted({name for found in measured for name in found if name.startswith(PREFIXES)})
        self.rows = [self.make_row(run) for run in self.runs]
        self.comparison = self.compare_with_papers()
        self.students = find_students(self.runs, self.measures)
        self.written: list[str] = []

    def write(self, pictures: bool = True, refresh: int | None = None) -> None:
        """Writes all files. A reader, or an interruption, finds the old content of each file or the new one.

        Args:
            pictures: draw them, too, which needs matplotlib.
            refresh: seconds after which the page reads itself again; None: never.
        """
        made = Pictures(self.runs, self.measures, self.ladder)
        for i, search in enumerate(self.searches):
            made.made += make_search_pictures(search, f'_{i}' if i else '')
        made.made += make_student_pictures(self.students)
        drawn = [f'{picture.name}{end}' for picture in made.made if pictures for end in ('.png', '.pdf')]
        check_folder(self.out, [PAGE, TEXT, *TABLES, *drawn])
        self.written = [TEXT]
        for picture in made.made if pictures else ():
            picture.draw(self.out)
        self.written += drawn
        self._write_csv('runs.csv', self.rows)
        if points := [point for picture in made.made for point in picture.list_points()]:
            self._write_csv('curves.csv', points)
        if self.comparison:
            self._write_csv('paper.csv', [compared.as_row() for compared in self.comparison])
        if self.ladder:
            self._write_csv('ladder.csv', self.ladder.list_rows())
        text = [*HEAD, self.make_run_table().to_markdown(), '']
        for table in (*self._make_ladder_tables(), *self._make_student_tables()):
            text += [f'## {table.title}', '', table.to_markdown(), '']
        text += paper.format_tables(self.comparison, self.corpus)
        for picture in made.made if pictures else ():
            caption = escape_markdown(picture.caption)
            text += [f'![{caption}]({picture.name}.png)', '', f'*{caption}*', '']
        left_out = ', '.join(run.name for run in self.runs if run not in made.drawn)
        note = f'Not in the pictures, for want of steps: {left_out}.' if left_out else ''
        if note:
            text += [escape_markdown(note), '']
        lines = [f'- {escape_markdown(f"{run.name}: {self.describe_provenance(run)}")}' for run in self.runs]
        text += ['## Runs', '', *lines, '']
        write_atomically(self.out / TEXT, '\n'.join(text))
        notes = [note] if note else []
        page = format_page(self.make_tables(), [*made.made, *made.courses], notes, self.written, refresh)
        write_atomically(self.out / PAGE, page)
        self.written.insert(0, PAGE)

    def make_tables(self) -> list[SortableTable]:
        """Returns the tables of the page: figures, differences of configurations, the papers' numbers, provenance."""
        tables = [self.make_run_table(), *self._make_ladder_tables()]
        tables += [table for search in self.searches if (table := make_search_table(search))]
        tables += self._make_student_tables()
        if differences := compare_configurations(self.runs):
            tables.append(differences)
        if compared := [found.as_row() for found in self.comparison if found.runs]:
            cells = [
                [make_cell(value, lambda v: f'{v:.5g}' if isinstance(v, float) else str(v)) for value in row.values()]
                for row in compared
            ]
            tables.append(SortableTable('Beside the papers', list(compared[0]), cells, 4))
        cells = [
            [TableCell(run.name, run.name, link_run(run, self.out)), make_cell(self.describe_provenance(run))]
            for run in self.runs
        ]
        tables.append(SortableTable('Where the figures come from', ['run', 'provenance'], cells, 2))
        return tables

    def _make_ladder_tables(self) -> list[SortableTable]:
        return [make_ladder_table(self.ladder)] if self.ladder else []

    def _make_student_tables(self) -> list[SortableTable]:
        found = make_student_table(self.students), make_position_table(self.students)
        return [table for table in found if table]

    def make_run_table(self) -> SortableTable:
        """Returns the runs and their figures, without columns that no run has, and the points without a run below."""
        columns, rows = self.list_columns(), []
        for run, row in zip(self.runs, self.list_rows(), strict=True):
            texts = ['–' if row[c.key] is None else c.form(row[c.key]) for c in columns]
            values = [row[c.sorted_by or c.key] for c in columns]
            rows.append([TableCell(text, value) for text, value in zip(texts, values, strict=True)])
            rows[-1][0] = rows[-1][0]._replace(link=link_run(run, self.out))
        titles = [column.title for column in columns]
        return SortableTable('Runs', titles, rows, sum(c.key in LEFT for c in columns), self.list_notes())

    def make_row(self, run: Run) -> dict[str, Any]:
        """Returns the figures of a run."""
        measured, rate, bounds = flatten_result(self.measures.find_newest(run)), run.tokens_per_second, run.speed_range
        is_conditional = 'perplexity' in measured and 'task' not in measured and is_conditioned(run)
        return {
            'run': run.name,
            'status': get_status(run),
            'attention': run.attention,
            'layers': run.value('model.n_layers'),
            'parameters': run.info.get('parameters'),
            'context': run.value('train.context_length'),
            'seed': run.value('train.seed'),
            **{name: run.config.get(name) for name in self.swept},
            'settings': ', '.join(describe_settings(run, self.runs, self.swept)) or None,
            'step': run.step,
            'steps': run.total_steps,
            'tokens': run.step * run.value('train.tokens_per_step', 0),
            'train_loss': run.train[-1]['loss'] if run.train else None,
            'split': measured.get('split'),
            'copied_share': measured.get('copied_share'),
            'conditioning': str(Conditioning.read(measured)) if is_conditional else None,
            **{name: measured.get(name) for name in (*MEASURES, *self.of_sets)},
            'evaluated_at': measured.get('step'),
            'tokens_per_second': rate,
            'tokens_per_second_low': bounds and bounds[0],
            'tokens_per_second_high': bounds and bounds[1],
            'microseconds_per_token': measure_microseconds_per_token(run),
            'goodput': run.goodput and run.goodput['share'],
            **self._compare_with_ladder(run),
            'devices': paper.name_devices(run),
            'path': make_visible(str(run.directory.path)),
        }

    def _compare_with_ladder(self, run: Run) -> dict[str, Any]:
        """Returns compute and speed-ups of a run; {} without a ladder."""
        if self.ladder is None:
            return {}
        result = self.ladder.find_result(run)
        speedup = self.ladder.compare(result.compute, result.loss) if result else Speedup()
        return {
            'compute': result and result.compute,
            'effective_speedup': speedup.value,
            'effective_speedup_above': speedup.above,
            'effective_speedup_below': speedup.below,
            'time_speedup': result and self.ladder.compare_times(result),
        }

    def list_rows(self) -> list[dict[str, Any]]:
        """Returns the figures of the runs with those that tables print as words."""
        words = {'progress': _format_progress, 'speed': _format_speed, 'speedup': _format_speedup}
        return [row | {name: form(row) for name, form in words.items()} for row in self.rows]

    def list_columns(self) -> list[Column]:
        """Returns the columns for which a run has a figure."""
        columns = [
            Column('run', 'run'),
            Column('status', 'status'),
            Column('attention', 'attention'),
            *self._list_settings(),
            Column('layers', 'layers'),
            Column('parameters', 'parameters', lambda v: f'{v / 1e6:.3g}M'),
            Column('context', 'context', shorten),
            Column('progress', 'steps', sorted_by='step'),
            Column('split', 'split'),
            Column('copied_share', 'copies of train', '{:.1%}'.format),
            Column('conditioning', 'conditioned on'),
            Column('perplexity', 'perplexity per token', lambda v: f'{v:.3f}'),
            Column('word_perplexity', 'per word', lambda v: f'{v:.2f}' if v < 1e5 else f'{v:.2e}'),
            Column('bits_per_byte', 'bits/byte', lambda v: f'{v:.4f}'),
            *(
                Column(name, name.replace('/', ' of '), '{:.3f}'.format)
                for name in self.of_sets
                if name.startswith('perplexity/')
            ),
            Column('accuracy', 'accuracy', lambda v: f'{v:.2%}'),
            Column('compute', 'FLOPs', format_power),
            Column('speedup', 'effective speed-up', sorted_by='effective_speedup'),
            Column('time_speedup', 'speed-up in time', format_digits),
            Column('speed', 'tokens/s', sorted_by='tokens_per_second'),
            Column('microseconds_per_token', 'µs/token', format_digits),
            Column('goodput', 'goodput', '{:.1%}'.format),
            Column('devices', 'devices'),
        ]
        rows = self.list_rows()
        hidden = {'status'} if all(row['status'] == 'done' for row in rows) else set()
        if len({row['conditioning'] for row in rows} - {None}) < 2:
            hidden.add('conditioning')
        shown = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
        return [column for column in shown if column.key not in hidden]

    def _list_settings(self) -> list[Column]:
        """Returns a column for each setting in which the runs differ; one column in all where these are many."""
        if len(self.swept) > MOST_NAMED:
            return [Column('settings', 'settings that few runs have')]
        return [Column(name, title) for name, title in name_bindings(self.swept).items()]

    def list_notes(self) -> list[str]:
        """Returns the sentences below the table."""
        notes = []
        if any(row['speed'] is not None for row in self.list_rows()):
            notes.append('Tokens/s: the median of the logged intervals, and their quartiles.')
        if parts := [run.name for run in self.runs if self.measures.covers_part_only(run)]:
            notes.append(
                f'Of the first train.eval_tokens alone, until lm evaluate scores the split: {", ".join(parts)}.'
            )
        notes += [
            f'{run.name}: in metrics.jsonl {changed}: its figures here may be wrong'
            for run in self.runs
            if (changed := run.changed_metrics)
        ]
        reasons: dict[str, list[str]] = {}
        for row in self.absent:
            status = describe_status(row['status'], row['exit_code'])
            reasons.setdefault(f'{status}: {row["error"]}' if row['error'] else status, []).append(row['point'])
        return [*notes, *(f'No run directory: {", ".join(points)}, {why}' for why, points in reasons.items())]

    def compare_with_papers(self) -> list[paper.Comparison]:
        """Returns the papers' cells beside ours: see `lm.report.paper.compare`."""
        if self.corpus == 'none':
            return []
        measures = {'perplexity': self.measures.perplexity, 'accuracy': self.measures.accuracy}
        return paper.compare(self.runs, measures, self.corpus, self.measures.figure)

    def describe_provenance(self, run: Run) -> str:
        """Returns where the numbers of a run come from."""
        info = run.info
        return (
            f'{make_visible(str(run.directory.path))}; commit {info.get("git_commit") or "unknown"}, '
            f'{paper.name_devices(run)}, data {str(info.get("data"))[:12]}, '
            f'tokenizer {str(info.get("tokenizer"))[:12]}, started {info.get("started")}, '
            f'resumed {format_count(len(info.get("resumed", [])), "time")}'
            + (f'; goodput {describe(run.goodput)}' if run.goodput else '')
        )

    def _write_csv(self, name: str, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows({name: _make_inert(value) for name, value in row.items()} for row in rows)
        write_atomically(self.out / name, text.getvalue())
        self.written.append(name)


def _make_inert(value: Any) -> Any:
    """Returns a cell of a CSV file. A spreadsheet computes text that begins like a formula, unless ' is before it."""
    if not isinstance(value, str) or not value.startswith(('=', '+', '-', '@')):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _format_progress(row: dict[str, Any]) -> str:
    return f'{row["step"]:,}' if row['step'] == row['steps'] else f'{row["step"]:,} of {row["steps"]:,}'


def _format_speedup(row: dict[str, Any]) -> str | None:
    """Returns the effective speed-up, or its bound where the loss lies beyond the ladder."""
    bounds = (row.get(f'effective_speedup{suffix}') for suffix in ('', '_above', '_below'))
    speedup = Speedup(*bounds)
    return None if speedup == Speedup() else str(speedup)


def _format_speed(row: dict[str, Any]) -> str | None:
    """Returns the median and, where there are enough intervals, the quartiles."""
    if row['tokens_per_second'] is None:
        return None
    text = format_digits(row['tokens_per_second'])
    low, high = row['tokens_per_second_low'], row['tokens_per_second_high']
    return text if low is None else f'{text} ({format_digits(low)}–{format_digits(high)})'
