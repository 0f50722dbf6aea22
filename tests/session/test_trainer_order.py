"""The actions of a session after each step, in order: the Trainer runs between stand-ins that keep a diary.

Nothing is compiled here. A step adds one to a number, and the steps named in `bad` are not finite.
"""

import contextlib
import time
import types

import numpy as np
import pytest

from lm.data.batches import Windows
from lm.errors import Diverged, LmError, Preempted
from lm.runs.goodput import Goodput
from lm.session.trainer import Computation, Records, Services, Trainer
from lm.training.config import TrainConfig
from lm.training.progress import Throughput, describe_divergence

LOSS = 2.5
"""The result of each evaluation."""


class Metrics:
    def __init__(self, diary, evaluated):
        self.diary, self.evaluated, self.records, self.count = diary, evaluated, [], 0

    def write(self, record):
        self.records.append(record)
        self.count += 1
        self.diary.append(f'{record["kind"]} {record["step"]}')

    def has_evaluation(self, step):
        return step in self.evaluated

    def seal(self):
        return {'sealed': self.count}

    def flush(self):
        self.diary.append('flush')


class Checkpoints:
    """Saves at multiples of `every`; a step in `fails` is never complete."""

    def __init__(self, diary, every, steps, fails, is_best):
        self.diary, self.every, self.steps, self.fails, self.is_best = diary, every, steps, fails, is_best
        self.saved, self.keeps = {}, ()
        self.asked = []

    def should_save(self, step):
        return bool(self.every) and step % self.every == 0

    def should_keep(self, step):
        return step in self.keeps

    def keep(self, step, state, metadata):
        assert state['params'] == step
        self.diary.append(f'keep {step}')

    def is_among_best(self, loss):
        self.asked.append(loss)
        return self.is_best

    def save(self, step, state, metadata, metrics):
        self.diary.append(f'save {step}')
        self.saved[step] = types.SimpleNamespace(count=state['params'], metadata=metadata, metrics=metrics)
        self.steps += [] if step in self.fails else [step]

    def add_loss(self, step, loss):
        self.diary.append(f'add {step}: {loss}')

    def check_for_errors(self):
        self.diary.append('check')

    def wait(self):
        self.diary.append('wait')

    def all_steps(self):
        return self.steps

    def latest_step(self):
        return max(self.steps, default=None)


class Watch:
    def __init__(self):
        self.deadlines, self.pauses, self.is_paused = [], 0, False

    def step(self, step):
        self.deadlines.append(step)

    def beat(self):
        pass

    @contextlib.contextmanager
    def watch(self, phase):
        self.pauses, self.is_paused = self.pauses + 1, True
        yield
        self.is_paused = False


