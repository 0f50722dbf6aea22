"""`lm reproduce`: what the tables run, their proportions, the choice of cells, and the table."""

import csv
import io
import statistics

import pytest
import tiny
from etils import epath
from scipy.stats import spearmanr

from lm import cli
from lm.errors import ConfigError
from lm.experiment import load
from lm.hardware import parse
from lm.report.published import load_tables
from lm.reproduce import hand_over
from lm.reproduce.descriptions import (
    PAPER_SCALE,
    Description,
    find_description,
    find_paths,
    load_descriptions,
    load_scales,
)
from lm.reproduce.price import RunPrice
from lm.reproduce.runs import TableChoice, TableRow, choose_columns, choose_rows, list_runs
from lm.reproduce.scale import Scale
from lm.reproduce.table import CellResult, ReproducedTable, collect, correlate_ranks
from lm.runs.sweep_file import read_rows
from lm.sweep.sweep import Sweep

TABLE_2 = 'polysketchformer/table_2'
ROWS = [TableRow('', label) for label in ('Softmax', 'Polynomial (degree 4)', 'Learned, r = 32', 'Learned, r = 64')]


@pytest.mark.parametrize('name', load_descriptions())
def test_a_description_names_what_exists(name):
    description = load_descriptions()[name]
    assert description.offered or description.missing
    assert not (description.offered and description.missing)
    assert parse(description.topology).chips
    assert set(description.published) <= load_tables().keys()
    assert set(description.scales) <= load_scales().keys()
    scales = {group.name: group.scale for group in description.runs}
    for group in description.runs:
        assert group.scale == scales[group.starts_from or group.name]
        for path in find_paths((*group.gin_files, *group.sweep_files)):
            assert (tiny.ROOT / path).exists(), path
    for line in [line for lines in description.commands.values() for line in lines]:
        for word in line.split():
            assert not word.startswith('configs/') or (tiny.ROOT / word).exists(), word


@pytest.mark.slow  # resolves hundreds of configurations
@pytest.mark.parametrize('name', [name for name, one in load_descriptions().items() if one.runs])
def test_every_published_number_has_a_run(name):
    """At each scale; a number without a mechanism in `published.toml` has none."""
    description = load_descriptions()[name]
    for scale in {*description.scales, *(group.scale for group in description.runs)}:
        runs = list_runs(description, TableChoice(scale))
        filled = {(cell.row, cell.column) for run in runs for cell in run.cells}
        columns = {run.column for run in runs}
        for table in map(load_tables().get, description.published):
            rows = [row for row in table.rows if row.mechanism and any(row is known for known, _ in filled)]
            assert {(row, column) for row in rows for column in table.columns if column in columns} <= filled


def test_all_rows_of_a_column_in_the_order_of_the_paper():
    runs = list_runs(find_description(TABLE_2), TableChoice('tiny', columns=('1',)))
    assert [run.row.label for run in runs] == [row.label for row in load_tables()['pg19'].rows]
    assert [run.cells[0].printed for run in runs] == [row.values[0] for row in load_tables()['pg19'].rows]
    assert {run.column for run in runs} == {512}
    assert len({run.point.name for run in runs}) == 13


