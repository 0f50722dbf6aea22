"""Gin text becomes frozen dataclasses: refused texts, composition, and dumps that load as they were."""

import dataclasses
import gc
import math
import pathlib
import re
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest
import shipped
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.cli import VERBS, parse
from lm.config.configurable import LARGEST, MOST, REGISTRY, SMALLEST, Configurable, configurable, field
from lm.config.load import load as load_into
from lm.config.names import may_change
from lm.config.read import read
from lm.config.text import dump
from lm.data.sources import Source
from lm.errors import ConfigError
from lm.experiment import Experiment, list_not_inherited, load
from lm.training.config import TrainConfig

PROJECT = pathlib.Path(__file__).resolve().parents[2]


class Shape(Configurable):
    """The base of the nested configurables below."""


@configurable('test_disc')
class Disc(Shape):
    radius: float = field(default=1.0, above=0)
    label: str | None = field(default=None)


@configurable('test_pair')
class Pair(Shape):
    first: Shape = field(default=Disc())
    others: tuple[Shape, ...] = field(default=())


@configurable('test_ring')
class Ring(Shape):
    inner_radius: float = field(default=0.5, formerly='hole')
    colour: str = field(default='red', formerly='test_shapes.colour')
    width: float = field(default=1.0, formerly='test_shapes.width')


@configurable('test_frame')
class Frame(Shape):
    border: float = field(default=1.0, formerly='test_shapes.width')


@configurable('test_needy')
class Needy(Shape):
    name: str = field(help='what it is called')


@configurable('test_shapes')
class Shapes(Configurable):
    shape: Shape | tuple[Shape, ...] | None = field(default=Disc())
    spare: Shape | None = field(default=None, formerly='reserve')


