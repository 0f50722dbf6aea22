"""The `lm` command: immediate help, one-line errors, exit codes; nothing happens before the configuration is valid."""

import dataclasses
import importlib.util
import inspect
import pathlib
import re
import resource
import subprocess
import sys

import pytest
import tiny

import lm.cli
from lm import errors
from lm.cli import VERBS, main
from lm.config.text import dump
from lm.experiment import Experiment
from lm.files import PACKAGES
from lm.ops.errors import OperationError

PROJECT = pathlib.Path(__file__).resolve().parent.parent

EVIL = "open('SENTINEL', 'w').close()\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Returns a working directory with gin files and a module that leaves a trace when it is imported."""
    here = tmp_path / 'project'
    (here / 'configs').mkdir(parents=True)
    (here / 'evil.py').write_text(EVIL)
    (tmp_path / 'outside.gin').write_text('train.steps = 5\n')
    (tmp_path / 'outside').mkdir()
    (tmp_path / 'outside' / 'x.gin').write_text('train.steps = 5\n')
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def calls(monkeypatch):
    """Records the calls that the command would make; returns the arguments of each call, by name."""
    made = []

    def wrap(make_call):
        def note(arguments):
            call = make_call(arguments)
            return lambda: made.append(inspect.signature(call.func).bind(*call.args, **call.keywords).arguments)

        return note

    for name, verb in VERBS.items():
        monkeypatch.setitem(VERBS, name, dataclasses.replace(verb, make_call=wrap(verb.make_call)))
    return made


HOSTILE = {
    'import': 'import evil',
    'import as': 'import evil as e',
    'from': 'from evil import thing',
    'import behind a comment': '# harmless\n\n   import evil',
    'import in the middle': 'train.steps = 5\nimport evil\n',
    'dynamic registration': 'from __gin__ import dynamic_registration\nimport evil',
    'dynamic call': 'from __gin__ import dynamic_registration\nimport os\ntrain.seed = @os.getpid()',
    'include parent': "include '../outside.gin'",
    'include parent folder': "include '../outside/x.gin'",
    'include absolute': "include '/etc/hostname'",
    'include through a link': "include 'configs/link.gin'",
    'include missing': "include 'nowhere.gin'",
    'include then import': "include 'configs/importer.gin'",
    'include of a device': "include '/dev/zero'",
    'unknown macro': 'train.steps = %STEPS',
    'unused macro': 'STEPS = 5',
    'unknown scope': 'trian/train.steps = 5',
    'unknown configurable': 'trian.steps = 5',
    'unknown parameter': 'train.stepz = 5',
    'unknown reference': 'model.attention = @softmx()',
    'unselected mechanism': 'polynomial.degree = 4',
    'wrong type': "train.steps = 'many'",
    'float for an int': 'train.steps = 1e5',
    'out of range': 'train.steps = 0',
    'duplicate': 'train.steps = 5\ntrain.steps = 6',
    'code as a value': "train.steps = __import__('evil')",
    'code as a selector': "__import__('evil').x = 3",
    'reference to a builtin': 'train.steps = @exec()',
    'gin internals': 's/gin.singleton.constructor = @softmax',
    'not text': '\x00\x01',
    'circle': 'A = %A\ntrain.steps = %A',
    'self-reference': 'model.attention = @model()',
    'no newline': 'train.steps = 5 train.seed = 6',
    'open bracket': 'model.attention = [@softmax(',
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_configuration(name, project, calls, capsys):
    (project / 'configs' / 'link.gin').symlink_to(project.parent / 'outside.gin')
    (project / 'configs' / 'importer.gin').write_text('import evil')
    (project / 'x.gin').write_text(HOSTILE[name])
    assert main(['train', '--run_dir', 'runs/r', '--gin_file', 'x.gin']) == 2
    printed = capsys.readouterr()
    assert printed.err.count('\n') == 1
    assert printed.err.startswith('lm train: error: ')
    assert printed.out == ''
    assert calls == []
    assert not (project / 'SENTINEL').exists(), 'code of the configuration ran'
    assert not (project / 'runs').exists(), 'something was written'


def test_imports_run_only_when_allowed(project, calls, capsys):
    (project / 'x.gin').write_text('import evil\n')
    command = ['train', '--run_dir', 'runs/r', '--gin_file', 'x.gin']
    assert main(command) == 2
    assert '--allow_gin_imports' in capsys.readouterr().err
    assert main([*command, '--allow_gin_imports']) == 0
    assert (project / 'SENTINEL').exists()
    sys.modules.pop('evil')


@pytest.mark.parametrize(
    'path',
    [
        *('..', '../x', 'runs/../../x', 'runs/..', '.hidden', 'a b', 'x;rm', '', 'a' * 129, 'runs/-x', 'gs://b/../x'),
        *('é', '~nosuchuser/x'),
    ],
)
def test_bad_run_names(path, project, calls, capsys):
    assert main(['train', '--run_dir', path]) == 2
    assert capsys.readouterr().err.count('\n') == 1
    assert calls == []
    assert sorted(p.name for p in project.iterdir()) == ['configs', 'evil.py']


@pytest.mark.parametrize('scheme', PACKAGES)
def test_a_bucket_without_its_package_is_refused_by_every_verb(scheme, project, calls, monkeypatch, capsys):
    find = importlib.util.find_spec
    absent = {*PACKAGES.values(), 'tensorflow'}
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *rest: None if name in absent else find(name, *rest))
    (project / 'x.gin').write_text('')
    address = f'{scheme}://bucket/x'
    for command in (
        ['train', '--run_dir', address],
        ['train', '--run_dir', address, '--gin_file', 'x.gin'],
        ['train', '--run_dir', 'x', '--gin_file', f'{address}.gin'],
        ['evaluate', '--run_dir', address],
        ['generate', '--run_dir', address],
    ):
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert error.count('\n') == 1
        assert error.endswith(f'pip install {PACKAGES[scheme]}\n')
    assert calls == []


