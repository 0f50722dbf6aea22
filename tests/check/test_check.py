"""`lm check`: memory and advice; the command on a tiny model."""

import dataclasses
import importlib.util
import json
import math
import re
import time

import jax
import pytest
import tiny

from lm import cli
from lm.attention.softmax import Softmax
from lm.check import advice, reach, tables
from lm.check import check as check_module
from lm.check.check import failure
from lm.commands import check as check_flags
from lm.config.text import dump
from lm.cost_model import compiled_step as check
from lm.cost_model.roofline import Roofline
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.hardware import Target, parse
from lm.model import REMAT, ModelConfig
from lm.plan import make_plan, plan_step
from lm.pod.mesh import MeshConfig
from lm.training.config import TrainConfig

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
SMALL = Experiment(
    model=ModelConfig(vocab_size=256, n_layers=2, d_model=64, n_heads=2, head_dim=32),
    train=TrainConfig(tokens_per_step=1024, context_length=128, steps=20_000),
)


@pytest.fixture
def on_cpus(monkeypatch):
    """Topologies consist of simulated CPU devices, which compile fast and need no libtpu."""
    monkeypatch.setattr(check, 'describe_devices', lambda topology: jax.devices()[: topology.chips])


# --------------------------------------------------------------------------------------------------------------- memory


# --------------------------------------------------------------------------------------------------------------- advice


def test_changes_that_recompute_least_come_first():
    experiment = dataclasses.replace(SMALL, train=TrainConfig(tokens_per_step=4096, context_length=128))  # 32 windows
    found = list(advice.list_candidates(experiment, parse('v5e:2x4')))
    assert found[:3] == [
        {'train.microbatches': 2},
        {'train.microbatches': 4},
        {'model.remat': 'dots'},
    ]
    assert found[-1] == {'train.microbatches': 4, 'model.remat': 'full', 'mesh.fsdp': 8}
    assert len(found) == 2 * 5 * 3 - 1
    recomputed = [list(REMAT).index(c.get('model.remat', 'none')) for c in found if 'mesh.fsdp' not in c]
    assert recomputed == sorted(recomputed)


def test_a_large_state_is_shared_first():
    experiment = dataclasses.replace(SMALL, model=ModelConfig(n_layers=36, d_model=1280, n_heads=20))
    assert next(advice.list_candidates(experiment, parse('v5e:2x4'))) == {'mesh.fsdp': 8}
    assert 'mesh.fsdp' not in next(advice.list_candidates(experiment, parse('v5p:2x2x1')))


def test_a_state_is_shared_inside_of_a_slice():
    train = TrainConfig(tokens_per_step=4096, context_length=128)
    large = dataclasses.replace(SMALL, model=ModelConfig(n_layers=36, d_model=1280, n_heads=20), train=train)
    assert next(advice.list_candidates(large, parse('2*v5e:2x4'))) == {'mesh.fsdp': 8}
    assert next(advice.list_candidates(large, parse('v5e:4x4'))) == {'mesh.fsdp': 16}


@pytest.mark.parametrize(
    ('name', 'gigabytes', 'seconds', 'line'),
    [
        ('2*v5e:2x4', 0.44, 0.1408, '141 ms: 0.44 GB of gradients sent a chip to the other slices at 3.125 GB/s'),
        ('2*v4:2x2x2', 0.44, None, '0.44 GB of gradients .* no figure of that .* for v4, so its time is not predicted'),
        ('2*v5e:2x4', 0.0, 0.0, 'nothing is sent between the slices.*'),
    ],
)
def test_traffic_between_slices_is_one_line(name, gigabytes, seconds, line):
    bound = Roofline(1.0, 1.0, (), 1.0, 1.0, 1.0, 'compute', (), gigabytes, seconds)
    found = tables.between_slices(bound, parse(name).chip, 'chip')
    assert re.fullmatch(line, found), found


def test_the_number_of_slices_is_printed_if_there_are_several(capsys):
    found = pretend(lambda e: 20)(SMALL, 'v5e:2x2')
    tables.print_check(
        dataclasses.replace(found, topology='2*v5e:2x2', chips=8, devices=8), check.compute_budget(plan_step(SMALL))
    )
    assert '2*v5e:2x2: 2 slices, 8 chips, 8 devices' in capsys.readouterr().out


def test_only_microbatches_that_the_devices_can_share():
    assert [c for c in advice.list_candidates(SMALL, parse('v5e:2x4')) if 'train.microbatches' in c] == []


