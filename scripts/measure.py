#!/usr/bin/env python
"""Runs the queue of measurements on a GPU, `scripts/gpu/rows/*.toml`, and takes results. `scripts/measure.sh` calls it.

A row runs by bash in the repository's root and ends at the first command that fails. RESULT is a file that it writes:
JSON, or a JSON object per line. CACHE is a folder that all rows share, with JAX's and Triton's compiled programs. PACK
is the folder that travelled with the tree. SECONDS_LEFT is the time until the end.

Rows with `alone = false` run first and side by side, then the others run one after the other; both by falling value.
A row starts only if its `minutes` (or `least`, if it has that) fit into the time that is left. Rows that have a good
result at their present `version` are left out.

The GPU machine has JAX, PyTorch and Python 3.12, and no network. `--pack` fetches what `lm` needs beyond that, as
pinned in `scripts/gpu/wheels.txt`; the run unpacks it into a temporary folder. This was tried with Python 3.12.1, JAX
0.11.2 and flax 0.12.12: `lm train`, `lm prepare`, `lm bench precision` and pytest start with these wheels alone.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS, WHEELS = (ROOT / 'scripts' / 'gpu' / name for name in ('rows', 'wheels.txt'))
RESULTS, PAGE = ROOT / 'scripts' / 'measurements.jsonl', ROOT / 'docs' / 'lab' / 'hardware.md'
SHOWN = ROOT / 'lm' / 'ops' / 'gpu' / 'shown.json'
PACK = '.gpu_pack'
DATA = {
    'corpus': ('build/corpus', 'python scripts/gpu/corpus.py build build/corpus'),
    'study_store': ('data/study', 'lm prepare --gin_file configs/papers/study/mechanisms/study.gin'),
    'quickstart_store': ('data/quickstart', 'lm prepare --gin_file configs/experiments/quickstart.gin'),
}
"""Pack → the folder that it holds, and the command that makes the folder."""
MOST_MIB = 52
"""The limit of a pack: 64 MiB travel at once, and the tree has up to 12."""
GRACE = 5.0
"""Seconds from the signal to end until the signal that ends."""
TAIL, MOST_LOG, MOST_LOGS = 4096, 2**20, 14 * 2**20
"""Bytes of a failed row's log in its result, of a row's log in the common log, and of the common log."""
PACKAGES = ('jax', 'jaxlib', 'torch', 'triton', 'nvidia-cudnn-cu13', 'fla-core', 'flax', 'numpy')
PLATFORMS = [f'manylinux_2_{n}_x86_64' for n in (28, 27, 24, 17)] + ['manylinux2014_x86_64', 'manylinux1_x86_64']


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement of the queue.

    Attributes:
        purpose: one sentence.
        part: the subject: correctness, peers, study and so on.
        command: what bash runs.
        minutes: the estimate on the GPU, with compilation.
        gpu_gib: the memory that it needs.
        alone: nothing else runs beside it, because it measures times.
        value: rows with larger values run first.
        needs: packs, files of the pack's folder without their endings.
        tiny: the same on a CPU, in seconds; a test runs it.
        version: a row runs again when this grows.
        least: the row starts if so many minutes are left, even if `minutes` are not.
        shows: the kernels that a good result shows to be right, as `lm.ops.platform` names them.
    """

    name: str
    purpose: str
    part: str
    command: str
    minutes: float
    gpu_gib: float
    alone: bool
    value: float
    needs: Sequence[str]
    tiny: str
    version: int = 1
    least: float | None = None
    shows: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Seconds that must be left when it starts."""
        return 60 * (self.minutes if self.least is None else self.least)


def read_rows(folder: pathlib.Path) -> list[Row]:
    """Returns the rows of all files of a folder. Raises SystemExit at a mistake in one."""
    rows: dict[str, Row] = {}
    for path in sorted(folder.glob('*.toml')):
        for name, fields in tomllib.loads(path.read_text()).items():
            if name in rows:
                raise SystemExit(f'{path.name}: [{name}]: another row has this name; choose another')
            fields.pop('item', None)
            try:
                rows[name] = Row(name, **fields)
            except TypeError as error:
                raise SystemExit(f'{path.name}: [{name}]: {error}; scripts/measure.py lists the fields') from None
    return list(rows.values())


def read_results(path: pathlib.Path) -> list[dict]:
    """Returns the results of a file, or none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_good(result: dict) -> bool:
    return result['code'] == 0 and result['device'] != 'cpu' and not result.get('tiny')


