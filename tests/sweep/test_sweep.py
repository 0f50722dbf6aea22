"""`lm sweep`: its points; mistakes are found before any file is written; no run is repeated."""

import json
import pathlib
import re
import signal
import time

import grids
import pytest
import shipped
import tiny
from corpora import CORPORA, needs_corpora

from lm.cli import main
from lm.errors import ConfigError
from lm.runs.paths import check_name
from lm.runs.run_dir import RunDir
from lm.sweep.points import LONGEST_NAME, keep_names, make_points


@pytest.fixture
def plan(tmp_path):
    """Returns the points of a sweep file with this text, on top of a base file and parameters."""

    def make(text: str, *params: str, base: str = ''):
        (tmp_path / 'base.gin').write_text(base)
        (tmp_path / 'sweep.gin').write_text(text)
        return make_points([str(tmp_path / 'base.gin')], [str(tmp_path / 'sweep.gin')], params)

    return make


def test_a_grid_varies_its_first_axis_slowest(plan):
    points = plan('model.n_layers = [12, 13]\ntrain.seed = [0, 1, 2]\ntrain.steps = 50', base='train.steps = 9')
    assert [p.name for p in points] == [f'n_layers-{n}_seed-{s}' for n in (12, 13) for s in (0, 1, 2)]
    assert [(p.experiment.model.n_layers, p.experiment.train.seed) for p in points] == [
        (n, s) for n in (12, 13) for s in (0, 1, 2)
    ]
    assert {p.experiment.train.steps for p in points} == {50}
    assert [p.index for p in points] == list(range(6))
    assert points[3].settings == {'model.n_layers': '13', 'train.seed': '0'}


def test_groups_vary_together(plan):
    points = plan(
        'zip/model.n_layers = [12, 13]\nzip/model.attention = [@softmax(), @polynomial()]\n'
        'zip_b/train.context_length = [512, 1024]\nzip_b/train.microbatches = [1, 2]\n'
    )
    assert [p.name for p in points] == [
        f'n_layers-{n}_{a}_context_length-{c}_microbatches-{m}'
        for n, a in ((12, 'softmax'), (13, 'polynomial'))
        for c, m in ((512, 1), (1024, 2))
    ]


def test_an_axis_of_a_mechanism_concerns_only_the_points_that_select_it(plan):
    points = plan(
        'model.attention = [@softmax(), @polynomial()]\npolynomial.degree = [2, 4, 8]\nsoftmax.window = [16]',
        base='DEGREE = 1.0\npolynomial.denominator_bias = %DEGREE\n',
    )
    assert [p.name for p in points] == ['softmax_window-16', *(f'polynomial_degree-{d}' for d in (2, 4, 8))]
    assert points[0].experiment.model.attention.window == 16
    assert [p.experiment.model.attention.degree for p in points[1:]] == [2, 4, 8]
    assert 'polynomial.degree' not in points[0].settings


def test_values_may_be_lists_scopes_and_macros(plan):
    points = plan(
        'LENGTH = [64, 128]\nmodel.attention = [@softmax(), [@a/softmax(), @b/softmax()]]\na/softmax.window = [8, 16]',
        base='train.context_length = %LENGTH\nevaluate.context_length = %LENGTH\n',
    )
    assert [(p.experiment.evaluate.context_length, len(p.experiment.model.pattern)) for p in points] == [
        (length, n) for length in (64, 128) for n in (1, 2, 2)
    ]
    assert points[2].name == 'LENGTH-64_a-softmax-b-softmax_window-16'
    assert [a.window for a in points[2].experiment.model.attention] == [16, None]


def test_variants_have_names_and_set_several_values(plan):
    """A list is the value itself here, a scope of a mechanism follows the name, and the rest of the file holds."""
    points = plan(
        'train.seed = [0, 1]\ntrain.steps = 50\n'
        'variant/base/train.steps = 50\n'
        'variant/pair/model.attention = [@softmax(), @near/softmax()]\nvariant/pair/near/softmax.window = 8\n'
        'variant/long/train.steps = 70\nvariant/long/LENGTH = 32\n',
        base='LENGTH = 16\ntrain.context_length = %LENGTH\n',
    )
    assert [p.name for p in points] == [f'seed-{seed}_{name}' for seed in (0, 1) for name in ('base', 'pair', 'long')]
    assert points[1].settings == {'train.seed': '0', 'variant': 'pair'}
    base, pair, long = (p.experiment for p in points[:3])
    assert [a.window for a in pair.model.attention] == [None, 8]
    assert [(e.train.steps, e.train.context_length) for e in (base, pair, long)] == [(50, 16), (50, 16), (70, 32)]


