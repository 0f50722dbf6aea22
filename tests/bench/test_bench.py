"""`lm bench`: each part's measurements, output and files. No test depends on how long anything takes."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm import plots
from lm.attention import HeadDims, mechanisms
from lm.attention.linear import LinearAttention
from lm.bench import attention, candidates, checkpoint, data, results, step, timing
from lm.bench.options import AttentionOptions
from lm.cli import main
from lm.data.store import TokenStore
from lm.errors import ConfigError
from lm.hardware import Target
from lm.ops.linear_attention import LinearResult, reference
from lm.plan import plan_step
from lm.training.step import TrainStep

SMALL_LAYER = ['--contexts', '16,64', '--tokens', '64', '--heads', '2', '--head_dim', '8', '--repeats', '2']
SKETCH = ['polysketch.block = 16', "polysketch.sketch = 'gaussian'", 'polysketch.sketch_size = 4']
SMALL_MODEL = ['model.vocab_size = 50', 'model.n_layers = 1', 'model.d_model = 8', 'model.n_heads = 2']
SMALL_MODEL += ['model.head_dim = 4', 'optimizer.warmup_steps = 1']


def params(bindings):
    return [word for binding in bindings for word in ('--gin_param', binding)]


def picture_size(path: pathlib.Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def read(path: pathlib.Path, part: str) -> dict:
    """Returns the JSON of a part, after checking the keys that all parts promise."""
    found = json.loads(path.read_text())
    assert found.keys() == {'benchmark', 'machine', 'settings', 'rows'}
    assert found['benchmark'] == part
    assert {'device_kind', 'device_count', 'jax', 'jaxlib', 'python', 'date'} <= found['machine'].keys()
    return found


def error_of(arguments: list[str], capsys) -> str:
    """Returns the single error line of a refused command."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_bench_without_a_part_prints_help(capsys):
    assert main(['bench']) == 2
    printed = capsys.readouterr().out
    assert all(part in printed for part in ('attention', 'step', 'data', 'checkpoint'))


# ----------------------------------------------------------------------------------------------------------- attention


def test_attention(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results, 'PLAIN_SECONDS', 0.0)
    flags = ['--json', str(tmp_path / 'a.json'), '--out', str(tmp_path / 'figures')]
    flags += ['--mechanisms', 'softmax,polysketch,taylor', '--passes', 'forward']
    assert main(['bench', 'attention', *SMALL_LAYER, *flags, *params(SKETCH)]) == 0
    printed, said = capsys.readouterr()
    assert 'compiling 1 of 6: forward, 16, softmax\n' in said
    assert 'compiling 6 of 6: forward, 64, taylor\n' in said
    assert 'first call 6 of 6\n' in said
    assert 'round 2 of 2\n' in said
    assert 'cpu' in printed
    assert f'jax {jax.__version__}' in printed
    found = read(tmp_path / 'a.json', 'attention')
    assert 'gaussian' in found['settings']['mechanisms']['polysketch']
    rows = {(row['passes'], row['context'], row['mechanism']): row for row in found['rows']}
    assert len(rows) == len(found['rows']) == 2 * 3
    for (_, context, name), row in rows.items():
        assert row['sequences'] * context == 64
        assert row['milliseconds'] >= row['least_milliseconds'] > 0
        assert math.isclose(row['microseconds_per_token'] * row['tokens_per_second'], 1e6)
        assert row['peak_mib'] > row['temporary_mib'] > 0
        assert set(row['speed_over']) == {'softmax'} - {name}
    both = [rows['forward', 64, name] for name in ('softmax', 'polysketch')]
    assert math.isclose(both[1]['speed_over']['softmax'], both[0]['milliseconds'] / both[1]['milliseconds'])
    assert {p.name for p in (tmp_path / 'figures').iterdir()} == {'attention_forward.png', 'attention_forward.pdf'}
    assert min(picture_size(tmp_path / 'figures' / 'attention_forward.png')) > 500


@pytest.mark.parametrize('given', [False, True])
@pytest.mark.parametrize('name', [n for n, cls in mechanisms().items() if issubclass(cls, LinearAttention)])
def test_the_timed_program_calls_the_operation_with_given_features(name, given, monkeypatch):
    """For every linear mechanism, the compiled program calls the operation once and returns gradients of all
    weights."""
    calls = []
    counted = lambda *a, **k: calls.append(k) or reference.linear_attention(*a, **k)  # noqa: E731
    monkeypatch.setattr('lm.ops.linear_attention.xla.linear_attention', counted)
    (experiment,) = candidates.candidates([name], [], []).values()
    layer = attention.build(experiment, HeadDims(2, 2, 8), given)
    qkv = [jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)] * 3
    arrays = jax.eval_shape(layer.arrays, *qkv)
    assert len(arrays) == 3 if not given else len(arrays) >= 3
    assert not calls
    out = jax.eval_shape(lambda *a: jax.vjp(layer.function, layer.weights, *a)[0], *arrays)
    assert out.shape == (1, 2048, 2, 8)
    assert len(calls) == 1