def choose(rows: Iterable[Row], results: Iterable[dict], only: Sequence[str] | None) -> list[Row]:
    """Returns the rows to run by falling value: the named ones, or all that have no good result at their version."""
    rows = sorted(rows, key=lambda row: -row.value)
    if only is not None:
        if unknown := set(only) - {row.name for row in rows}:
            raise SystemExit(f'--only {min(unknown)}: no such row; --list shows all')
        return [row for row in rows if row.name in only]
    done = {(result['row'], result['version']) for result in results if is_good(result)}
    return [row for row in rows if (row.name, row.version) not in done]


def find_machine(pack: pathlib.Path) -> dict[str, Any]:
    """Returns device, driver, memory, versions and commit; the device is 'cpu' where there is no GPU."""
    query = ['nvidia-smi', '--query-gpu=name,driver_version,memory.total', '--format=csv,noheader,nounits']
    fields = (run_quietly(query) or 'cpu, none, 0').splitlines()[0].split(', ')
    versions = {'python': platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    noted = pack / 'commit'  # a copy of the tree may have an older .git
    commit = noted.read_text().strip() if noted.exists() else run_quietly(['git', 'rev-parse', '--short=12', 'HEAD'])
    gib = round(float(fields[2]) / 1024, 1)
    return {'device': fields[0], 'driver': fields[1], 'gib': gib, 'versions': versions, 'commit': commit or 'unknown'}


def run_quietly(command: list[str]) -> str:
    """Returns the output of a command, or '' where it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ''


def unpack(pack: pathlib.Path, folder: pathlib.Path) -> dict[str, str]:
    """Unpacks the wheels into a folder, with commands `lm` and `python` that find them; returns the variables."""
    site, binaries, cache = (folder / name for name in ('site', 'bin', 'cache'))
    for made in (site, binaries, cache):
        made.mkdir(exist_ok=True)
    for wheel in sorted((pack / 'wheels').glob('*.whl')):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    sys.path.insert(0, str(site))  # for versions
    paths = f'{shlex.quote(str(ROOT))}:{shlex.quote(str(site))}'
    start = f'#!/bin/bash\nexport PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{paths}\nexec {shlex.quote(sys.executable)}'
    for name, words in {'python': '', 'python3': '', 'lm': ' -m lm'}.items():
        (binaries / name).write_text(f'{start}{words} "$@"\n')
        (binaries / name).chmod(0o755)
    return os.environ | {
        'PATH': f'{binaries}:{os.environ["PATH"]}',
        'PYTHONPATH': f'{ROOT}:{site}',
        'PYTHONUNBUFFERED': '1',
        'CACHE': str(cache),
        'PACK': str(pack),
        'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
        'JAX_COMPILATION_CACHE_DIR': str(cache / 'jax'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        'TRITON_CACHE_DIR': str(cache / 'triton'),
        'TORCHINDUCTOR_CACHE_DIR': str(cache / 'inductor'),
    }


@dataclasses.dataclass
class Running:
    """A row that has been started."""

    row: Row
    process: subprocess.Popen
    begun: float
    date: str
    result: pathlib.Path
    log: pathlib.Path
    beside: set[str]
    killed: bool = False

    def stop(self, signum: signal.Signals) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


class Day:
    """The rows that run now, and the results of those that have ended."""

    def __init__(self, out: pathlib.Path, seconds: float, machine: dict, variables: dict, folder: pathlib.Path):
        self.out, self.machine, self.variables, self.folder = out, machine, variables, folder
        self.deadline, self.reserve = time.monotonic() + seconds, 0.0
        self.running: list[Running] = []
        self.results: list[dict] = []
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.deadline - time.monotonic()

    def run(self, rows: Sequence[Row], jobs: int, gib: float, reserve: float = 0) -> list[Row]:
        """Runs rows in their order, at most `jobs` side by side; returns those for which no time was left.

        `reserve`: the seconds that they leave to others.
        """
        waiting, left_out, self.reserve = list(rows), [], reserve
        while waiting or self.running:
            for row in list(waiting):
                used = sum(one.row.gpu_gib for one in self.running)
                if row.seconds > self.left - reserve:
                    waiting.remove(row)
                    left_out.append(row)
                elif len(self.running) < jobs and (not self.running or used + row.gpu_gib <= gib):
                    waiting.remove(row)
                    self.start(row)
            if self.left <= reserve:
                self.kill()
            self.collect()
            time.sleep(0.05)
        return left_out

    def start(self, row: Row) -> None:
        result, log = self.folder / f'{row.name}.json', self.folder / f'{row.name}.log'
        variables = self.variables | {'RESULT': str(result), 'SECONDS_LEFT': str(int(self.left - self.reserve))}
        with log.open('wb') as output:
            process = subprocess.Popen(
                ['bash', '-eo', 'pipefail', '-c', row.command],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        date = f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}'
        beside = {one.row.name for one in self.running}
        for one in self.running:
            one.beside.add(row.name)
        self.running.append(Running(row, process, time.monotonic(), date, result, log, beside))

    def kill(self) -> None:
        """Ends everything that runs, with its children."""
        for one in self.running:
            one.stop(signal.SIGTERM)
        until = time.monotonic() + GRACE
        while time.monotonic() < until and any(one.process.poll() is None for one in self.running):
            time.sleep(0.05)
        for one in self.running:
            one.stop(signal.SIGKILL)
            one.process.wait()

    def collect(self) -> None:
        """Records the rows that have ended."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            seconds = round(time.monotonic() - one.begun, 1)
            if not one.killed:  # children that it left behind
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGKILL)
            log = one.log.read_bytes()
            record = {
                'row': one.row.name,
                'version': one.row.version,
                'part': one.row.part,
                'date': one.date,
                **self.machine,
                'seconds': seconds,
                'code': one.process.returncode,
                'killed': one.killed,
                'beside': sorted(one.beside),
                'command': one.row.command,
                'result': read_result(one.result),
            }
            if one.process.returncode:
                record['tail'] = log[-TAIL:].decode(errors='replace')
            self.results.append(record)
            with (self.out / 'results.jsonl').open('a') as file:
                file.write(json.dumps(record) + '\n')
            with (self.out / 'log.txt').open('ab') as file:
                if file.tell() < MOST_LOGS:
                    file.write(f'\n===== {one.row.name}: {describe(record)}\n'.encode() + log[-MOST_LOG:])
            print(f'{one.row.name}: {describe(record)}, {max(0, self.left):.0f} s left', flush=True)