@configurable('test_values')
class Values(Configurable):
    steps: int = field(default=10, minimum=1)
    rate: float = field(default=0.5)
    flag: bool = field(default=False)
    name: str = field(default='x')
    maybe: int | None = field(default=None)
    ranges: tuple[tuple[int, int], ...] = field(default=())
    words: tuple[str, ...] = field(default=('a', 'b'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
    shapes: Shapes = dataclasses.field(default_factory=Shapes)
    values: Values = dataclasses.field(default_factory=Values)


def resolve(*params: str, files: tuple = (), **options) -> Root:
    return load_into([str(f) for f in files], params, root=Root, **options)


def refused(*params: str, files: tuple = (), **options) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*params, files=files, **options)
    message = str(caught.value)
    assert '\n' not in message
    return message


# ---------------------------------------------------------------------------------------------------------- dump, load

shapes = st.deferred(lambda: discs | pairs)
discs = st.builds(Disc, radius=st.floats(SMALLEST, LARGEST), label=st.none() | st.text(max_size=8))
pairs = st.builds(Pair, first=shapes, others=st.lists(shapes, max_size=3).map(tuple))
shape_sections = st.builds(
    Shapes, shape=shapes | st.none() | st.lists(shapes, max_size=4).map(tuple), spare=shapes | st.none()
)
small = st.integers(-MOST, MOST)
value_sections = st.builds(
    Values,
    steps=st.integers(1, MOST),
    rate=st.just(0.0) | st.floats(SMALLEST, LARGEST) | st.floats(-LARGEST, -SMALLEST),
    flag=st.booleans(),
    name=st.text(st.characters(), max_size=20),
    maybe=st.none() | small,
    ranges=st.lists(st.tuples(small, small), max_size=3).map(tuple),
    words=st.lists(st.text(max_size=5), max_size=4).map(tuple),
)


@settings(max_examples=150)
@given(st.builds(Root, shapes=shape_sections, values=value_sections))
def test_load_of_dump_is_the_same(root):
    text = dump(root)
    lines = [line for line in text.splitlines() if line and not line.startswith('#')]
    loaded = load_into([], lines, root=Root)
    assert loaded == root
    assert dump(loaded) == text


def test_dump_is_sorted_complete_and_scopes_only_what_differs(tmp_path):
    root = Root(shapes=Shapes(shape=(Disc(radius=2.0), Disc(), Disc(radius=2.0)), spare=Pair()))
    text = dump(root)
    assert 'test_shapes.shape = [@a/test_disc(), @b/test_disc(), @a/test_disc()]' in text
    assert 'test_pair.first = @b/test_disc()' in text
    assert '# a/test_disc\na/test_disc.label = None\na/test_disc.radius = 2.0\n' in text
    assert 'test_shapes.shape = @test_disc()' in dump(Root())
    assert 'test_values.rate = 1e+30' in dump(Root(values=Values(rate=1e30)))
    (tmp_path / 'config.gin').write_text(text)
    assert resolve(files=(tmp_path / 'config.gin',)) == root


def test_dump_refuses_what_gin_cannot_hold():
    with pytest.raises(ConfigError, match=r'test_values\.rate = nan'):
        dump(Root(values=Values(rate=math.nan)))


def test_experiment_survives():
    experiment = load(
        [],
        [
            'model.attention = [@a/softmax(), @polynomial(), @b/softmax()]',
            'a/softmax.window = 16',
            'polynomial.degree = 2',
            'prepare.source = @text_files()',
            "text_files.path = 'it\\'s'",
        ],
    )
    assert experiment.model.attention[0].window == 16
    assert load([], [line for line in dump(experiment).splitlines() if '=' in line]) == experiment


def test_neither_dump_nor_the_package_imports_gin():
    code = "import sys, lm.experiment, lm.config.text, lm.config.load; sys.exit('gin' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], cwd=PROJECT, timeout=120).returncode == 0


# --------------------------------------------------------------------------------------------------------- composition


def test_last_of_files_and_parameters_wins(tmp_path):
    (tmp_path / 'a.gin').write_text('test_values.steps = 1\ntest_values.rate = 1')
    (tmp_path / 'b.gin').write_text("include 'a.gin'\ntest_values.steps = 2")
    files = (tmp_path / 'a.gin', tmp_path / 'b.gin')
    assert resolve(files=files).values == Values(steps=2, rate=1.0)
    assert resolve('test_values.steps = 3', 'test_values.steps = 4', files=files).values.steps == 4


def test_includes_are_found_beside_the_file_then_here_then_in_the_project(tmp_path, monkeypatch):
    for folder in ('deep', 'here'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'x.gin').write_text(f"test_values.name = '{folder}'")
    (tmp_path / 'deep' / 'top.gin').write_text("include 'x.gin'")
    (tmp_path / 'top.gin').write_text("include 'x.gin'")
    monkeypatch.chdir(tmp_path / 'here')
    assert resolve(files=(tmp_path / 'deep' / 'top.gin',)).values.name == 'deep'
    assert resolve(files=(tmp_path / 'top.gin',)).values.name == 'here'
    (tmp_path / 'top.gin').write_text("include 'configs/models/tiny.gin'")
    assert load([str(tmp_path / 'top.gin')]).model.n_layers == 4


def test_macros_scopes_blocks_and_required():
    root = resolve(
        'N = 3', 'S = @a/test_disc()', 'test_values.steps = %N', 'test_values.maybe = %N',
        'test_shapes.shape = [%S, @b/c/test_disc()]', 'a/test_disc.radius = 2', 'b/test_disc.radius = 4',
        'test_disc.label = "all"', 'test_shapes:\n  spare = @test_pair()\n', 'test_values.name = %gin.REQUIRED',
        'test_values.name = "given"',
    )  # fmt: skip
    assert root.values.steps == root.values.maybe == 3
    assert root.shapes.shape == (Disc(radius=2.0, label='all'), Disc(radius=4.0, label='all'))
    assert root.shapes.spare == Pair()
    assert 'test_values.name: must be set' in refused('test_values.name = %gin.REQUIRED')


def test_state_does_not_leak_from_one_load_to_the_next():
    refused('test_values.steps = 7', 'test_values.steps = "x"')
    resolve('test_values.steps = 7', 'test_shapes.shape = @test_disc()', 'test_disc.radius = 9')
    assert resolve() == Root()
    import gin

    assert gin.config_str().strip() == ''
    assert not gin.config_is_locked()


def test_several_threads_may_load_at_once(request):
    together = threading.Barrier(8)
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    request.addfinalizer(lambda: (sys.setswitchinterval(interval), gc.set_threshold(*threshold)))
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)  # a collection calls back into Python, where threads take turns

    def many(i: int) -> list[Root]:
        together.wait(timeout=60)
        size = f'a/test_disc.radius = {i + 1}'
        return [resolve('test_shapes.shape = [@a/test_disc(), @test_pair()]', size, f'N = {i + 1}',
                        'test_values.steps = %N') for _ in range(20)]  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        for i, roots in enumerate(pool.map(many, range(8))):
            expected = Root(shapes=Shapes(shape=(Disc(radius=i + 1.0), Pair())), values=Values(steps=i + 1))
            assert roots == [expected] * 20


