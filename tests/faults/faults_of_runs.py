"""The faults that hit a training: signals, dying hosts, other devices, damaged checkpoints, full disks, NaN."""

import contextlib
import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import tiny
from etils import epath
from tally import Tally, side_by_side
from workshop import (
    BRAKE,
    HEARTBEAT,
    Failed,
    Session,
    Shape,
    Workshop,
    arrays,
    compare_arrays,
    damage,
    files,
    logged,
    metrics,
    need,
    saved,
)

from lm.checkpoint.checkpointer import Checkpointer
from lm.errors import LmError

PLAIN = Shape()
OFTEN = Shape(bindings=(('checkpoint.save_every_steps', 3),), steps=200)
PAIR = Shape(processes=2, steps=50)
KILLS = 50


def sigkill(shop: Workshop, tally: Tally) -> None:
    """1. SIGKILL at random moments of runs that save every 3 steps loses nothing beyond the last complete save."""

    def chain(seed: int) -> None:
        draw, kills = random.Random(seed), 0
        while kills < KILLS // 2:
            run, is_over = shop.place('sigkill'), False
            while not is_over:
                is_last = kills >= KILLS // 2
                with tally.attempt(f'seed {seed}, kill {kills}', count=0 if is_last else 1):
                    before, newest = logged(run), (saved(run) or [0])[-1]
                    session = shop.start(OFTEN, run)
                    if not is_last:
                        if draw.random() < 0.7 and session.wait_for(' loss '):
                            time.sleep(draw.uniform(0, 2.0))
                        else:
                            time.sleep(draw.uniform(0.3, 2.5))
                        is_over = session.processes[0].poll() is not None
                        session.kill()
                        kills += not is_over
                        tally.tries -= is_over
                    else:
                        session.end()
                        is_over = True
                    need(is_over <= (session.codes() == [0]), session.output())
                    if session.first('step ') is not None:
                        need((session.resumed_from() or 0) == newest, f'step {newest} was saved:\n{session.output()}')
                        tally.recovered(session, before)
                    if is_over:
                        shop.same_end(OFTEN, run)
                    continue
                break

    shop.reference(OFTEN)
    side_by_side(chain, (0, 1))


def told_to_stop(shop: Workshop, tally: Tally) -> None:
    """2. SIGTERM and Ctrl-C in one process and two; while importing, compiling, training and evaluating."""
    moments = ('', 'devices', 'step 1/', 'step 3/', 'step 20/', 'evaluation at step 20')  # step 20: in the evaluation

    def stop(case) -> None:
        shape, words, how, index = case
        run = shop.place('stopped')
        with tally.attempt(f'{how.name} at {words!r}, {shape}'):
            session, at = shop.hit(shape, run, words, how, index)
            need(set(session.codes()) == {42}, f'{session.codes()}:\n{session.output()}')
            need('Traceback' not in session.output(), session.output())
            newest = (saved(run) or [0])[-1]
            need(at <= newest <= at + 20, f'told at step {at}, saved {newest}')
            before = logged(run)
            tally.recovered(shop.finish(shape, run), before)
            shop.same_end(shape, run)

    cases = [(PLAIN, words, signal.SIGTERM, 0) for words in moments]
    cases += [(PLAIN, 'step 3/', signal.SIGINT, 0)]
    cases += [(PAIR, words, signal.SIGTERM, i) for words, i in (('step 11/', 0), ('step 25/', 1), ('step 30/', None))]
    side_by_side(stop, cases)


def other_devices(shop: Workshop, tally: Tally) -> None:
    """3. A run that continues with 8, 4, 2 and 1 devices restores the same arrays; its losses agree within 1e-5."""
    run, before = shop.place('devices'), 0
    reference = shop.reference(PLAIN)
    for devices, until in ((8, 10), (4, 20), (2, 30), (1, None)):
        with tally.attempt(f'{devices} devices'):
            shape = Shape(devices=devices)  # a checksum over all devices is verified when it is read
            if until:
                session, _ = shop.hit(shape, run, f'step {until + 1}/', signal.SIGTERM)
                need(session.codes() == [42], session.output())
            else:
                session = shop.finish(shape, run)
            need(f'{devices} × cpu' in session.output() or devices == 1, session.output())
            tally.recovered(session, before)
            before = logged(run)
    with tally.attempt('losses', count=0):
        for one, two in zip(metrics(run), metrics(reference), strict=True):
            need((one['kind'], one['step']) == (two['kind'], two['step']), (one, two))
            need(abs(one['loss'] - two['loss']) <= 1e-5, f'step {one["step"]}: {one["loss"]}, {two["loss"]}')


