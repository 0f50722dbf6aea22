"""Tries the detector of wrong chips on simulated devices, and counts its false alarms.

    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/faults/detector.py                  faults, and the cost of a replay
    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/faults/detector.py --steps 10000    steps without a fault as well
    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/faults/detector.py --steps 960 --first_form 16    from a form on

A fault begins at a random step. A replay comes every EVERY steps. Copies are compared every SAVE steps, as by saves.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'training'))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0')

import chips
import jax
import numpy as np
import pytest
from mechanisms_list import MECHANISMS, QUICK

from lm.checkpoint.snapshot import flatten
from lm.model.functions import select_weights
from lm.ops.documents import Documents
from lm.pod.votes import Difference
from lm.training.copies import compare_copies

EVERY, SAVE, BAD = 10, 15, 2
"""Steps per replay and per save, and the group that is wrong."""
MOST = 30 * EVERY
"""Steps after which a fault counts as not found."""

Active = Callable[[int, str, np.random.Generator], bool]


def always(onset: int) -> Active:
    return lambda step, what, draws: step >= onset


def sometimes(onset: int) -> Active:
    return lambda step, what, draws: step >= onset and draws.random() < 0.25


def once_in_a_replay(onset: int) -> Active:
    calls: list[int] = []
    return lambda step, what, draws: what == 'replay' and step >= onset and not calls and not calls.append(step)


def once_in_a_step(onset: int) -> Active:
    return lambda step, what, draws: what == 'step' and step == onset


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        context: programs that are traced inside have the fault.
        active: takes the step where the fault begins, and tells in which computations it acts.
        found_by: what has to find it; None: nothing can.
        damaged: the first word of the array of which one copy changes in memory when the fault begins.
        layout: of the devices (`chips.make_bench`).
    """

    name: str
    context: Callable[[int], contextlib.AbstractContextManager]
    active: Active
    found_by: str | None
    damaged: str = ''
    layout: dict = dataclasses.field(default_factory=dict)


def none(group: int) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


CASES = [
    Case('a bit of a product, always', chips.wrong_products, always, 'replay'),
    Case('a bit of a product, in every fourth computation', chips.wrong_products, sometimes, 'replay'),
    Case('a bit of a product, once, in a replay', chips.wrong_products, once_in_a_replay, 'replay'),
    Case('a bit of a product, once, in a step', chips.wrong_products, once_in_a_step, None),
    Case('a bit of a parameter in the memory of one device', none, always, 'replay or copies', 'params'),
    Case('a bit of the optimizer in the memory of one device', none, always, 'replay or copies', 'optimizer'),
    Case('a sum of gradients that one device receives damaged', chips.wrong_link, once_in_a_step, 'replay or copies'),
    Case('windows that one device receives damaged', chips.wrong_link, once_in_a_replay, 'replay'),
    Case('parameters gathered inside a group, always', chips.wrong_gather, always, 'replay', layout={'fsdp': 2}),
]


@dataclasses.dataclass
class Found:
    """The end of a try: steps from the beginning of the fault until it was found, what found it, and who was named."""

    steps: int | None
    by: str | None = None
    difference: Difference | None = None

    def names(self, devices: set[int]) -> bool:
        """Tells whether these devices were named; where no vote can decide, among the suspects."""
        if self.difference is None:
            return False
        named = {device.id for group in self.difference.groups for device in group}
        return named == devices if self.difference.is_certain else devices <= named


class Detector:
    """The programs of a case, with and without the fault."""

    def __init__(self, case: Case):
        self.case = case
        self.sound, self.faulty = chips.make_bench(**case.layout), chips.make_bench(**case.layout)
        self.bad = BAD % self.sound.mesh.shape['data']
        self.devices = {device.id for device in self.sound.replay.groups[self.bad]}
        self.advance, self.advance_wrongly = self.sound.train(), self.faulty.train()
        with case.context(self.bad), jax.set_mesh(self.faulty.mesh):
            self.advance_wrongly(self.faulty.state, self.faulty.batch())
            self.faulty.replay.compute(self.faulty.state, self.faulty.batch(), 0)
        self.compute = self.sound.replay.compute

    def run(self, seed: int) -> Found:
        """Trains until the fault is found, or for MOST steps after it began."""
        draws = np.random.default_rng(seed)
        onset = int(draws.integers(1, 2 * SAVE + 1))
        active, state = self.case.active(onset), self.sound.state
        for step in range(1, onset + MOST):
            batch = self.sound.batch(step)
            if self.case.damaged and step == onset:
                state = damage_first(state, self.case.damaged, BAD)

            def compute(*arguments, step=step):
                is_wrong = not self.case.damaged and active(step, 'replay', draws)
                return (self.faulty.replay.compute if is_wrong else self.compute)(*arguments)

            self.sound.replay.compute = compute
            if step % EVERY == 0 and (found := self.sound.replay.check(state, batch, step)):
                return Found(step - onset, 'replay', found)
            is_wrong = not self.case.damaged and active(step, 'step', draws)
            with jax.set_mesh(self.sound.mesh):
                state, _ = (self.advance_wrongly if is_wrong else self.advance)(state, batch)
            if step % SAVE == 0 and (found := compare_copies(state)):
                return Found(step - onset, 'copies', found)
        return Found(None)