@pytest.mark.parametrize('windows', [4, 16])
def test_devices_that_share_a_window_share_it_in_every_change(windows):
    train = TrainConfig(tokens_per_step=windows * 4096, context_length=4096)
    mesh, topology = MeshConfig(sequence=4), parse('v5e:4x4')
    found = list(advice.list_candidates(dataclasses.replace(SMALL, train=train, mesh=mesh), topology))
    assert {'model.remat': 'dots'} in found
    assert {'mesh.fsdp': 4} in found
    assert ({'train.microbatches': 4} in found) == (windows == 16)
    for changes in found:
        dataclasses.replace(mesh, fsdp=changes.get('mesh.fsdp', 1)).plan(Target('tpu', (16,)))
        dataclasses.replace(train, microbatches=changes.get('train.microbatches', 1)).check_divides(4)


def pretend(fits, takes=None):
    """Returns a `check` whose memory, and optionally predicted time, is a function of the configuration."""

    def made(experiment, topology, bindings=None):
        experiment = check.apply_bindings(experiment, bindings or {})
        needed = fits(experiment)
        bindings = tuple(f'{k} = {v!r}' for k, v in (bindings or {}).items())
        seconds = takes and takes(experiment)
        speed = seconds and check.Speed(seconds, 1 / seconds, 1.0, 0.5, 1.0, 4.0)
        memory = check.Memory(16, needed)
        return check.Check('v5e:2x2', 4, 4, bindings, needed <= 16, memory, None, None, 0.0, None, speed)

    return made


KEPT = {'none': 20, 'dots': 15.8, 'dense': 12, 'attention': 8, 'full': 5}
TIMES = {'none': 1.0, 'dots': 1.1, 'dense': 1.4, 'attention': 1.2, 'full': 1.5}


@pytest.mark.parametrize(
    ('needs', 'expected'),
    [
        (lambda e: 30 / e.train.microbatches, ('train.microbatches = 2',)),
        (
            lambda e: dict(none=40, dots=20, dense=18, attention=10, full=5)[e.model.remat],
            ("model.remat = 'attention'",),
        ),
        (lambda e: 20 / e.mesh.fsdp, ('mesh.fsdp = 4',)),
        (lambda e: 20 + 1 / e.train.microbatches, None),
    ],
)
def test_advice_is_the_first_that_fits(needs, expected, on_cpus, monkeypatch):
    monkeypatch.setattr(advice, 'check', pretend(needs))
    failed = pretend(needs)(SMALL, 'v5e:2x2')
    found = advice.advise(SMALL, parse('v5e:2x2'), failed)
    if expected is None:
        assert found.check is None
        assert found.nearest.needed_gib == 20.5
        assert 'larger topology' in failure(dataclasses.replace(failed, advice=found))
        return
    assert found.check.bindings == expected
    assert expected[0] in failure(dataclasses.replace(failed, advice=found))


def test_advice_is_the_fastest_with_room_to_spare(on_cpus, monkeypatch):
    """`dots` alone fits in 15.8 of 16 GiB. `full` recomputes more than `attention` and is not tried."""
    needs, takes = (lambda e: KEPT[e.model.remat]), (lambda e: TIMES[e.model.remat] / (1 + 0.001 * e.mesh.fsdp))
    monkeypatch.setattr(advice, 'check', pretend(needs, takes))
    found = advice.advise(SMALL, parse('v5e:2x2'), pretend(needs, takes)(SMALL, 'v5e:2x2'))
    assert found.check.bindings == ("model.remat = 'attention'",)
    first, *changes = found.tried
    assert (first.bindings, first.has_headroom) == (('model.unroll = 1',), False)
    alone = [t for t in changes if 'mesh.fsdp = 4' not in t.bindings]
    assert [(t.bindings[-1], t.has_headroom) for t in alone if 'train.microbatches = 2' not in t.bindings] == [
        ("model.remat = 'dots'", False),
        ("model.remat = 'dense'", True),
        ("model.remat = 'attention'", True),
    ]