class Session:
    """A Trainer, its stand-ins, and the diary of calls to them."""

    def __init__(
        self,
        start=0,
        every=None,
        bad=(),
        skip=(),
        stop_at=None,
        evaluated=(),
        saved=(),
        fails=(),
        is_best=False,
        keeping=(),
        **train,
    ):
        train = {'steps': 6, 'log_every': 1, 'eval_every': None, 'skip_batches': skip} | train
        self.config = TrainConfig(**train)
        self.diary, self.notes, self.ledgers, self.profiled, self.redrawn = [], [], [], [], []
        self.bad, self.stop_at, self.keeping = bad, stop_at, keeping
        self.metrics = Metrics(self.diary, evaluated)
        self.checkpoints = Checkpoints(self.diary, every, list(saved), fails, is_best)
        self.watch, self.goodput = Watch(), Goodput(begun=None)
        self.evaluation_is_stopped, self.seen = False, []
        self.counters = {'skipped': 0, 'in_a_row': 0}
        named = types.SimpleNamespace
        windows = Windows(10**6, 1024, 1, seed=0, skip=skip)
        computation = Computation(
            step=named(
                functions=named(choose_redrawn=lambda done: (1,) if done == 2 else ()),
                name_first_bad=lambda i: ('loss', 'gradient of x')[i],
                read_measures=lambda metrics: ({}, None),
            ),
            batches=named(prefetch=lambda first, last: iter(range(first, last)), windows=windows),
            advance=self.advance,
            redraw=lambda weights, which, seed, done: self.redrawn.append((weights, which, seed, done)) or f'at {done}',
            evaluator=self.evaluator(),
        )
        records = Records(
            run=named(path='RUN', write_goodput=self.ledgers.append),
            text='the configuration',
            metrics_file=self.metrics,
            progress=named(
                step=lambda record, left, summary: self.diary.append(f'shown {record["step"]}'), note=self.notes.append
            ),
            throughput=Throughput(start, self.config.steps, self.config.tokens_per_step, 1000.0),
            flops_per_token=3.0,
            peak_flops=None,
        )
        services = Services(
            lock=named(check=lambda: self.diary.append('lock')),
            preemption=named(is_requested=lambda step: self.stop_at is not None and step >= self.stop_at),
            profiler=named(begin_step=self.profiled.append),
            watchdog=self.watch,
            goodput=self.goodput,
            programs=named(publish=lambda: self.diary.append('publish')),
        )
        state = {'params': start, 'buffers': 'drawn at 0', 'in_a_row': 0}
        self.trainer = Trainer(self.config, computation, self.checkpoints, records, services, state, start)

    def advance(self, state, batch):
        """The state counts the steps; batch `i` belongs to step i + 1."""
        step = batch + 1
        assert state['params'] == batch, 'each batch meets the state after the batch before'
        self.diary.append(f'step {step}')
        is_bad = step in self.bad
        self.counters['skipped'] += is_bad
        self.counters['in_a_row'] = (self.counters['in_a_row'] + 1) * is_bad
        values = {'loss': np.nan if is_bad else 1.0 + step, 'grad_norm': 0.5, 'learning_rate': step / 100}
        values |= self.counters | {'first_bad': 1 if is_bad else -1, 'kept': 3.0 * (step in self.keeping)}
        return state | {'params': step, 'in_a_row': values['in_a_row']}, {
            name: np.asarray(value) for name, value in values.items()
        }

    def evaluator(self):
        session = self

        class Evaluator:
            split = 'validation'

            def __call__(self, weights, step, should_stop):
                session.diary.append(f'evaluating {step}')
                session.seen.append((weights['params'], step))
                assert session.watch.is_paused
                return None if should_stop() else {'loss': LOSS, 'step': step}

            def describe(self, result):
                return f'loss {result["loss"]}'

        return Evaluator()

    def of(self, *kinds):
        """Returns the diary's entries of these kinds."""
        return [entry for entry in self.diary if entry.partition(' ')[0] in kinds]


def test_steps_are_logged_while_the_next_one_runs_and_before_they_are_saved():
    session = Session(every=3)
    assert session.trainer.run() == {'params': 6, 'buffers': 'at 2', 'in_a_row': 0}
    assert session.of('step', 'train', 'save') == [
        *('step 1', 'step 2', 'train 1', 'step 3', 'train 2', 'train 3', 'save 3'),
        *('step 4', 'step 5', 'train 4', 'step 6', 'train 5', 'train 6', 'save 6'),
    ]
    # Metrics that a checkpoint covers are on disk before the checkpoint is, in object stores too. A run that has lost
    # its lock writes no metrics.
    for step in (3, 6):
        at = session.diary.index(f'save {step}')
        assert session.diary[at - 2 : at + 2] == ['lock', 'flush', f'save {step}', 'publish']
    assert session.diary.count('check') == 6
    assert session.diary[-1] == 'wait'
    assert session.profiled == [1, 2, 3, 4, 5, 6]
    assert session.watch.deadlines == [1, 2, 3, 4, 5, 6, 7]
    assert session.watch.pauses == 4  # two saves, the evaluation, and the wait for the last save
    assert session.of('evaluating') == ['evaluating 6']


