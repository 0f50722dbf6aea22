"""Many restarts: runs that are killed or stopped after every step or two, and must end like undisturbed runs."""

import dataclasses
import json
import pathlib
import random
import signal
import time
from collections.abc import Callable

from draws import BRAKE, FAULTS, STEPS, draw_shape, wait_until
from tally import Tally
from warm import Nursery
from workshop import Shape, Workshop, logged, need, saved

CODES = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (42,), signal.SIGINT: (42, 130)}
"""Signal → the exit codes that it may lead to; 0 is allowed too."""


def draw_run(seed: int, number: int) -> tuple[Shape, dict[str, object]]:
    """Returns the shape of run `number` in one process, and when it saves and keeps states."""
    draw = random.Random(f'restarts {seed} {number}')
    shape = dataclasses.replace(draw_shape(seed, number * len(FAULTS)), devices=1, processes=1)
    bindings = {name: value for name, value in shape.bindings if name != 'mesh.fsdp'}
    saves = {'checkpoint__save_every_steps': draw.choice([1, 2]), 'checkpoint__memory_every': draw.choice([None, 1])}
    return dataclasses.replace(shape, bindings=tuple(bindings.items())), saves


def restart(shop: Workshop, run: pathlib.Path, shape: Shape, saves: dict, draw: random.Random, row: Tally) -> bool:
    """Starts the run and interrupts it after a step; returns whether it has ended."""
    before = logged(run)
    how = draw.choice(list(CODES))
    session = shop.start(shape, run, launcher=BRAKE, **saves)
    wait_until(lambda: logged(run) > before, session)
    time.sleep(draw.uniform(0.0, 0.1))
    session.send(how)
    session.end()
    need(set(session.codes()) <= {0, *CODES[how]}, f'{session.codes()} after {how.name}:\n{session.output()}')
    row.recovered(session, before)
    return not any(session.codes()) and saved(run)[-1:] == [STEPS]


def many_restarts(
    shop: Workshop, count: int, seed: int, say: Callable[[str], None], path: pathlib.Path | None
) -> Tally:
    """Makes at least `count` restarts, with those that the file `path` has: run after run, each to its end."""
    row = Tally('restarts')
    lines = path.read_text().splitlines() if path and path.exists() else []
    done = [found for found in map(json.loads, lines) if found['seed'] == seed]
    for found in done:
        row.tries += found['restarts']
        row.failures += found['failures']
        row.lost += found['lost']
        row.seconds += found['recovered']
    number = len(done)
    with Nursery(shop.environment()) as shop.nursery:
        while row.tries < count:
            (shape, saves), draw = draw_run(seed, number), random.Random(f'moments {seed} {number}')
            run, one = shop.place(f'restarts-{number}'), Tally('restarts')
            with one.attempt(f'--restarts --seed {seed}, run {number}: {shape} {saves}', count=0):
                while not restart(shop, run, shape, saves, draw, one):
                    one.tries += 1
                shop.same_end(shape, run)
            row.tries += one.tries
            for mine, its in ((row.failures, one.failures), (row.lost, one.lost), (row.seconds, one.seconds)):
                mine += its
            result = {'seed': seed, 'run': number, 'restarts': one.tries, 'failures': one.failures, 'lost': one.lost}
            if path:
                with open(path, 'a') as file:
                    file.write(json.dumps(result | {'recovered': one.seconds}) + '\n')
            say(f'{"failed" if one.failures else "ok"} run {number}, {shape}: {one.tries} restarts, {row.tries} in all')
            number += 1
    return row