def damage_first(state: dict, word: str, device: int) -> dict:
    """Returns the state with one bit flipped in a device's copy of the first matrix whose name begins with `word`."""
    arrays = flatten(state)
    chosen = next(name for name, x in arrays.items() if name.startswith(word) and x.ndim > 1)
    leaves = [chips.damage(x, device) if name == chosen else x for name, x in arrays.items()]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def try_case(case: Case, tries: int) -> tuple[str, bool]:
    """Returns a row of the table, and whether every try ended as it should."""
    detector = Detector(case)
    ends = [detector.run(seed) for seed in range(tries)]
    found = [end for end in ends if end.steps is not None]
    named = sum(end.names(detector.devices) for end in found)
    steps = [end.steps for end in found if end.steps is not None]
    by = ', '.join(sorted({end.by for end in found if end.by})) or '–'
    times = f'{statistics.mean(steps):.1f} / {max(steps)}' if steps else ''
    right = not found if case.found_by is None else len(found) == named == tries
    right &= all(case.found_by and end.by and end.by in case.found_by for end in found)
    named_text = f'{named} of {len(found)}' if found else ''
    return f'| {case.name} | {len(found)} of {tries} | {by} | {times} | {named_text} |', right


LAYOUTS = {
    'data 4, two microbatches, documents': dict(microbatches=2, documents=Documents(eod_id=0)),
    'fsdp 2, two microbatches, documents': dict(fsdp=2, microbatches=2, documents=Documents(eod_id=0)),
    'sequence 2, documents': dict(sequence=2, microbatches=1, documents=Documents(eod_id=0)),
    'data 2, redrawn projections': dict(devices=2, microbatches=1),
}
REDRAWN = 3
"""Steps per drawing of new projections."""


def count_alarms(form, layout: dict, steps: int) -> int:
    """Returns how many of so many steps without a fault raise an alarm: each step has a replay and compares copies."""
    forms = form if isinstance(form, tuple) else (form,)
    is_redrawn = 'documents' not in layout
    if is_redrawn and any('redraw_every' in {field.name for field in dataclasses.fields(one)} for one in forms):
        forms = tuple(dataclasses.replace(one, redraw_every=REDRAWN) for one in forms)
    # Lists of mechanisms repeat over the layers.
    model = dataclasses.replace(chips.MODEL, n_layers=len(forms), attention=forms if len(forms) > 1 else forms[0])
    bench = chips.make_bench(model=model, length=32, **layout)
    advance, state, alarms = bench.train(), bench.state, 0
    with jax.set_mesh(bench.mesh):
        functions = bench.step.functions
        redraw = jax.jit(functions.redraw, static_argnums=(1, 2))
        for step in range(1, steps + 1):
            batch = bench.batch(step)
            if which := functions.choose_redrawn(step - 1):
                state['buffers'] = redraw(select_weights(state), which, 0, step - 1)
            alarms += bench.replay.check(state, batch, step) is not None
            state, _ = advance(state, batch)
            alarms += compare_copies(state) is not None
    assert np.isfinite(jax.device_get(jax.tree.leaves(state['params'])[0])).all()
    return alarms


def all_alarms(steps: int, first: int) -> Iterator[tuple[str, str, int, int]]:
    """Yields (mechanism, layout, steps, alarms); the mechanisms, from number `first` on, and the layouts share the
    steps."""
    forms = sorted(MECHANISMS.items(), key=lambda item: item[0] not in QUICK)[first:]  # most different ones first
    each = -(-steps // (len(forms) * len(LAYOUTS)))
    for name, form in forms:
        for layout, options in LAYOUTS.items():
            yield name, layout, each, count_alarms(form, options, each)
        jax.clear_caches()


def measure_cost(microbatches: int = 4, repeats: int = 15) -> float:
    """Returns the time of a replay over the time of a microbatch of the step, medians of calls in turn."""
    model = dataclasses.replace(chips.MODEL, d_model=128, n_layers=4)
    bench = chips.make_bench(model=model, length=128, microbatches=microbatches, rows=8)
    advance, seconds = bench.train(), ([], [])
    with jax.set_mesh(bench.mesh):
        for i in range(repeats + 1):
            batch = bench.batch(i)
            for times, call in zip(seconds, (bench.replay.compute, advance), strict=True):
                begun = time.perf_counter()
                jax.block_until_ready(call(bench.state, batch, *([i] if call is not advance else [])))
                times.append(time.perf_counter() - begun)
    replay, step = (statistics.median(times[1:]) for times in seconds)
    return replay / (step / microbatches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tries', type=int, default=20, help='of each fault')
    parser.add_argument('--steps', type=int, default=0, help='without a fault, over all mechanisms and layouts')
    parser.add_argument('--first_form', type=int, help='leave out the faults, the cost, and so many first mechanisms')
    arguments = parser.parse_args()
    is_right, is_whole = True, arguments.first_form is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('lm.pod.mesh.MIN_SHARDED_SIZE', 1)  # so that fsdp shares small matrices
        if is_whole:
            print('| fault | found | by | steps until found, mean / most | named |\n|---|---|---|---|---|')
        for case in CASES if is_whole else ():
            row, right = try_case(case, arguments.tries)
            print(row + ('' if right else '  WRONG'), flush=True)
            is_right &= right
        if is_whole:
            print(f'a replay takes {measure_cost():.2f} of the time of a microbatch', flush=True)
        alarms = total = 0
        given = arguments.steps, arguments.first_form or 0
        for name, layout, steps, count in all_alarms(*given) if arguments.steps else ():
            total, alarms = total + steps, alarms + count
            print(f'{name}, {layout}: {count} alarms in {steps} steps', flush=True)
        print(f'{alarms} false alarms in {total} steps')
    return 0 if is_right and not alarms else 1


if __name__ == '__main__':
    sys.exit(main())