def processes(shop: Workshop, tally: Tally) -> None:
    """5. Two processes equal one process with two devices to the bit; 2×2 equals 1×4 within 1e-6."""
    with tally.attempt('2×1 and 1×2'):
        one, two = shop.reference(Shape(devices=2, steps=50)), shop.reference(PAIR)
        need(metrics(one) == metrics(two), 'metrics differ')
        compare_arrays(arrays(one, 50), arrays(two, 50))
    with tally.attempt('2×2 and 1×4'):
        one = shop.reference(Shape(devices=4, steps=50))
        two = shop.reference(Shape(devices=2, processes=2, steps=50))
        for a, b in zip(metrics(one), metrics(two), strict=True):
            need(abs(a['loss'] - b['loss']) <= 1e-6 * abs(a['loss']), (a, b))


class _Restored:
    """The newest checkpoints of a finished run, read as a restart reads them."""

    def __init__(self, run: pathlib.Path):
        self.run, self.steps = run, saved(run)
        self.intact = {step: arrays(run, step) for step in self.steps}
        self.abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in self.intact[self.steps[-1]].items()}

    def step(self) -> int:
        """Returns the step that is restored; raises Failed if its arrays differ from the saved arrays."""
        with Checkpointer(self.run / 'checkpoints') as saved_steps:
            state, step, _ = saved_steps.restore(self.abstract)
        compare_arrays({n: np.asarray(x) for n, x in state.items()}, self.intact[step])
        return step


def flipped_bits(shop: Workshop, tally: Tally) -> None:
    """6. 200 single bits of the newest checkpoint, over all its files, are flipped: none is read silently."""
    run, draw = shop.copy(PLAIN, 'flips'), random.Random(6)
    restored, paths = _Restored(run), files(run, 40)
    harmful = 0
    for i in range(200):
        path = paths[i % len(paths)]
        with tally.attempt(f'flip {i} in {path.name}'):
            intact = damage(path, 'flip', draw)
            harmful += restored.step() != 40
            path.write_bytes(intact)
    need(harmful > 20, f'only {harmful} flips were harmful')
    with tally.attempt('a run goes on'):
        damage(max(paths, key=lambda path: path.stat().st_size), 'flip', draw)
        before = logged(run)
        session = shop.finish(PLAIN, run)
        need('checkpoint step 40 is damaged, trying another one' in session.output(), session.output())
        tally.recovered(session, before)
        shop.same_end(PLAIN, run)


def bad_files(shop: Workshop, tally: Tally) -> None:
    """7. Each file is cut off, emptied or deleted, the marker too: the step before is used. If no step is sound, the
    exit code is 44."""
    run, draw = shop.copy(PLAIN, 'files'), random.Random(7)
    restored = _Restored(run)
    for path in files(run, 40):
        for how in ('truncate', 'delete', 'empty'):
            with tally.attempt(f'{how} {path.name}'):
                intact = damage(path, how, draw)
                restored.step()
                path.write_bytes(intact)
    with tally.attempt('no sound checkpoint'):
        for step in saved(run):
            damage(run / 'checkpoints' / str(step) / 'metadata' / 'metadata', 'empty', draw)
        before = (run / 'metrics.jsonl').read_bytes()
        session = shop.start(PLAIN, run)
        need(session.end() == 44 and 'no checkpoint is sound' in session.output(), session.output())
        need((run / 'metrics.jsonl').read_bytes() == before, 'metrics were rewritten')


def mount(*arguments: str) -> bool:
    """Runs `mount` and returns whether it worked: a small file system in memory, if that is permitted."""
    return subprocess.run(['mount', *arguments], capture_output=True).returncode == 0


