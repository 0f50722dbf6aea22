#!/usr/bin/env python
"""Mutation run: makes small changes to the code, one at a time. A test of the module should notice each change.

    pip install -e '.[test,mutation]'
    scripts/mutation.py                        # the sample of tests/mutation.toml (hours on two cores).
    scripts/mutation.py step optimizer         # these modules.
    scripts/mutation.py --survivors            # the mutants that no test noticed last time, again.
    scripts/mutation.py --short --folder F     # only with the tests of the short run.
    scripts/mutation.py --report               # the table, and the survivors as diffs.

cosmic-ray makes the mutants and keeps the session of each module in FOLDER/NAME.sqlite. It has no operators that leave
out statements and keyword arguments, so they are added here. Messages, annotations and type checkers' code are not
mutated. At most one mutant is drawn at a place, by the seed alone, so that a run can be repeated.

The tests run in a copy of the working tree. Each mutant runs in a fork of one process that has imported JAX. All share
one cache of compiled programs.
"""

import argparse
import ast
import contextlib
import difflib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
WALL_SECONDS = 900
"""The limit for the tests of one mutant, if it waits for ever. CPU time stops one that computes for ever."""
NO_TESTS = 5
"""Pytest's exit status where it found no test."""
SILENT = {'warning', 'info', 'debug', 'print', 'note', '_say', 'print_row'}
"""Functions whose arguments are messages."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('modules', nargs='*', help='names of tests/mutation.toml; default: all')
    parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('/tmp/lm-mutation'))
    parser.add_argument('--sample', type=int, help='mutants of each file; default: those of tests/mutation.toml')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--survivors', action='store_true', help='test again what survived')
    parser.add_argument('--short', action='store_true', help='run only the tests that scripts/test.sh runs by default')
    parser.add_argument('--report', action='store_true', help='print the results so far and run nothing')
    arguments = parser.parse_args()
    config = tomllib.loads((ROOT / 'tests' / 'mutation.toml').read_text())
    unknown = set(arguments.modules) - set(config)
    if unknown:
        parser.error(f'{", ".join(sorted(unknown))}: not in tests/mutation.toml, which has {", ".join(config)}')
    chosen = {name: config[name] for name in arguments.modules or config}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        report(arguments.folder, chosen)
        return 0
    tree = copy_tree(arguments.folder / 'trees' / str(os.getpid()))
    try:
        prepare_process(tree, arguments.folder)
        for name, module in chosen.items():
            run(name, module, tree, arguments)
    finally:
        shutil.rmtree(tree)
    report(arguments.folder, chosen)
    return 0


def copy_tree(target: pathlib.Path) -> pathlib.Path:
    """Copies the files of the working tree that git does not ignore."""
    listed = subprocess.check_output(['git', 'ls-files', '-co', '--exclude-standard', '-z'], cwd=ROOT, text=True)
    for name in filter(None, listed.split('\0')):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def prepare_process(tree: pathlib.Path, folder: pathlib.Path) -> None:
    """Imports what all tests need but nothing that is mutated, and starts no thread: this process forks."""
    os.environ |= {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8',
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        'PYTHONPATH': str(tree),
        'PYTHONDONTWRITEBYTECODE': '1',
    }
    os.chdir(tree)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree), str(tree / 'tests')]
    import flax.nnx
    import hypothesis
    import jax
    import optax
    import orbax.checkpoint
    import pytest
    import tensorstore

    # The prepared text is the same for all mutants, so it is made once.
    import tiny

    made = folder / 'tokens'
    plain = tiny.prepare

    def prepare(target: pathlib.Path, characters: int = 60_000) -> pathlib.Path:
        if characters != 60_000:
            return plain(target, characters)
        if not made.exists():
            plain(made.with_suffix('.new'))
            made.with_suffix('.new').rename(made)
        shutil.copytree(made, target, dirs_exist_ok=True)
        return target / 'tokens'

    tiny.prepare = prepare
    assert all((flax.nnx, hypothesis, jax, optax, orbax.checkpoint, pytest, tensorstore))


def run(name: str, module: dict, tree: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Draws the mutants of one module, or takes those that survived, and tests each."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    with use_db(str(arguments.folder / f'{name}.sqlite')) as db:
        if not db.num_work_items:
            draw(db, module, tree, arguments)
        if arguments.survivors:
            pending = [item for item, result in db.completed_work_items if not result.is_killed]
        else:
            pending = db.pending_work_items
        if not pending:
            return
        limits, baseline = [], arguments.folder / f'{name}.baseline.log'
        stages = []
        for stage in ([*stage, '--short'] if arguments.short else stage for stage in module['tests']):
            code, seconds = test(stage, tree, baseline, 3600)
            if arguments.short and code == NO_TESTS:
                continue
            if code:
                raise SystemExit(f'{name}: its tests fail without a mutant ({code}); see {baseline}')
            stages.append(stage)
            limits.append(2 * seconds + 15)
        print(f'{name}: {len(pending)} mutants, at most {sum(limits):.0f} s of CPU each', flush=True)
        for item in pending:
            mutation = item.mutations[0]
            code, diff = mutated(mutation, tree)
            path = tree / mutation.module_path
            original, begun, log = path.read_text(), time.monotonic(), arguments.folder / f'{name}.log'
            path.write_text(code)
            try:
                codes = (test(stage, tree, log, limit)[0] for stage, limit in zip(stages, limits, strict=True))
                found = next(filter(None, codes), 0)
            finally:
                path.write_text(original)
            outcome = TestOutcome.KILLED if found else TestOutcome.SURVIVED
            tail = '\n'.join(log.read_text(errors='replace').splitlines()[-40:])
            db.set_result(item.job_id, WorkResult(WorkerOutcome.NORMAL, tail, outcome, diff))
            where = f'{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name.partition("/")[2]}'
            print(f'{outcome.value:9} {where} ({time.monotonic() - begun:.0f} s)', flush=True)


def test(stage: list[str], tree: pathlib.Path, log: pathlib.Path, cpu_seconds: float) -> tuple[int, float]:
    """Runs pytest in a fork of this process and returns (its exit status, its CPU seconds)."""
    scratch = tree.parent / f'{tree.name}.tests'
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds), int(cpu_seconds) + 5))
            import pytest

            os._exit(
                int(pytest.main(['-q', '-x', '-n', '0', '-p', 'no:cacheprovider', f'--basetemp={scratch}', *stage]))
            )
        os._exit(70)
    end = time.monotonic() + WALL_SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the processes that it has started
    shutil.rmtree(scratch, ignore_errors=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return os.waitstatus_to_exitcode(ended[1]), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def draw(db, module: dict, tree: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Fills a new session: a sample of each file, at most one mutant of a kind at a place."""
    import cosmic_ray.plugins
    from cosmic_ray.commands import init
    from cosmic_ray.work_item import WorkItem

    cosmic_ray.plugins.OPERATOR_PROVIDERS['lm'] = provider()
    for name in module['files']:
        init([pathlib.Path(name)], scratch := _Items(), {})
        left_out = list(unmutated(ast.parse((tree / name).read_text())))
        places: dict[tuple, list[WorkItem]] = {}
        for item in scratch.items:
            mutation = item.mutations[0]
            if not any(first <= mutation.start_pos < last for first, last in left_out):
                kind = mutation.operator_name.partition('_')[0]
                places.setdefault((mutation.start_pos, kind), []).append(item)
        rng = random.Random(f'{arguments.seed} {name}')
        drawn = [rng.choice(places[place]) for place in sorted(places)]
        count = arguments.sample or module['sample']
        db.add_work_items(rng.sample(drawn, min(count, len(drawn))))


