"""The experiments of the papers: every file and every sweep resolves, has the paper's shape, and fills its tables."""

import collections
import functools
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import tiny
from shipped import CONFIGS, EXPERIMENTS, SWEEPS, experiment, name_of

from lm.experiment import load
from lm.model import ModelConfig
from lm.model.functions import count_parameters
from lm.report import paper
from lm.report.published import load_tables
from lm.runs.config_diff import parse_bindings
from lm.runs.records import Run
from lm.sweep.points import Point, make_points
from lm.training.rules.adamw import AdamW
from lm.training.schedules.linear import Linear

HARDWARE = re.compile(r'^Hardware: (v\d\w*-\d+ \(lm check: .+\)|2 CPU cores, .+)$', re.M)

APPENDIX_H = {  # layers × width, mechanism, r → millions of parameters
    (12, 768, 'softmax', None): 110,
    (12, 768, 'polynomial', None): 110,
    (12, 768, 'learned', 64): 113,
    (12, 768, 'learned', 32): 111,
    (13, 768, 'learned', 64): 120,
    (13, 768, 'learned', 32): 118,
    (13, 768, 'gaussian', 64): 117,
    (13, 768, 'gaussian', 32): 117,
    (13, 768, 'performer', None): 117,
    (24, 1024, 'softmax', None): 337,
    (24, 1024, 'polynomial', None): 337,
    (24, 1024, 'learned', 64): 341,
    (24, 1024, 'learned', 32): 337,
    (26, 1024, 'learned', 64): 367,
    (26, 1024, 'learned', 32): 362,
    (36, 1280, 'softmax', None): 748,
    (36, 1280, 'polynomial', None): 748,
    (39, 1280, 'learned', 64): 817,
    (39, 1280, 'learned', 32): 811,
    (24, 1536, 'softmax', None): 730,  # the draft, §5
    (24, 1536, 'srht', 32): 730,
}


def is_of_paper(path) -> bool:
    """Returns whether an experiment has the size of a paper; the others are smaller, or belong to this
    project alone."""
    return not re.match(r'experiments/|papers/study/|.*_(small|start|finish)$', name_of(path))


def header(path) -> str:
    lines = [line.removeprefix('#').strip() for line in path.read_text().splitlines() if line.startswith('#')]
    return '\n'.join(lines).replace('\\\n', ' ')


@functools.cache
def sweeps(path) -> list[tuple[str, list[Point]]]:
    """Returns the `lm sweep` commands of a header, and their points."""
    found = []
    for line in header(path).splitlines():
        if line.startswith('lm sweep'):
            words = shlex.split(line)
            flag = lambda name, words=words: tuple(words[i + 1] for i, word in enumerate(words) if word == name)  # noqa: E731
            found.append((line, points(flag('--gin_file'), flag('--sweep_file'), flag('--gin_param'))))
    return found


@functools.cache
def points(gin_files: tuple, sweep_files: tuple, gin_params: tuple = ()) -> list[Point]:
    return make_points(gin_files, sweep_files, gin_params)


@functools.cache
def parameters(model: ModelConfig) -> int:
    return sum(count_parameters(model).values())


def all_models() -> dict[ModelConfig, str]:
    """Yields every model of a file or of a point of a sweep, with its name."""
    found = {load([str(path)]).model: name_of(path) for path in EXPERIMENTS}
    for path in [*EXPERIMENTS, *SWEEPS]:
        found |= {p.experiment.model: f'{name_of(path)}: {p.name}' for _, made in sweeps(path) for p in made}
    return found


def as_run(point: Point) -> Run:
    return Run(None, parse_bindings(point.config), {}, [], [], [])


@pytest.mark.parametrize('path', EXPERIMENTS, ids=name_of)
def test_the_header_names_hardware_and_results(path):
    text = header(path)
    assert len(HARDWARE.findall(text)) == 1, 'one line `# Hardware: v4-64 (lm check: …)`'
    assert 'lm train ' in text
    if is_of_paper(path):
        assert '--sweep_file ' in text
        assert re.search(r'^(The p|P)aper\b', text, re.M)
        assert re.search(r'Ours: (not measured|\S*\d)|docs/results.md has ours', text), 'our number or "not measured"'


@pytest.mark.parametrize('path', SWEEPS, ids=name_of)
def test_every_sweep_resolves_and_is_named_in_a_header(path):
    name = path.relative_to(tiny.ROOT).as_posix()
    assert any(name in command for command, made in sweeps(path) if made)