def full_disk(shop: Workshop, tally: Tally) -> None:
    """8. The disk is full while a step is saved, and while metrics are written: one error line, then an exact
    resume."""

    def check(session: Session) -> None:
        code = session.end()
        need(code == 1, f'exit code {code}:\n{session.output()}')
        need('make room' in session.output() and 'Traceback' not in session.output(), session.output())

    def limit(policy: str, size: int) -> None:
        """From step 30 on, no file may be longer than `size` bytes."""
        run = shop.copy(PLAIN, 'full')
        shutil.rmtree(run / 'checkpoints' / '40')
        with tally.attempt(f'files of at most {size} bytes, {policy}'):
            newest = saved(run)[-1]
            intact = arrays(run, newest)
            changes = {'checkpoint__on_failed_save': policy}
            check(shop.start(PLAIN, run, launcher=('limit', str(size)), **changes))
            compare_arrays(arrays(run, newest), intact)
            before = logged(run)
            tally.recovered(shop.finish(PLAIN, run, **changes), before)
            shop.same_end(PLAIN, run)

    def fill(policy: str, size: int) -> None:
        """The run directory is a file system of `size` bytes, until room is made."""
        run = shop.place('full')
        run.mkdir(parents=True)
        with tally.attempt(f'a disk of {size} bytes, {policy}'):
            need(mount('-t', 'tmpfs', '-o', f'size={size}', 'lm', str(run)), 'cannot be mounted')
            try:
                changes = {'checkpoint__on_failed_save': policy}
                check(shop.start(PLAIN, run, **changes))
                for step in saved(run):
                    arrays(run, step)
                need(mount('-o', 'remount,size=64m', str(run)), 'cannot be mounted again')
                before = logged(run)
                tally.recovered(shop.finish(PLAIN, run, **changes), before)
                shop.same_end(PLAIN, run)
            finally:
                subprocess.run(['umount', '-l', str(run)], capture_output=True)

    cases = [(limit, policy, size) for policy in ('stop', 'continue') for size in (20_000, 2000)]
    probe = shop.place('probe')
    probe.mkdir(parents=True)
    if mount('-t', 'tmpfs', '-o', 'size=64k', 'lm', str(probe)):
        subprocess.run(['umount', str(probe)], check=True)
        cases += [(fill, 'stop', 700_000), (fill, 'continue', 700_000), (fill, 'stop', 1_300_000)]
    side_by_side(lambda case: case[0](*case[1:]), cases)


def last_save(shop: Workshop, tally: Tally) -> None:
    """9. At exit code 0 the last step is on disk: all remaining processes are killed at once."""

    def end(number: int) -> None:
        run = shop.copy(PLAIN, 'end')
        with tally.attempt(number):
            shutil.rmtree(run / 'checkpoints' / '40')
            before = logged(run)
            session = shop.start(PLAIN, run)
            need(session.processes[0].wait(240) == 0, session.output())
            session.kill()
            tally.recovered(session, before)
            shop.same_end(PLAIN, run)

    side_by_side(end, range(20))


def not_finite(shop: Workshop, tally: Tally) -> None:
    """10. A step that is not finite changes only counters; many in a row end with 43 and lose nothing."""
    every = Shape(bindings=(('checkpoint.save_every_steps', 1), ('train.max_nonfinite_steps', 3)), steps=16)
    run = shop.place('nan')
    with tally.attempt('the last step'):
        session = shop.start(every, run, launcher=('poison', '15'))
        need(session.end() == 43 and 'step 16 is saved' in session.output(), session.output())
        before, after = arrays(run, 15), arrays(run, 16)
        kept = [name for name in before if name.startswith(('params', 'optimizer', 'opt_state'))]
        need(len(kept) > 10, list(before))
        compare_arrays({n: before[n] for n in kept}, {n: after[n] for n in kept})
        need([r['skipped_steps'] for r in metrics(run) if r['kind'] == 'train'][-2:] == [0, 1], 'not counted')
    with tally.attempt('a step before others'):
        run = shop.place('nan')
        shop.finish(every, run, launcher=('poison', '9'))
        losses = [r['loss'] for r in metrics(run) if r['kind'] == 'train']
        need(isinstance(losses[9], str) and all(isinstance(x, float) for x in losses[:9] + losses[10:]), losses)
        need(all(np.isfinite(x).all() for x in arrays(run, 16).values()), 'the state is not finite')
    with tally.attempt('three in a row, then without them'):
        run = shop.place('nan')
        session = shop.start(every, run, launcher=('poison', '9', '10', '11'))
        need(session.end() == 43, session.output())
        need('not finite for 3 steps in a row, up to step 12' in session.output(), session.output())
        need(saved(run)[-1] == 9 and all(np.isfinite(x).all() for x in arrays(run, 9).values()), saved(run))
        before = logged(run)
        tally.recovered(shop.finish(every, run), before)
        shop.same_end(every, run)