@pytest.mark.parametrize('given', [False, True])
def test_the_requested_implementation_is_timed(given, monkeypatch):
    calls = []
    plain = reference.linear_attention
    monkeypatch.setattr(reference, 'linear_attention', lambda *a, **k: calls.append(k) or plain(*a, **k))
    for asked, expected in (([], 0), (["polysketch.implementation = 'reference'"], 1)):
        (experiment,) = candidates.candidates(['polysketch'], [], [*SKETCH, *asked]).values()
        layer = attention.build(experiment, HeadDims(2, 2, 8), given)
        arrays = jax.eval_shape(layer.arrays, *[jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.float32)] * 3)
        jax.eval_shape(layer.function, layer.weights, *arrays)
        assert len(calls) == expected


def test_a_context_of_one_block_is_timed_as_the_layer_computes_it(monkeypatch):
    """The layer computes it exactly, without sketches or sums."""
    calls = []
    found = lambda call, _: calls.append(call) or LinearResult(call.v_BxLxKxD, None)  # noqa: E731
    monkeypatch.setattr('lm.attention.linear.compute', found)
    (experiment,) = candidates.candidates(['polysketch'], [], SKETCH).values()
    layer = attention.build(experiment, HeadDims(2, 2, 8))
    for length, expected in ((16, 0), (17, 1)):
        jax.eval_shape(layer.function, layer.weights, *[jnp.zeros((1, length, 2, 8))] * 3)
        assert len(calls) == expected


def test_mechanisms_by_file_and_by_scope():
    found = candidates.candidates(['configs/attention/polysketch_random.gin', 'softmax'], [], [])
    assert list(found) == ['polysketch_random', 'softmax']
    assert found['polysketch_random'].model.attention.sketch == 'gaussian'
    scoped = candidates.candidates(['a/polysketch', 'polysketch'], [], ["a/polysketch.sketch = 'srht'"])
    sketches = {name: one.model.attention.sketch for name, one in scoped.items()}
    assert sketches == {'a/polysketch': 'srht', 'polysketch': 'learned'}
    configured = candidates.candidates(None, ['configs/attention/llops.gin'], [])
    assert list(configured) == ['softmax', 'llops']
    assert list(candidates.candidates(None, ['configs/attention/softmax.gin'], [])) == ['softmax']