def test_headers_give_each_run_its_own_folder():
    """A run in the folder of a sweep hides its points. Two sweeps in one folder overwrite each other's table."""
    told = {}
    for path in sorted(CONFIGS.rglob('*.gin')):
        for line in header(path).splitlines():
            if match := re.search(r'\blm (train|sweep) .*', line):
                words = shlex.split(match[0])
                flags = [pair for pair in itertools.pairwise(words) if pair[0] in ('--gin_file', '--sweep_file')]
                told.setdefault(words[words.index('--run_dir') + 1], set()).add((match[1], *flags))
    assert {folder: uses for folder, uses in told.items() if len(uses) > 1} == {}


@pytest.mark.parametrize('path', EXPERIMENTS, ids=name_of)
def test_a_sweep_has_as_many_runs_as_its_header_says(path):
    promised = re.search(r'(?:All|The same) (\d+) (?:runs|rows)', header(path).replace('\n', ' '))
    for command, made in sweeps(path):
        assert len({p.name for p in made}) == len(made)
        for point in made:
            train = point.experiment.train
            assert train.tokens_per_step % train.context_length == 0
        if promised:
            assert len(made) == int(promised[1]), command


def test_parameters_agree_with_appendix_h():
    found = {}
    for model, name in all_models().items():
        count = parameters(model)
        mechanism = model.pattern[0]
        kind = getattr(mechanism, 'sketch', mechanism.gin_name)
        key = (model.n_layers, model.d_model, kind, getattr(mechanism, 'sketch_size', None))
        if key in APPENDIX_H and len(model.pattern) == 1:
            found[key] = count
            assert count == pytest.approx(APPENDIX_H[key] * 1e6, rel=0.01), name
    assert found.keys() == APPENDIX_H.keys()


def test_the_recipes_equal_the_papers():
    for name, batch, peak, warmup in (
        ('table_2_pg19/kernel', 2**20, 7e-4, 10_000),
        ('table_1_c4/small', 2**19, 3e-4, 12_500),
    ):
        e = load([experiment(name)])
        assert (e.train.steps, e.train.tokens_per_step, e.optimizer.warmup_steps) == (125_000, batch, warmup)
        assert (e.optimizer.peak_learning_rate, e.optimizer.rule) == (peak, AdamW(b1=0.95, b2=0.98))
        assert e.optimizer.schedule == Linear(final_fraction=0.0)
    short = load([experiment('table_1_c4/medium_30k')])
    assert (short.train.steps, short.optimizer.warmup_steps, short.train.context_length) == (30_000, 3_000, 8192)
    assert load([experiment('table_1_c4/large')]).train.context_length == 2048
    for name, split in (
        ('table_2_pg19/exact', 'test'),
        ('table_3_wiki40b/kernel', 'test'),
        ('table_1_c4/small', 'validation'),
    ):
        assert load([experiment(name)]).data.eval_split == split


@pytest.mark.parametrize('name', ['softmax', 'polynomial', 'polysketch', 'performer', 'polysketch_draft', 'llops'])
def test_the_sweeps_use_the_mechanisms_of_configs_attention(name):
    """Sweep files leave fields that they do not vary at their defaults, and these must equal configs/attention."""
    shipped = load([f'configs/attention/{name}.gin']).model.attention
    assert any(model.attention == shipped for model in all_models())


ARENA = ['listops', 'pathfinder', 'arena_images', 'arena_texts', 'arena_retrieval']
SWEEP_OF = {  # table → the sweep that fills it, where headers of its experiments name others
    'arena': 'configs/papers/llops/table_1_arena/sweep_tune.gin',
    'copying_long': 'configs/papers/polysketchformer/table_5_copying/sweep_long.gin',
}
TABLES = {  # table → the experiments whose sweeps fill it, and its rows that no experiment repeats
    'pg19': (['table_2_pg19/exact', 'table_2_pg19/kernel'], []),
    'wiki40b': (['table_3_wiki40b/exact', 'table_3_wiki40b/kernel'], []),
    'speed': (['table_4_speed/exact', 'table_4_speed/kernel'], []),
    'c4': ([f'table_1_c4/{name}' for name in ('small', 'small_30k', 'medium', 'medium_30k', 'large')], []),
    'c4_speed': (['table_1_c4/small', 'table_1_c4/medium'], []),
    'copying': (['selective_copying'], ['Polysketch (learned + local, different learning rate schedule)']),
    'copying_long': (['selective_copying'], []),
    'induction': (['induction_heads'], []),
    'recall': (['multiquery_recall'], []),
    'arena': (ARENA, ['Nyström', 'Skyformer', 'PolaFormer', 'Flatten']),
    'continued': ([], ['Softmax', 'Mamba', 'BASED', 'LLoPS (p = 4)', 'LLoPS (p = 2)']),
    'sketches': ([], ['PSF', 'NN', 'LLoPS']),
    'proteins': (['proteins'], ['Empirical baseline']),
    'c4_tasks': ([f'table_1_c4/{name}' for name in ('small', 'medium', 'large')], []),
    'c4_tasks_30k': ([f'table_1_c4/{name}' for name in ('small_30k', 'medium_30k')], []),
    'draft_wiki40b': (['tables_1_2/wiki40b'], []),
    'draft_pg19': (['tables_1_2/pg19'], []),
    'draft_speed': (['tables_1_2/pg19'], ['Softmax', 'Performer']),
    'draft_long': (['section_5/long'], []),
    'draft_large': (['section_5/large'], []),
}


