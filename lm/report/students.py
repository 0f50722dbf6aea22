"""Students beside their teachers: runs of `lm distill`, compared on the same tokens of the same split."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from lm.errors import LmError
from lm.evaluation.conditioning import Conditioning
from lm.files import open_path
from lm.plots import COLOURS, Curve
from lm.report.measures import Measures, name_loss
from lm.report.page import SortableTable, TableCell, make_cell
from lm.report.pictures import Picture
from lm.report.scores import read_scores
from lm.runs.records import Run
from lm.text import perplexity

LAYER_ERROR = re.compile(r'layer_error/(\d+)')
"""The names of the errors of the layers in metrics.jsonl."""
ALIKE = ('split', 'context_length', 'window', 'tokens')
"""The figures that two evaluations share if they scored the same tokens of one store."""


@dataclasses.dataclass(frozen=True)
class Student:
    """A run that learned from a teacher.

    Attributes:
        teacher_path: the run of its teacher, as its configuration names it.
        teacher: this run; None: it is not there any more.
        loss: what the student minimizes.
        measured: its newest evaluation; {}: it has none.
        taught: the evaluation of the teacher on the same tokens; {}: it has none.
        tasks: task → metric → results of student and teacher, of the tasks on which both were evaluated.
    """

    run: Run
    teacher_path: str
    teacher: Run | None
    loss: str
    measured: dict[str, Any]
    taught: dict[str, Any]
    tasks: dict[str, dict[str, tuple[float, float]]]

    @property
    def behind(self) -> float | None:
        """The nats per token by which its cross-entropy exceeds the teacher's; None: they were not both evaluated."""
        return self.measured['loss'] - self.taught['loss'] if self.taught else None

    @property
    def layer_errors(self) -> dict[int, list[tuple[int, float]]]:
        """Layer → pairs of a step and the error of the layer, relative to the size of the teacher's output."""
        found: dict[int, list[tuple[int, float]]] = {}
        for record in self.run.train:
            for name, value in record.items():
                if (match := LAYER_ERROR.fullmatch(name)) and isinstance(value, int | float):
                    found.setdefault(int(match[1]), []).append((record['step'], value))
        return found

    def explain_missing(self) -> str:
        """Returns a sentence on why there is no comparison; '' if there is one."""
        if self.behind is not None:
            return ''
        if self.teacher is None:
            return f'{self.run.name}: its teacher {self.teacher_path} is not there.'
        if not self.measured:
            return f'{self.run.name}: was not evaluated yet.'
        split, length = self.measured['split'], self.measured['context_length']
        return (
            f'{self.run.name}: its teacher was not evaluated on the same tokens; run lm evaluate --split {split} '
            f'--context_length {length} with --run_dir {self.teacher_path}, and with the student.'
        )


def find_students(runs: Iterable[Run], measures: Measures) -> list[Student]:
    """Returns the runs that learned from a teacher, each with its teacher."""
    return [_make_student(run, loss, measures) for run in runs if (loss := name_loss(run)) is not None]


def _make_student(run: Run, loss: str, measures: Measures) -> Student:
    path, measured = str(run.value(f'{run.objective}.teacher', '')), measures.find_newest(run)
    try:
        teacher = Run.read(epath.Path(open_path(path)))
    except (LmError, OSError):
        return Student(run, path, None, loss, measured, taught={}, tasks={})
    taught = _find_taught(run, measured, teacher) if measured else {}
    tasks = _compare_tasks(_read_tasks(run), _read_tasks(teacher))
    return Student(run, path, teacher, loss, measured, taught, tasks)


def _find_taught(run: Run, measured: dict[str, Any], teacher: Run) -> dict[str, Any]:
    """Returns the newest evaluation of the teacher that scored the tokens of `measured`; {}: there is none.

    Only the step from which the student learned counts, if its configuration names one.
    """
    step = run.value(f'{run.objective}.teacher_step')
    records = [r for r in (*teacher.evals, *teacher.evaluations) if step in (None, r['step'])]
    alike = [record for record in records if _scored_the_same(run, measured, teacher, record)]
    # The last of several records of a step is the newest, and `max` takes the first.
    return max(reversed(alike), key=lambda record: record['step'], default={})


def _scored_the_same(run: Run, one: dict[str, Any], teacher: Run, other: dict[str, Any]) -> bool:
    """Tells whether an evaluation of a student and one of its teacher scored the same tokens, in the same way."""
    if other.get('overrides') and not set(other['overrides']) <= {'data.path'}:
        return False
    if Conditioning.read(one) != Conditioning.read(other):
        return False
    # Evaluations of as many tokens have read the same first tokens of the split.
    same_windows = all(one.get(name) == other.get(name) for name in ALIKE)
    return same_windows and _read_data(run, one) == _read_data(teacher, other)


def _read_data(run: Run, record: dict[str, Any]) -> Any:
    """Returns the digest of the store of an evaluation; an old record has none, and read the store of its run."""
    return record.get('data_sha256', run.info.get('data'))


def _read_tasks(run: Run) -> dict[tuple, dict[str, float]]:
    """Returns (task, context length, limit) → metric → result, of the newest step."""
    return {(s.task, s.context_length, s.limit): dict(s.metrics) for s in read_scores(run)}