def test_advice_reports_a_fit_at_once_and_stops_after_its_time(on_cpus, monkeypatch):
    """`dense` fits. `attention`, which is faster, is tried within the time alone; each try says which it is."""
    made = pretend(lambda e: KEPT[e.model.remat], lambda e: TIMES[e.model.remat])
    clock, said = [0.0], []

    def slow(*given):
        clock[0] += 100.0
        return made(*given)

    monkeypatch.setattr(advice, 'check', slow)
    monkeypatch.setattr(advice.time, 'monotonic', lambda: clock[0])
    configured = made(SMALL, 'v5e:2x2')
    found = advice.advise(SMALL, parse('v5e:2x2'), configured, said.append, budget_seconds=0.0)
    assert found.check.bindings == ("model.remat = 'dense'",)
    assert found.left_out > 0
    total = len(list(advice.list_candidates(SMALL, parse('v5e:2x2'))))
    assert said[-1].endswith("model.remat = 'dense': 12.00 GiB, fits, 1.4 s per step predicted")
    looped, *tries = said
    assert looped.startswith('with a loop over the layers: ')
    assert [re.match(r'try (\d+) of (\d+): ', line).groups() for line in tries] == [
        (str(i), str(total)) for i in range(1, len(said))
    ]
    again = advice.advise(SMALL, parse('v5e:2x2'), configured, said.append, budget_seconds=500.0)
    assert again.check.bindings == ("model.remat = 'attention'",)
    # Where nothing fits, everything is tried: each try is refused within seconds.
    monkeypatch.setattr(advice, 'check', lambda *given: pretend(lambda e: 20 + 1 / e.train.microbatches)(*given))
    assert advice.advise(SMALL, parse('v5e:2x2'), configured, budget_seconds=0.0).left_out == 0


def test_the_printed_table_belongs_to_the_printed_command(capsys, monkeypatch):
    """The part that needs no compiler is equal. The rest names the slice of the command, and says that it fits."""
    page = (tiny.ROOT / 'docs' / 'check.md').read_text()
    command, table = re.match(r'.*?```bash\nlm (check .*?)\n```.*?```\n(.*?)\n```', page, re.DOTALL).groups()
    before, _, compiled = table.partition('\ntopology ')
    words, _, topology = command.partition(' --topology ')
    monkeypatch.chdir(tiny.ROOT)
    assert cli.main(words.split()) == 0
    assert capsys.readouterr().out.strip() == before
    assert compiled.split()[0] == f'{topology}:'
    assert 'of HBM: fits' in compiled
    assert 'This configuration fits' in page


def test_the_time_of_advice_is_a_flag(capsys):
    def seconds(*flags: str) -> float:
        return check_flags.make_call(cli.parse(['check', *flags])).args[1].advice_seconds

    assert seconds() == 300
    assert seconds('--advice_minutes', '2', '--topology', 'v5e:2x2') == 120
    assert seconds('--best', '--topology', 'v5e:2x2') == math.inf
    for flags, said in ((['-1'], 'at least 0'), (['nan'], 'at least 0'), (['3', '--no_advice'], 'leave this')):
        assert cli.main(['check', '--advice_minutes', *flags]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(('extra', 'faster', 'unrolled'), [(1.0, 0.9, True), (9.0, 0.9, False), (1.0, 1.1, False)])
def test_the_fastest_is_tried_without_a_loop_over_the_layers(extra, faster, unrolled, on_cpus, monkeypatch):
    """The unrolled form is tried once; it is chosen if it fits with room to spare and is faster."""

    def is_unrolled(e):
        return e.model.unroll == e.model.n_layers

    def needs(e):
        return KEPT[e.model.remat] + extra * is_unrolled(e)

    def takes(e):
        return TIMES[e.model.remat] * (faster if is_unrolled(e) else 1.0)

    monkeypatch.setattr(advice, 'check', pretend(needs, takes))
    configured = pretend(needs, takes)(SMALL, 'v5e:2x2')
    found = advice.advise(SMALL, parse('v5e:2x2'), configured, everything=True)
    bound = f'model.unroll = {SMALL.model.n_layers}'
    assert found.check.bindings[:1] == ("model.remat = 'attention'",)
    assert (bound in found.check.bindings) == unrolled
    assert sum(bound in t.bindings for t in found.tried) == 1
    assert not any(bound in t.bindings for t in advice.advise(SMALL, parse('v5e:2x2'), configured).tried)


@pytest.mark.parametrize(('extra', 'looped'), [(1.0, False), (9.0, True)])
def test_a_change_is_tried_with_a_loop_over_the_layers_first(extra, looped, on_cpus, monkeypatch):
    """A step with `dots` has no loop by default, and takes long to compile. Here it may need too much memory."""

    def is_unrolled(e):
        return e.model.resolve_unroll('tpu', e.mesh.fsdp > 1) > 1

    def needs(e):
        return (40 if e.model.remat == 'none' else 10) + extra * is_unrolled(e)

    def takes(e):
        return TIMES[e.model.remat] * (0.8 if is_unrolled(e) else 1.0) * (1.1 if e.train.microbatches > 1 else 1.0)

    monkeypatch.setattr(advice, 'check', pretend(needs, takes))
    configured = pretend(needs, takes)(SMALL, 'v5e:2x2')
    found = advice.advise(SMALL, parse('v5e:2x2'), configured)
    bindings = ("model.remat = 'dots'",)
    assert found.check.bindings == (('model.unroll = 1', *bindings) if looped else bindings)
    assert [t.bindings for t in found.tried].count(bindings) == 1
    assert found.tried[-1].bindings == bindings


def test_a_loop_over_the_layers_is_advised_where_it_suffices(on_cpus, monkeypatch):
    def needs(e):
        return 10 + 9 * (e.model.resolve_unroll('tpu', e.mesh.fsdp > 1) > 1)

    kept = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, remat='dots'))
    monkeypatch.setattr(advice, 'check', pretend(needs))
    found = advice.advise(kept, parse('v5e:2x2'), pretend(needs)(kept, 'v5e:2x2'))
    assert found.check.bindings == ('model.unroll = 1',)
    assert () not in [t.bindings for t in found.tried]