def test_variants_of_several_axes_cross_and_equal_points_are_one(plan):
    """`wide` concerns polynomial attention alone, so softmax has the points of `plain`."""
    points = plan(
        'variant_model/near/model.attention = @softmax()\nvariant_model/far/model.attention = @polynomial()\n'
        'variant/plain/train.steps = 9\nvariant/wide/polynomial.degree = 8\nvariant/wide/train.steps = 9\n'
    )
    assert [p.name for p in points] == ['near_plain', 'far_plain', 'far_wide']


def test_a_point_has_the_name_of_the_variant_that_has_an_effect(plan):
    """`wide` comes first, but softmax has no degree."""
    text = 'variant/wide/polynomial.degree = 8\nvariant/plain/train.steps = 9\ntrain.steps = 9\n'
    points = plan(f'model.attention = [@softmax(), @polynomial()]\n{text}')
    assert [p.name for p in points] == ['softmax_plain', 'polynomial_wide', 'polynomial_plain']


def test_a_variant_of_an_included_file_may_be_changed(plan, tmp_path):
    (tmp_path / 'inner.gin').write_text('variant/a/train.steps = 5\nvariant/b/train.steps = 6\n')
    points = plan("include 'inner.gin'\nvariant/b/train.steps = 7\nvariant/c/train.steps = 8\n")
    assert [(p.name, p.experiment.train.steps) for p in points] == [('a', 5), ('b', 7), ('c', 8)]


def test_an_axis_of_an_included_file_may_be_replaced(plan, tmp_path):
    """The axis stands alone and in a group."""
    for group in ('', 'zip/'):
        (tmp_path / 'inner.gin').write_text(f'{group}train.seed = [0, 1]\n{group}model.n_layers = [2, 3]\n')
        points = plan(f"include 'inner.gin'\n{group}train.seed = [7, 8]")
        pairs = [(p.experiment.train.seed, p.experiment.model.n_layers) for p in points]
        assert sorted(pairs) == ([(7, 2), (8, 3)] if group else [(7, 2), (7, 3), (8, 2), (8, 3)])


def test_the_later_of_an_axis_and_a_value_wins(plan, tmp_path):
    (tmp_path / 'inner.gin').write_text('train.seed = [0, 1]\nmodel.n_layers = [2, 3]\ntrain.steps = 5\n')
    points = plan("include 'inner.gin'\ntrain.seed = 7\ntrain.steps = [8, 9]")
    assert [(p.experiment.train.seed, p.experiment.model.n_layers, p.experiment.train.steps) for p in points] == [
        (7, n, steps) for n in (2, 3) for steps in (8, 9)
    ]


def test_names_of_points_are_valid_stable_and_different(plan):
    values = "['a/b', 'c/b', '..', 'x y', 'X Y', 'é', '" + 'w' * 200 + "', '" + 'w' * 201 + "']"
    text = f'data.path = {values}\noptimizer.peak_learning_rate = [1e-3, 1e-5, 1e20]\n'
    names = [p.name for p in plan(text)]
    assert len({name.lower() for name in names}) == len(names) == 24
    assert all(check_name(name) and len(name) <= LONGEST_NAME for name in names)
    assert names == [p.name for p in plan(text)]
    more = [p.name for p in plan(text.replace('1e20]', '1e20, 1.0]'))]
    assert set(names) < set(more), 'a further value leaves the other names as they are'
    one, two = (plan(f'train.seed = {seeds}\nmodel.attention = [@softmax(), @taylor()]') for seeds in ('[0]', '[0, 1]'))
    assert {p.name for p in one} == {'seed-0_softmax', 'seed-0_taylor'} < {p.name for p in two}