def test_a_save_right_after_a_skipped_range_can_go_on():
    """Step 3 is the first one behind the batches 2 and 3."""
    skip = ((2, 4),)
    session = Session(every=1, skip=skip)
    session.trainer.run()
    kept = {step: saved.metadata['skipped_batches'] for step, saved in session.checkpoints.saved.items()}
    assert kept == {1: [], 2: []} | {step: [(2, 4)] for step in (3, 4, 5, 6)}
    for step, skipped in kept.items():
        resumed = Windows(10**6, 1024, 1, seed=0, skip=skip)
        resumed.resume(step, skipped)
        assert resumed.batch(step) == (step if step < 2 else step + 2)


def test_the_figures_of_a_record():
    session = Session(tokens_per_step=2048)
    before = {'seconds': {'data': 7.0}, 'starts': 1, 'started': time.time() - 60, 'updated': time.time() - 50}
    session.trainer.services.goodput = Goodput(before)  # of the earlier starts
    session.trainer.services.goodput.seconds['data'] += 3.0
    session.trainer.run()
    first, second = session.metrics.records[:2]
    assert (first['loss'], first['grad_norm'], first['learning_rate']) == (2.0, 0.5, 0.01)
    assert (second['tokens'], second['skipped_steps'], second['mfu']) == (4096, 0, None)
    assert first['tokens_per_second'] > 0
    assert first['seconds'] >= 1000
    waits = session.trainer.services.goodput.seconds['data'] - 7.0
    assert 3 <= first['data_wait_seconds'] <= waits
    assert 0 <= second['data_wait_seconds'] <= waits - 3


def test_utilisation_is_a_fraction_of_the_peak():
    session = Session()
    session.trainer.records.peak_flops = 6e12
    session.trainer.run()
    record = session.metrics.records[0]
    assert record['mfu'] == pytest.approx(3.0 * record['tokens_per_second'] / 6e12)


def test_some_steps_are_logged_and_always_the_last_one():
    session = Session(log_every=4)
    session.trainer.run()
    assert session.of('train', 'shown') == ['train 4', 'shown 4', 'train 6', 'shown 6']


def test_projections_are_drawn_from_the_weights_before_the_step():
    session = Session(seed=5)
    session.trainer.run()
    assert session.redrawn == [({'params': 2, 'buffers': 'drawn at 0'}, (1,), 5, 2)]


def test_a_checkpoint_records_what_a_resume_needs():
    session = Session(every=3, start=2, skip=((1, 3), (9, 11)))
    session.trainer.run()
    saved = session.checkpoints.saved[3]
    assert saved.count == 3
    assert saved.metrics == {}
    assert saved.metadata.keys() == {'seconds', 'step_seconds', 'config', 'skipped_batches', 'sealed'}
    assert saved.metadata['config'] == 'the configuration'
    assert saved.metadata['seconds'] >= 1000
    assert 0 <= saved.metadata['step_seconds'] < 60
    assert saved.metadata['skipped_batches'] == [(1, 3)]
    assert session.checkpoints.saved[6].metrics == {'loss': LOSS}  # the last step is evaluated, then saved


def test_evaluations_happen_when_they_are_due_and_at_the_end():
    session = Session(eval_every=2, steps=5)
    session.trainer.run()
    assert session.of('train', 'evaluating', 'eval', 'save') == [
        *('train 1', 'train 2', 'evaluating 2', 'eval 2', 'train 3'),
        *('train 4', 'evaluating 4', 'eval 4', 'train 5', 'evaluating 5', 'eval 5', 'save 5'),
    ]
    assert session.seen == [(2, 2), (4, 4), (5, 5)]
    assert session.checkpoints.asked == [LOSS] * 3
    record = next(record for record in session.metrics.records if record['kind'] == 'eval')
    assert (record['loss'], record['step']) == (LOSS, 2)
    assert record['seconds'] >= 1000
    assert 'evaluation at step 2: validation loss 2.5' in session.notes


def test_the_last_of_many_steps_is_evaluated():
    trainer = Session(steps=100_000).trainer
    assert [trainer.is_evaluation_due(int(step)) for step in ('99999', '100000')] == [False, True]


def test_one_of_the_best_steps_is_saved_when_it_is_found():
    session = Session(eval_every=2, steps=5, is_best=True)
    session.trainer.run()
    assert session.of('save') == ['save 2', 'save 4', 'save 5']
    assert session.checkpoints.saved[2].metrics == {'loss': LOSS}