def read_result(path: pathlib.Path) -> Any:
    """Returns the JSON of a file, or the objects of its lines; a last line that was cut off is left out."""
    if not path.exists():
        return None
    text = path.read_text(errors='replace')
    try:
        return json.loads(text)
    except ValueError:
        found = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


def describe(record: dict) -> str:
    """Returns a few words about a result."""
    outcome = 'stopped at the end' if record['killed'] else f'code {record["code"]}' if record['code'] else 'good'
    return f'{outcome}, {record["seconds"]:.1f} s'


def run_day(arguments: argparse.Namespace) -> int:
    """Runs rows until the time is up; returns 1 if one failed."""
    seconds = 60 * arguments.minutes
    pack = pathlib.Path(arguments.pack or ROOT / PACK).absolute()
    packed = {path.name.partition('.')[0] for path in pack.iterdir()} if pack.exists() else set()
    rows = choose(read_rows(arguments.rows), read_results(arguments.results), arguments.only)
    if arguments.tiny:
        rows = [dataclasses.replace(row, command=row.tiny, gpu_gib=0) for row in rows]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = unpack(pack, pathlib.Path(folder))
        machine = find_machine(pack)
        print(f'{machine["device"]}, driver {machine["driver"]}, {machine["versions"]}', flush=True)
        for row in rows:
            if missing := set(row.needs) - packed - {'wheels'}:
                print(f'{row.name}: left out, it needs {pack}/{min(missing)}', flush=True)
        rows = [row for row in rows if set(row.needs) <= packed | {'wheels'}]
        gib = machine['gib'] - 2 if machine['gib'] else float('inf')  # without a GPU there is nothing to share
        if arguments.tiny:
            machine['tiny'] = True
        day = Day(pathlib.Path(arguments.out), seconds, machine, variables, pathlib.Path(folder))
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            left_out = day.run([row for row in rows if not row.alone], arguments.jobs, gib, 60 * arguments.reserve)
            left_out += day.run([row for row in rows if row.alone], 1, gib)
        finally:
            day.kill()
            day.collect()
    print('\nrow | outcome')
    for record in day.results:
        print(f'{record["row"]} | {describe(record)}')
    for row in left_out:
        print(f'{row.name} | no time left')
    return int(any(record['code'] for record in day.results))