@pytest.mark.parametrize('key', load_tables())
def test_the_sweeps_fill_the_papers_table(key):
    """Every cell of a table has exactly one run among the points of its experiments. No run is left over."""
    table, (names, left_out) = load_tables()[key], TABLES[key]
    made = [p for name in names for _, found in sweeps(tiny.ROOT / experiment(name)) for p in found]
    if sweep := SWEEP_OF.get(key):
        made = [p for name in names for p in points((experiment(name),), (sweep,))]
    among, cells = paper.select_tables([as_run(point) for point in made]), []
    for point in made:
        own = [c for c in paper.find_cells(as_run(point), among) if c.table is table]
        assert own or (key == 'recall' and 'recall-softmax' in point.name), point.name
        assert [paper.list_differences(as_run(point), cell) for cell in own] == [[]] * len(own), point.name
        cells += own
    wanted = [
        paper.Cell(table, row, column)
        for row in table.rows
        for column, value in zip(table.columns, row.values, strict=True)
        if row.label not in left_out and not (isinstance(value, str) and key == 'c4')
    ]
    assert collections.Counter(cells) == collections.Counter(wanted)


@pytest.mark.slow  # a whole act of several runs; its parts have tests of their own
def test_a_checkpoint_is_evaluated_under_every_point(reference_run, tmp_path):
    run = shutil.copytree(reference_run[0], tmp_path / 'run')
    sweep = tmp_path / 'sweep.gin'
    sweep.write_text('model.attention = [@softmax(), @hybrid()]\nhybrid.window = [4]\n')
    script = CONFIGS / 'papers/approximate_attention/section_7/evaluate_sweep.py'
    command = [sys.executable, str(script), str(run), '--sweep_file', str(sweep)]
    options = {'capture_output': True, 'text': True, 'env': tiny.environment(1) | {'PYTHONPATH': str(tiny.ROOT)}}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in done.stdout.splitlines()]
    assert rows[0] == ['model.attention', 'hybrid.window', 'validation perplexity', 'bits per byte']
    softmax, hybrid = [float(row[2]) for row in rows[2:]]
    assert softmax == pytest.approx(math.exp(tiny.losses(run, 'eval')[40]), abs=1e-3)
    assert hybrid != pytest.approx(softmax, abs=1e-3)
    assert hybrid == pytest.approx(softmax, rel=0.2), 'the scores of a young model are small'

    (run / 'evaluation_sweep' / 'softmax.json').write_text(
        json.dumps({'perplexity': 1.0, 'bits_per_byte': 2.0, 'split': 'validation'})
    )
    (run / 'checkpoints').rename(tmp_path / 'gone')
    again = subprocess.run(command, **options)
    assert again.returncode == 0, 'what is measured is not measured again'
    assert '| 1.000 | 2.0000 |' in again.stdout


def test_the_readme_lists_every_experiment_with_its_number_of_runs():
    papers, listed = CONFIGS / 'papers', set()
    for section in (papers / 'README.md').read_text().split('\n## '):
        folder = papers / (match[1] if (match := re.match(r'.*\(`(\w+)/`\)', section)) else '')
        for file, names, count in re.findall(r'^\|.*\| `(\S+\.gin)` \| (`.+`) \| (\d+) \|$', section, re.M):
            sweep_files = tuple(str(folder / name) for name in re.findall(r'`(\S+\.gin)`', names))
            assert len(points((str(folder / file),), sweep_files)) == int(count), file
            listed |= {(folder / name).resolve() for name in (file, *sweep_files)}
    swept = {path for path in SWEEPS if path.is_relative_to(papers)}
    assert {path.stem for path in swept - listed} == {
        'sweep',  # of hybrid.gin: evaluations, not runs
        'sweep_associative_recall_start',
        'sweep_associative_recall_finish',
    }
    shipped = {path for path in EXPERIMENTS if is_of_paper(path) and path.stem != 'hybrid'}
    assert shipped <= listed


def test_both_ways_to_the_quickstart_prepare_the_same_store():
    alone, whole = (
        load([str(tiny.ROOT / name)]) for name in ('data/quickstart.gin', 'configs/experiments/quickstart.gin')
    )
    assert (alone.prepare, alone.data) == (whole.prepare, whole.data)