@pytest.mark.parametrize(
    ('start', 'evaluated', 'first'),
    [
        (4, (), ['evaluating 4', 'eval 4', 'step 5', 'step 6', 'evaluating 6']),  # a session stopped in it
        (4, (4,), ['step 5', 'step 6', 'evaluating 6', 'eval 6']),
        (3, (), ['step 4', 'evaluating 4', 'eval 4', 'step 5', 'step 6']),
        (0, (), ['step 1', 'step 2', 'evaluating 2', 'eval 2', 'step 3']),
        (6, (), ['evaluating 6', 'eval 6']),
        (6, (6,), []),
    ],
)
def test_an_evaluation_due_at_a_resume_is_repeated(start, evaluated, first):
    session = Session(start=start, eval_every=2, evaluated=evaluated, saved=[start] if start else [])
    session.trainer.run()
    assert session.of('step', 'evaluating', 'eval')[:5] == first
    assert session.of('add') == ([f'add {start}: {LOSS}'] if f'evaluating {start}' in first[:1] else [])


def test_a_step_whose_evaluation_fails_is_saved_before_the_run_ends():
    for bad, saved in ((), ['save 4']), ((4,), []):
        session = Session(eval_every=4, bad=bad)
        session.trainer.computation.evaluator = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            session.trainer.run()
        assert session.of('train', 'save')[-len(saved) - 1 :] == ['train 4', *saved]


def test_a_session_asked_to_stop_logs_saves_and_reports():
    session = Session(stop_at=3)
    with pytest.raises(Preempted, match=r'stopped at step 3 of 6, which is saved: run the same command again'):
        session.trainer.run()
    assert session.of('step', 'train', 'save', 'wait') == [
        *('step 1', 'step 2', 'train 1', 'step 3', 'train 2', 'train 3', 'save 3', 'wait')
    ]
    assert len(session.ledgers) == 3  # at the start, with the save, and at the end
    assert not any(note.startswith('done') for note in session.notes)


def test_a_session_asked_to_stop_in_an_evaluation_leaves_it_to_the_next_session():
    session = Session(eval_every=2, stop_at=2)
    with pytest.raises(Preempted, match='stopped at step 2 of 6, which is saved'):
        session.trainer.run()
    assert session.of('eval', 'save') == ['save 2']


@pytest.mark.parametrize(('saved', 'newest'), [([1, 2], 2), ([], 0)])
def test_steps_that_were_not_finite_are_repeated_and_not_saved(saved, newest):
    session = Session(bad=(3, 4), stop_at=4, every=3, saved=saved)
    with pytest.raises(Preempted, match=f'stopped at step 4 .*not finite; the next session goes on from {newest}'):
        session.trainer.run()
    assert session.of('save', 'wait') == ['wait']
    assert len(session.ledgers) == 2


def test_a_save_that_is_due_waits_for_a_good_step():
    session = Session(bad=(2, 3), every=2)
    session.trainer.run()
    assert session.of('save') == ['save 4', 'save 6']
    session = Session(bad=(4,), every=4)
    session.trainer.run()
    assert session.of('save') == ['save 5', 'save 6']


def test_the_last_step_is_saved_even_if_it_was_not_finite_and_the_run_has_diverged():
    session = Session(bad=(5, 6))
    with pytest.raises(
        Diverged, match=r'the last 2 steps of 6 were not finite .*; step 6 is saved .* weights of step 4'
    ):
        session.trainer.run()
    assert session.of('save') == ['save 6']
    assert not any(note.startswith('done') for note in session.notes)
    again = Session(start=6, saved=[6], evaluated=(6,))  # the same command, after it
    again.trainer.state['in_a_row'] = 2
    with pytest.raises(Diverged):
        again.trainer.run()