def test_a_configurable_is_built_in_the_scope_of_its_reference():
    root = resolve(
        'test_shapes.shape = @a/b/test_pair()', 'a/b/test_pair.first = @test_disc()', 'a/test_disc.radius = 2',
        'a/b/test_pair.others = [@c/test_disc(), %M]', 'c/test_disc.label = "c"', 'x/M = @test_disc()',
        'M = %x/M', 'x/test_disc.radius = 5',
    )  # fmt: skip
    assert root.shapes.shape == Pair(first=Disc(radius=2.0), others=(Disc(label='c'), Disc(radius=5.0)))


def test_values_nested_too_deeply_are_an_error():
    chain = [f'M{i} = %M{i + 1}' for i in range(2000)]
    assert 'nested too deeply' in refused(*chain, 'M2000 = 3', 'test_values.steps = %M0')


def test_each_section_is_constructed_once(monkeypatch):
    built = []
    monkeypatch.setattr(Values, '__post_init__', lambda self, old=Values.__post_init__: (built.append(1), old(self)))
    resolve('test_values.steps = 3')
    assert len(built) == 1


def test_overriding_a_run_drops_only_the_bindings_of_the_replaced_configurable(tmp_path):
    base = tmp_path / 'config.gin'
    base.write_text(dump(Root(shapes=Shapes(shape=Pair(first=Disc(radius=3.0))))))
    assert (
        resolve('test_shapes.shape = @test_needy()', "test_needy.name = 'n'", base=str(base)).shapes.shape.name == 'n'
    )
    assert resolve('test_disc.radius = 5', base=str(base)).shapes.shape.first.radius == 5.0
    message = refused('test_shapes.shape = None', 'test_disc.radius = 5', base=str(base))
    assert 'test_disc.radius' in message
    assert '--gin_param' in message
    base.write_text(base.read_text() + 'a/test_disc.radius = 1\n')
    assert 'a/test_disc.radius' in refused(base=str(base)), 'the run itself must be sound'


