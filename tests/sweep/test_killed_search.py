"""A search whose machine dies by SIGKILL: the same command proposes the same trials, loses none and does none twice."""

import json
import random
import signal
import subprocess
import sys
import time

import fake_trainer
import pytest
import search_machine
import tiny

from lm.runs import sweep_file
from lm.sweep.options import SearchOptions
from lm.sweep.search.search import Search
from lm.sweep.search.space import make_space
from lm.sweep.search.study import find_pruned_step

SPACE = """\
optimizer.peak_learning_rate = log_uniform(1e-5, 1e-1)  # the best is 1e-3
model.n_layers = integers(1, 4)
train.steps = 810
train.eval_every = 30
"""
BASE = ['configs/experiments/quickstart.gin']
EVALUATIONS = 27


class Laboratory:
    """The folder of a test, in which searches are started, killed and compared."""

    def __init__(self, folder, flags, trials):
        self.folder, self.trials = folder, trials
        self.space, self.notes = folder / 'space.gin', folder / 'notes'
        self.space.write_text(SPACE)
        self.notes.mkdir()
        program = folder / 'trainer'
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake_trainer.__file__} "$@"\n')
        program.chmod(0o755)
        self.flags = ['--search', '--trials', str(trials), '--gin_file', *BASE, '--sweep_file', str(self.space), *flags]
        self.environment = {'TRAINER': str(program), 'FAKE_TRAINER': str(self.notes), 'FAKE_LIMIT': '0.03'}
        self.environment |= {'FAKE_SECONDS': '0.01'}

    def start(self, root, die=''):
        return subprocess.Popen(
            [sys.executable, search_machine.__file__, *self.flags, '--run_dir', str(self.folder / root)],
            env=tiny.environment() | self.environment | {'DIE': die},
            stdout=open(self.folder / f'{root}.log', 'ab'),
            stderr=subprocess.STDOUT,
            cwd=tiny.ROOT,
        )

    def finish(self, root, die=''):
        return self.start(root, die).wait(timeout=300)

    def count_evaluations(self, root):
        return sum(path.read_bytes().count(b'\n') for path in (self.folder / root).glob('trial-*/metrics.jsonl'))

    def kill_at(self, root, evaluations, whole):
        """Starts the search, and kills it when its trials have so many evaluations; `whole`: with its trainings."""
        process = self.start(root)
        while self.count_evaluations(root) < evaluations:
            assert process.poll() is None, (self.folder / f'{root}.log').read_text()[-3000:]
            time.sleep(0.005)
        search_machine.kill_machine(process.pid) if whole else process.kill()
        assert process.wait() == -signal.SIGKILL

    def read(self, root, options):
        """Returns what the study says of each trial: its values, its end, the step of its pruning, and its loss."""
        space = make_space([str(tiny.ROOT / BASE[0])], [str(self.space)])
        search = Search(self.folder / root, space, SearchOptions(trials=self.trials, **options))
        assert not search.refresh(), 'a trial has not ended'
        trials = [search.study.judge(point.index) for point in search.sweep.points]
        return [
            (point.settings, trial.state.name, find_pruned_step(trial), trial.value)
            for point, trial in zip(search.sweep.points, trials, strict=True)
        ]

    def compare(self, killed, whole, options):
        """Compares a search that was killed with one that was not."""
        found, expected = (self.read(root, options) for root in (killed, whole))
        assert len(expected) == len({str(values) for values, *_ in expected}) == self.trials
        assert found == expected
        rows = [sweep_file.read_rows(self.folder / root) for root in (killed, whole)]
        statuses = [[row['status'] for row in found] for found in rows]
        assert [row['exit_code'] for row in rows[0] if row['status'] == 'failed'] == [43] * statuses[0].count('failed')
        for number, (*ends, pruned_at) in enumerate(zip(*statuses, [end[2] for end in expected], strict=True)):
            # A trial may reach its end before the search looks: it is done then, and counts as pruned all the same.
            assert ends[0] == ends[1] or (pruned_at is not None and set(ends) == {'done', 'pruned'}), number
        assert sweep_file.read_search(self.folder / killed) == sweep_file.read_search(self.folder / whole)
        assert not (self.notes / 'twice').exists(), 'two trainings of one trial at the same time'
        for path in sorted((self.folder / killed).glob('trial-*/metrics.jsonl')):
            steps = [json.loads(line)['step'] for line in path.read_text().splitlines()]
            assert steps == list(range(30, 30 * len(steps) + 1, 30)), 'an evaluation is lost or came twice'
        assert {path.name for path in (self.folder / killed).glob('trial-*')} == {
            f'trial-{number:04}' for number in range(self.trials)
        }
        return expected


