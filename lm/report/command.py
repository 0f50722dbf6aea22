"""`lm report`: runs → a table (Markdown, CSV), the paper's table with ours beside it, and pictures.

report.md       every number, with the run that it came from
runs.csv        a row a run                    curves.csv      the points of all pictures
paper.csv       the paper's numbers and ours   *.png, *.pdf    the pictures, a column wide
"""

import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm import plots as figures
from lm.errors import ConfigError
from lm.plots import Curve
from lm.report import paper
from lm.report.curves import (
    accuracy_curve,
    context_curve,
    first_position,
    is_under_way,
    loss_curve,
    make_series,
    position_curve,
)
from lm.runs.goodput import describe
from lm.runs.records import Run, find_runs


def main(_: Any, arguments: Any) -> int:
    """The `lm report` command."""
    runs = find_runs(arguments.paths)
    if arguments.pictures:
        figures.check_matplotlib()
    out = Path(arguments.out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out {arguments.out}: {error.strerror}; name a local folder') from None
    report = Report(runs, out, arguments.split, arguments.paper)
    report.write(arguments.pictures)
    print(report.markdown_table())
    print(f'\n{len(report.written)} files in {out}: {", ".join(report.written)}')
    return 0


class Report:
    """The report on `runs` in the folder `out`.

    Args:
        split: which evaluations count; None: those of training.
        corpus: pg19 or wiki40b, the text whose tables of the paper are compared with; None: by the data of each run;
            none: no comparison.
    """

    def __init__(self, runs: Sequence[Run], out: Path, split: str | None = None, corpus: str | None = None):
        self.runs, self.out, self.split, self.corpus = list(runs), out, split, corpus
        self.drawn = [run for run in self.runs if is_under_way(run)]
        self.series = make_series(self.drawn)
        self.contexts = sorted({run.value('train.context_length') for run in self.drawn})
        self.rows = [self.row(run) for run in self.runs]
        self.written: list[str] = []
        self._curves: list[dict[str, Any]] = []
        self._pictures: list[tuple[str, str]] = []

    def write(self, pictures: bool = True) -> None:
        """Writes all files."""
        if pictures:
            self.draw()
        self._csv('runs.csv', self.rows)
        if self._curves:
            self._csv('curves.csv', self._curves)
        comparison = self.paper_rows()
        if comparison:
            self._csv('paper.csv', comparison)
        text = ['# Report', '', self.markdown_table(), '']
        text += paper.markdown(comparison)
        for name, caption in self._pictures:
            text += [f'![{caption}]({name})', '', f'*{caption}*', '']
        if pictures and len(self.drawn) < len(self.runs):
            absent = ', '.join(run.name for run in self.runs if run not in self.drawn)
            text += [f'Not in the pictures, for want of steps: {absent}.', '']
        text += ['## Runs', '', *(f'- {self.provenance(run)}' for run in self.runs), '']
        (self.out / 'report.md').write_text('\n'.join(text), encoding='utf-8')
        self.written.insert(0, 'report.md')

    # Tables

    def measurement(self, run: Run, context: int | None = None) -> dict[str, Any]:
        """The newest evaluation of a run at its own context length or another one, windows disjoint; {} if none.

        A file of `lm evaluate` counts more than the periodic evaluation of the same step, unless it scored the
        weights under another attention than the run's own.
        """
        context = context or run.value('train.context_length')
        split = self.split or (run.last_evaluation or {}).get('split')
        found = [
            r
            for r in [*run.evals, *run.evaluations]
            if r.get('split') == split
            and r.get('context_length') == context
            and r.get('window') in ('disjoint', None)
            and not _is_another_model(run, r)
        ]
        return max(reversed(found), key=lambda r: r['step'], default={})

    def row(self, run: Run) -> dict[str, Any]:
        """The figures of a run."""
        measured, rate = self.measurement(run), run.tokens_per_second
        return {
            'run': run.name,
            'attention': run.attention,
            'layers': run.value('model.n_layers'),
            'parameters': run.info.get('parameters'),
            'context': run.value('train.context_length'),
            'seed': run.value('train.seed'),
            'step': run.step,
            'steps': run.total_steps,
            'tokens': run.step * run.value('train.tokens_per_step', 0),
            'train_loss': run.train[-1]['loss'] if run.train else None,
            'split': measured.get('split'),
            'loss': measured.get('loss'),
            'perplexity': measured.get('perplexity'),
            'word_perplexity': measured.get('word_perplexity'),
            'bits_per_byte': measured.get('bits_per_byte'),
            'accuracy': measured.get('accuracy'),
            'evaluated_at': measured.get('step'),
            'tokens_per_second': rate,
            'microseconds_per_token': 1e6 / rate if rate else None,
            'goodput': run.goodput and run.goodput['share'],
            'devices': f'{run.info.get("device_count")} × {run.info.get("device_kind")}',
            'path': str(run.directory.path),
        }

    def markdown_table(self) -> str:
        """The runs and their figures, without what none of them has."""
        columns: dict[str, tuple[str, Callable[[Any], str]]] = {
            'run': ('run', str),
            'attention': ('attention', str),
            'layers': ('layers', str),
            'parameters': ('parameters', lambda v: f'{v / 1e6:.3g}M'),
            'context': ('context', figures.short),
            'progress': ('steps', str),
            'perplexity': ('perplexity', lambda v: f'{v:.3f}'),
            'word_perplexity': ('per word', lambda v: f'{v:.2f}' if v < 1e5 else f'{v:.2e}'),
            'bits_per_byte': ('bits/byte', lambda v: f'{v:.4f}'),
            'accuracy': ('accuracy', lambda v: f'{v:.2%}'),
            'tokens_per_second': ('tokens/s', lambda v: f'{v:,.0f}'),
            'microseconds_per_token': ('µs/token', lambda v: f'{v:.3g}'),
            'goodput': ('goodput', lambda v: f'{v:.1%}'),
        }
        rows = [row | {'progress': _progress(row)} for row in self.rows]
        shown = {k: v for k, v in columns.items() if any(row[k] is not None for row in rows)}
        cells = [['–' if row[k] is None else form(row[k]) for k, (_, form) in shown.items()] for row in rows]
        right = {'layers', 'parameters', 'context', 'progress'} | set(list(columns)[6:])
        lines = [
            '| ' + ' | '.join(title for title, _ in shown.values()) + ' |',
            '| ' + ' | '.join('---:' if k in right else '---' for k in shown) + ' |',
            *('| ' + ' | '.join(row) + ' |' for row in cells),
        ]
        text = '\n'.join(lines)
        splits = sorted({row['split'] for row in rows if row['split']})
        return f'{text}\n\nPerplexity on: {", ".join(splits)}.' if splits else text

    def paper_rows(self) -> list[dict[str, Any]]:
        """The papers' cells beside ours: see `lm.report.paper.compare`."""
        if self.corpus == 'none':
            return []
        return paper.compare(self.runs, {'perplexity': self.perplexity, 'accuracy': self.accuracy}, self.corpus)

    def provenance(self, run: Run) -> str:
        """Where the numbers of a run come from."""
        info = run.info
        return (
            f'`{run.name}`: {run.directory.path}; commit {info.get("git_commit") or "unknown"}, '
            f'{info.get("device_count")} × {info.get("device_kind")}, data {str(info.get("data"))[:12]}, '
            f'tokenizer {str(info.get("tokenizer"))[:12]}, started {info.get("started")}, '
            f'resumed {len(info.get("resumed", []))} times'
            + (f'; goodput {describe(run.goodput)}' if run.goodput else '')
        )

    # Pictures

    def draw(self) -> None:
        """Draws every picture for which there are data."""
        for context in self.contexts:
            suffix, where = (f'_{context}', f', context {context:,}') if len(self.contexts) > 1 else ('', '')
            end = max(run.train[-1]['tokens'] for s in self.series for run in s.at(context))
            self._lines(
                f'loss{suffix}',
                [curve for s in self.series if (curve := loss_curve(s, context, end))],
                f'Training loss (smoothed){where}; bands (of up to 6 curves): extremes over seeds.',
                'training tokens',
                'loss (nats per token)',
                x_scale='log',
            )
            self._lines(
                f'position{suffix}',
                [curve for s in self.series if (curve := position_curve(s, context, self.measurement))],
                f'Loss by position in the context{where}.',
                'position in the context (tokens)',
                'loss (nats per token)',
                x_scale='log',
                markers=True,
                ticks=_thinned([2**i for i in range(context.bit_length()) if 2**i >= first_position(context)]),
            )
            self._lines(
                f'accuracy{suffix}',
                [curve for s in self.series if (curve := accuracy_curve(s, context))],
                f'Accuracy during training{where}.',
                'training steps',
                'accuracy (%)',
                y_limits=(-3, 103),
            )
        self._against_context('perplexity', self.perplexity, 'perplexity')
        self._against_context('accuracy', self.accuracy, 'accuracy (%)')
        self._against_context(
            'speed',
            lambda run: 1e6 / run.tokens_per_second if run.tokens_per_second else None,
            'time per token (µs)',
            y_scale='log',
            right=('tokens per second', lambda value: 1e6 / np.maximum(value, 1e-12)),
        )
        self._other_contexts()

    def perplexity(self, run: Run) -> float | None:
        """Of a run on text; answers to a task have an accuracy."""
        measured = self.measurement(run)
        return None if 'accuracy' in measured else measured.get('perplexity')

    def accuracy(self, run: Run) -> float | None:
        """In percent."""
        measured = self.measurement(run)
        return 100 * measured['accuracy'] if 'accuracy' in measured else None

    def _against_context(
        self,
        name: str,
        measure: Callable[[Run], float | None],
        label: str,
        y_scale: str = 'linear',
        right: tuple[str, Callable] | None = None,
    ) -> None:
        """A measure against the context length in training; with one length alone, a row of dots a series."""
        devices = sorted({row['devices'] for row, run in zip(self.rows, self.runs, strict=True) if run in self.drawn})
        note = f', measured on {"; ".join(devices)}' if right else ''
        values = [[(run.value('train.context_length'), measure(run)) for run in s.runs] for s in self.series]
        if len(self.contexts) > 1:
            curves = [context_curve(s, found) for s, found in zip(self.series, values, strict=True)]
            self._lines(
                f'{name}_context',
                [curve for curve in curves if len(curve.x)],
                f'{label[0].upper()}{label[1:]} against context length{note}.',
                'context length (tokens)',
                label,
                x_scale='log',
                y_scale=y_scale,
                markers=True,
                ticks=self.contexts,
                right=right,
            )
        else:
            rows = []
            for s, found in zip(self.series, values, strict=True):
                x = np.array([v for _, v in found if v is not None])
                if len(x):
                    rows.append(Curve(s.label, s.style, x, np.zeros(len(x))))
            if rows:
                caption = f'{label[0].upper()}{label[1:]}, a dot a run, the bar at their mean{note}.'
                figures.draw_dots(self.out / f'{name}_runs', rows, label)
                self._drawn(f'{name}_runs', caption, rows)

    def _other_contexts(self) -> None:
        """Perplexity of runs that were evaluated at several context lengths, against these."""
        curves, contexts = [], set()
        for s in self.series:
            for run in s.runs:
                lengths = sorted({r.get('context_length') for r in run.evaluations} - {None})
                values = [(n, self.measurement(run, n).get('perplexity')) for n in lengths]
                values = [(n, v) for n, v in values if v is not None]
                if len(values) > 1:
                    trained = run.value('train.context_length')
                    label = s.label if len(self.contexts) == 1 else f'{s.label}, trained at {figures.short(trained)}'
                    curve = context_curve(dataclasses.replace(s, label=label, style=len(curves)), values)
                    curves.append(curve)
                    contexts |= {n for n, _ in values}
        self._lines(
            'perplexity_evaluated',
            curves,
            'Perplexity against the context length in evaluation.',
            'context length in evaluation (tokens)',
            'perplexity',
            x_scale='log',
            markers=True,
            ticks=sorted(contexts),
        )

    def _lines(self, name: str, curves: list[Curve], caption: str, x: str, y: str, **options: Any) -> None:
        if curves:
            figures.draw_lines(self.out / name, curves, x, y, **options)
            self._drawn(name, caption, curves)

    def _drawn(self, name: str, caption: str, curves: Iterable[Curve]) -> None:
        self.written += [f'{name}.png', f'{name}.pdf']
        self._pictures.append((f'{name}.png', caption))
        for curve in curves:
            for x, y in zip(curve.x, curve.y, strict=True):
                self._curves.append({'picture': name, 'series': curve.label, 'x': float(x), 'y': float(y)})

    def _csv(self, name: str, rows: list[dict[str, Any]]) -> None:
        with open(self.out / name, 'w', newline='', encoding='utf-8') as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        self.written.append(name)


def _progress(row: dict[str, Any]) -> str:
    return f'{row["step"]:,}' if row['step'] == row['steps'] else f'{row["step"]:,} of {row["steps"]:,}'


def _line(cells: Iterable[str]) -> str:
    return '| ' + ' | '.join(cells) + ' |'


def _is_another_model(run: Run, record: dict[str, Any]) -> bool:
    """Whether an evaluation ran the weights with another attention than they were trained with."""
    own = tuple(f'{name}.' for name in run.mechanisms())
    return any(name == 'model.attention' or name.startswith(own) for name in record.get('overrides') or ())


def _thinned(ticks: list[int]) -> list[int]:
    """At most eight of the ticks, evenly spaced, the last among them."""
    stride = -(-len(ticks) // 8)
    return ticks[::-1][::stride][::-1]