def make_pack(folder: pathlib.Path, data: Sequence[str] = ()) -> int:
    """Fetches the wheels into a folder, packs data and notes the commit; returns 1 if that is too large to travel."""
    for name in data:
        if name not in DATA:
            raise SystemExit(f'--data {name}: no such pack; there are {", ".join(DATA)}')
        if not (ROOT / DATA[name][0]).exists():
            raise SystemExit(f'--data {name}: {DATA[name][0]} is not there; {DATA[name][1]} makes it')
    wheels = folder / 'wheels'
    wheels.mkdir(parents=True, exist_ok=True)
    names = [line for line in WHEELS.read_text().split('\n') if line and not line.startswith('#')]
    pip, pure = [sys.executable, '-m', 'pip', '--quiet'], [name for name in names if name.startswith('promise=')]
    target = ['--python-version', '3.12', '--implementation', 'cp', *(f'--platform={name}' for name in PLATFORMS)]
    binary = [name for name in names if name not in pure]
    options = ['--no-deps', '--only-binary=:all:', *target, '--dest', str(wheels)]
    subprocess.run([*pip, 'download', *options, *binary], check=True)
    if pure:  # the registry has its sources alone
        subprocess.run([*pip, 'wheel', '--no-deps', '--wheel-dir', str(wheels), *pure], check=True)
    for name in data:
        made = ROOT / DATA[name][0]
        if name == 'corpus':  # it is compressed
            shutil.copytree(made, folder / name, dirs_exist_ok=True)
        else:
            with tarfile.open(folder / f'{name}.tar.xz', 'w:xz') as archive:
                archive.add(made, made.name)
    (folder / 'commit').write_text(run_quietly(['git', 'rev-parse', '--short=12', 'HEAD']) + '\n')
    size = sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 2**20
    print(f'{folder}: {size:.1f} MiB')
    if size > MOST_MIB:
        print(f'{folder}: {size:.1f} MiB: must be at most {MOST_MIB}; make a pack smaller', file=sys.stderr)
    return int(size > MOST_MIB)


def merge(
    source: pathlib.Path, results: pathlib.Path, page: pathlib.Path, shown: pathlib.Path, rows: Sequence[Row]
) -> int:
    """Adds results to the results of the project, each once. Writes the tables of the page and the record again."""
    if not source.exists():
        print(f'--merge {source}: no such file', file=sys.stderr)
        return 2
    kept = read_results(results)
    if damaged := [result['row'] for result in read_results(source) if not is_whole(result)]:
        why = 'has another checksum than its figures; send the file again'
        print(f'--merge {source}: {damaged[0]} {why}', file=sys.stderr)
        return 2
    known = {(result['row'], result['date'], result['device']) for result in kept}
    new = [result for result in read_results(source) if (result['row'], result['date'], result['device']) not in known]
    results.write_text(''.join(json.dumps(result) + '\n' for result in [*kept, *new]))
    write_page(page, rows, [*kept, *new])
    shown.write_text(json.dumps(find_shown(rows, [*kept, *new]), indent=2) + '\n')
    print(f'{len(new)} results added to {results}')
    return 0


def is_whole(result: dict) -> bool:
    """Returns whether a result is as it was written; only results of docs/notebooks have a checksum."""
    figures = {name: value for name, value in result.items() if name != 'sha256'}
    digest = hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
    return result.get('sha256', digest) == digest


def find_shown(rows: Sequence[Row], results: Sequence[dict]) -> dict[str, str]:
    """Returns kernel → row, day and GPU of the first result that showed it to be right.

    A good result shows what its row says. `lm bench precision` shows the kernels of each mechanism whose gradients are
    right, also if the row failed for another reason: two runs of a program may differ in XLA alone. Results of earlier
    versions of a row do not count.
    """
    present, found = {(row.name, row.version): row for row in rows}, {}
    for result in results:
        row = present.get((result['row'], result['version']))
        if row is None or result['device'] == 'cpu' or result.get('tiny'):
            continue
        kernels = list(row.shows) if is_good(result) else []
        if isinstance(result['result'], dict) and result['result'].get('benchmark') == 'precision':
            compared = result['result']['rows']
            kernels += [kernel for one in compared if one['right'] for kernel in one['kernels'].split(', ')]
        for kernel in kernels:
            if kernel != '–':  # XLA alone
                found.setdefault(kernel, f'{row.name}, {result["date"][:10]}, {result["device"]}')
    return dict(sorted(found.items()))