def test_a_configurable_of_an_imported_module_can_be_named(tmp_path, monkeypatch):
    (tmp_path / 'lm_test_mine.py').write_text(
        'from lm.config.configurable import REGISTRY, Configurable, configurable, field\n'
        "from test_config import Shape\n@configurable('test_mine')\nclass Mine(Shape):\n  size: int = field(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PROJECT / 'tests'))
    monkeypatch.setitem(sys.modules, 'test_config', sys.modules[__name__])
    gin = tmp_path / 'x.gin'
    gin.write_text('import lm_test_mine\ntest_shapes.shape = @test_mine()\ntest_mine.size = 2')
    assert resolve(files=(gin,), allow_imports=True).shapes.shape.size == 2
    gin.write_text(
        'from __gin__ import dynamic_registration\nimport lm_test_mine as mine\ntest_shapes.shape = @mine.Mine()'
    )
    assert resolve(files=(gin,), allow_imports=True).shapes.shape.size == 1


def test_a_dump_imports_modules_of_users(tmp_path, monkeypatch):
    (tmp_path / 'lm_test_own.py').write_text(
        'from lm.config.configurable import configurable, field\n'
        "from test_config import Shape\n@configurable('test_own')\nclass Own(Shape):\n  size: int = field(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, 'test_config', sys.modules[__name__])
    chosen = ('test_shapes.shape = @test_own()', 'test_own.size = 2')
    (tmp_path / 'x.gin').write_text('\n'.join(['import lm_test_own', *chosen]))
    text = dump(resolve(files=(tmp_path / 'x.gin',), allow_imports=True))
    assert 'import lm_test_own\n' in text
    assert 'import' not in dump(Experiment())
    (tmp_path / 'config.gin').write_text(text)
    again = dict(files=(tmp_path / 'config.gin',))
    assert resolve(**again).shapes.shape.size == 2, 'here its module has run already'
    # Another process does not know the class.
    monkeypatch.delitem(REGISTRY, 'test_own')
    monkeypatch.delitem(sys.modules, 'lm_test_own')
    assert "'import lm_test_own' would run code" in refused(**again)
    assert 'would run code' in refused(base=str(tmp_path / 'config.gin'))
    assert resolve(**again, allow_imports=True).shapes.shape.size == 2
    (tmp_path / 'x.gin').write_text('import lm_test_not_there')
    with pytest.raises(ConfigError, match='PYTHONPATH must name its folder'):
        resolve(files=(tmp_path / 'x.gin',), allow_imports=True)
    monkeypatch.setattr(
        type(resolve(**again).shapes.shape), '__module__', '__main__'
    )  # as if a script or notebook defined the class
    assert 'lm_test_own' not in dump(resolve(*chosen))


# ---------------------------------------------------------------------------------------------------- earlier versions


def test_names_of_earlier_versions_set_the_fields_of_today(tmp_path):
    chosen = 'test_shapes.shape = [@test_ring(), @a/test_ring()]'
    root = resolve(chosen, 'test_ring.hole = 0.25', 'a/test_ring.hole = 0.75', 'test_shapes.colour = "blue"')
    assert root.shapes.shape == (Ring(inner_radius=0.25, colour='blue'), Ring(inner_radius=0.75, colour='blue'))
    # The last of several files and parameters wins, whatever name it uses.
    (tmp_path / 'old.gin').write_text(f'{chosen}\na/test_ring.hole = 0.125\ntest_ring.hole = 0.25\n')
    newer = resolve('test_ring.inner_radius = 4', files=(tmp_path / 'old.gin',)).shapes.shape
    assert newer == (Ring(inner_radius=4.0), Ring(inner_radius=0.125))
    assert resolve('test_ring.inner_radius = 4', base=str(tmp_path / 'old.gin')).shapes.shape == newer


def test_a_name_that_became_several_sets_the_selected_ones():
    assert resolve('test_shapes.shape = @test_ring()', 'test_shapes.width = 3').shapes.shape == Ring(width=3.0)
    assert resolve('test_shapes.shape = @test_frame()', 'test_shapes.width = 3').shapes.shape == Frame(border=3.0)
    assert resolve('test_shapes.width = 3') == Root()


def test_a_string_that_named_a_configurable_becomes_a_reference():
    assert resolve('test_shapes.reserve = "test_ring"').shapes.spare == Ring()
    assert resolve('test_shapes.reserve = None').shapes.spare is None
    message = refused('test_shapes.reserve = "test_rong"')
    assert "test_shapes.spare = 'test_rong': must be one of @test_disc(), " in message


def test_two_names_of_one_field_in_a_file_are_an_error(tmp_path):
    (tmp_path / 'x.gin').write_text('test_ring.hole = 0.25\n\ntest_ring.inner_radius = 0.5\n')
    message = refused('test_shapes.shape = @test_ring()', files=(tmp_path / 'x.gin',))
    assert 'x.gin:3: test_ring.inner_radius and, on line 1, test_ring.hole are two names of' in message
    # An unused binding is an error under its old name too.
    assert 'test_ring.inner_radius, because @test_ring() is not selected' in refused('test_ring.hole = 0.25')
    assert 'because @test_ring() is not selected' in refused('test_shapes.colour = "blue"')


def test_fields_and_sections_declare_which_values_may_change_on_resume():
    allowed = {f'train.{f}' for f in (
        'log_every', 'eval_every', 'eval_tokens', 'max_nonfinite_steps', 'profile', 'skip_batches', 'tensorboard',
        'hang_minutes', 'trackers', 'microbatches', 'replay_every',
    )} | {'data.path', 'model.remat', 'model.unroll', 'softmax.implementation', 'softmax.block'}  # fmt: skip
    whole = {'checkpoint', 'evaluate', 'mesh', 'prepare', 'tokenizer'}
    for line in dump(Experiment()).splitlines():
        name = line.partition(' = ')[0]
        if name[:1] not in ('', '#'):
            section = name.partition('.')[0]
            assert may_change(name) == may_change(f'a/b/{name}') == (name in allowed or section in whole), name
    assert not may_change('nothing.steps')
    assert not may_change('train.log')


def test_the_source_of_a_store_may_change_on_resume():
    sources = [name for name, cls in REGISTRY.items() if issubclass(cls, Source)]
    assert {'tfds', 'jsonl', 'text_files', 'fasta'} <= set(sources)
    for name in sources:
        assert all(may_change(f'{name}.{field.name}') for field in dataclasses.fields(REGISTRY[name])), name


def test_the_implementation_of_a_mechanism_may_change_on_resume_but_not_its_values():
    for name in ('softmax.implementation', 'polysketch.implementation', 'performer.block'):
        assert may_change(name), name
    for name in ('softmax.window', 'polysketch.block', 'performer.n_features'):
        assert not may_change(name), name


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ('params', 'expected'),
    [
        (['tset_values.steps = 3'], 'nothing is called tset_values; did you mean test_values.steps?'),
        (['test_values.stesp = 3'], "no parameter 'stesp'; did you mean test_values.steps?"),
        (['steps = 3'], 'nothing uses steps, did you mean test_values.steps?'),
        (['STEPS = 3', 'test_values.maybe = %STEPS', 'STESP = 4'], 'nothing uses STESP, did you mean STEPS?'),
        (['STEPS = 3', 'test_values.steps = %STESP'], 'the macro %STESP has no value; did you mean %STEPS?'),
        (['trian/test_values.steps = 3'], 'trian/test_values.steps, did you mean test_values.steps?'),
        (['test_needy.name = "x"'], 'not selected: set test_shapes.shape = @test_needy()'),
        (['test_shapes.shape = @test_dics()'], 'nothing is called @test_dics; did you mean @test_disc()?'),
        (['test_shapes.shape = @test_disc'], 'write @test_disc()'),
        (['test_shapes.shape = @a/test_disc()', 'b/test_disc.radius = 2'], 'did you mean a/test_disc.radius?'),
        (
            ['test_shapes.shape = @a/test_disc()', 'a/test_disc.radius = 2', 'test_disc.radius = 3'],
            '@a/test_disc() sets it in its own scope',
        ),
        (['test_shapes.shape = @test_needy()'], 'test_needy.name: has no value'),
        (['test_shapes.shape = @test_values()'], 'test_shapes.shape = Values('),
        (['test_shapes.shape = @test_shapes()'], 'contains itself'),
        (['A = %B', 'B = %A', 'test_values.steps = %A'], 'contains itself'),
        (['test_values.steps = 1e5'], 'test_values.steps = 100000.0: must be an int, not float (write 100000)'),
        (['test_values.steps = 1.5'], 'must be an int, not float'),
        (['test_values.steps = True'], 'must be an int, not bool'),
        (['test_values.steps = 0'], 'must be at least 1'),
        (['test_values.flag = 1'], 'must be a bool'),
        (['test_values.name = 3'], 'must be a string'),
        (['test_values.words = "ab"'], 'must be a list'),
        (['test_values.name = ab'], 'strings in quotes'),
        (['test_values.steps = 2 * 3'], 'no arithmetic'),
        (['test_values.steps = 0x' + 'f' * 9000], 'test_values.steps = an integer of 36000 bits'),
        (['test_values.steps = ' + '[' * 4000], '--gin_param: '),
        (['test_values.steps'], 'cannot read'),
        (['half-rotary/test_values.steps = 3'], "'half-rotary' is no name: names have letters, digits and _"),
        (['2x/test_values.steps = 3'], "'2x' is no name"),
        (['gin.macro.value = 3'], 'nothing is called gin.macro'),
        (['test_values.name = "\\'], 'cannot read'),
    ],
)
def test_mistakes_are_reported_with_a_remedy(params, expected):
    assert expected in refused(*params)


def test_all_unused_bindings_are_listed_with_their_places(tmp_path):
    (tmp_path / 'x.gin').write_text('X = 1\n\nY = 2\ntest_values.steps = 3\n')
    message = refused('Z = 1', files=(tmp_path / 'x.gin',))
    assert all(place in message for place in ('x.gin:1)', 'x.gin:3)', 'Z, ', '(--set or --gin_param)'))
    assert 'steps' not in message


def test_errors_name_file_and_line(tmp_path):
    path = tmp_path / 'x.gin'
    path.write_text('# a comment\ntest_values.steps = 1\ntest_values.steps = 2\n')
    assert f'{path}:3: test_values.steps is already set on line 2' in refused(files=(path,))
    path.write_text('test_values.rate = 1\ntest_values.steps = 1e3\n')
    assert f'({path}:2)' in refused(files=(path,))
    path.write_text('test_values.rate = 1\n\ntest_values.steps = many\n')
    assert f"{path}:3: cannot read 'test_values.steps = many'" in refused(files=(path,))
    path.write_text("include 'x.gin'\n")
    assert 'includes itself' in refused(files=(path,))
    assert 'did you mean' in refused(files=(tmp_path / 'xx.gin',))
    path.write_bytes(b'\xff\xfe')
    assert 'UTF-8' in refused(files=(path,))
    assert 'no such file' in refused(files=(tmp_path,))
    assert 'no such file' in refused(files=('configs/\0.gin',))
    assert 'without ..' in refused("include 'gs://bucket/../secret.gin'")


# ------------------------------------------------------------------------------------------------------- shipped files


def header(path: pathlib.Path) -> str:
    lines = path.read_text().splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith('#')), len(lines))
    return '\n'.join(line.removeprefix('#').strip() for line in lines[:end])


