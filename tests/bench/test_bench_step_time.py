"""`lm bench step --topology`: its output and files, and a gate against steps that take longer by the model."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from lm.bench.candidates import change_context
from lm.cli import main
from lm.compilation.compiler import CompiledProgram
from lm.compilation.memory import ProgramMemory
from lm.cost_model import forecast
from lm.cost_model.step_time import PartTime, StepTime
from lm.errors import ConfigError
from lm.experiment import load
from lm.hardware import Target, Topology, generation
from lm.model import REMAT
from lm.plan import plan_step
from lm.training import program
from lm.training.objectives.next_token import next_token

RECORD = pathlib.Path(__file__).parents[1] / 'data' / 'step_time.json'
CONFIGURATIONS = [
    *('--topology', 'v5e', '--contexts', '2048', '--tokens_per_step', '2048'),
    *('--mechanisms', 'softmax,polysketch,random/polysketch,performer'),
    *('--gin_param', "random/polysketch.sketch = 'gaussian'", '--gin_param', 'performer.n_features = 64'),
    *('--gin_param', "model.remat = 'dots'", '--gin_param', 'model.n_layers = 2', '--gin_param', 'model.d_model = 128'),
    *('--gin_param', 'model.n_heads = 2', '--gin_param', 'model.vocab_size = 1024'),
]
"""`lm bench step` with these arguments and --json tests/data/step_time.json writes the record."""
GROWTH = 1.05
NOISE = 2e-6
"""Seconds that a part may gain; it matters for parts that take almost no time."""

PROGRAM = """HloModule step, is_scheduled=true