def write_page(page: pathlib.Path, rows: Sequence[Row], results: Sequence[dict]) -> None:
    """Writes the tables between the markers of a page."""
    text = page.read_text()
    for name, table in {'occasions': make_occasions(results), 'queue': make_queue(rows, results)}.items():
        pattern = rf'(<!-- {name} -->\n).*?(<!-- end of {name} -->)'
        text = re.sub(pattern, lambda found, table=table: f'{found[1]}\n{table}\n{found[2]}', text, flags=re.S)
    page.write_text(text)


def make_occasions(results: Sequence[dict]) -> str:
    """Returns a Markdown table with a line per machine, day and commit."""
    titles = 'date', 'device', 'driver', 'commit', 'versions', 'rows', 'failed', 'stopped at the end'
    lines = [f'| {" | ".join(titles)} |', '|---|---|---|---|---|---:|---:|---:|']
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items())
        where = result['date'][:10], result['device'], result['driver'], result['commit'], versions
        groups.setdefault(where, []).append(result)
    for where, found in groups.items():
        stopped = sum(one['killed'] for one in found)
        failed = sum(one['code'] != 0 and not one['killed'] for one in found)
        lines.append(f'| {" | ".join(where)} | {len(found)} | {failed} | {stopped} |')
    return '\n'.join(lines) if groups else 'No row has run on a GPU yet.'


def make_queue(rows: Sequence[Row], results: Sequence[dict]) -> str:
    """Returns a Markdown table with a line per row, by part and falling value."""
    lines = ['| row | part | purpose | minutes | alone | ran |', '|---|---|---|---:|---|---|']
    for row in sorted(rows, key=lambda row: (row.part, -row.value)):
        ran = [result for result in results if result['row'] == row.name and result['version'] == row.version]
        last = next((one for one in reversed(ran) if is_good(one)), ran[-1] if ran else None)
        when = f'{last["date"][:10]}, {last["device"]}: {describe(last)}' if last else 'never'
        alone = 'yes' if row.alone else 'no'
        lines.append(f'| `{row.name}` | {row.part} | {row.purpose} | {row.minutes:g} | {alone} | {when} |')
    return '\n'.join(lines)


def print_list(rows: Sequence[Row], results: Sequence[dict]) -> int:
    """Prints the queue, and the time that its open rows take."""
    print(make_queue(rows, results))
    open_rows = choose(rows, results, None)
    beside, alone = (sum(row.minutes for row in open_rows if row.alone is one) for one in (False, True))
    print(f'\n{len(open_rows)} rows are open: {beside:.1f} minutes of rows that share the GPU, {alone:.1f} of others')
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, help='run rows for so long')
    parser.add_argument('--out', help='the folder for results.jsonl and log.txt')
    parser.add_argument('--only', type=lambda text: text.split(','), help='names of rows, with commas')
    parser.add_argument('--jobs', type=int, default=8, help='rows side by side; default: 8')
    parser.add_argument('--reserve', type=float, default=0, help='minutes kept for rows that run alone; default: 0')
    parser.add_argument('--tiny', action='store_true', help='the tiny command of each row, for a CPU')
    parser.add_argument('--pack', help=f'fetch wheels into this folder, or with --minutes use it; default: {PACK}')
    packs = f'with --pack: pack these too, with commas, of {", ".join(DATA)}'
    parser.add_argument('--data', type=lambda text: text.split(','), default=[], metavar='PACKS', help=packs)
    parser.add_argument('--merge', type=pathlib.Path, metavar='FILE', help='add these results to the project')
    parser.add_argument('--list', action='store_true', help='show the queue')
    parser.add_argument('--rows', type=pathlib.Path, default=ROWS, help='the folder of rows')
    parser.add_argument('--results', type=pathlib.Path, default=RESULTS, help='the results of the project')
    parser.add_argument('--page', type=pathlib.Path, default=PAGE, help='the page with tables')
    parser.add_argument('--shown', type=pathlib.Path, default=SHOWN, help='the record of kernels that are right')
    arguments = parser.parse_args()
    if arguments.minutes is not None:
        if arguments.out is None:
            parser.error('--minutes needs --out, a folder for the results')
        return run_day(arguments)
    if arguments.merge:
        return merge(arguments.merge, arguments.results, arguments.page, arguments.shown, read_rows(arguments.rows))
    if arguments.list:
        return print_list(read_rows(arguments.rows), read_results(arguments.results))
    if arguments.pack:
        return make_pack(pathlib.Path(arguments.pack), arguments.data)
    parser.error('give --minutes, --pack, --merge or --list')


if __name__ == '__main__':
    sys.exit(main())
