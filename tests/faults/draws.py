"""The random battery: a run shape with several faults, which must end in the same state as without faults.

Draw I of a seed is always the same, whatever was drawn before. The moments of faults are random, their order is not.
Consecutive draws share a run shape, its undisturbed run and its compiled programs. Among these draws, each fault comes
first once.
"""

import contextlib
import dataclasses
import json
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable

from tally import Tally, side_by_side
from warm import Nursery
from workshop import Failed, Session, Shape, Workshop, catches, damage, files, logged, need, saved

from lm.attention import mechanisms

STEPS = 24
BRAKE = ('slow', '0.02')
"""The launcher of a run that a fault must hit at a certain step: it makes steps slow enough."""
SMALL = {'performer': {'n_features': 16, 'block': 8, 'redraw_every': 5}, 'polysketch': {'sketch_size': 8, 'block': 8}}
SMALL |= {'llops': {'n_features': 16}, 'taylor': {'feature_dim': 4}, 'hybrid': {'window': 5}}
"""Fields of mechanisms whose defaults are too large for a tiny model."""


def draw_shape(seed: int, number: int, kinds: int | None = None) -> Shape:
    """Returns the shape that as many draws in a row share as there are kinds of faults."""
    draw = random.Random(f'shape {seed} {number // (kinds or len(FAULTS))}')
    attention = draw.choice(sorted(mechanisms()))
    processes, devices = draw.choice([(1, 1), (1, 1), (1, 2), (1, 4), (2, 1), (2, 1), (2, 2)])
    bindings = {f'{attention}.{name}': value for name, value in SMALL.get(attention, {}).items()}
    bindings |= {'train.microbatches': draw.choice([1, 2]), 'checkpoint.save_every_steps': draw.choice([2, 3, 5])}
    if processes * devices > 1:
        bindings |= {'mesh.fsdp': draw.choice([1, 2]), 'model.vocab_size': 512}  # large enough to be sharded
    bindings |= {'train.seed': draw.randrange(3), 'train.max_nonfinite_steps': 3}
    return Shape(attention, devices, processes, tuple(bindings.items()), STEPS)