PRUNED = {'prune': True, 'parallel': 3}


@pytest.fixture
def make(tmp_path):
    return lambda trials, options: Laboratory(
        tmp_path, ['--prune', '--jobs', str(options['parallel'])] if options else [], trials
    )


@pytest.mark.slow  # a whole act of several runs; its parts have tests of their own
def test_a_small_search_survives_sigkill(make):
    search = make(6, {})
    assert search.finish('killed', 'after lm.sweep.sweep.Sweep.prepare 1') == -signal.SIGKILL
    (search.notes / 'trial-0001.begun').touch()
    assert search.finish('killed') == -signal.SIGKILL
    search.kill_at('killed', 3 * EVALUATIONS + 5, whole=True)
    for root in ('killed', 'whole'):
        assert search.finish(root) == 0
    search.compare('killed', 'whole', {})


@pytest.mark.slow
@pytest.mark.parametrize('options', [{}, PRUNED], ids=['plain', 'pruned'])
@pytest.mark.parametrize('seed', [0, 1])
def test_a_search_that_is_killed_at_ten_random_moments_proposes_the_same_trials(make, options, seed):
    search, draw = make(24, options), random.Random(seed)
    assert search.finish('whole') == 0
    total = search.count_evaluations('whole')
    for moment in sorted(draw.sample(range(total - 40), 10)):
        search.kill_at('killed', moment, whole=draw.random() < 0.5)
        if draw.random() < 0.3:
            (search.folder / 'killed' / 'sweep.json').unlink(missing_ok=True)  # the run directories alone count
    assert search.finish('killed') == 0
    ends = {end[1] for end in search.compare('killed', 'whole', options)}
    assert ends == ({'COMPLETE', 'PRUNED'} if options else {'COMPLETE'})


MOMENTS = [
    'before lm.sweep.sweep.Sweep.write_config 1',
    'after lm.sweep.sweep.Sweep.write_config 4',
    'after lm.sweep.sweep.Sweep.prepare 2',
    'before lm.runs.sweep_file.write_rows 3',
    'after os.open 40',
    'before os.replace 6',
    'after lm.sweep.runner.Runner.launch 2',
    'before lm.sweep.sweep.Sweep.record_failure 1',
    'after lm.sweep.sweep.Sweep.record_failure 1',
    'before lm.sweep.sweep.Sweep.record_pruned 1',
    'after lm.sweep.sweep.Sweep.record_pruned 1',
    'after lm.sweep.runner.Runner.end_early 1',
]
"""Before and after all that a search writes or starts. A moment that does not come in its turn is no kill."""
OF_TRAININGS = [('trial-0002', 'begun'), ('trial-0005', 'last'), ('trial-0011', 'begun'), ('trial-0013', 'last')]


@pytest.mark.slow
def test_a_search_that_is_killed_at_named_moments_proposes_the_same_trials(make):
    search, kills = make(24, PRUNED), 0
    assert search.finish('whole') == 0
    for trial, moment in OF_TRAININGS:
        (search.notes / f'{trial}.{moment}').touch()
    for moment in MOMENTS:
        kills += search.finish('killed', moment) == -signal.SIGKILL
    while (code := search.finish('killed')) == -signal.SIGKILL:
        kills += 1
    assert code == 0
    assert kills >= 10
    search.compare('killed', 'whole', PRUNED)