@pytest.mark.parametrize('path', ['x', 'runs/x-1.2_y', 'runs/x/', '/tmp/elsewhere/' + 'a' * 128])
def test_good_run_names(path, project, calls):
    assert main(['train', '--run_dir', path, '--gin_param', 'train.steps = 7', '--set', 'data.path=data/x']) == 0
    (call,) = calls
    assert call['experiment'].train.steps == 7
    assert call['run_dir'] == path


def test_train_resumes_with_the_configuration_of_the_run(project, calls):
    run = project / 'runs' / 'r'
    run.mkdir(parents=True)
    (run / 'config.gin').write_text('model.attention = @polynomial()\npolynomial.degree = 2\ntrain.seed = 9\n')
    assert main(['train', '--run_dir', 'runs/r', '--gin_param', 'train.steps = 7']) == 0
    (project / 'x.gin').write_text('train.steps = 8\n')
    assert main(['train', '--run_dir', 'runs/r', '--gin_file', 'x.gin']) == 0
    experiments = [call['experiment'] for call in calls]
    assert [(e.train.seed, e.train.steps, e.model.attention.gin_name) for e in experiments] == [
        (9, 7, 'polynomial'),
        (0, 8, 'softmax'),
    ]


def test_evaluate_and_generate_start_from_the_run(project, calls, capsys):
    for verb in ('evaluate', 'generate'):
        assert main([verb, '--run_dir', 'runs/r']) == 2
        assert 'config.gin' in capsys.readouterr().err
    run = project / 'runs' / 'r'
    run.mkdir(parents=True)
    (run / 'config.gin').write_text('model.attention = @polynomial()\npolynomial.degree = 2\nevaluate.batch_size = 4\n')
    flags = ['--split', 'te"st', '--context_length', '64', '--window', 'sliding:8']
    assert main(['evaluate', '--run_dir', 'runs/r', *flags, '--gin_param', 'model.attention = @softmax()']) == 0
    experiment = calls.pop()['experiment']
    assert experiment.model.attention.gin_name == 'softmax'
    assert (experiment.evaluate.split, experiment.evaluate.context_length) == ('te"st', 64)
    assert (experiment.evaluate.window, experiment.evaluate.batch_size) == ('sliding:8', 4)
    assert main(['evaluate', '--run_dir', 'runs/r', '--window', 'sidling:8']) == 2
    assert 'evaluate.window' in capsys.readouterr().err
    assert main(['generate', '--run_dir', 'runs/r', '--prompt', 'x', '--top_p', '0.9', '--max_tokens', '3']) == 0
    call = calls.pop()
    assert call['experiment'].model.attention.degree == 2
    assert (call['sampling'].top_p, call['sampling'].top_k, call['seed'], call['step']) == (0.9, None, 0, None)