class _Items:
    """Collects the work items of cosmic-ray in place of a session, before the sample is drawn."""

    def clear(self) -> None:
        self.items = []

    def add_work_items(self, items) -> None:
        self.items += items


def unmutated(module: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields (start, end) of messages, annotations and code for type checkers: lines from 1, columns from 0."""

    def span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
        return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)

    for node in ast.walk(module):
        match node:
            case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
                yield from map(span, [*args, *(k.value for k in keywords)])
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SILENT:
                yield span(node)
            case ast.JoinedStr():
                yield span(node)
            case ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.AST() as annotation):
                yield span(annotation)
            case ast.FunctionDef(returns=ast.AST() as returns):
                yield span(returns)
            case ast.If(test=ast.Name(id='TYPE_CHECKING')):
                yield span(node)
            case ast.Raise(exc=ast.Name(id='NotImplementedError')):
                yield span(node)


def mutated(mutation, tree: pathlib.Path) -> tuple[str, str]:
    """Returns the text of the mutated file, and the change as a diff."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    cosmic_ray.plugins.OPERATOR_PROVIDERS.setdefault('lm', provider())
    original = (tree / mutation.module_path).read_text()
    operator = cosmic_ray.plugins.get_operator(mutation.operator_name)(**mutation.operator_args)
    code = mutate_code(original, operator, mutation.occurrence)
    lines = difflib.unified_diff(original.splitlines(), code.splitlines(), str(mutation.module_path), lineterm='', n=1)
    return code, '\n'.join(list(lines)[2:])


def provider() -> dict[str, type]:
    """Returns the operators that cosmic-ray lacks, by name."""
    from cosmic_ray.operators.operator import Operator
    from parso.python.tree import Name

    class OmitStatement(Operator):
        """Replaces a call with an unused value, or an assignment to an attribute or an item, by `pass`."""

        def mutation_positions(self, node):
            if node.parent is None or node.parent.type != 'simple_stmt':
                return
            is_call = node.type in ('atom_expr', 'power') and node.children[-1].type == 'trailer'
            is_kept = node.type == 'expr_stmt' and node.children[0].type in ('atom_expr', 'power')
            is_added = (
                node.type == 'expr_stmt' and node.children[1].type == 'operator' and node.children[1].value != '='
            )
            if is_call or is_kept or is_added:
                yield node.start_pos, node.end_pos

        def mutate(self, node, index):
            return Name('pass', node.start_pos, prefix=node.get_first_leaf().prefix)

        @classmethod
        def examples(cls):
            return ()

    class OmitKeyword(Operator):
        """Removes one keyword argument of a call."""

        def mutation_positions(self, node):
            if node.type == 'argument' and getattr(node.children[1], 'value', None) == '=':
                yield node.start_pos, node.end_pos

        def mutate(self, node, index):
            return Name('**{}', node.start_pos, prefix=node.get_first_leaf().prefix)

        @classmethod
        def examples(cls):
            return ()

    return {'OmitStatement': OmitStatement, 'OmitKeyword': OmitKeyword}


def report(folder: pathlib.Path, modules: dict) -> None:
    """Prints the survivors as diffs, then one line per module."""
    from cosmic_ray.work_db import WorkDB, use_db

    rows = []
    for name in modules:
        path = folder / f'{name}.sqlite'
        if not path.exists():
            continue
        with use_db(str(path), WorkDB.Mode.open) as db:
            results = db.completed_work_items
        for item, result in results:
            if not result.is_killed:
                print(f'{item.mutations[0].module_path}\n{result.diff}\n')
        rows.append((name, sum(result.is_killed for _, result in results), len(results)))
    rows.append(('together', sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for name, killed, count in rows:
        print(f'| {name} | {killed} of {count} | {100 * killed / max(count, 1):.0f} % |')


if __name__ == '__main__':
    sys.exit(main())