ENTRY %main (x: bf16[1024,262144]) -> bf16[1024,262144] {
  %x = bf16[1024,262144]{1,0} parameter(0)
  %y = bf16[1024,262144]{1,0} tanh(%x), metadata={op_name="jit(train)/jvp()/rematted_computation/glu/tanh"}
  ROOT %z = bf16[1024,262144]{1,0} tanh(%y), metadata={op_name="jit(train)/jvp()/norms/tanh"}
}
"""
MILLISECONDS = 1e3 * 2 * 2 * 1024 * 262_144 / 819e9
"""The time of each of the two instructions on a v5e: it reads one array and writes one."""


COMPILED = CompiledProgram(None, PROGRAM, ProgramMemory(2**30, 2**30, 2**30, 2**30, 2**31))


def small(*flags: str) -> list[str]:
    shape = ('model.d_model = 32', 'model.n_layers = 1', 'model.n_heads = 1', 'model.vocab_size = 64')
    return ['bench', 'step', '--topology', 'v5e', *flags, *(w for p in shape for w in ('--gin_param', p))]


def test_parts_are_printed_written_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(forecast, 'compile_step', lambda *_: COMPILED)
    flags = small('--contexts', '64', '--mechanisms', 'softmax,polynomial')
    assert main([*flags, '--json', str(tmp_path / 's.json'), '--out', str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    whole, half = f'{2 * MILLISECONDS:.1f} ({MILLISECONDS:.0f})', f'{MILLISECONDS:.1f} ({MILLISECONDS:.0f})'
    for title, value in (('step', whole), ('FFN', half), ('norms', f'{MILLISECONDS:.1f}'), ('memory, GiB', '2.00')):
        (line,) = (line for line in printed.splitlines() if line.strip().startswith(title))
        assert line.count(value) == 2
    rows = json.loads((tmp_path / 's.json').read_text())['rows']
    assert [(row['mechanism'], row['remat'], row['speed_over_softmax']) for row in rows] == [
        ('softmax', 'none', None),
        ('polynomial', 'none', 1.0),
    ]
    assert rows[0]['milliseconds'] == pytest.approx(2 * MILLISECONDS)
    assert {part['part'] for part in rows[0]['time']['parts']} == {'FFN', 'norms'}
    for suffix in ('png', 'pdf'):
        assert (tmp_path / f'step_time_v5e_64.{suffix}').stat().st_size > 1000


def test_a_speed_over_softmax_is_shown_only_where_softmax_was_compiled(monkeypatch, capsys):
    monkeypatch.setattr(forecast, 'compile_step', lambda *_: COMPILED)
    assert main(small('--contexts', '64,2048', '--mechanisms', 'polynomial')) == 0
    printed = capsys.readouterr().out
    assert '× softmax' not in printed
    assert 'polynomial 64 ' in printed, 'no thousands'
    assert 'polynomial 2k' in printed
    assert main(small('--contexts', '64', '--mechanisms', 'polynomial,softmax')) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if '× softmax' in line)
    assert line.count('1.00') == 2


def test_a_step_that_does_not_fit_recomputes_more(monkeypatch, tmp_path):
    tried = []

    def compile_step(plan, topology):
        tried.append(plan.experiment.model.remat)
        return COMPILED if tried[-1] == 'attention' else None

    monkeypatch.setattr(forecast, 'compile_step', compile_step)
    assert main([*small('--contexts', '64', '--mechanisms', 'softmax'), '--json', str(tmp_path / 's.json')]) == 0
    assert tried == list(REMAT)
    assert json.loads((tmp_path / 's.json').read_text())['rows'][0]['remat'] == 'attention'


def test_the_fastest_remat_level_that_fits_is_taken(monkeypatch, tmp_path):
    """In long windows, recomputing attention costs more than recomputing products."""
    seconds = {'dense': 3.0, 'attention': 2.0, 'full': 4.0}

    def forecast_level(experiment, remat, topology):
        part = PartTime('attention core', *[seconds.get(remat, 0.0)] * 2, *[0.0] * 5)
        return forecast.Forecast(remat, 1.0, StepTime((part,), ()), mfu=0.5) if remat in seconds else None

    monkeypatch.setattr(forecast, '_forecast_level', forecast_level)
    assert main([*small('--contexts', '64', '--mechanisms', 'softmax'), '--json', str(tmp_path / 's.json')]) == 0
    assert json.loads((tmp_path / 's.json').read_text())['rows'][0]['remat'] == 'attention'


@pytest.mark.compiles
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_the_step_computes_in_the_dtype_of_its_chip(monkeypatch):
    """It computes in bfloat16 although this machine is a CPU: the model is built for the described chip."""
    made = []

    monkeypatch.setattr(program, 'lower_step', lambda program, _: made.append(program.step.functions.dtype))
    monkeypatch.setattr(program, 'compile_with_text', lambda lowered: COMPILED)
    small_model = ['model.d_model = 32', 'model.n_layers = 1', 'model.n_heads = 1', 'model.vocab_size = 64']
    topology = Topology(generation('v5e'), (1, 1))
    assert forecast.compile_step(forecast.plan_one(load([], small_model), topology), topology) is not None
    assert made == [jnp.bfloat16]


@pytest.mark.parametrize(
    'bindings', [['data.mask_documents = True'], ['train.objective = @masked()', 'model.causal = False']]
)
def test_the_step_is_the_one_that_is_configured(bindings, monkeypatch):
    """Separate documents and other requested options are part of the program."""
    made = []
    monkeypatch.setattr(program, 'lower_step', lambda program, _: made.append(program.step))
    monkeypatch.setattr(program, 'compile_with_text', lambda lowered: COMPILED)
    monkeypatch.setattr(forecast, 'describe_devices', lambda topology: jax.devices())
    shape = ['model.d_model = 32', 'model.n_layers = 1', 'model.n_heads = 1', 'model.vocab_size = 64']
    for given in ([], bindings):
        topology = Topology(generation('v5e'), (1, 1))
        forecast.compile_step(forecast.plan_one(load([], shape + given), topology), topology)
    plain, configured = ((step.unpack, step.documents) for step in made)
    assert plain == (next_token, None) != configured


def test_a_window_can_be_shared_by_the_devices_of_one_chip():
    """`mesh.sequence` says how many devices share a window; here there is one device."""
    experiment = load([], ['mesh.sequence = 2', 'train.context_length = 64'])
    with pytest.raises(ConfigError, match=r'mesh\.sequence = 2: must divide the 1 groups'):
        change_context(experiment, 64, 64, 64, Target('cpu', (1,)))
    eight = Target('cpu', (8,))
    halves = change_context(experiment, 64, 512, 64, eight)
    assert (halves.train.microbatches, halves.train.batch_size) == (1, 8)
    with pytest.raises(ConfigError, match=r'mesh\.sequence = 2: must divide train\.context_length = 63'):
        plan_step(change_context(experiment, 63, 504, 64, eight), eight)


def test_chip_names_without_sizes_are_accepted():
    assert generation('v5e:1x1') == generation('v5litepod') == generation('v5e')
    for name in ('v5e:2x2', 'v3', 'H100'):
        with pytest.raises(ConfigError, match='name a chip'):
            generation(name)


def grown(rows: list[dict], limits: list[dict]) -> list[str]:
    """Returns the parts, and the sums, that are more than `GROWTH` above the record."""
    complaints = []
    for row, limit in zip(rows, limits, strict=True):
        allowed = {part['part']: part['seconds'] for part in limit['time']['parts']}
        found = {part['part']: part['seconds'] for part in row['time']['parts']}
        allowed['step'], found['step'] = sum(allowed.values()), sum(found.values())
        for part, seconds in found.items():
            if seconds > GROWTH * allowed.get(part, 0.0) + NOISE:
                complaints.append(f'{row["mechanism"]}, {part}: {1e3 * seconds:.3f} ms')
    return complaints


def recorded() -> list[dict]:
    return json.loads(RECORD.read_text())['rows']


def test_the_gate_complains_of_growth():
    rows = recorded()
    assert len(rows) == 4
    assert grown(rows, rows) == []
    slower = json.loads(json.dumps(rows))
    slower[1]['time']['parts'][0]['seconds'] *= 1.5
    assert {line.partition(',')[0] for line in grown(slower, rows)} == {rows[1]['mechanism']}
    assert all(row['time']['unknown_kernels'] == [] for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_steps_take_no_longer_than_they_did(tmp_path):
    """The test uses its own process: libtpu reports its schedules only if it is told to when it is loaded."""
    path = tmp_path / 'step_time.json'
    command = [sys.executable, '-m', 'lm.cli', 'bench', 'step', *CONFIGURATIONS, '--json', str(path)]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(path.read_text())['rows']
    assert [row['mechanism'] for row in rows] == [row['mechanism'] for row in recorded()]
    assert grown(rows, recorded()) == []