@pytest.mark.parametrize(
    ('flags', 'words'),
    [
        (['--mechanisms', 'polyskech'], 'did you mean polysketch'),
        (['--mechanisms', 'softmax', '--gin_param', 'performer.feature = 3'], 'performer.feature'),
        (['--mechanisms', 'softmax', '--gin_param', 'polysketch.block = 16'], 'polysketch.block'),
        (['--mechanisms', 'configs/attention/based.gin', '--gin_param', 'model.n_layers = 2'], 'lm bench step'),
        (['--mechanisms', 'polynomial', '--features_given'], 'polynomial'),
        (['--passes', 'backward'], 'forward+backward'),
        (['--contexts', '0'], '--contexts'),
        (['--contexts', ','], '--contexts'),
        (['--mechanisms', 'softmax', '--gin_file', 'configs/models/tiny.gin', '--heads', '2'], 'model.n_heads'),
        (['--json', 'no/such/folder/a.json'], 'folder'),
        (['--json', 'configs'], 'is a folder'),
        (['--json', 'gs://b/a.json'], 'must lie on a disk'),
        (['--out', 's3://b/pictures'], 'must lie on a disk'),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(flags, words, capsys):
    assert words in error_of(['bench', 'attention', *flags], capsys)


def test_a_layer_has_the_heads_of_the_configured_model(tmp_path):
    bindings = ['model.n_kv_heads = 2', 'model.causal = False', 'model.head_dim = 8', 'model.n_heads = 4']
    options = AttentionOptions(gin_file=['configs/models/tiny.gin'])
    found = candidates.candidates(['softmax'], ['configs/models/tiny.gin'], bindings)
    assert attention.choose_dims(options, found, is_cpu=True) == HeadDims(4, 2, 8, causal=False)
    assert attention.choose_dims(AttentionOptions(heads=3), found, is_cpu=True).n_kv_heads == 3
    flags = ['--mechanisms', 'softmax,polynomial', '--gin_file', 'configs/models/tiny.gin', '--contexts', '24']
    flags += ['--tokens', '64', '--repeats', '1', '--json', str(tmp_path / 'a.json'), *params(bindings[::3])]
    assert main(['bench', 'attention', *flags]) == 0
    found = read(tmp_path / 'a.json', 'attention')
    assert found['settings']['kv_heads'] == 2 < found['settings']['heads']
    assert {row['sequences'] for row in found['rows']} == {2}


# -------------------------------------------------------------------------------------------------------------- memory


def refusal(text: str):
    def call():
        raise jax.errors.JaxRuntimeError(text)

    return call


def test_out_of_memory_is_a_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timing, 'available_mib', lambda: 0.0)
    flags = ['--json', str(tmp_path / 'a.json'), '--out', str(tmp_path)]
    flags += ['--mechanisms', 'softmax', '--passes', 'forward']
    assert main(['bench', 'attention', *SMALL_LAYER, *flags]) == 0
    assert 'OOM' in capsys.readouterr().out
    rows = read(tmp_path / 'a.json', 'attention')['rows']
    assert rows
    assert all(row['out_of_memory'] and row['milliseconds'] is None and row['peak_mib'] > 0 for row in rows)
    assert not list(tmp_path.glob('*.png'))


def test_one_candidate_may_run_out_of_memory():
    made = []

    def later():
        made.append(0)
        if len(made) > 2:
            raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes')

    calls = {'ok': lambda: None, 'never': refusal('RESOURCE_EXHAUSTED: no space'), 'later': later}
    found = timing.in_turns(calls, 4)
    assert found['never'] is found['later'] is None
    assert found['ok'].repeats == 4


def test_other_failures_are_not_taken_for_out_of_memory():
    with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
        timing.in_turns({'a': refusal('INTERNAL: no memory of that')}, 2)
    with pytest.raises(ZeroDivisionError):
        timing.in_turns({'a': lambda: 1 / 0}, 2)


def test_a_compiler_may_run_out_of_memory():
    class Lowered:
        def compile(self):
            refusal('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm')()

    assert timing.compile_if_fits(Lowered()) == (None, {})


# ---------------------------------------------------------------------------------------------------------------- step


def test_step(tmp_path, capsys):
    flags = ['--contexts', '16', '--tokens_per_step', '512', '--microbatch_tokens', '32', '--repeats', '2']
    flags += ['--mechanisms', 'softmax,polynomial', '--json', str(tmp_path / 's.json'), '--out', str(tmp_path)]
    assert main(['bench', 'step', *flags, *params(SMALL_MODEL)]) == 0
    assert 'steps/s' in capsys.readouterr().out
    found = read(tmp_path / 's.json', 'step')
    assert [(row['context'], row['mechanism']) for row in found['rows']] == [(16, 'softmax'), (16, 'polynomial')]
    for row in found['rows']:
        # 8 devices with 64 tokens each
        assert (row['windows'], row['microbatches'], row['remat']) == (32, 2, 'none')
        assert math.isclose(row['tokens_per_second'], 512 * row['steps_per_second'])
        assert row['slowest'] <= row['steps_per_second'] <= row['fastest']
        assert abs(row['loss'] - math.log(50)) < 0.7
        assert row['host_milliseconds'] > 0
        assert row['mfu'] is None
        assert (row['speed_over_softmax'] is None) == (row['mechanism'] == 'softmax')
    for name in ('step_speed', 'step_latency'):
        assert min(picture_size(tmp_path / f'{name}.png')) > 500
        assert (tmp_path / f'{name}.pdf').stat().st_size > 1000


def test_a_step_with_a_teacher_is_timed_with_one(tmp_path):
    path = tmp_path / 'teacher.gin'
    path.write_text('\n'.join(SMALL_MODEL))
    flags = ['--contexts', '16,24', '--repeats', '1', '--mechanisms', 'polynomial', '--json', str(tmp_path / 's.json')]
    bindings = [*SMALL_MODEL, 'train.objective = @distill()', f"distill.teacher = '{path}'"]
    assert main(['bench', 'step', *flags, *params(bindings)]) == 0
    found = read(tmp_path / 's.json', 'step')
    assert found['settings']['tokens_per_step'] == 8 * 48, 'each device has whole windows of both lengths'
    assert all(row['steps_per_second'] > 0 and row['host_milliseconds'] > 0 for row in found['rows'])


def test_pictures_name_the_devices_and_the_dtype(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plots, '_save', lambda figure, path: kept.append(figure.axes[0]))
    results.draw_contexts(
        tmp_path / 'x',
        {'a': [results.ContextFigure(16, 1.0, 0.5, 4.0), results.ContextFigure(32, 2.0, 1.0, 3.0)]},
        'time',
        'bfloat16',
    )
    assert kept[0].get_title(loc='left') == f'{jax.device_count()} × {jax.devices()[0].device_kind}, bfloat16'
    (band,) = kept[0].collections  # the band of the repeats
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {(16, 0.5), (16, 4), (32, 1), (32, 3)}


def test_bars_show_their_lengths_in_three_digits(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plots, '_save', lambda figure, path: kept.append(figure.axes[0]))
    plots.draw_bars(
        tmp_path / 'x', ['a', 'b'], {'core': np.array([0.1, 1000.0]), 'rest': np.array([0.0654, 433.0])}, 'ms'
    )
    assert [text.get_text() for text in kept[0].texts] == ['0.165', '1,433']


def test_speeds_are_printed_without_powers_of_ten():
    row = step.StepRow('softmax', 512, 8, 1, 'none', 1, False, 1150.4, 869.6, 1200.0)
    assert (row.speed, row.speeds) == ('1,150', '870–1,200')


def pretend_step(state, batch):
    """Replaces a compiled step."""
    return {'step': state['step'] + 1}, {'loss': jnp.ones(())}


def test_a_step_that_does_not_fit_is_tried_with_remat(monkeypatch):
    tried = []

    def compile_if_fits(lowered):
        tried.append(lowered)
        return (pretend_step if len(tried) == 2 else None), {'peak_mib': 9.0}

    monkeypatch.setattr(timing, 'compile_if_fits', compile_if_fits)
    monkeypatch.setattr(step, 'lower_step', lambda program, _: program.step.functions.config.remat)
    monkeypatch.setattr(TrainStep, 'init', lambda self, seed: {'step': jnp.zeros((), jnp.int32)})
    monkeypatch.setattr(TrainStep, 'abstract', {'step': jax.ShapeDtypeStruct((), jnp.int32)})
    found = candidates.candidates(['softmax'], [], SMALL_MODEL)
    rows = step.measure(found, [16, 32], 512, 512, steps=1, repeats=1)
    assert tried == ['none', 'full', 'none', 'full']
    assert [(row.remat, row.out_of_memory, row.peak_mib) for row in rows] == [('full', False, 9), ('full', True, 9)]
    assert rows[0].steps_per_second > 0
    assert rows[1].steps_per_second is None


def test_a_step_that_fails_leaves_the_state_intact(monkeypatch):
    monkeypatch.setattr(timing, 'compile_if_fits', lambda _: (pretend_step, {}))
    monkeypatch.setattr(step, 'lower_step', lambda *_: None)
    monkeypatch.setattr(TrainStep, 'init', lambda self, seed: {'step': jnp.zeros((), jnp.int32)})
    monkeypatch.setattr(TrainStep, 'abstract', {'step': jax.ShapeDtypeStruct((), jnp.int32)})
    (experiment,) = candidates.candidates(['softmax'], [], SMALL_MODEL).values()
    state = {}
    target = Target.of_devices(jax.devices())
    experiment = candidates.change_context(experiment, 16, 128, 128, target)
    program = step.TimedStep(plan_step(experiment, target), state, 2)
    program()
    assert int(state['state']['step']) == 2
    program.compiled = lambda *_: refusal('RESOURCE_EXHAUSTED')()
    with pytest.raises(jax.errors.JaxRuntimeError):
        program()
    program.compiled = pretend_step
    program()
    assert int(state['state']['step']) == 2
    assert program.host_seconds(3) > 0
    assert int(state['state']['step']) == 2  # no step is computed
    state.clear()  # the last call of another context has failed
    assert program.host_seconds(3) > 0


def test_wrong_arguments_of_step_are_refused_in_one_line(capsys):
    flags = ['--contexts', '16,48', '--tokens_per_step', '256', *params(SMALL_MODEL)]
    assert '48' in error_of(['bench', 'step', *flags], capsys)
    flags = ['--contexts', '64', '--tokens_per_step', '64', *params(SMALL_MODEL)]
    assert '8 devices' in error_of(['bench', 'step', *flags], capsys)


# ---------------------------------------------------------------------------------------------------------------- data


def test_data(tmp_path, capsys):
    text = tmp_path / 'some.txt'
    text.write_text(data.made_up_text(40_000) + 'ö▁…')
    flags = ['--text', str(text), '--vocab_size', '400', '--document_bytes', '1000', '--repeats', '2']
    flags += ['--context_length', '64', '--tokens', '100_000', '--tokens_per_step', '4096']
    assert main(['bench', 'data', *flags, '--json', str(tmp_path / 'd.json')]) == 0
    assert 'per core ÷ SentencePiece' in capsys.readouterr().out
    found = read(tmp_path / 'd.json', 'data')
    assert found['settings']['bytes'] == text.stat().st_size
    *rates, batches = found['rows']
    assert [row['name'] for row in rates] == ['SentencePiece, documents', 'SentencePiece, lines', 'lm prepare']
    for row in rates:
        assert math.isclose(row['tokens_per_second'] * row['seconds'], found['settings']['tokens'])
        assert row['megabytes_per_core_second'] > 0
    assert max(row['over_sentencepiece'] for row in rates[:2]) == 1.0
    assert batches['name'] == 'batches'
    assert math.isclose(batches['tokens_per_second'] * batches['seconds'], data.BATCHES * 4096)


def test_batches_of_a_store(tmp_path, capsys):
    path = str(tmp_path / 'tokens')
    data.write_store(path, 10_000)
    assert TokenStore.open(path).tokens('train') == 10_000
    flags = ['--path', path, '--context_length', '32', '--tokens_per_step', '1050', '--repeats', '1']
    assert main(['bench', 'data', *flags, '--json', str(tmp_path / 'd.json')]) == 0
    found = read(tmp_path / 'd.json', 'data')
    (row,) = found['rows']
    assert row['name'] == 'batches'
    assert found['settings']['tokens_per_step'] == 1024, 'windows are whole'
    assert 'in steps of 1,024 tokens' in capsys.readouterr().out


def test_made_up_text_is_prose_and_always_the_same():
    text = data.made_up_text(20_000)
    assert text == data.made_up_text(20_000)
    assert 19_990 < len(text.encode()) <= 20_000
    assert len(set(text.split())) > 500
    assert ''.join(data.cut(text, 300)) == text


def test_wrong_arguments_of_checkpoint_are_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint.subprocess, 'run', lambda *_, **__: pytest.fail('something was measured'))
    assert '--folder' in error_of(['bench', 'checkpoint', '--folder', str(tmp_path / 'absent')], capsys)
    (tmp_path / 'x.gin').write_text('import this_is_nothing')
    flags = ['bench', 'checkpoint', '--gin_file', str(tmp_path / 'x.gin')]
    assert 'would run code' in error_of(flags, capsys)
    assert 'No module' in error_of([*flags, '--allow_gin_imports'], capsys)