class Draw:
    """One draw: `run` raises Failed if the product has lost something.

    Attributes:
        fault: the newest fault.
        recoveries: (fault, repeated steps, seconds to the first step or None) of each restart.
    """

    def __init__(self, shop: Workshop, seed: int, number: int, kinds: 'Kinds | None' = None):
        self.shop, self.number, self.kinds = shop, number, kinds or FAULTS
        self.shape = draw_shape(seed, number, len(self.kinds))
        self.draw = random.Random(f'draw {seed} {number}')
        in_turn = random.Random(f'faults {seed} {number // len(self.kinds)}').sample(list(self.kinds), len(self.kinds))
        more = self.draw.choices(list(self.kinds), k=self.draw.choice([0, 0, 0, 1, 2]))
        self.faults = [in_turn[number % len(self.kinds)], *more]
        self.fault = self.faults[0]
        self.recoveries: list[tuple[str, int, float | None]] = []

    def __str__(self) -> str:
        return f'{self.number}: {", ".join(self.faults)} ({self.shape})'

    def run(self) -> None:
        self.shop.reference(self.shape)
        self.path = self.shop.place(f'draw-{self.number}')
        previous = None
        for fault in self.faults:
            self.fault = fault
            session = self.kinds[fault](self)
            if previous and session.first('step ') is not None:
                self.note(previous, session, self.before)
            previous = fault
            if saved(self.path)[-1:] == [STEPS]:
                break  # the fault came too late
        before = logged(self.path)
        self.note(previous, self.shop.finish(self.shape, self.path), before)
        self.shop.same_end(self.shape, self.path)
        shutil.rmtree(self.path.parent)

    def note(self, fault: str, session: Session, before: int) -> None:
        lost = max(0, before - (session.resumed_from() or 0))
        self.recoveries.append((fault, lost, session.first('step ')))

    # The parts of faults.

    def start(self, *extra: str, **options) -> Session:
        self.before = logged(self.path)
        return self.shop.start(self.shape, self.path, *extra, **options)

    def interrupt(self, how: signal.Signals, index: int | None = None, allowed: tuple[int, ...] = ()) -> Session:
        """Runs a session and hits it at a random moment, a named moment or a step.

        Each process must finish, or end with an allowed code.
        """
        kind = self.draw.choice(['time', 'devices', 'step', 'step', 'step', 'save', 'evaluation'])
        later = self.draw.uniform(0.0, 0.15)
        step = self.draw.randint(1, STEPS - 4)
        session = self.start(cold=kind == 'time', launcher=() if kind == 'time' else BRAKE)
        if kind == 'time':
            if how != signal.SIGKILL:  # an earlier signal hits Python's start and not the program
                # SIGTERM, since Python itself catches SIGINT from its first moment on.
                wait_until(lambda: all(catches(p, signal.SIGTERM) for p in session.processes), session)
            time.sleep(self.draw.uniform(0.0, 5.0))
        elif kind == 'devices':
            session.wait_for('devices')
        elif kind == 'step':
            wait_until(lambda: logged(self.path) >= step, session)
        elif kind == 'evaluation':
            wait_until(lambda: logged(self.path) >= STEPS // 2, session)
        else:
            wait_until(lambda: any((self.path / 'checkpoints').glob('*.orbax-checkpoint-tmp*')), session)
            later /= 10
        time.sleep(later)
        session.send(how, index)
        session.end()
        wrong = [code for code in session.codes() if code not in (0, -signal.SIGKILL, *allowed)]
        need(not wrong, f'{session.codes()} after {how.name}:\n{session.output()}')
        return session

    def stop(self) -> Session:
        """Stops a session after a few steps and a save, so that there is something to damage."""
        session = self.start(launcher=BRAKE)
        wait_until(lambda: logged(self.path) >= min(self.before + 6, STEPS - 2) and saved(self.path), session)
        session.send(self.draw.choice([signal.SIGTERM, signal.SIGKILL]))
        session.end()
        return session

    def refused(self, code: int, words: str, mend: Callable[[], object], **options) -> Session:
        """Runs a session that must be refused with one line; then mends the cause."""
        session = self.start(**options)
        session.end()
        need(set(session.codes()) <= {code}, f'{session.codes()} instead of {code}:\n{session.output()}')
        need(words in session.output() and 'Traceback' not in session.output(), session.output())
        mend()
        return session


def wait_until(condition: Callable[[], bool], session: Session, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition() and any(p.poll() is None for p in session.processes):
        if time.monotonic() > end:
            session.kill()
            raise Failed(f'nothing happens for {timeout:.0f} s:\n{session.output()}')
        time.sleep(0.003)


def kill(d: Draw) -> Session:
    return d.interrupt(signal.SIGKILL)


def terminate(d: Draw) -> Session:
    index = d.draw.choice([None, *range(d.shape.processes)])
    return d.interrupt(signal.SIGTERM, index, (42, -signal.SIGTERM) if d.shape.processes > 1 else (42,))


def ctrl_c(d: Draw) -> Session:
    """While Python imports, Ctrl-C ends it with 130, as in any program."""
    return d.interrupt(signal.SIGINT, None, (42, 130, -signal.SIGINT))


def lose_host(d: Draw) -> Session:
    """Kills or freezes a process; if the job has one process, kills it."""
    if d.shape.processes == 1:
        return kill(d)
    index = d.draw.randrange(2)
    session = d.start(launcher=BRAKE)
    wait_until(lambda: logged(d.path) >= d.before + 1, session)
    session.send(d.draw.choice([signal.SIGKILL, signal.SIGSTOP]), index)
    process = session.processes[1 - index]
    process.wait(60)
    session.kill()
    need(process.returncode in (0, 42), f'the other ends with {process.returncode}:\n{session.output()}')
    return session


def damaged_checkpoint(d: Draw) -> Session:
    session = d.stop()
    steps = saved(d.path)
    if steps and steps[-1] < STEPS:
        path = d.draw.choice(files(d.path, steps[-1]))
        intact = damage(path, d.draw.choice(['flip', 'flip', 'truncate', 'delete', 'empty']), d.draw)
        again = d.start()
        code = again.end()
        if code == 44:  # no sound checkpoint is left: a copy that somebody has kept comes back
            need(len(steps) == 1 or all(s not in saved(d.path) for s in steps[:-1]), again.output())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(intact)
        else:
            need(code == 0, f'{again.codes()} after {path} was damaged:\n{again.output()}')
        return again
    return session


def damaged_metrics(d: Draw) -> Session:
    session = d.stop()
    path = d.path / 'metrics.jsonl'
    if path.exists() and saved(d.path)[-1:] != [STEPS]:
        covered = (saved(d.path) or [0])[-1]
        lines = path.read_bytes().splitlines(keepends=True)
        # Everything that a checkpoint covers was on disk before it. A crash can damage only later lines.
        keep = sum(f'"step": {step},'.encode() in line for line in lines for step in range(covered + 1))
        rest = b''.join(lines[keep:])
        path.write_bytes(b''.join(lines[:keep]) + rest[: d.draw.randrange(len(rest) + 1)])
    return session


def second_process(d: Draw) -> Session:
    session = d.start(launcher=BRAKE)
    wait_until(lambda: logged(d.path) >= d.before + 1, session)
    session.send(signal.SIGSTOP, 0)
    is_running = session.processes[0].poll() is None
    alone = dataclasses.replace(d.shape, processes=1, devices=1)
    second = d.shop.start(alone, d.path, mesh__fsdp=1)
    try:
        code = second.end(100)
    finally:
        session.send(signal.SIGCONT, 0)
    need(not is_running or code == 2, f'{second.codes()}:\n{second.output()}')
    code = session.end()
    need(code in (0, 42), f'the first ends with {session.codes()}:\n{session.output()}')
    return session


def full_disk(d: Draw) -> Session:
    size = int(10 ** d.draw.uniform(2.5, 5.5))
    session = d.start(launcher=('limit', str(size)))
    code = session.end()
    need(code in (0, 1, 42) and 'Traceback' not in session.output(), f'{session.codes()}:\n{session.output()}')
    return session


def not_finite(d: Draw) -> Session:
    first = d.draw.randrange(2, STEPS - 6)
    d.before = logged(d.path)
    session = d.start(launcher=('poison', *(str(first + i) for i in range(3))))
    code = session.end()
    is_behind = session.resumed_from() and session.resumed_from() > first
    need(code == 43 or (is_behind and code == 0), f'{session.codes()}:\n{session.output()}')
    need(not is_behind or code == 0, session.output())
    return session


def damaged_shard(d: Draw) -> Session:
    session = d.stop()
    if saved(d.path)[-1:] == [STEPS]:
        return session
    store = shutil.copytree(d.shop.tokens, d.path.parent / 'tokens')
    (path,) = [p for p in (store / 'train' / 'tokens').rglob('*') if p.is_file() and p.name != 'zarr.json']
    damage(path, d.draw.choice(['flip', 'truncate', 'delete']), d.draw)
    return d.refused(44, "split 'train'", lambda: shutil.rmtree(store), data__path=str(store))


def changed_config(d: Draw) -> Session:
    session = d.stop()
    config = d.path / 'config.gin'
    if not saved(d.path) or saved(d.path)[-1] == STEPS:
        return session
    text = config.read_text()
    config.write_text(text.replace('model.n_layers = 2', 'model.n_layers = 3'))
    return d.refused(44, 'model.n_layers was', lambda: config.write_text(text))


def lost_checkpoints(d: Draw) -> Session:
    session = d.stop()
    folder, aside = d.path / 'checkpoints', pathlib.Path(f'{d.path}.aside')
    if not saved(d.path) or saved(d.path)[-1] == STEPS:
        return session

    def put_back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)

    folder.rename(aside)
    return d.refused(44, 'mount or restore that folder', put_back)


Kinds = dict[str, Callable[[Draw], Session]]
FAULTS: Kinds = {
    'SIGKILL': kill,
    'SIGTERM': terminate,
    'Ctrl-C': ctrl_c,
    'lost host': lose_host,
    'damaged checkpoint': damaged_checkpoint,
    'damaged metrics.jsonl': damaged_metrics,
    'second process': second_process,
    'full disk': full_disk,
    'not finite': not_finite,
    'damaged shard': damaged_shard,
    'changed config.gin': changed_config,
    'lost checkpoints': lost_checkpoints,
}


class Results:
    """The results of the draws of a seed.

    They go to the file `path`, if there is one, as a line of JSON each. The next battery then goes on where this one
    stopped. Draws from other `kinds` of faults do not count.
    """

    def __init__(self, seed: int, path: pathlib.Path | None = None, kinds: Kinds = FAULTS):
        self.seed, self.path, self.kinds = seed, path, kinds
        self.of: dict[int, dict] = {}
        text = path.read_text() if path and path.exists() else ''
        if text and not text.endswith('\n'):
            path.write_text(text + '\n')
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # the last line, if the battery was killed
                result = json.loads(line)
                if result['seed'] == seed and result.get('kinds', len(FAULTS)) == len(kinds):
                    self.of[result['draw']] = result

    def add(self, draw: Draw, failures: list[str], seconds: float) -> None:
        self.of[draw.number] = {
            'seed': self.seed,
            'draw': draw.number,
            'kinds': len(self.kinds),
            'faults': draw.faults,
            'shape': str(draw.shape),
            'failed': draw.fault if failures else None,
            'failures': failures,
            'recoveries': draw.recoveries,
            'seconds': round(seconds, 1),
        }
        if self.path:
            with open(self.path, 'a') as file:
                file.write(json.dumps(self.of[draw.number]) + '\n')

    def rows(self) -> list[Tally]:
        """Returns one row per fault; a draw counts for each of its faults."""
        rows = {name: Tally(name) for name in self.kinds}
        for result in self.of.values():
            for name in set(result['faults']):
                rows[name].tries += 1
            if result['failures']:
                rows[result['failed']].failures += result['failures']
            for name, lost, seconds in result['recoveries']:
                rows[name].lost.append(lost)
                rows[name].seconds += [] if seconds is None else [seconds]
        return [row for row in rows.values() if row.tries]


def random_battery(
    shop: Workshop, results: Results, numbers: list[int], say: Callable[[str], None], jobs: int = 2
) -> list[Tally]:
    """Runs the draws that have no result yet."""

    def one(number: int) -> None:
        draw = Draw(shop, results.seed, number, results.kinds)
        begin = time.monotonic()
        result = Tally('draw')
        with result.attempt(f'--random --seed {results.seed} --only {number}: {draw}'):
            draw.run()
        took = time.monotonic() - begin
        results.add(draw, result.failures, took)
        say(f'{"failed" if result.failures else "ok"} {draw} {took:.0f} s')

    if wanted := [number for number in numbers if number not in results.of]:
        with Nursery(shop.environment()) as shop.nursery:
            side_by_side(one, wanted, jobs)
    return results.rows()
