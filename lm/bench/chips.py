"""`lm bench chips`: a burn-in of all chips of this machine or pod, before a run or after a run has ended with 45.

Each part of the chips is tested by itself (`lm.bench.chip_parts`). Then the run's own step trains on random tokens:
before each step all groups of devices replay the same windows, and after it their copies of the state are compared.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.bench import results
from lm.bench.candidates import CPU_MODEL, MODEL
from lm.bench.chip_parts import find_memory, make_tests
from lm.bench.options import ChipOptions
from lm.errors import WrongResults
from lm.experiment import Experiment, load
from lm.hardware import Target
from lm.plan import plan_step
from lm.pod.job import JobAddress, initialize_distributed
from lm.pod.mesh import MeshConfig, batch_sharding
from lm.pod.votes import find_hosts, name_device
from lm.training.copies import compare_copies
from lm.training.program import lower_step
from lm.training.replay import Replay
from lm.training.step import Batch

STEP_SHARE = 0.5
"""The share of the time that the run's own step gets."""


@dataclasses.dataclass(frozen=True)
class ChipRow:
    """The test of one part.

    Attributes:
        part: what was tested.
        rounds: how often; of the step, the number of steps.
        seconds: the time that it took.
        wrong: what was found, '' if nothing was.
    """

    part: str
    rounds: int
    seconds: float
    wrong: str

    @property
    def result(self) -> str:
        return self.wrong or 'right'


COLUMNS = {
    'part': ('part', str),
    'rounds': ('rounds', '{:,}'.format),
    'seconds': ('seconds', '{:,.1f}'.format),
    'result': ('result', str),
}


def bench_chips(options: ChipOptions, job: JobAddress) -> None:
    """Tests all chips, prints a table and writes it to a file, if there is one.

    Raises WrongResults if a chip is wrong, with the names of all chips that are.
    """
    output = results.Output(options.save)
    initialize_distributed(MeshConfig(), job)
    files = options.gin_file or [CPU_MODEL if jax.default_backend() == 'cpu' else MODEL]
    experiment = load(files, options.gin_param, allow_imports=options.allow_gin_imports)
    printer, machine = results.Printer(), results.machine()
    printer.line(results.heading('lm bench chips', machine))
    rows = []
    for row in test_parts(options.minutes * 60, experiment):
        printer.progress(f'{row.part}: {row.result} …')
        rows.append(row)
    printer.progress()
    printer.table(rows, COLUMNS)
    settings = {'minutes': options.minutes, 'gin_files': list(files), 'gin_params': list(options.gin_param)}
    output.write('chips', machine, settings, rows)
    if wrong := [f'{row.part}: {row.wrong}' for row in rows if row.wrong]:
        raise WrongResults(f'{"; ".join(wrong)}; use another machine')


def test_parts(seconds: float, experiment: Experiment) -> Iterator[ChipRow]:
    """Yields the row of each part, and of the step."""
    devices = jax.devices()
    tests = make_tests(devices, find_memory(jax.local_devices()[0]))
    for part, test in tests.items():

        def check(seed: int, test=test) -> str:
            wrong = sorted(test(seed))
            hosts = find_hosts([devices]) if wrong else {}
            return ', '.join(name_device(devices[position], hosts) for position in wrong)

        yield repeat(part, check, (1 - STEP_SHARE) * seconds / len(tests))
    yield repeat('training step', make_step_check(experiment), STEP_SHARE * seconds)


def repeat(part: str, check: Callable[[int], str], seconds: float) -> ChipRow:
    """Repeats a check until it finds something or the time is up; process 0 tells the others when it is."""
    begun, rounds, wrong = time.monotonic(), 0, ''
    is_on = True
    while is_on and not wrong:
        wrong = check(rounds)
        rounds += 1
        is_on = time.monotonic() - begun < seconds
        if jax.process_count() > 1:
            is_on = bool(multihost_utils.broadcast_one_to_all(np.int32(is_on)))
    return ChipRow(part, rounds, time.monotonic() - begun, wrong)


def make_step_check(experiment: Experiment) -> Callable[[int], str]:
    """Compiles the step of the configuration; returns a check that replays and trains one step on random tokens."""
    plan = plan_step(experiment, Target.of_devices(jax.devices()))
    mesh, program = plan.mesh.arrange(jax.devices()), plan.program
    with jax.set_mesh(mesh):
        fixed = program.draw_fixed(mesh, experiment.train.seed)
        replay, others = Replay(program, mesh, fixed), () if fixed is None else (fixed,)
        state = program.init_state(program.place_state(mesh), experiment.train.seed)
        advance = lower_step(program, mesh).compile()

        def draw(seed: jax.Array) -> Batch:
            tokens = jax.random.randint(jax.random.key(seed), program.batch_shape, 0, experiment.model.vocab_size)
            return program.complete(tokens.astype(program.batch_dtype))

        draw_batch = jax.jit(draw, out_shardings=batch_sharding(mesh, axis=1))

    def check(step: int) -> str:
        nonlocal state
        with jax.set_mesh(mesh):
            batch = draw_batch(np.int32(step))
            found = replay.check(state, batch, step)
            if found is None:
                state, _ = advance(state, batch, *others)
                found = compare_copies(state)
        return found.describe(find_hosts(found.groups)) if found else ''

    return check