@pytest.mark.parametrize('path', shipped.SINGLE, ids=lambda p: str(p.relative_to(PROJECT)))
def test_shipped_file_resolves(path, monkeypatch):
    """The file resolves alone, or with the files that its header names in a line `# with: a.gin b.gin`."""
    monkeypatch.chdir(PROJECT)
    companions = [name for line in header(path).splitlines() if line.startswith('with: ') for name in line.split()[1:]]
    experiment = load([*companions, str(path)])
    assert load([], [line for line in dump(experiment).splitlines() if line and line[0] != '#']) == experiment


@pytest.mark.parametrize('path', shipped.SINGLE, ids=lambda p: str(p.relative_to(PROJECT)))
def test_commands_in_headers_are_right(path, monkeypatch):
    import shlex

    monkeypatch.chdir(PROJECT)
    text = header(path).replace('\\\n', ' ')
    text = re.sub(r'--gin_file runs/\S+', '--gin_file configs/models/tiny.gin', text)  # a run that the reader has
    commands = [line for line in text.splitlines() if line.startswith('lm ')]
    assert commands, f'{path}: the header shows no command'
    for command in commands:
        arguments = parse(shlex.split(command)[1:])
        if arguments.verb in ('prepare', 'train', 'check'):
            VERBS[arguments.verb].make_call(arguments)