def test_no_batch_is_to_blame_for_a_rate_or_an_update_that_is_not_finite():
    windows = Windows(10**6, 1024, 1, seed=0)
    kinds = 'learning rate', 'gradient of x', 'update of x'
    said = {what: describe_divergence(4, 2, what, windows, (), 2) for what in kinds}
    assert [what for what, text in said.items() if 'skip_batches' in text] == ['gradient of x']
    assert [what for what, text in said.items() if 'optimizer.weight_decay' in text] == ['update of x']
    assert 'run it again with a lower optimizer.peak_learning_rate and --rewind_to 2' in said['learning rate']


def test_numbers_that_keep_their_value_are_counted_across_sessions():
    session = Session(keeping=(2, 5), every=3)
    session.trainer.run()
    assert [r.get('kept_numbers') for r in session.metrics.records if r['kind'] == 'train'] == [None, 3, 3, 3, 6, 6]
    assert [saved.metadata.get('kept_numbers') for saved in session.checkpoints.saved.values()] == [3, 6]


def test_states_are_kept_in_memory_unless_they_are_saved_or_not_finite():
    session = Session(every=3, bad=(4,))
    session.checkpoints.keeps = (2, 3, 4, 5)
    session.trainer.run()
    assert [entry for entry in session.diary if entry.split()[0] in ('keep', 'save')] == [
        *('keep 2', 'save 3', 'keep 5', 'save 6')
    ]
    at = session.diary.index('keep 2')
    assert session.diary[at - 2 : at] == ['lock', 'flush']
    assert 'train 2' in session.diary[:at]


def test_a_run_ends_with_its_last_step_on_disk_or_with_an_error():
    session = Session(fails=(6,), saved=[4])
    with pytest.raises(LmError, match='step 6 could not be saved, the newest complete checkpoint is 4; make room'):
        session.trainer.run()
    assert not any(note.startswith('done') for note in session.notes)


def test_a_run_reports_that_it_is_done():
    session = Session(tokens_per_step=2048)
    session.trainer.run()
    assert session.notes[0].startswith('first step after ')
    assert session.notes[-2].startswith('done: 6 steps in 16m')
    assert '12.3k tokens; lm evaluate --run_dir RUN' in session.notes[-2]
    assert session.notes[-1].startswith('goodput ')
    assert [ledger['finished'] for ledger in session.ledgers] == [*[False] * (len(session.ledgers) - 1), True]
    assert len(session.ledgers) == 3  # at the start, with the save, and at the end
    assert all(session.goodput.seconds[account] > 0 for account in ('step', 'data', 'evaluation', 'checkpoint'))


@pytest.mark.parametrize(
    ('bad', 'limit', 'saved', 'skip', 'expected'),
    [
        ((3, 4), 2, [1, 2], (), ['2 steps in a row, up to step 4', 'gradient of x', 'is step 2', '[(2, 4)]',
                                 '--rewind_to 2']),
        ((1, 2, 3), 3, [], (), ['up to step 3', 'no step is saved', '[(0, 3)]', 'in a new --run_dir']),
        # Batches 1 and 2 are left out: step 3 sees batch 4. The new range covers the ranges inside it.
        ((3, 4), 2, [2], ((1, 3), (5, 6), (90, 91)), ['[(1, 3), (4, 7), (90, 91)]']),
    ],
)  # fmt: skip
def test_divergence_names_the_batches_and_a_way_out(bad, limit, saved, skip, expected):
    session = Session(bad=bad, max_nonfinite_steps=limit, saved=saved, skip=skip)
    with pytest.raises(Diverged) as error:
        session.trainer.run()
    for words in expected:
        assert words in str(error.value)
    assert session.of('save') == []
    assert session.diary[-1] == 'wait'  # the newest checkpoint is known when all saves have ended


def test_a_good_step_resets_the_count_of_steps_that_were_not_finite():
    session = Session(bad=(1, 2, 4, 5), max_nonfinite_steps=3)
    session.trainer.run()
    assert session.metrics.records[-2]['skipped_steps'] == 4


@pytest.mark.parametrize(('age', 'more'), [(59.5, 0), (60.5, 6)])
def test_the_ledger_is_written_once_a_minute(monkeypatch, age, more):
    session = Session()
    monkeypatch.setattr(Goodput, 'age', property(lambda self: age))
    session.trainer.run()
    assert len(session.ledgers) == 3 + more