def test_lengths_have_the_proportions_of_the_paper():
    runs = list_runs(find_description(TABLE_2), TableChoice('tiny', rows=('12-13',), columns=('8k',)))
    for run in runs:
        ours, theirs = run.point.experiment, run.original.experiment
        (small,), (large,) = ours.model.pattern, theirs.model.pattern
        for section, name in (('model', 'd_model'), ('model', 'vocab_size'), ('train', 'context_length')):
            assert 8 * getattr(getattr(ours, section), name) == getattr(getattr(theirs, section), name)
        assert 8 * ours.model.layer.head_dim == theirs.model.layer.head_dim
        assert 8 * small.block == large.block
        assert (ours.model.n_layers, ours.model.layer.n_heads) == (13, 12)
        share = theirs.optimizer.warmup_steps / theirs.train.steps
        assert ours.optimizer.warmup_steps == round(share * ours.train.steps)
    learned, performer = (run.point.experiment.model.pattern[0] for run in runs)
    assert performer.n_features == 2 * (learned.sketch_size // 2) ** 2


def test_seeds_and_bindings_reach_the_runs():
    choice = TableChoice('tiny', rows=('softmax',), columns=('512',), seeds=2, gin_params=('train.steps = 7',))
    runs = list_runs(find_description(TABLE_2), choice)
    assert [run.point.experiment.train.seed for run in runs] == [0, 1]
    assert {run.point.experiment.train.steps for run in runs} == {7}
    assert {run.original.experiment.train.steps for run in runs} == {125_000}


def test_a_length_that_cannot_be_divided_is_named():
    experiment = load(['configs/models/small.gin'], ['model.head_dim = 60', 'train.context_length = 512'])
    scale = Scale('tiny', 8, {'train.steps': 4})
    with pytest.raises(ConfigError, match=r'model\.head_dim = 60: is no multiple of 8, so --scale tiny has none'):
        scale.shrink(experiment)


@pytest.mark.parametrize(
    ('asked', 'kept'),
    [((), [0, 1, 2, 3]), (('2',), [1]), (('2-3',), [1, 2]), (('learned', '1'), [0, 2, 3]), (('r = 64',), [3])],
)
def test_rows_are_chosen_by_number_and_label(asked, kept):
    assert choose_rows(ROWS, asked) == [ROWS[i] for i in kept]


@pytest.mark.parametrize('asked', ['0', '5', '3-2', 'performer'])
def test_a_row_that_is_not_there_is_named(asked):
    with pytest.raises(ConfigError, match=f'--rows {asked}: '):
        choose_rows(ROWS, (asked,))


def test_columns_are_chosen_by_value_and_number():
    columns = [512, 1024, 32_768]
    assert choose_columns(columns, ()) == columns
    assert choose_columns(columns, ('1', '32k')) == [512, 32_768]
    assert choose_columns(columns, ('1024',)) == [1024]
    with pytest.raises(ConfigError, match='--columns 4: must be 1 to 3, or one of 512, 1k, 32k'):
        choose_columns(columns, ('4',))


def test_ranks_with_ties_are_those_of_scipy():
    first, second = [13.57, 13.37, 13.37, 14.3, 13.84], [40.0, 38.0, 39.0, 50.0, 37.0]
    assert correlate_ranks(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert correlate_ranks([1, 2, 3], [2, 2, 2]) != correlate_ranks([1, 2, 3], [2, 2, 2])  # NaN


@pytest.fixture
def table():
    """A table of four rows, three of which are measured with two seeds."""
    description, choice = find_description(TABLE_2), TableChoice('tiny', rows=('1-4',), columns=('8k',), seeds=2)
    runs = list_runs(description, choice)
    figures = [{0: 40.0, 1: 41.0}, {0: 44.0, 1: 45.0}, {0: 42.0, 1: 40.5}, {}]
    rows = list(dict.fromkeys(run.row for run in runs))
    printed = [11.65, 12.72, 11.85, 11.64]
    found = zip(rows, printed, figures, strict=True)
    return ReproducedTable(description, choice, runs, [CellResult(r, '8k', 'perplexity', p, f, 2) for r, p, f in found])


def test_the_table_has_both_numbers_and_says_what_is_missing(table):
    lines = table.format_markdown().splitlines()
    assert lines[0] == '# Report'
    assert f'| Softmax (using FlashAttention) | 11.65 / 40.50 ± {statistics.stdev([40, 41]):.2f} |' in '\n'.join(lines)
    assert any('11.64 / –' in line for line in lines)
    text = '\n'.join(table.list_remarks())
    assert '6 of 8 figures are there' in text
    assert 'divided by 8, 492k training tokens in place of 131B, on Python sources' in text
    assert 'A model this small may rank otherwise' in text
    rows = list(csv.DictReader(io.StringIO(table.format_csv())))
    assert [row['seeds'] for row in rows] == ['0 1', '0 1', '0 1', '']
    assert rows[0]['ours'] == '40.5'


def test_the_order_is_compared_over_seeds(table):
    (found,) = table.correlate()
    assert found.rows == 3
    assert found.by_seed == {0: pytest.approx(1.0), 1: pytest.approx(0.5)}
    assert '+0.50 to +1.00 over 2 seeds' in found.describe()
    table.cells = table.cells[:2]
    assert table.correlate() == []  # two rows have no order


def test_the_files_of_a_table(table, tmp_path):
    names = table.write(tmp_path / 'out', pictures=False)
    assert names == ['report.md', 'report.html', 'table.csv']
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == sorted(names)
    table.write(tmp_path / 'out', pictures=False)  # which replaces its own
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'table.csv').write_text('mine')
    with pytest.raises(ConfigError, match=r'holds table\.csv, which no report has written'):
        table.write(tmp_path / 'mine', pictures=False)


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        ('', 'PAPER/TABLE: name a table; lm reproduce --list shows all'),
        (
            'polysketchformer/table_22',
            'polysketchformer/table_22: no such table; did you mean polysketchformer/table_2?',
        ),
        (f'{TABLE_2} --scale huge', f'--scale huge: {TABLE_2} has tiny, small, paper'),
        (f'{TABLE_2} --seeds 0', '--seeds 0: must be at least 1'),
        (f'{TABLE_2} --topology v5e:4x4', '--topology v5e:4x4: is of machines elsewhere; add --on'),
        (f'{TABLE_2} --text books', '--text books: is of smaller scales'),
        (f'{TABLE_2} --run_dir gs://b/t', '--run_dir gs://b/t: the table is written beside the runs'),
        (f'{TABLE_2} --price_per_chip_hour 2', '--price_per_chip_hour 2: is of --price'),
        (f'{TABLE_2} --on slurm --columns 1 --rows 1', '--on slurm: name the folder for its manifests'),
        (f'{TABLE_2} --no_check', '--no_check: is of --on'),
        (f'{TABLE_2} --on tpu --columns 1 --rows 1', 'pods need a bucket, such as gs://my-bucket/table_2'),
    ],
)
def test_wrong_flags_are_named(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(['reproduce', *command.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_nothing_repeats_says_why():
    with pytest.raises(ConfigError, match='paper/table: nothing repeats it: its data are secret'):
        Description('paper/table', 'Table', missing='its data are secret').check_scale(PAPER_SCALE)


def test_runs_are_handed_to_a_cluster(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = '--scale tiny --rows 1-2 --columns 1 --on slurm --manifests jobs --gpus 1 --run_dir runs'
    assert cli.main(['reproduce', TABLE_2, *flags.split()]) == 0
    assert '2 points of 2 in ' in capsys.readouterr().out
    points = sorted(path.name for path in (tmp_path / 'runs' / 'points').glob('*.gin'))
    assert points == [
        'exact_polynomial-deg-2_512_seed-0.gin',
        'exact_softmax-using-flashattention_512_seed-0.gin',
    ]
    assert list((tmp_path / 'jobs').glob('*'))


@pytest.fixture
def jobset(tmp_path, monkeypatch):
    """The command that hands four rows at 16k to Kubernetes, of which none has been compiled; and what will fit."""
    fits = {}

    def price(runs, choice, root, topology):
        assert topology.name == 'v5e:4x4'
        return [RunPrice(run, 1e18, fits.get(run.row.label, True), 1.0, 1.0, 16.0, 10.0) for run in runs]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hand_over, 'price_runs', price)
    monkeypatch.setattr(hand_over, 'find_slices', lambda names, if_possible: map(parse, names))
    flags = '--rows 1-4 --columns 16k --on jobset --manifests jobs --image i --claim c --topology v5e:4x4'
    return ['reproduce', TABLE_2, *flags.split(), '--run_dir', str(tmp_path / 'runs')], fits


def test_no_row_is_handed_over_if_one_does_not_fit(jobset, tmp_path, capsys):
    command, fits = jobset
    fits['Softmax (using FlashAttention)'] = False
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    assert 'v5e:4x4: does not fit: exact_softmax-using-flashattention_16384_seed-0; take a larger slice' in said
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_does_not_fit_in_the_paper_either_is_left_out(jobset, tmp_path, capsys):
    command, fits = jobset
    fits['Polynomial (deg=4)'] = False  # the paper prints OOM
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert 'left out, as it does not fit v5e:4x4, nor in the paper: exact_polynomial-deg-4_16384_seed-0' in printed
    assert '3 points of 3 in ' in printed
    assert not (tmp_path / 'runs' / 'points' / 'exact_polynomial-deg-4_16384_seed-0.gin').exists()
    assert [row['index'] for row in read_rows(epath.Path(tmp_path / 'runs'))] == [0, 1, 2]


def test_rows_are_handed_over_unchecked_only_if_that_is_asked_for(jobset, monkeypatch, capsys):
    command, fits = jobset
    fits['Softmax (using FlashAttention)'] = False
    assert cli.main([*command, '--no_check']) == 0
    assert '4 points of 4 in ' in capsys.readouterr().out


def test_pods_are_asked_for_only_if_all_rows_fit(tmp_path, monkeypatch, capsys):
    """The script says which slice the settings name; it starts nothing if a row is too large for it."""
    calls = tmp_path / 'calls'
    script = tmp_path / 'sweep.sh'
    script.write_text(f'#!/bin/sh\necho "$@ CHECK=$CHECK" >>{calls}\n[ "$1" = --slice ] && echo v5litepod-16\nexit 0\n')
    script.chmod(0o755)
    monkeypatch.setattr(hand_over, 'find_script', lambda: script)
    monkeypatch.setattr(hand_over, 'is_remote', lambda path: True)
    monkeypatch.setattr(hand_over, 'refuse_absent_tokens', lambda experiment: None)
    needed = []
    fits = [False]

    def price(runs, choice, root, topology):
        needed.append(topology.name)
        return [RunPrice(run, 1e18, fits[0], 1.0, 1.0, 16.0, 10.0) for run in runs]

    monkeypatch.setattr(hand_over, 'price_runs', price)
    monkeypatch.setattr(hand_over, 'find_slices', lambda names, if_possible: map(parse, names))
    root = str(tmp_path / 'runs')
    command = ['reproduce', TABLE_2, '--rows', '1', '--columns', '1', '--on', 'tpu', '--run_dir', root]
    assert cli.main(command) == 2
    assert 'does not fit: exact_softmax' in capsys.readouterr().err
    assert calls.read_text() == f'--slice {root} CHECK=\n'
    fits[0] = True
    assert cli.main(command) == 0
    assert calls.read_text().splitlines()[1:] == [f'--slice {root} CHECK=', f'lm sweep --run_dir {root} CHECK=0']
    assert needed == ['v5e:4x4', 'v5e:4x4']


def test_absent_tokens_are_named_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hand_over, 'is_remote', lambda path: True)
    runs = list_runs(find_description(TABLE_2), TableChoice(rows=('1',), columns=('1',)))
    with pytest.raises(ConfigError, match=r"data\.path = 'data/pg19': is a folder of this machine"):
        hand_over.check_runs(runs, TableChoice(), str(tmp_path), 'v5e:4x4')


ARENA = 'llops/table_1'


@pytest.mark.parametrize('scale', ['tiny', PAPER_SCALE])
def test_models_are_pre_trained_before_they_are_tuned(scale):
    """Each from its own weights: of the same mechanism, task and seed, seen from both sides."""
    choice = TableChoice(scale, rows=('softmax', 'llops'), columns=('listops',), seeds=2)
    runs = list_runs(find_description(ARENA), choice, 'runs/arena')
    starts = {f'runs/arena/{run.point.name}': run for run in runs if run.is_start}
    tuned = [run for run in runs if not run.is_start]
    assert [run.point.index for run in runs] == list(range(8))
    assert [run.is_start for run in runs] == [True] * 4 + [False] * 4
    assert [run.point.experiment.train.init_from for run in tuned] == list(starts)
    for run in tuned:
        ours, first = run.point.experiment, starts[run.point.experiment.train.init_from].point.experiment
        assert (ours.model, ours.data.task, ours.train.seed) == (first.model, first.data.task, first.train.seed)
        assert not ours.model.causal
        objectives = first.train.objective.gin_name, ours.train.objective.gin_name
        assert objectives == ('masked', 'next_token')
        assert [cell.column for cell in run.cells] == ['listops']
        assert first.train.init_from is None
    assert all(run.cells == () for run in starts.values())
    cells = collect(runs, Sweep('runs/nowhere', []))
    assert [(cell.row.label, cell.planned) for cell in cells] == [('Softmax', 2), ('LLoPS (p = 4)', 2)]


def test_what_starts_from_other_runs_is_handed_over_behind_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = '--scale tiny --rows softmax --on slurm --manifests jobs --gpus 1 --run_dir runs'
    names = [f'short_listops{kind}_softmax_listops_seed-0' for kind in ('_pretrain', '')]
    done = []
    monkeypatch.setattr(Sweep, 'is_finished', lambda sweep, point: point.name in done)
    assert cli.main(['reproduce', ARENA, *flags.split()]) == 0
    assert '1 run first; the same command later hands over what starts from them' in capsys.readouterr().out
    assert [row['point'] for row in read_rows(epath.Path('runs'))] == names[:1]
    done.append(names[0])
    assert cli.main(['reproduce', ARENA, *flags.split()]) == 0
    assert [(row['index'], row['point']) for row in read_rows(epath.Path('runs'))] == [(0, names[1])]
    config = (tmp_path / 'runs' / 'points' / f'{names[1]}.gin').read_text()
    assert f"train.init_from = 'runs/{names[0]}'" in config


@pytest.mark.slow  # two runs as processes
def test_a_model_is_tuned_from_the_weights_that_its_pre_training_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = {
        'train.steps': 2,
        'optimizer.warmup_steps': 1,
        'train.eval_every': 2,
        'listops.train_examples': 512,
        'listops.eval_examples': 250,
    }
    bindings = [word for name, value in small.items() for word in ('--set', f'{name}={value}')]
    flags = '--scale tiny --rows softmax --run_dir runs --no_pictures'
    assert cli.main(['reproduce', ARENA, *flags.split(), *bindings]) == 0
    printed = capsys.readouterr().out
    assert 'a small form of the experiments' in printed
    assert (tmp_path / 'runs' / 'short_listops_pretrain_softmax_listops_seed-0' / 'checkpoints' / '2').exists()
    (row,) = csv.DictReader((tmp_path / 'runs' / 'table' / 'table.csv').open())
    assert (row['row'], row['column'], row['paper'], row['seeds']) == ('Softmax', 'listops', '48.49', '0')
    assert float(row['ours']) >= 0
