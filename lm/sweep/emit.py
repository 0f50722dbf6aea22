"""`lm sweep --emit`: hands the points of a sweep to a cluster, whose scheduler runs them.

It writes the configuration of each point into the folder of the sweep, and manifests into a folder of this machine. The
command in a manifest, `lm sweep --run_dir ROOT --index I`, needs nothing but the folder of the sweep.
"""

import hashlib
import re
import shlex
from pathlib import Path

from lm.errors import ConfigError, writing
from lm.files import local_path, write_atomically
from lm.runs import sweep_file
from lm.sweep.manifests import FORMATS, ClusterJob, ManifestFormat
from lm.sweep.options import ClusterOptions
from lm.sweep.points import Point
from lm.sweep.sweep import Sweep
from lm.text import format_count

MARK = '.lm_sweep'
"""A file that lists what `--emit` wrote into a folder, so that the next one may delete it."""


def find_format(name: str) -> ManifestFormat:
    """Returns the format of this name. Raises ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f'--emit {name}: write a format and a folder; there are {", ".join(sorted(FORMATS))}')
    return FORMATS[name]


def emit_sweep(
    sweep: Sweep, kind: ManifestFormat, options: ClusterOptions, out: str, *, retry_failed: bool = False
) -> None:
    """Writes the configurations of all points, and manifests for the points that are due, and says how to submit them.

    Points are left out that are done, that another process trains, or that failed in a way that would be repeated,
    unless `retry_failed`.

    Raises:
        MismatchError, ConfigError: as `Sweep.check`.
        ConfigError: `out` holds other files than manifests of an earlier call.
    """
    sweep.check()
    folder = check_folder(out)
    due = []
    for point in sweep.points:
        if sweep.is_running(point):
            print(f'{point.name} is being trained and is left out')
        elif sweep.is_due(point, retry_failed):
            due.append(point)
    for point in sweep.points:
        if point in due:
            sweep.prepare(point)
        else:
            sweep.write_config(point)
    sweep.write_results()
    jobs = make_jobs(sweep, due)
    write_manifests(folder, kind.make_files(jobs, options, str(folder)) if jobs else {})
    for job in jobs:
        print(f'{job.index:>4}  {job.point}  [{job.name}]')
    if jobs and jobs[0].excluded:
        print(f'without the machines that computed wrongly: {", ".join(jobs[0].excluded)}')
    print(f'{format_count(len(jobs), "point")} of {len(sweep.points)} in {folder}')
    if jobs:
        watch = shlex.join(['lm', 'sweep', '--status', '--run_dir', str(sweep.root)])
        print(f'submit: {kind.submit.format(folder=shlex.quote(out))}\nwatch:  {watch}')


def make_jobs(sweep: Sweep, points: list[Point]) -> list[ClusterJob]:
    """Returns the jobs of `points`. Two sweeps, or two points of similar names, have different names of jobs."""
    excluded, root = tuple(sweep_file.read_wrong_machines(sweep.root)), str(sweep.root)
    jobs = []
    for point in points:
        digest = hashlib.sha256(f'{root}/{point.name}'.encode()).hexdigest()[:8]
        label = re.sub('[^a-z0-9]+', '-', point.name.lower()).strip('-')[:32].strip('-')
        jobs.append(ClusterJob(f'lm-{label}-{digest}', point.name, point.index, root, excluded))
    return jobs


def check_folder(out: str) -> Path:
    """Returns the folder. Raises ConfigError if it has files, and none of them is the list that `--emit` leaves."""
    folder = local_path(out, '--emit').absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f'--emit {out}: is a file; name a folder for the manifests')
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise ConfigError(f'--emit {out}: holds other files; name an empty folder, which is submitted whole')
    return folder


def write_manifests(folder: Path, files: dict[str, str]) -> None:
    """Writes the files, and deletes the files of an earlier call."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / MARK
        for name in mark.read_text().splitlines() if mark.exists() else ():
            if name not in files and '/' not in name:
                (folder / name).unlink(missing_ok=True)
        write_atomically(mark, ''.join(f'{name}\n' for name in files))
        for name, text in files.items():
            write_atomically(folder / name, text)