def test_a_further_axis_keeps_the_names_of_the_runs_that_are_there(plan, tmp_path):
    root = tmp_path / 'sweep'

    def list_names(text: str) -> list[str]:
        return [point.name for point in keep_names(root, plan(text))]

    assert list_names('train.seed = [0, 1]') == ['seed-0', 'seed-1']
    for name, seed, about in (('a-branch', 0, '{"branch": {"from": "x"}}'), ('seed-0', 0, '{}'), ('seed-1', 1, '{}')):
        (root / name).mkdir(parents=True)
        (root / name / 'config.gin').write_text(plan(f'train.seed = [{seed}]')[0].config)
        (root / name / 'run.json').write_text(about)
    grid = 'train.seed = [0, 1, 2]\ntrain.tokens_per_step = [{}]'
    default = plan('train.seed = [0]')[0].experiment.train.tokens_per_step
    assert list_names(grid.format(f'4096, {default}')) == [
        *('seed-0_tokens_per_step-4096', 'seed-0', 'seed-1_tokens_per_step-4096', 'seed-1'),
        *(f'seed-2_tokens_per_step-{tokens}' for tokens in (4096, default)),
    ]
    (root / f'seed-1_tokens_per_step-{default}').mkdir()
    (root / f'seed-1_tokens_per_step-{default}' / 'config.gin').write_text('trained again by an earlier version')
    assert list_names(grid.format(default))[:2] == ['seed-0', f'seed-1_tokens_per_step-{default}']