def rewind(shop: Workshop, tally: Tally) -> None:
    """11. After a rewind that leaves out batches 32 … 34, these are never read; each other batch is read once, in
    order."""
    run, seen = shop.copy(PLAIN, 'rewind'), []
    for name, extra in (('all', ()), ('rewound', ('--rewind_to', '30'))):
        file = shop.place(name).parent
        target, changes = (shop.place(name), {'train__steps': 44}) if not extra else (run, {})
        if extra:
            changes['train__skip_batches'] = [[32, 35]]
        with tally.attempt(name):
            session = shop.finish(PLAIN, target, *extra, launcher=('record', str(file)), **changes)
            lines = [line.split() for line in file.read_text().splitlines()]
            seen.append({int(step): checksum for step, checksum in lines})
            if extra:
                tally.recovered(session, 30)
    with tally.attempt('order', count=0):
        wanted = [seen[0][batch] for batch in [*range(30, 32), *range(35, 43)]]
        need([seen[1][step] for step in range(30, 40)] == wanted, 'other batches')
        need(json.loads((run / 'run.json').read_text())['rewinds'][0]['to'] == 30, 'not recorded')


def dying_host(shop: Workshop, tally: Tally) -> None:
    """14. One of two processes is killed or frozen: the other ends with 42 within the heartbeat and 5 s."""

    def die(case) -> None:
        index, how = case
        run = shop.place('host')
        with tally.attempt(f'process {index}, {how.name}'):
            session = shop.start(PAIR, run, launcher=BRAKE)
            need(session.wait_for('step 25/'), session.output())
            session.send(how, index)
            other, begin = session.processes[1 - index], time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(60)
            took, code = time.monotonic() - begin, other.poll()
            session.kill()
            need(code == 42, f'{code} after {took:.1f} s:\n{session.output()}')
            need(took <= HEARTBEAT + 5, f'{took:.1f} s:\n{session.output()}')
            need(index == 0 or not (run / 'lock.json').exists(), 'process 0 has left its lock behind')
            before = logged(run)
            tally.recovered(shop.finish(PAIR, run), before)
            shop.same_end(PAIR, run)

    shop.reference(PAIR)
    for case in ((0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)):
        die(case)


def mismatch(shop: Workshop, tally: Tally) -> None:
    """17. Another tokenizer, configuration, shape or type on resume: 44, named in one line, nothing written."""
    run = shop.copy(PLAIN, 'mismatch')
    other = tiny.prepare(shop.place('other').parent, 15_000)
    cases = {
        'data is': {'data__path': str(other)},
        'model.d_model was 32, now 64': {'model__d_model': 64},
        'model.vocab_size = 300': {'model__vocab_size': 300},
        'train.seed was 0, now 1': {'train__seed': 1},
        'train.tokens_per_step was 256, now 512': {'train__tokens_per_step': 512},
        'optimizer.peak_learning_rate was 0.003': {'optimizer__peak_learning_rate': 1e-3},
    }
    before = {path: path.stat().st_mtime_ns for path in run.rglob('*')}
    for words, changes in cases.items():
        with tally.attempt(words):
            session = shop.start(PLAIN, run, **changes)
            need(session.end() == 44, f'{session.codes()}:\n{session.output()}')
            (error,) = [line for _, line in session.lines[0] if 'error:' in line]
            need(words in error, error)
            need({path: path.stat().st_mtime_ns for path in run.rglob('*')} == before, 'something was written')
    name, whole = next((n, x) for n, x in arrays(run, 40).items() if x.dtype == np.float32 and x.ndim > 1)
    for shape, dtype in ((whole.shape, 'bfloat16'), ((*whole.shape, 1), 'float32')):
        changed = jax.ShapeDtypeStruct(shape, dtype)
        with tally.attempt(f'{name} as {changed}'):
            try:
                with Checkpointer(epath.Path(run / 'checkpoints')) as checkpoints:
                    checkpoints.restore({name: changed}, partial=True)
                raise Failed('was read')
            except LmError as error:
                need(error.exit_code == 44 and re.search(rf'{re.escape(name)} is float32', str(error)), error)
