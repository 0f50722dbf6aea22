"""`lm report`: runs → a table (Markdown, CSV), the paper's table with ours beside it, and pictures.

- report.html: sortable tables and curves with values under the pointer, in one file (`lm.report.page`)
- report.md: every number, with the run that it came from
- runs.csv: a row per run
- paper.csv: the paper's numbers and ours
- ladder.csv: losses and effective speed-ups by size, with a ladder
- curves.csv: the points of all pictures
- *.png, *.pdf: the pictures, a column wide
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lm import plots
from lm.config.text import join_names
from lm.errors import ConfigError
from lm.files import local_path
from lm.report import paper
from lm.report.ladder import make_ladder
from lm.report.ladder_table import make_ladder_table
from lm.report.measures import Measures, choose_conditioning
from lm.report.report import Report
from lm.report.search import read_searches
from lm.runs import sweep_file
from lm.runs.records import Run, find_runs
from lm.text import format_count


def write_report(paths: Sequence[str], out: str, **options: Any) -> None:
    """Writes the report on `paths` into the folder `out` as `write_files` does, and prints its table."""
    report = write_files(paths, out, **options)
    print(report.make_run_table().to_markdown())
    if report.ladder:
        print(f'\n{make_ladder_table(report.ladder).to_markdown()}')
    if missing := paper.explain_no_match(report.comparison, report.corpus):
        print(f'\n{missing}')
    print(f'\n{format_count(len(report.written), "file")} in {report.out}: {", ".join(report.written)}')


def write_files(
    paths: Sequence[str],
    out: str,
    *,
    split: str | None = None,
    corpus: str | None = None,
    ladder: str | None = None,
    pictures: bool = True,
    refresh: int | None = None,
    any_conditioning: bool = False,
) -> Report:
    """Writes the files of a report, and prints nothing.

    Args:
        paths: run directories, sweeps, or globs of them.
        split, corpus: as in `lm.report.report.Report`.
        ladder: run directories of a baseline, a sweep, or a glob of them (`lm.report.ladder`); None: no comparison.
        refresh: seconds after which the page reads itself again; None: never.
        any_conditioning: compare perplexities that are conditioned on different tokens, too.
    """
    baseline = find_runs([ladder]) if ladder else []
    runs = find_runs([*paths, *([ladder] if ladder else [])])
    check_split(runs, split)
    conditioning = choose_conditioning(runs, Measures(split), any_conditioning)
    climbed = make_ladder(ladder, baseline, runs, Measures(split, conditioning)) if ladder else None
    if pictures:
        plots.check_matplotlib(', or pass --no_pictures')
    folder = local_path(out, '--out')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out {out}: {error.strerror}; name a local folder') from None
    absent, searches = find_points_without_runs(paths), read_searches(paths)
    report = Report(runs, folder, split, corpus, absent, climbed, searches, conditioning)
    report.write(pictures, refresh)
    return report


def check_split(runs: Sequence[Run], split: str | None) -> None:
    """Raises ConfigError where no run was ever evaluated on `split`; None is the split of training."""
    known = {str(r['split']) for run in runs for r in [*run.evals, *run.evaluations] if r.get('split')}
    if split is not None and split not in known:
        others = f'those are of {join_names(sorted(known))}' if known else 'nor of any other'
        raise ConfigError(
            f'--split {split}: no evaluation of these runs is of it, {others}; run lm evaluate --split {split} first'
        )


def find_points_without_runs(paths: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the points of the sweeps among `paths` that have no run directory: not begun, or refused."""
    rows = [(root, row) for root in sweep_file.find_sweeps(paths) for row in sweep_file.read_rows(root)]
    return [row for root, row in rows if not (root / row['point'] / 'config.gin').exists()]