def test_prepare_flags(calls):
    assert main(['prepare', '--strict', '--processes', '3']) == 0
    assert main(['prepare']) == 0
    assert [(call['config'].strict, call['config'].processes) for call in calls] == [(True, 3), (False, None)]


@pytest.mark.parametrize(
    ('error', 'code', 'message'),
    [
        (errors.ConfigError('bad'), 2, 'lm prepare: error: bad\n'),
        (OperationError('heads'), 2, 'lm prepare: error: heads\n'),
        (errors.Preempted('saved'), 42, 'lm prepare: saved\n'),
        (errors.Diverged('nan'), 43, 'lm prepare: error: nan\n'),
        (errors.MismatchError('damaged'), 44, 'lm prepare: error: damaged\n'),
        (errors.WrongResults('chip 3'), 45, 'lm prepare: error: chip 3\n'),
        (KeyboardInterrupt(), 130, 'lm prepare: interrupted\n'),
        (
            RuntimeError('odd\nthing'),
            1,
            'lm prepare: error: RuntimeError: odd thing (run it again with --debug for the traceback)\n',
        ),
    ],
)
def test_exit_codes(error, code, message, monkeypatch, capsys):
    def fail(*arguments):
        raise error

    monkeypatch.setattr('lm.data.prepare.run.run', fail)
    assert main(['prepare']) == code
    assert capsys.readouterr().err == message
    assert main(['prepare', '--debug']) == code
    assert ('Traceback' in capsys.readouterr().err) == (code != 130)


def test_an_interrupted_program_leaves_out_the_end_of_the_interpreter(monkeypatch, capsys):
    # What XLA computes in its threads makes that end crash.
    def interrupt(*_):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr('lm.data.prepare.run.run', interrupt)
    monkeypatch.setattr('lm.cli.IS_PROGRAM', True)
    monkeypatch.setattr('os._exit', leave)
    with pytest.raises(SystemExit, match='130'):
        main(['prepare'])
    assert capsys.readouterr().err == 'lm prepare: interrupted\n'


def test_help_explains_every_exit_code(capsys):
    assert main(['--help']) == 0
    shown = capsys.readouterr().out
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LmError)]
    kinds = [kind for kind in kinds if 'exit_code' in vars(kind)]  # other errors get their code from their class
    for kind in kinds:
        assert f'\n  {kind.exit_code:<3}{kind.meaning}\n' in shown
    assert len({kind.exit_code for kind in kinds}) == len(kinds) >= 5
    assert main(['train', '--help']) == 0
    assert 'exit codes: lm --help' in capsys.readouterr().out


def test_exit_code_of_the_verb_is_passed_on(monkeypatch):
    monkeypatch.setattr('lm.data.prepare.run.run', lambda *arguments: 3)
    assert main(['prepare']) == 3