def test_an_error_of_the_measuring_process_is_one_line(capsys, monkeypatch):
    """The command itself starts no JAX before: the devices belong to one process at a time."""
    monkeypatch.setattr(checkpoint.jax, 'devices', lambda: pytest.fail('devices were taken'))
    flags = ['bench', 'checkpoint', '--gin_file', 'configs/models/tiny.gin', '--set', 'mesh.fsdp=3']
    assert 'mesh.fsdp = 3: must divide the number of devices' in error_of(flags, capsys)


def test_wrong_arguments_of_data_are_refused_in_one_line(tmp_path, capsys):
    assert 'absent.txt' in error_of(['bench', 'data', '--text', str(tmp_path / 'absent.txt')], capsys)
    (tmp_path / 'empty.txt').write_text(' \n')
    assert 'no text' in error_of(['bench', 'data', '--text', str(tmp_path / 'empty.txt')], capsys)


@pytest.mark.parametrize(
    ('flags', 'named'),
    [
        (['step', '--topology', 'v5e', '--steps', '7'], '--steps 7'),
        (['step', '--topology', 'v5e', '--repeats', '5'], '--repeats 5'),
        (['step', '--topology', 'v5e', '--process_id', '0'], '--process_id 0'),
        (['data', '--path', 'data/mine', '--tokens', '67108864'], '--tokens 67108864'),
        (['data', '--path', 'data/mine', '--document_bytes', '8192'], '--document_bytes 8192'),
    ],
)
def test_flags_without_effect_are_refused(flags, named, capsys):
    assert named in error_of(['bench', *flags], capsys)


def test_an_impossible_number_of_tokens_per_step_is_refused():
    (experiment,) = candidates.candidates(['softmax'], [], SMALL_MODEL).values()
    with pytest.raises(ConfigError, match='multiple'):
        candidates.change_context(experiment, 48, 256, 256, Target('cpu', (1,)))