def test_old_paths_of_shipped_files_still_work(monkeypatch, tmp_path, caplog):
    """Commands, includes and scripts of earlier versions use these paths."""
    configs = PROJECT / 'configs'
    moves = tomllib.loads((configs / 'moved.toml').read_text())
    assert len(moves) > 60
    monkeypatch.chdir(tmp_path)
    for old, new in moves.items():
        assert not (configs / old).exists()
        assert (configs / new).is_file()
        (tmp_path / 'a.gin').write_text(f"include 'configs/{old}'\ninclude '{configs / 'experiments' / '..' / old}'")
        for name in (f'configs/{old}', str(configs / old)):
            assert read([name]) == read([str(configs / new)])
        assert len(read(['a.gin'])) == 2 * len(read([str(configs / new)]))
        assert f'configs/{old} has moved to {configs / new}' in caplog.text
    (tmp_path / 'configs' / 'tasks').mkdir(parents=True)
    (tmp_path / 'configs' / 'tasks' / 'listops.gin').write_text('train.steps = 7')
    assert [s.value for s in read(['configs/tasks/listops.gin'])] == [7], 'a file of this name goes first'


def test_bindings_of_the_default_mechanism_need_no_selection():
    experiment = load([], ['softmax.window = 7', 'tokenizer.vocab_size = 999'])
    assert experiment.model.attention == REGISTRY['softmax'](window=7)
    assert experiment.prepare.tokenizer.vocab_size == 999
    with pytest.raises(ConfigError, match=r'because @softmax\(\) is not selected'):
        load([], ['softmax.window = 7', 'model.attention = @polynomial()'])


def test_a_field_of_train_says_whether_a_student_has_the_value_of_its_teacher():
    silent = [f.name for f in dataclasses.fields(TrainConfig) if f.metadata['inherit'] is None]
    assert not silent, f'add inherit=True or inherit=False to these fields of train: {silent}'
    assert {'train.objective', 'optimizer.z_loss', 'mesh.slices'} <= set(list_not_inherited())