@pytest.mark.parametrize(
    ('argv', 'expected'),
    [
        (['trian'], 'did you mean train?'),
        (['frobnicate'], 'prepare, train, distill'),
        ([], 'VERB'),
        (['train'], '--run_dir'),
        (['train', '--run_dir', 'x', '--gin_flie=y'], 'did you mean --gin_file?'),
        (['train', '--run', 'x'], '--run_dir'),
        (['evaluate', '--run_dir', 'x', '--step', 'ten'], '--step'),
        (['prepare', 'stray'], "unknown argument 'stray'"),
        (['prepare', '--gin_file', 'http://x/y.gin'], "--gin_file 'http://x/y.gin': http:// is not supported"),
        (['train', '--run_dir', 'http://x/y'], "--run_dir 'http://x/y': http:// is not supported"),
    ],
)
def test_wrong_usage_is_one_line(argv, expected, calls, capsys):
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert expected in printed
    assert printed.count('\n') == 1
    assert calls == []


@pytest.mark.parametrize('verb', VERBS)
def test_help_of_each_verb_shows_an_example_that_parses(verb, capsys):
    import shlex

    assert main([verb, '--help']) == 0
    shown = capsys.readouterr().out
    assert VERBS[verb].example in shown
    arguments = lm.cli.parse(shlex.split(VERBS[verb].example)[1:])
    assert arguments.verb == verb
    for path in getattr(arguments, 'gin_file', []):
        assert (PROJECT / path).is_file()


def processor_time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_lists_the_verbs_without_importing_jax():
    code = "import sys, lm.cli; lm.cli.main(['--help']); sys.exit('jax' in sys.modules or 'gin' in sys.modules)"
    times = []
    for _ in range(3):
        start = processor_time_of_children()
        done = subprocess.run([sys.executable, '-c', code], cwd=PROJECT, capture_output=True, text=True, timeout=60)
        times.append(processor_time_of_children() - start)
        assert done.returncode == 0, done.stderr
    assert all(re.search(rf'^ +{verb}\s', done.stdout, re.MULTILINE) for verb in VERBS)
    assert min(times) < 1.0


def test_python_m_lm_is_the_command(tmp_path):
    """It returns the same exit codes and shows the same name."""
    found = []
    for module in ('lm', 'lm.cli'):
        for arguments in (['--help'], ['train'], ['inspect', str(tmp_path / 'nothing')]):
            command = [sys.executable, '-m', module, *arguments]
            done = subprocess.run(command, cwd=PROJECT, env=tiny.environment(), capture_output=True, text=True)
            found.append((done.returncode, done.stdout, done.stderr))
    assert found[:3] == found[3:]
    assert [code for code, *_ in found[:3]] == [0, 2, 2]
    assert found[1][2].startswith('lm train: error: ')


def test_a_dumped_experiment_is_a_run_configuration(project, calls):
    run = project / 'runs' / 'r'
    run.mkdir(parents=True)
    (run / 'config.gin').write_text(dump(Experiment()))
    assert main(['evaluate', '--run_dir', 'runs/r']) == 0
    assert calls.pop()['experiment'] == Experiment()


def test_a_start_imports_no_more_than_it_needs(tmp_path):
    """Restarts cost money: a start imports nothing that the first step does not need, and collects no garbage
    meanwhile."""
    late = ['orbax', 'clu', 'tensorflow', 'tensorflow_datasets', 'matplotlib', 'pyarrow', 'array_record', 'pandas']
    code = (
        f"import gc, sys; sys.orig_argv[0] = 'lm'; import lm.cli; assert not gc.isenabled(); import lm.session.train\n"
        f'print(sorted(set({late}) & {{name.partition(".")[0] for name in sys.modules}}))\n'
        f'assert lm.cli.main(["inspect", {str(tmp_path / "nothing")!r}]) == 2 and gc.isenabled()\n'
    )
    done = subprocess.run([sys.executable, '-c', code], env=tiny.environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '[]\n'
