"""Reads what papers published, table by table, from the files `published*.toml` of `configs/papers`."""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from lm.config.project import project_root

WORDS = {('sketch', 'gaussian'): 'random', ('local', True): ' + local', ('local', False): ''}
"""(field, value) → its text in a label, if that is not the value."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure that is measured of a run.

    Attributes:
        label: the heading of its column.
        measure: perplexity, accuracy (in percent) or steps_per_second; None: a task of the harness.
        set: of which text (`evaluate.sets`); None: the run's own.
        task: the task of lm-evaluation-harness.
        metric: of the task, in percent.
        shots: examples in front of each question of the task.
        examples: how many questions the paper asks, drawn at random; None: all.
    """

    label: str = ''
    measure: str | None = None
    set: str | None = None
    task: str | None = None
    metric: str = 'acc'
    shots: int | None = None
    examples: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A row of a table.

    Attributes:
        group: the heading above it.
        label: its name, made from its fields as the paper prints it.
        mechanism: the attention of its runs; None: no run repeats the row.
        fields: field of the mechanism → value; 'None' stands for None, which TOML lacks.
        settings: binding → value of the runs that repeat the row; a list has a value per column.
        values: a number per column, or the text that the paper prints in its place.
    """

    group: str
    label: str
    mechanism: str | None
    fields: Mapping[str, Any]
    settings: Mapping[str, Any]
    values: list[float | str]


@dataclasses.dataclass(frozen=True, eq=False)
class PaperTable:
    """One table.

    Attributes:
        key: its name in paper.csv.
        title: number and contents.
        source: the paper, and the place of the table in it.
        unit: of the values.
        columns: values of the binding `axis`, or figures of one run.
        labels: mechanism → the template of its labels, and the fields that all its rows have.
        rows: in the paper's order.
        measure: what is measured where columns are values (`Figure.measure`).
        axis: the binding whose values are the columns; None: the columns are figures.
        corpus: the text of its runs; None: any text.
        task: the synthetic task of its runs.
        beside: the mechanism of the layers that stand beside the row's in a pattern.
        only_with: label of a row; the table counts only beside runs of its mechanism.
    """

    key: str
    title: str
    source: str
    unit: str
    columns: list[int | str | Figure]
    labels: Mapping[str, tuple[str, Mapping[str, Any]]]
    rows: list[Row]
    measure: str | None = None
    axis: str | None = None
    corpus: str | None = None
    task: str | None = None
    beside: str | None = None
    only_with: str | None = None

    @property
    def paper(self) -> str:
        """The paper of the source."""
        return self.source.partition(', ')[0]


@functools.cache
def load_tables() -> dict[str, PaperTable]:
    """Returns key → table, in the order of the files."""
    files = sorted((project_root() / 'configs' / 'papers').rglob('published*.toml'))
    found = [_table(tomllib.loads(path.read_text(encoding='utf-8'))) for path in files]
    return {table.key: table for table in found}


def make_label(template: str, fields: Mapping[str, Any]) -> str:
    """Returns the template with the values of the fields in it."""
    return template.format(**{name: WORDS.get((name, value), value) for name, value in fields.items()})


def _table(data: dict[str, Any]) -> PaperTable:
    labels = {name: (fields.pop('label'), fields) for name, fields in data.pop('mechanisms', {}).items()}
    settings, rows = flatten_dict(data.pop('settings', {}), sep='.'), []
    columns = [Figure(**column) if isinstance(column, dict) else column for column in data.pop('columns')]
    for group in data.pop('groups'):
        for row in group['rows']:
            mechanism, values, own = row.pop('mechanism', None), row.pop('values'), row.pop('label', None)
            template, fields = labels.get(mechanism, ('', {}))
            # A key with a dot is a binding of the run, any other key a field of the mechanism.
            row = flatten_dict(row, sep='.')
            bindings = {name: value for name, value in row.items() if '.' in name}
            fields = fields | {name: value for name, value in row.items() if '.' not in name}
            layers = f', {bindings["model.n_layers"]} layers' if 'model.n_layers' in bindings else ''
            label = make_label(template, fields | {'layers': layers}) if own is None else own
            bindings = settings | flatten_dict(group.get('settings', {}), sep='.') | bindings
            rows.append(Row(group['title'], label, mechanism, fields, bindings, values))
    return PaperTable(**data, columns=columns, labels=labels, rows=rows)