def test_levels_of_remat_are_compared_by_what_they_repeat():
    assert advice.BEYOND.keys() == REMAT.keys()
    for level, beyond in advice.BEYOND.items():
        assert all(advice.BEYOND[other] <= beyond for other in beyond), level


def test_the_best_setting_that_fits_is_printed_as_gin(on_cpus, monkeypatch, capsys):
    needs, takes = (lambda e: 1 + KEPT[e.model.remat] / 2), (lambda e: TIMES[e.model.remat])
    for module in (check_module, advice):
        monkeypatch.setattr(module, 'check', pretend(needs, takes))
    flags = tiny.params(tiny.MODEL | {'model.remat': 'full'})
    assert cli.main(['check', '--best', '--topology', 'v5e:2x2', *flags]) == 0
    printed = capsys.readouterr().out
    assert 'as configured: 3.50 GiB, 1.50 s' in printed
    assert "\n                        model.remat = 'none'\n" in printed
    flags = tiny.params(tiny.MODEL | {'model.remat': 'none'})
    assert cli.main(['check', '--best', '--topology', 'v5e:2x2', *flags]) == 0
    assert 'advice                  none' in capsys.readouterr().out
    assert cli.main(['check', '--best', *flags]) == 2
    assert '--topology' in capsys.readouterr().err


def test_the_checked_step_is_printed_completely_before_the_advised_one(on_cpus, monkeypatch, capsys):
    made = pretend(lambda e: 1 + KEPT[e.model.remat] / 2, lambda e: TIMES[e.model.remat])
    for module in (check_module, advice):
        monkeypatch.setattr(module, 'check', lambda *a: dataclasses.replace(made(*a), roofline='a roofline'))
    monkeypatch.setattr(tables, 'print_times', lambda found, *_: print(f'times of {found.memory.needed_gib}'))
    flags = tiny.params(tiny.MODEL | {'model.remat': 'full'})
    assert cli.main(['check', '--best', '--topology', 'v5e:2x2', *flags]) == 0
    printed = capsys.readouterr().out
    order = ['topology', 'times of 3.5', 'tried', 'advice', 'topology', 'times of 11']
    assert [word for line in printed.splitlines() for word in sorted(set(order)) if line.startswith(word)] == order


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ('needed', 'said'),
    [
        (15.8, 'none: nothing fits with 3% of the memory to spare, and of what fits this needs least'),
        (12.0, 'none: of what fits with 3% of the memory to spare this is the fastest by prediction'),
    ],
)
def test_no_advice_says_whether_there_is_room(needed, said, on_cpus, monkeypatch, capsys):
    fake = pretend(lambda e: needed if (e.model.remat, e.train.microbatches) == ('none', 1) else 20, lambda e: 1.0)
    monkeypatch.setattr(check_module, 'check', fake)
    monkeypatch.setattr(advice, 'check', fake)
    assert cli.main(['check', '--topology', 'v5e:2x2', '--best', *tiny.params(tiny.MODEL)]) == 0
    assert said in capsys.readouterr().out