def _compare_tasks(
    ours: dict[tuple, dict[str, float]], theirs: dict[tuple, dict[str, float]]
) -> dict[str, dict[str, tuple[float, float]]]:
    found = {}
    for key in ours.keys() & theirs.keys():
        task, length, _ = key
        shared = ours[key].keys() & theirs[key].keys()
        found[f'{task} at {length} tokens'] = {metric: (ours[key][metric], theirs[key][metric]) for metric in shared}
    return dict(sorted(found.items()))


def make_student_table(students: Sequence[Student]) -> SortableTable | None:
    """Returns the table of students and teachers; None without a student."""
    if not students:
        return None
    tasks = sorted({(task, metric) for s in students for task, metrics in s.tasks.items() for metric in metrics})
    columns = ['student', 'teacher', 'loss of the training', 'perplexity', "teacher's", 'nats behind', 'behind']
    columns += [f'{task}: {metric}, student / teacher' for task, metric in tasks]
    rows = []
    for student in students:
        ours, theirs = (record.get('perplexity') for record in (student.measured, student.taught))
        behind = student.behind
        more = None if behind is None else perplexity(behind) - 1
        cells = [make_cell(text) for text in (student.run.name, student.teacher_path, student.loss)]
        cells += [make_cell(value, '{:.3f}'.format) for value in (ours, theirs)]
        cells += [make_cell(behind, '{:+.4f}'.format), make_cell(more, '{:+.1%}'.format)]
        for task, metric in tasks:
            pair = student.tasks.get(task, {}).get(metric)
            cells.append(TableCell('–' if pair is None else f'{pair[0]:.3f} / {pair[1]:.3f}', pair and pair[0]))
        rows.append(cells)
    notes = ['Behind: by cross-entropy on the same tokens, whatever the training minimizes.']
    notes += [note for student in students if (note := student.explain_missing())]
    return SortableTable('Students beside their teachers', columns, rows, 3, notes)


def make_position_table(students: Sequence[Student]) -> SortableTable | None:
    """Returns the loss by position of student and teacher; None if no two can be compared."""
    rows = [
        [
            make_cell(student.run.name),
            TableCell(f'{ours["start"]}–{ours["end"] - 1}', ours['start']),
            *(make_cell(bucket['loss'], '{:.4f}'.format) for bucket in (ours, theirs)),
            make_cell(ours['loss'] - theirs['loss'], '{:+.4f}'.format),
        ]
        for student in students
        for ours, theirs in _pair_positions(student)
    ]
    columns = ['student', 'positions', 'loss', "teacher's", 'nats behind']
    return SortableTable('Loss by position', columns, rows, 2) if rows else None


def _pair_positions(student: Student) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ours, theirs = (record.get('loss_by_position') or () for record in (student.measured, student.taught))
    known = {(bucket['start'], bucket['end']): bucket for bucket in theirs}
    pairs = [(bucket, known.get((bucket['start'], bucket['end']))) for bucket in ours]
    return [(one, other) for one, other in pairs if other is not None]


def make_student_pictures(students: Sequence[Student]) -> list[Picture]:
    """Returns the nats behind by position, and the errors of the layers over time, one picture per student."""
    made, curves = [], []
    for student in students:
        if pairs := _pair_positions(student):
            x = np.array([np.sqrt((ours['start'] + 1) * ours['end']) for ours, _ in pairs])
            y = np.array([ours['loss'] - theirs['loss'] for ours, theirs in pairs])
            curves.append(Curve(student.run.name, len(curves), x, y))
    if curves:
        caption = 'Nats per token behind the teacher, by position in the context.'
        options = {'x_scale': 'log', 'markers': True}
        label = 'position in the context (tokens)'
        made.append(Picture('behind', caption, curves, label, 'behind the teacher (nats per token)', options))
    aligned = [student for student in students if student.layer_errors]
    for i, student in enumerate(aligned):
        suffix = f'_{i}' if len(aligned) > 1 else ''
        made.append(_draw_errors(student, f'layer_errors{suffix}'))
    return made


def _draw_errors(student: Student, name: str) -> Picture:
    """Returns a curve per layer, or, of more layers than there are colours, the worst, the median and the best."""
    errors = {layer: found for layer, found in sorted(student.layer_errors.items()) if any(e for _, e in found)}
    curves = [
        Curve(f'layer {layer}', style, *np.array(found, float).T) for style, (layer, found) in enumerate(errors.items())
    ]
    note = ''
    if len(curves) > len(COLOURS):
        steps = functools.reduce(np.intersect1d, [curve.x for curve in curves])
        values = np.array([curve.y[np.isin(curve.x, steps)] for curve in curves])
        kinds = {'worst layer': np.max, 'median layer': np.median, 'best layer': np.min}
        curves = [Curve(kind, style, steps, of(values, axis=0)) for style, (kind, of) in enumerate(kinds.items())]
        note = f', of {len(errors)} layers'
    caption = f'{student.run.name}: error of attention in each layer{note}, relative to the output of the teacher.'
    y_label = 'error of attention (share)'
    return Picture(name, caption, curves, 'training steps', y_label, {'y_scale': 'log'})