def test_a_long_name_is_cut_and_is_the_same_in_every_version(plan):
    """The name was recorded once: a sweep finds the runs of its points by their names."""
    names = [p.name for p in plan(f"data.path = ['{'w' * 100}', '{'w' * 90}', 'a']")]
    assert names == [f'path-{"w" * 86}-10669c69', f'path-{"w" * 90}', 'path-a']


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('polynomial.degre = [2, 4]\nmodel.attention = [@polynomial()]', 'did you mean polynomial.degree?'),
        ('modle.n_layers = [2, 4]', 'did you mean model.n_layers?'),
        ('model.attention = [@softmax(), @polinomial()]', 'did you mean @polynomial()?'),
        ('polynomial.degree = [2, 4]', '@polynomial() is not selected'),
        ('polynomial.degree = [2, 3]\nmodel.attention = [@softmax(), @polynomial()]', 'must be even'),
        ('train.steps = [100, 1e5]', 'must be an int'),
        ('train.steps = []', 'needs a value'),
        ('train.steps = 3', 'nothing to sweep'),
        ('zip/train.steps = [1, 2]\nzip/train.seed = [1, 2, 3]', 'equally long'),
        ('zip/train.steps = 7\ntrain.seed = [1, 2]', 'must be a list'),
        ('zip/train.steps = [7, 8]\ntrain.steps = [1, 2]', 'set twice'),
        ('variant/a/train.steps = 7\ntrain.steps = [1, 2]', 'set twice'),
        ('variant/a/train.steps = 7\nvariant_b/c/train.steps = 8', 'set twice'),
        ('variant/train.steps = 7', 'write variant/NAME/SECTION.FIELD = VALUE'),
        ('variant/a/train.step = 7', 'did you mean train.steps?'),
        ('variant/a/train.steps = 0', 'in the point variant = a'),
        ('variant/a/polynomial.degree = 4', '@polynomial() is not selected'),
        (
            'variant/a/polynomial.degree = 4\n'
            'variant/b/polynomial.degree = 8\nvariant/b/model.attention = @polynomial()',
            'nothing uses polynomial.degree, because @polynomial() is not selected',
        ),
        ('model.attention = [@delta(), @delta(), @softmax()]', 'stands in double brackets'),
        ('train.seed = [0, 1, 0]', 'has a value twice'),
        ('STEPS = [1, 2]\n', 'STEPS'),
        ('train.seed = [1, 2]\ntrain.tokens_per_step = [1024, 1000]', 'tokens_per_step = 1000'),
    ],
)
def test_mistakes_in_any_point_are_refused_before_anything_is_written(text, expected, tmp_path, capsys):
    (tmp_path / 'sweep.gin').write_text(text)
    root = tmp_path / 'root'
    assert main(['sweep', '--run_dir', str(root), '--sweep_file', str(tmp_path / 'sweep.gin')]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.err.count('\n') == 1
    assert not root.exists()


def test_a_parameter_must_not_override_an_axis(plan):
    with pytest.raises(ConfigError, match='is an axis of the sweep'):
        plan('train.seed = [1, 2]', 'train.seed = 3')
    assert {p.experiment.train.steps for p in plan('train.seed = [1, 2]', 'train.steps = 3')} == {3}


def test_a_parameter_must_not_override_a_variant(plan):
    with pytest.raises(ConfigError, match='is an axis of the sweep'):
        plan('variant/a/train.steps = 5', 'train.steps = 6')


def test_dry_run_and_count_write_nothing(tmp_path, capsys):
    (tmp_path / 's.gin').write_text('train.seed = [0, 1]')
    command = ['sweep', '--run_dir', str(tmp_path / 'root'), '--sweep_file', str(tmp_path / 's.gin')]
    assert main([*command, '--dry_run']) == 0
    assert re.findall(r'seed-\d  \[\w+\]', capsys.readouterr().out) == ['seed-0  [waiting]', 'seed-1  [waiting]']
    assert main([*command, '--count']) == 0
    assert capsys.readouterr().out == '2\n'
    assert main([*command, '--index', '2']) == 2
    assert main(['sweep', '--sweep_file', str(tmp_path / 's.gin')]) == 2
    assert main(['sweep', '--run_dir', str(tmp_path / 'root')]) == 2
    assert not (tmp_path / 'root').exists()


def test_a_single_point_can_be_selected(tmp_path, capsys):
    (tmp_path / 's.gin').write_text('train.seed = [0]')
    assert main(['sweep', '--run_dir', 'root', '--sweep_file', str(tmp_path / 's.gin'), '--dry_run']) == 0
    assert capsys.readouterr().out.startswith('1 point in ')


@pytest.mark.parametrize(
    ('flags', 'expected'),
    [
        ('--index 1 --dry_run', '--index 1 and --dry_run: give one of them'),
        ('--index 1 --jobs 2', '--index 1 and --jobs 2: give one of them'),
        ('--index 1 --jobs 1', '--index 1 and --jobs 1: give one of them'),
        ('--index 0 --gpus_per_job 1', '--index 0 and --gpus_per_job 1: give one of them'),
        ('--index 0 --count', '--index 0 and --count: give one of them'),
        ('--count --dry_run', '--count and --dry_run: give one of them'),
        ('--count --process_id 0', '--count and --process_id 0: give one of them'),
        ('--dry_run --jobs 0', 'argument --jobs: 0: must be at least 1'),
        ('--gpus_per_job 0', 'argument --gpus_per_job: 0: must be at least 1'),
        ('--process_id 0', '--process_id: give --index as well'),
        ('--image x', '--image: give --emit as well'),
        ('--status --jobs 2', '--status and --jobs 2: give one of them'),
    ],
)
def test_no_flag_is_ignored(flags, expected, tmp_path, capsys):
    (tmp_path / 's.gin').write_text('train.seed = [0, 1]')
    command = ['sweep', '--run_dir', str(tmp_path / 'root'), '--sweep_file', str(tmp_path / 's.gin')]
    assert main([*command, *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f'lm sweep: error: {expected}')
    assert (printed.out, printed.err.count('\n')) == ('', 1)
    assert not (tmp_path / 'root').exists()


def test_the_help_explains_exit_code_1(capsys):
    assert main(['sweep', '--help']) == 0
    assert '1 also means that points did not succeed' in capsys.readouterr().out


def test_the_shipped_sweeps_resolve():
    for path in shipped.SWEEPS:
        base = re.search(r'--gin_file (\S+)', path.read_text())[1]
        assert make_points([base], [str(path)])


def test_the_examples_of_the_page_resolve(tmp_path):
    page = (tiny.ROOT / 'docs/how_to/sweep.md').read_text()
    blocks = [block for block in re.findall(r'```text\n(.*?)```', page, re.DOTALL) if 'uniform(' not in block]
    counts = []
    for block in blocks:
        (tmp_path / 'sweep.gin').write_text(block)
        counts.append(len(make_points(['configs/experiments/quickstart.gin'], [str(tmp_path / 'sweep.gin')])))
    assert counts == [6, 12, 3]


@pytest.fixture
def sweep(tokens, tmp_path):
    """Returns the flags of `lm sweep` with a sweep file of this text, on top of the tiny experiment."""

    def flags(text: str, store: pathlib.Path = tokens) -> list[str]:
        values = tiny.MODEL | {'data.path': str(store)}
        (tmp_path / 'base.gin').write_text(''.join(f'{name} = {value!r}\n' for name, value in values.items()))
        (tmp_path / 'sweep.gin').write_text(text)
        files = ['--gin_file', str(tmp_path / 'base.gin'), '--sweep_file', str(tmp_path / 'sweep.gin')]
        return ['sweep', '--run_dir', str(tmp_path / 'root'), *files]

    return flags


def results(root: pathlib.Path) -> dict[str, dict]:
    return {row['point']: row for row in json.loads((root / 'sweep.json').read_text())['points']}


def test_a_failing_point_does_not_stop_the_rest_and_nothing_is_repeated(sweep, reference_run, tmp_path, capsys):
    root = tmp_path / 'root'
    # No check of a configuration can find this: the first point diverges.
    command = sweep('optimizer.peak_learning_rate = [1e30, 3e-3]\ntrain.max_nonfinite_steps = 3\n')
    done = tiny.lm(*command, '--jobs', '2')
    assert done.returncode == 1, done.stdout + done.stderr
    assert '1 of 2 points did not succeed: peak_learning_rate-1e30' in done.stderr.splitlines()[-1]
    assert 'not finite' in done.stdout
    rows = results(root)
    assert (rows['peak_learning_rate-1e30']['status'], rows['peak_learning_rate-1e30']['exit_code']) == ('failed', 43)
    assert 'not finite' in rows['peak_learning_rate-1e30']['error']
    good = rows['peak_learning_rate-0.003']
    assert (good['status'], good['step'], good['steps']) == ('done', 40, 40)
    assert good['loss'] == tiny.losses(reference_run[0], 'eval')[40]
    assert good['tokens_per_second'] > 0
    assert tiny.losses(root / 'peak_learning_rate-0.003') == tiny.losses(reference_run[0])

    before = (root / 'peak_learning_rate-0.003' / 'metrics.jsonl').stat().st_mtime_ns
    assert main(command) == 1
    again = capsys.readouterr()
    assert '--retry_failed' in again.out
    assert 'started' not in again.out
    assert main([*command, '--index', '1']) == 0
    assert 'is finished already' in capsys.readouterr().out
    assert (root / 'peak_learning_rate-0.003' / 'metrics.jsonl').stat().st_mtime_ns == before
    assert main(['inspect', str(root)]) == 0
    assert 'diverged (43)' in capsys.readouterr().out

    # A run that was stopped during its last evaluation is saved but not finished.
    metrics = root / 'peak_learning_rate-0.003' / 'metrics.jsonl'
    *rest, last = metrics.read_text().splitlines(keepends=True)
    assert json.loads(last)['kind'] == 'eval'
    metrics.write_text(''.join(rest))
    assert tiny.lm(*command, '--index', '1').returncode == 0
    assert tiny.losses(root / 'peak_learning_rate-0.003', 'eval') == tiny.losses(reference_run[0], 'eval')

    # The directories now hold runs of this sweep: another sweep is refused.
    assert main([*command, '--gin_param', 'adamw.b1 = 0.5']) == 44
    assert 'adamw.b1 was 0.95, now 0.5' in capsys.readouterr().err


def test_one_point_in_this_process_fails_like_lm_train(sweep, tmp_path, capsys):
    assert main([*sweep('model.vocab_size = [100, 400]\n'), '--index', '0']) == 44
    assert 'set model.vocab_size = 400' in capsys.readouterr().err
    rows = results(tmp_path / 'root')
    assert [rows[name]['status'] for name in ('vocab_size-100', 'vocab_size-400')] == ['failed', 'waiting']


def test_a_point_trained_by_another_process_has_not_failed(sweep, tmp_path, capsys):
    command, root = sweep('optimizer.peak_learning_rate = [1e-3, 3e-3]\n'), tmp_path / 'root'
    with RunDir(root / 'peak_learning_rate-0.001').lock():
        assert main([*command, '--index', '0']) == 2
        assert 'trains in it; wait for it or end it' in capsys.readouterr().err
    assert {row['status'] for row in results(root).values()} == {'waiting'}
    assert main([*command, '--dry_run']) == 0
    assert 'failed' not in capsys.readouterr().out


@pytest.mark.parametrize('how', grids.draw([signal.SIGTERM, signal.SIGKILL], 1))
def test_an_interrupted_sweep_continues(how, sweep, reference_run, tmp_path):
    """A sweep that is asked to stop saves and exits with 42. If the sweep is killed, its point still saves."""
    root = tmp_path / 'root'
    command = sweep('train.seed = [0]\n')
    process = tiny.start(*command)
    tiny.wait_for_step(root / 'seed-0', 3, process)
    code, output = tiny.stop(process, how)
    if how == signal.SIGTERM:
        assert code == 42, output
        assert results(root)['seed-0']['status'] == 'interrupted'
    done = tiny.lm(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(root)['seed-0']['status'] == 'done'
    assert tiny.losses(root / 'seed-0') == tiny.losses(reference_run[0])
    assert tiny.checksums(root / 'seed-0', 40) == tiny.checksums(reference_run[0], 40)
    assert 'resumed from step' in (root / 'points' / 'seed-0.log').read_text()


@pytest.mark.slow
@needs_corpora
def test_two_by_two_by_two_on_real_text_killed_half_way(sweep, tmp_path):
    """2 mechanisms × 2 sketch sizes × 2 seeds and a learning rate that diverges; SIGKILL comes in the middle of a
    point."""
    bindings = {
        'prepare.source': '@text_files()',
        'text_files.path': str(CORPORA / 'pg19'),
        'prepare.tokenizer': '@tokenizer()',
        'tokenizer.vocab_size': 400,
        'tokenizer.sample_bytes': 500_000,
        'data.path': str(tmp_path / 'pg19'),
    }
    prepared = tiny.lm('prepare', *tiny.params(bindings), '--processes', '2', timeout=1200)
    assert prepared.returncode == 0, prepared.stderr
    text = """
model.attention = [@random/polysketch(), @learned/polysketch()]
random/polysketch.sketch = 'gaussian'
learned/polysketch.sketch = 'learned'
polysketch.sketch_size = [4, 8]
polysketch.block = 16
zip/train.seed = [0, 1, 2]
zip/optimizer.peak_learning_rate = [3e-3, 3e-3, 1e30]
train.max_nonfinite_steps = 3
train.steps = 400
train.eval_every = None
evaluate.split = 'validation'
"""
    root, command = tmp_path / 'root', sweep(text, tmp_path / 'pg19')

    def begun() -> list[str]:
        """Returns unfinished points that have done some steps and have many left."""
        found = []
        for name, row in results(root).items() if (root / 'sweep.json').exists() else ():
            metrics = root / name / 'metrics.jsonl'
            if row['status'] in ('waiting', 'interrupted') and metrics.exists():
                found += [name] * (20 < len(metrics.read_text().splitlines()) < 300)
        return found

    process = tiny.start(*command, '--jobs', '2')
    end = time.monotonic() + 1800
    while not (begun() and sum(row['status'] == 'done' for row in results(root).values()) >= 3):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    tiny.stop(process, signal.SIGKILL)
    rows = results(root)
    finished = [name for name, row in rows.items() if row['status'] == 'done']
    stamps = [(root / name / 'metrics.jsonl').stat().st_mtime_ns for name in finished]
    again = tiny.lm(*command, '--jobs', '2', timeout=1800)
    assert again.returncode == 1, again.stdout + again.stderr
    assert not any(f'{name}: started' in again.stdout for name in finished)
    assert stamps == [(root / name / 'metrics.jsonl').stat().st_mtime_ns for name in finished]
    rows = results(root)
    assert sorted((r['status'], r['exit_code']) for r in rows.values()) == [('done', 0)] * 8 + [('failed', 43)] * 4
    assert all('not finite' in row['error'] for row in rows.values() if row['status'] == 'failed')

    resumed = [name for name, row in rows.items() if json.loads((root / name / 'run.json').read_text())['starts'][1:]]
    resumed = [name for name in resumed if rows[name]['status'] == 'done']
    assert resumed
    for name in resumed:
        elsewhere = [part.replace(str(root), str(tmp_path / 'whole')) for part in command]
        done = tiny.lm(*elsewhere, '--index', str(rows[name]['index']))
        assert done.returncode == 0, done.stderr
        assert tiny.losses(root / name) == tiny.losses(tmp_path / 'whole' / name)
        assert tiny.checksums(root / name, 400) == tiny.checksums(tmp_path / 'whole' / name, 400)
    assert main(['report', str(root), '--out', str(tmp_path / 'report')]) == 0
    assert list((tmp_path / 'report').glob('*.png'))