def test_without_libtpu_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert cli.main(['check', '--topology', 'v5e:2x2']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "-e '.[tpu]'" in error


def test_a_batch_that_does_not_divide_raises_the_error_of_training(on_cpus):
    experiment = dataclasses.replace(SMALL, train=TrainConfig(tokens_per_step=3 * 128, context_length=128))
    with pytest.raises(ConfigError) as of_check:
        check.check(experiment, 'v5e:2x2')
    with pytest.raises(ConfigError) as of_training:
        make_plan(experiment, Target.of_devices(jax.devices()[:4]))
    assert str(of_check.value) == str(of_training.value)


def test_if_possible_goes_on_without_libtpu_or_for_an_unknown_slice(monkeypatch, capsys):
    flags = tiny.params(tiny.MODEL)
    assert cli.main(['check', '--if_possible', '--topology', 'v3-32', *flags]) == 0
    assert 'not compiled: --topology v3-32' in capsys.readouterr().err
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert cli.main(['check', '--if_possible', '--topology', 'v5e:2x2', *flags]) == 0
    assert "-e '.[tpu]'" in capsys.readouterr().err


def test_a_point_of_a_sweep_is_checked(tmp_path, capsys):
    (tmp_path / 's.gin').write_text('model.n_layers = [2, 3]')
    command = ['check', '--sweep_file', str(tmp_path / 's.gin'), *tiny.params({'model.d_model': 32})]
    for index, layers in (('0', 2), ('1', 3)):
        assert cli.main([*command, '--index', index]) == 0
        assert f'({layers} layers of width 32' in capsys.readouterr().out
    assert cli.main([*command, '--index', '2']) == 2
    assert 'must be 0 to 1' in capsys.readouterr().err


def test_all_points_of_a_sweep_are_checked_by_name(tmp_path, capsys):
    (tmp_path / 's.gin').write_text('model.n_layers = [2, 3]')
    command = ['check', '--sweep_file', str(tmp_path / 's.gin'), *tiny.params({'model.d_model': 32})]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    parts = printed.split('point ')[1:]
    assert [part.partition('\n')[0] for part in parts] == ['0 of 2: n_layers-2', '1 of 2: n_layers-3']
    assert ['(2 layers' in parts[0], '(3 layers' in parts[1]] == [True, True]
    assert cli.main([*command, '--json']) == 2
    assert 'the sweep has 2 points; add --index' in capsys.readouterr().err


def test_the_points_in_the_folder_of_a_sweep_are_checked(tmp_path, capsys):
    """A folder that `lm sweep --emit` has written is checked as its sweep file is; a run is none."""
    (tmp_path / 's.gin').write_text('model.n_layers = [2, 3]')
    root = str(tmp_path / 'sweep')
    flags = ['--sweep_file', str(tmp_path / 's.gin'), *tiny.params({'model.d_model': 32})]
    assert cli.main(['sweep', '--run_dir', root, *flags, '--emit', 'slurm', str(tmp_path / 'jobs'), '--gpus', '1']) == 0
    capsys.readouterr()
    assert cli.main(['check', '--if_possible', '--run_dir', root]) == 0
    assert 'point 1 of 2: n_layers-3' in capsys.readouterr().out
    assert cli.main(['check', '--if_possible', '--run_dir', root, '--index', '1']) == 0
    assert '(3 layers of width 32' in capsys.readouterr().out
    absent = str(tmp_path / 'absent')
    assert cli.main(['check', '--if_possible', '--run_dir', absent, '--index', '1']) == 0
    assert f'not checked: {absent}: no run is there on this machine' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--price_per_chip_hour 1.2', '--price_per_chip_hour 1.2: needs --topology'),
        ('--advice_minutes 3', '--advice_minutes 3.0: needs --topology'),
        ('--no_advice', '--no_advice: needs --topology'),
        ('--topology v5e:2x2 --price_per_chip_hour=-1', 'must be a number of at least 0'),
        ('--topology v5e:2x2 --best --no_advice', 'give one of them'),
        ('--index 1', '--index 1: is of a sweep; add --sweep_file'),
        ('--sweep_file s.gin --run_dir runs/x', '--run_dir runs/x: the points of a sweep are new runs'),
    ],
)
def test_no_flag_is_ignored(flags, said, capsys):
    assert cli.main(['check', *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_small_cost_is_not_printed_as_zero():
    run = check.Speed(2.0, 0.5, 1.0, 0.5, run_hours=0.02, run_chip_hours=0.08)
    assert tables.cost_of(run, 1.2) == '1m12s: 0.0200 hours, 0.0800 chip-hours, 0.10 at 1.2 each'
    long = dataclasses.replace(run, run_hours=123.45, run_chip_hours=15_802.0)
    assert tables.cost_of(long, None) == '5d03h: 123 hours, 15,802 chip-hours'


def test_the_price_is_in_the_json_too(on_cpus, monkeypatch, capsys):
    fake = pretend(lambda e: 30 / e.train.microbatches, lambda e: 3.6)
    monkeypatch.setattr(check_module, 'check', fake)
    monkeypatch.setattr(advice, 'check', fake)
    flags = ['--topology', 'v5e:2x2', '--json', '--price_per_chip_hour', '2.5', *tiny.params(tiny.MODEL)]
    assert cli.main(['check', *flags]) == 2
    (found,) = json.loads(capsys.readouterr().out)['checks']
    speed = found['advice']['check']['predicted']
    assert speed['run_price'] == 2.5 * speed['run_chip_hours'] == 10


def test_the_plan_is_printed_without_a_compiler(capsys):
    assert cli.main(['check', *tiny.params(tiny.MODEL)]) == 0
    printed = capsys.readouterr().out
    assert 'tokens per step         256 (8 windows of 32, 1 microbatch)' in printed
    assert 'embedding' in printed
    assert 'topology' not in printed
    assert cli.main(['check', '--json', *tiny.params(tiny.MODEL)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['checks'] == []
    assert found['plan']['parameters_total'] == sum(found['plan']['parameters'].values())
    assert found['plan']['tokens_total'] == 40 * 256


def test_the_step_of_training_on_simulated_devices(on_cpus):
    found = check.check(SMALL, 'v5e:2x2')
    model_teraflops = SMALL.model.flops_per_token(128) * 1024 / 4 / 1e12
    assert found.fits
    assert 1.0 < found.roofline.hardware_teraflops / model_teraflops < 1.3
    parameters, embedding = check.compute_budget(plan_step(SMALL)).parameters_total, 256 * 64
    assert found.memory.arguments_gib == pytest.approx(3 * 4 * parameters / 2**30, rel=0.01)
    assert found.memory.aliased_gib == pytest.approx(found.memory.outputs_gib, rel=0.01)
    gradients = sum(e.gigabytes_sent_per_device for e in found.roofline.collectives)
    # The embedding is tied. Its gradients as a table of inputs and of outputs are each summed over the devices.
    assert gradients <= 2 * 3 / 4 * 4 * (parameters + embedding) / 1e9 * 1.01
    assert gradients >= 2 * 3 / 4 * 4 * parameters / 1e9
    speed = found.speed
    assert speed.run_chip_hours == pytest.approx(20_000 * speed.seconds_per_step * 4 / 3600)
    assert speed.mfu < 1


def test_kernels_that_declare_nothing_count_as_their_own_layers(on_cpus, monkeypatch):
    """JAX's kernels declare nothing. The other layers of the model see everything, and their kernels declare their
    cost."""
    given, near = [], Softmax(window=16)
    counted, declares = check.roofline, Softmax.kernels_declare_cost
    monkeypatch.setattr(Softmax, 'kernels_declare_cost', lambda self, dims: self.window is None)
    monkeypatch.setattr(check, 'roofline', lambda *a: given.append(a[2]) or counted(*a))
    for attention, undeclared in ((Softmax(), 0), (near, near), ((Softmax(), near), near)):
        model = dataclasses.replace(SMALL.model, attention=attention)
        check.check(dataclasses.replace(SMALL, model=model), 'v5e:2x2')
        assert given[-1] == (undeclared and near.flops_per_token(model.resolve(near).dims, 128))
    dims = SMALL.model.resolve(Softmax()).dims
    wide = dataclasses.replace(dims, head_dim=256)
    assert declares(Softmax(window=16), dims)
    assert not declares(Softmax(), wide)
    assert not declares(Softmax(implementation='splash'), dims)


def test_a_replay_counts_if_it_needs_more_memory_than_a_step(on_cpus, monkeypatch, capsys):
    plain = check.check(SMALL, 'v5e:2x2')
    experiment = dataclasses.replace(SMALL, train=dataclasses.replace(SMALL.train, replay_every=100))
    found = check.check(experiment, 'v5e:2x2').memory
    assert plain.memory.replay_gib is None
    assert plain.memory.arguments_gib < found.replay_gib
    # Two compilations of the same step may differ by a few bytes.
    assert found.needed_gib == pytest.approx(max(found.replay_gib, plain.memory.needed_gib), rel=1e-3)
    compiled = check.compile_described

    def compile_step(*arguments):
        if arguments[3:]:
            raise check.StepTooLarge(99.0)
        return compiled(*arguments)

    monkeypatch.setattr(check, 'compile_described', compile_step)
    large = check.check(experiment, 'v5e:2x2')
    assert (large.memory.replay_gib, large.memory.needed_gib, large.fits) == (99.0, 99.0, False)
    tables.print_check(large, check.compute_budget(plan_step(SMALL)))
    assert '99.00 GiB with the state, before each' in capsys.readouterr().out


@pytest.mark.smoke  # newer versions of JAX print their programs differently
@needs_libtpu
def test_the_command_compiles_for_a_pod(capsys):
    flags = tiny.params(tiny.MODEL | {'train.tokens_per_step': 1024, 'train.context_length': 128, 'model.n_layers': 2})
    assert cli.main(['check', '--json', '--topology', 'v5e:2x2', *flags]) == 0
    (found,) = json.loads(capsys.readouterr().out)['checks']
    assert (found['topology'], found['chips'], found['fits']) == ('v5e:2x2', 4, True)
    assert 0 < found['memory']['arguments_gib'] < found['memory']['needed_gib'] < found['memory']['limit_gib']
    assert found['roofline']['notes'] == []
    model_teraflops = (
        ModelConfig(
            vocab_size=400, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=Softmax()
        ).flops_per_token(128)
        * 1024
        / 4e12
    )
    # Splash attention computes whole blocks, and its backward pass computes the scores again.
    assert 1.0 < found['roofline']['hardware_teraflops'] / model_teraflops < 1.6
    assert {e['kind'] for e in found['roofline']['collectives']} == {'all-reduce'}
    assert 0 < found['predicted']['mfu'] <= found['speed']['mfu'] < 1
    assert {'attention core', 'FFN', 'collectives'} <= {part['part'] for part in found['predicted_step']['parts']}
    check_tables_print(found, capsys)


def check_tables_print(found, capsys):
    """The table of results has every figure that a newcomer looks for."""
    from lm.check.tables import print_check
    from lm.cost_model.roofline import CollectiveTotals, Roofline
    from lm.cost_model.step_time import PartTime, StepTime

    parts = found['predicted_step'].pop('parts')
    collectives = tuple(CollectiveTotals(**e) for e in found['roofline'].pop('collectives'))
    built = check.Check(
        **found
        | {
            'memory': check.Memory(**found['memory']),
            'roofline': Roofline(**found['roofline'], collectives=collectives),
            'speed': check.Speed(**found['speed']),
            'predicted': check.Speed(**found['predicted']),
            'predicted_step': StepTime(tuple(PartTime(**part) for part in parts), ()),
        }
    )
    print_check(built, check.compute_budget(plan_step(SMALL)), price=4.0)
    printed = capsys.readouterr().out
    for words in (
        '4 chips',
        'GiB of 15.75 GiB of HBM: fits',
        'nothing is faster',
        'prediction of a step',
        " with XLA's estimates",
        '  attention core',
        '  collectives',
        'all-reduce',
        'at 4 each',
        'MFU',
        'chip-hours',
        'not measurements',
    ):
        assert words in printed


def test_a_step_that_does_not_fit_ends_with_the_remedy(on_cpus, monkeypatch, capsys):
    needs = lambda e: 30 / e.train.microbatches  # noqa: E731
    monkeypatch.setattr(check_module, 'check', pretend(needs))
    monkeypatch.setattr(advice, 'check', pretend(needs))
    flags = tiny.params(tiny.MODEL)
    assert cli.main(['check', '--topology', 'v5e:2x2', *flags]) == 2
    printed = capsys.readouterr()
    assert 'does NOT fit' in printed.out
    assert printed.err.splitlines()[-1].endswith('add --gin_param "train.microbatches = 2"')
    assert cli.main(['check', '--topology', 'v5e:2x2', '--no_advice', *flags]) == 2
    printed = capsys.readouterr()
    assert 'tried' not in printed.out
    assert 'larger topology' in printed.err.splitlines()[-1]


@pytest.fixture
def run(tmp_path):
    """Writes as much of a run of `lm train` with three layers as `lm check` reads."""
    (tmp_path / 'run').mkdir()
    experiment = load((), tiny.params(tiny.MODEL | {'model.n_layers': 3, 'optimizer.rule': '@muon()'})[1::2])
    (tmp_path / 'run' / 'config.gin').write_text(dump(experiment))
    return tmp_path / 'run'


def test_a_resumed_or_branched_run_is_checked(run, tmp_path, capsys):
    change = ['--gin_param', 'muon.rms = 0.3']
    new, file = str(tmp_path / 'new'), tmp_path / 'model.gin'
    file.write_text('model.n_layers = 2\noptimizer.rule = @muon()\n')
    assert cli.main(['check', *change]) == 2, 'the default model has no muon'
    for given, layers in (
        (['--run_dir', str(run)], 3),
        (['--run_dir', new, '--branch_from', str(run)], 3),
        (['--branch_from', str(run)], 3),
        (['--run_dir', str(run), '--gin_file', str(file)], 2),
        (['--run_dir', new, '--gin_file', str(file)], 2),
    ):
        assert cli.main(['check', *given, *change]) == 0, given
        assert f'({layers} layers of width' in capsys.readouterr().out
    assert cli.main(['check', '--run_dir', new, '--branch_from', str(tmp_path / 'gone'), *change]) == 2
    assert 'holds no config.gin' in capsys.readouterr().err
    assert cli.main(['check', '--run_dir', '../x', *change]) == 2


@pytest.mark.parametrize('flag', ['--run_dir', '--branch_from'])
def test_with_if_possible_an_unreachable_run_is_not_checked(flag, tmp_path, monkeypatch, capsys):
    """The machine that trains may have the run, and a bucket may not answer."""
    change = ['--if_possible', '--gin_param', 'muon.rms = 0.3']
    assert cli.main(['check', flag, str(tmp_path / 'gone'), *change]) == 0
    assert 'gone: no run is there on this machine' in capsys.readouterr().err
    for answer, said in ((lambda path: time.sleep(60), 'no answer within 0.1 seconds'), (refuse, 'not checked: gs://')):
        monkeypatch.setattr(reach, 'PATIENCE_SECONDS', 0.1)
        monkeypatch.setattr(reach, 'RunDir', lambda path, answer=answer: answer(path))
        assert cli.main(['check', flag, 'gs://bucket/run', *change]) == 0
        assert said in capsys.readouterr().err
    (tmp_path / 'model.gin').write_text('optimizer.rule = @muon()\n')
    assert cli.main(['check', '--run_dir', 'gs://bucket/run', '--gin_file', str(tmp_path / 'model.gin'), *change]) == 0
    assert 'layers of width' in capsys.readouterr().out


def refuse(path):
    raise PermissionError(f'{path}: 403')


def test_a_resumed_run_needs_no_initial_run(run, tokens, tmp_path, capsys):
    changes = tiny.params({'data.path': str(tokens), 'train.init_from': str(tmp_path / 'gone')})
    assert cli.main(['check', '--run_dir', str(run), *changes]) == 0
    assert 'not checked: train.init_from' in capsys.readouterr().err
    (run / 'checkpoints' / '10').mkdir(parents=True)
    (run / 'checkpoints' / '10' / 'commit_success.txt').touch()
    assert cli.main(['check', '--run_dir', str(run), *changes]) == 0
    assert 'not checked' not in capsys.readouterr().err


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        (
            ['data.path=data/pg19'],
            'is a folder of this machine, which a pod does not have; prepare tokens in a bucket',
        ),
        (
            ['model.attention=polysketch', 'train.context_length=512'],
            'no sketch takes part; train.context_length = 512',
        ),
    ],
)
def test_what_a_pod_would_be_paid_for_in_vain_is_refused(settings, words, capsys):
    """`scripts/tpu` ask with --if_possible before they make a pod."""
    flags = ['--gin_file', 'configs/models/small.gin', *(word for text in settings for word in ('--set', text))]
    assert cli.main(['check', *flags]) == 0
    assert cli.main(['check', '--if_possible', *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_store_that_is_not_in_the_bucket_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('lm.check.reach.is_remote', lambda path: True)
    flags = ['--gin_file', 'configs/models/small.gin', '--set', f'data.path={tmp_path / "nothing"}']
    assert cli.main(['check', '--if_possible', *flags]) == 2
    assert 'no finished token store is there' in (error := capsys.readouterr().err)
    assert error.endswith('; scripts/tpu/prepare_data.sh lm prepare … makes it\n')
