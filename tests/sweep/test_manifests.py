"""`lm sweep --emit`: its manifests pass the schemas, and simulated clusters that lose machines keep the exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import simulated_kubectl
import simulated_slurm
import tiny
import yaml

from lm.cli import main
from lm.errors import ConfigError, WrongResults
from lm.hardware import parse
from lm.pod.job import JobAddress
from lm.runs import sweep_file
from lm.sweep import run
from lm.sweep.emit import find_format
from lm.sweep.manifests import FORMATS, ClusterJob
from lm.sweep.options import ClusterOptions
from lm.sweep.points import read_points
from lm.sweep.sweep import Sweep

JOBS = [ClusterJob(f'lm-{name}-0123abcd', name, i, 'gs://bucket/sweep') for i, name in enumerate('ab')]


@pytest.fixture
def emit(tmp_path, monkeypatch):
    """Writes the manifests of a sweep of points seed-0 to seed-4; returns the exit code."""
    monkeypatch.chdir(tiny.ROOT)
    (tmp_path / 'sweep.gin').write_text('train.seed = [0, 1, 2, 3, 4]\n')
    base = ['--run_dir', str(tmp_path / 'root'), '--gin_file', 'configs/experiments/quickstart.gin']

    def call(kind, *flags, files=('--sweep_file', str(tmp_path / 'sweep.gin'))):
        return main(['sweep', *base, *files, '--emit', kind, str(tmp_path / kind), *flags])

    return call


def check_jobset(tree: dict) -> None:
    """Checks a JobSet with the models of its own schema, and its Jobs with the models of `kubernetes`."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubernetes.client.models.v1_job_template_spec import V1JobTemplateSpec

    assert JobsetV1alpha2JobSet.from_dict(tree).to_dict() == tree  # no field is unknown
    for job in tree['spec']['replicatedJobs']:
        read = V1JobTemplateSpec.from_dict(job['template'])
        assert read.model_dump(by_alias=True, exclude_none=True) == job['template']
        # The pods need it to have a policy.
        assert job['template']['spec']['template']['spec']['restartPolicy'] == 'Never'
    assert len(tree['metadata']['name']) <= 44
    assert re.fullmatch(r'[a-z]([-a-z0-9]*[a-z0-9])?', tree['metadata']['name'])


@pytest.mark.parametrize(
    'options',
    [
        ClusterOptions(image='reg/lm', topology=parse('v5e:4x4'), queue='tpus', namespace='ml', service_account='sa'),
        ClusterOptions(image='reg/lm', topology=parse('2*v5p:2x2x2'), spot=True, failures=0),
        ClusterOptions(image='reg/lm', gpus='16', nodes=2),
        ClusterOptions(image='reg/lm'),
    ],
    ids=['tpu', 'slices', 'gpus', 'cpu'],
)
def test_jobsets_pass_the_schemas(options):
    kind = FORMATS['jobset']
    kind.check(options, is_local=False)
    files = kind.make_files([JOBS[0], ClusterJob('lm-c', 'c', 2, 'gs://bucket/sweep', ('bad-1',))], options, '/x')
    trees = [yaml.safe_load(text) for text in files.values()]
    for tree in trees:
        check_jobset(tree)
    with pytest.raises(AssertionError):
        check_jobset(trees[0] | {'spec': trees[0]['spec'] | {'failurepolicy': {}}})


def test_a_jobset_asks_for_the_machines_of_its_slices():
    def read(options, job=JOBS[1]):
        (text,) = FORMATS['jobset'].make_files([job], options, '/x').values()
        tree = yaml.safe_load(text)
        (replicated,) = tree['spec']['replicatedJobs']
        return tree, replicated, replicated['template']['spec']['template']['spec']

    tree, replicated, pod = read(ClusterOptions(image='reg/lm', topology=parse('2*v5e:4x4'), queue='tpus', spot=True))
    assert tree['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'tpus'
    assert (replicated['replicas'], replicated['template']['spec']['completions']) == (2, 4)
    assert pod['nodeSelector'] == {
        'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
        'cloud.google.com/gke-tpu-topology': '4x4',
        'cloud.google.com/gke-spot': 'true',
    }
    (container,) = pod['containers']
    assert container['resources']['limits'] == {'google.com/tpu': '4'}
    assert container['command'] == ['lm', 'sweep', '--run_dir', 'gs://bucket/sweep', '--index', 'b']

    _, replicated, pod = read(ClusterOptions(image='reg/lm', gpus='16', nodes=2))
    assert pod['containers'][0]['resources']['limits'] == {'nvidia.com/gpu': '8'}
    assert pod['containers'][0]['command'][6:] == [
        *('--coordinator_address', 'lm-b-0123abcd-lm-0-0.lm-b-0123abcd:8476'),
        *('--process_count', '2', '--process_id', '$(PROCESS_ID)'),
    ]
    assert 'PROCESS_ID' in [variable['name'] for variable in pod['containers'][0]['env']]


@pytest.mark.parametrize(
    ('slice', 'per_machine', 'machines'),
    [
        ('v5e:1x1', 1, 1),
        ('v5e:2x2', 4, 1),
        ('v6e:2x4', 8, 1),
        ('v6e:4x4', 4, 4),
        ('v4:2x2x2', 4, 2),
        ('2*v5e:4x8', 4, 16),
    ],
)
def test_chips_and_machines_of_slices(slice, per_machine, machines):
    options = ClusterOptions(topology=parse(slice))
    assert (options.chips_per_machine, options.processes) == (per_machine, machines)


def test_skypilot_recovers_what_may_be_run_again():
    """Two tasks like these were read by `sky.Task.from_yaml_config` and SkyPilot's schemas, of version 0.14.1."""
    kind, options = FORMATS['skypilot'], ClusterOptions(topology=parse('v5e:4x4'), spot=True)
    kind.check(options, is_local=False)
    task = yaml.safe_load(kind.make_files(JOBS, options, '/x')['lm-b-0123abcd.yaml'])
    assert task['resources'] == {
        'infra': 'gcp',
        'accelerators': 'tpu-v5litepod-16',
        'accelerator_args': {'runtime_version': 'v2-alpha-tpuv5-lite'},
        'use_spot': True,
        'job_recovery': {'max_restarts_on_errors': 0, 'recover_on_exit_codes': [42, 45]},
    }
    assert (task['workdir'], 'num_nodes' in task) == ('.', False)
    assert task['run'].endswith('exec .venv/bin/lm sweep --run_dir gs://bucket/sweep --index b\n')

    options = ClusterOptions(image='reg/lm', gpus='H100:16', nodes=2)
    kind.check(options, is_local=False)
    task = yaml.safe_load(kind.make_files(JOBS, options, '/x')['lm-a-0123abcd.yaml'])
    assert (task['resources']['accelerators'], task['num_nodes']) == ('H100:8', 2)
    assert task['resources']['image_id'] == 'docker:reg/lm'
    shell = 'lm() { echo "$@"; }\n' + task['run'].replace('exec lm', 'lm')
    names = {'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2', 'SKYPILOT_NUM_NODES': '2', 'SKYPILOT_NODE_RANK': '1'}
    done = subprocess.run(['bash', '-c', shell], env=os.environ | names, capture_output=True, text=True, check=True)
    assert done.stdout.split()[5:] == [
        *('--coordinator_address', '10.0.0.1:8476', '--process_count', '2', '--process_id', '1')
    ]


@pytest.mark.parametrize(
    ('kind', 'options', 'is_local', 'message'),
    [
        ('jobset', {}, False, '--image: --emit jobset needs it'),
        ('jobset', {'image': 'i', 'jobs': 2}, False, '--jobs: --emit jobset does not use it'),
        ('jobset', {'image': 'i'}, True, 'pods see no disk of this machine'),
        ('jobset', {'image': 'i', 'claim': 'c'}, False, 'needs no volume'),
        ('jobset', {'image': 'i', 'topology': parse('v7x:2x2x2')}, False, 'knows the nodes of v4, v5e'),
        ('jobset', {'image': 'i', 'topology': parse('v4-8'), 'gpus': '8'}, False, 'give one of them'),
        ('skypilot', {'gpus': 'H100:8'}, True, 'name a folder in a bucket'),
        ('skypilot', {}, False, '--topology or --gpus'),
        ('skypilot', {'gpus': '8'}, False, 'H100:8'),
        ('skypilot', {'topology': parse('2*v4-8')}, False, 'single slices'),
        ('slurm', {'topology': parse('v4-8')}, True, '--topology: --emit slurm does not use it'),
    ],
)
def test_options_that_a_format_cannot_use_are_refused(kind, options, is_local, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_format(kind).check(ClusterOptions(**options), is_local)


def test_gpus_are_shared_evenly():
    with pytest.raises(ConfigError, match='--gpus 9: give a number that 2 machines can share'):
        FORMATS['slurm'].make_files(JOBS, ClusterOptions(gpus='9', nodes=2), '/x')
    with pytest.raises(ConfigError, match='--emit pbs: write a format and a folder; there are jobset, skypilot, slurm'):
        find_format('pbs')


def test_a_cluster_that_loses_pods(emit, tmp_path, monkeypatch, capsys):
    """42 and lost pods come again for ever, 2, 43 and 44 never, 45 on another machine, others three times."""
    flags = ('--image', 'reg/lm', '--topology', 'v5e:2x2', '--queue', 'tpus', '--claim', 'disk')
    assert emit('jobset', *flags) == 0
    printed = capsys.readouterr().out
    submit = re.search(r'^submit: (.*)$', printed, re.M)[1]
    root, cluster = tmp_path / 'root', tmp_path / 'cluster'
    cluster.mkdir()
    program = cluster / 'kubectl'
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {simulated_kubectl.__file__} "$@"\n')
    program.chmod(0o755)
    ends = {
        'seed-0': [42, 'lost', 42, 42, 42, 'lost', 0],
        'seed-1': [42, 43, 0],
        'seed-2': [45, 0],
        'seed-3': [1, 137, 42, 1, 1, 0],
        'seed-4': [1, 42, 0],
    }
    environment = os.environ | {'SIMULATED_CLUSTER': str(cluster), 'PATH': f'{cluster}:{os.environ["PATH"]}'}

    def run_cluster():
        (cluster / 'outcomes.json').write_text(json.dumps(ends))
        subprocess.run(submit, shell=True, env=environment, check=True)
        return json.loads((cluster / 'pods.json').read_text())

    found = run_cluster()
    assert {point: ([end for _, end in pods], state) for point, (pods, state) in found.items()} == {
        'seed-0': ([42, 'lost', 42, 42, 42, 'lost', 0], 'Completed'),
        'seed-1': ([42, 43], 'Failed: PodFailurePolicy'),
        'seed-2': ([45], 'Failed: PodFailurePolicy'),
        'seed-3': ([1, 137, 42, 1, 1], 'Failed: maxRestarts'),
        'seed-4': ([1, 42, 0], 'Completed'),
    }
    # The machine of seed-2 is noted as the process itself would do it. The second call leaves the machine out.
    sweep = Sweep(root, read_points(root))

    def compute_wrongly(*_, **__):
        raise WrongResults('chip 3 differs', processes)

    processes = {7}
    monkeypatch.setenv('NODE_NAME', found['seed-2'][0][0][0])
    monkeypatch.setattr(run, 'train_in_job', compute_wrongly)
    with pytest.raises(WrongResults):
        run.run_point(sweep, 2, JobAddress())
    assert sweep_file.read_wrong_machines(root) == [], 'the chips of another process are named'
    processes = {0, 7}
    monkeypatch.setenv('LM_WRONG_MACHINES', str(tmp_path / 'wrong'))
    with pytest.raises(WrongResults):
        run.run_point(sweep, 2, JobAddress())
    assert (tmp_path / 'wrong').read_text() == 'machine-0\n'
    assert sweep.result(sweep.points[2])['exit_code'] == 45
    sweep.record_failure(sweep.points[1], 43, 'it diverged')
    assert emit('jobset', *flags) == 0
    printed = capsys.readouterr().out
    assert 'seed-1 failed with 43 before and is left out' in printed
    assert 'without the machines that computed wrongly: machine-0' in printed
    assert len(list((tmp_path / 'jobset').glob('*.yaml'))) == 4, 'the manifest of seed-1 is gone'
    assert run_cluster()['seed-2'] == [[['machine-1', 45]], 'Failed: PodFailurePolicy']


def test_slurm_puts_tasks_back_into_its_queue(emit, tmp_path):
    flags = ('--gpus', '8', '--queue', 'gpu', '--jobs', '2', '--image', 'reg/lm', '--scheduler_option=--account=mine')
    assert emit('slurm', *flags, '--setup', 'module load cuda || true') == 0
    script = tmp_path / 'slurm' / 'sweep.sh'
    text = script.read_text()
    for line in ('--array=0,1,2,3,4%2', '--gpus-per-node=8', '--partition=gpu', '--requeue', '--account=mine'):
        assert f'#SBATCH {line}\n' in text
    subprocess.run(['bash', '-n', script], check=True)
    shellcheck = shutil.which('shellcheck', path=f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}')
    subprocess.run([shellcheck, script], check=True)
    cluster = tmp_path / 'cluster'
    cluster.mkdir()
    ends = {'0': [42, 143, 137, 42, 0], '1': [43, 0], '2': [45, 42, 0], '3': [1, 1, 42, 1, 1, 0], '4': [42, 0]}
    environment = simulated_slurm.install(cluster, ends | {'cancelled': ['4']})
    subprocess.run(['sbatch', script], env=environment, check=True)
    log = json.loads((cluster / 'log.json').read_text())
    codes = {i: [(machine, code) for task, machine, code, _ in log if task == i] for i in range(5)}
    first, second = 'machine-0', 'machine-1'
    assert codes == {
        0: [(first, code) for code in (42, 143, 137, 42, 0)],
        1: [(first, 43)],
        2: [(first, 45), (second, 42), (second, 0)],
        3: [(second, code) for code in (1, 1, 42, 1, 1)],  # not on the wrong machine, though its turn comes there
        4: [(second, 42)],  # it was cancelled
    }
    assert log[0][3] == ['sweep', '--run_dir', str(tmp_path / 'root'), '--index', 'seed-0']


def test_slurm_gives_up_on_a_point_that_fails_without_a_new_checkpoint(emit, tmp_path):
    """Such as one that the kernel kills for its memory. One that saves between its failures goes on."""
    assert emit('slurm') == 0
    cluster = tmp_path / 'cluster'
    cluster.mkdir()
    ends = {'0': [137] * 30, '1': [[137, 10], [1, 20], [137, 30], [137, 30], [1, 40], [137, 50], 0]}
    environment = simulated_slurm.install(cluster, ends | {'2': [1] * 9, '3': [[9, 10], *[9] * 8], '4': [0]})
    subprocess.run(['sbatch', tmp_path / 'slurm' / 'sweep.sh'], env=environment, check=True)
    log = json.loads((cluster / 'log.json').read_text())
    assert [sum(task == i for task, *_ in log) for i in range(5)] == [4, 7, 4, 4, 1]


def test_a_point_whose_starts_save_nothing_comes_back_no_more(emit, tmp_path, monkeypatch):
    """The rule is the command's own, so that it holds on each kind of cluster."""
    assert emit('jobset', '--image', 'x', '--claim', 'disk') == 0
    sweep = Sweep(str(tmp_path / 'root'), read_points(str(tmp_path / 'root')))
    info = tmp_path / 'root' / 'seed-0' / 'run.json'
    info.parent.mkdir()

    def start(*steps: int, saved: int = 0) -> None:
        starts = [{'when': '2026-11-29T00:00:00+00:00', 'first_step': step} for step in steps]
        info.write_text(json.dumps({'started': 'x', 'saved_step': saved, 'starts': starts}))
        run.run_point(sweep, 'seed-0', JobAddress())

    trained = []
    monkeypatch.setattr(run, 'train_in_job', lambda *_: trained.append(1))
    for name in ('check', 'is_finished', 'prepare', 'write_results'):  # they look at checkpoints
        monkeypatch.setattr(Sweep, name, lambda *_: None)
    start(*[20] * 9, saved=20)
    start(*[20] * 10, saved=30)
    start(*[20] * 9, 30, saved=30)
    assert len(trained) == 3
    with pytest.raises(ConfigError, match='its last 10 starts saved no step'):
        start(*[20] * 10, saved=20)
    with pytest.raises(ConfigError, match='train it by hand: lm train --run_dir'):
        start(*[0] * 12)


def test_slurm_gets_an_array_for_each_thousand_points(tmp_path):
    jobs = [ClusterJob(f'lm-{i}', f'point-{i}', i, str(tmp_path)) for i in (0, 999, 1000, 2500)]
    files = FORMATS['slurm'].make_files(jobs, ClusterOptions(), str(tmp_path))
    found = {name: re.search(r'--array=(.*)', text)[1] for name, text in files.items()}
    assert found == {'sweep.sh': '0,999', 'sweep-1.sh': '0', 'sweep-2.sh': '500'}
    for name, first in (('sweep.sh', 'point-0'), ('sweep-1.sh', 'point-1000'), ('sweep-2.sh', 'point-2500')):
        assert f']={first}' in files[name]
        assert f'$folder/{name}' in files[name], 'a task goes to other machines with its own script'
    logs = [re.search(r'--output=.*/(.*)', text)[1] for text in files.values()]
    assert logs == ['%a.log', '1-%a.log', '2-%a.log']


@pytest.mark.parametrize(('folder', 'output'), [('/x/my jobs', '"/x/my jobs/%a.log"'), ('/x/lr%j', '/x/lr%%j/%a.log')])
def test_slurm_writes_logs_into_folders_of_any_name(folder, output):
    files = FORMATS['slurm'].make_files(JOBS, ClusterOptions(), folder)
    assert f'#SBATCH --output={output}\n' in files['sweep.sh']


def test_slurm_tells_each_process_where_to_meet(emit, tmp_path):
    assert emit('slurm', '--gpus', '16', '--nodes', '2') == 0
    cluster = tmp_path / 'cluster'
    cluster.mkdir()
    environment = simulated_slurm.install(cluster, {str(i): [0] for i in range(5)})
    names = {'SLURM_NTASKS': '2', 'SLURM_PROCID': '1'}
    subprocess.run(['sbatch', tmp_path / 'slurm' / 'sweep.sh'], env=environment | names, check=True)
    assert json.loads((cluster / 'log.json').read_text())[4][3][4:] == [
        *('seed-4', '--coordinator_address', 'machine-0:8476', '--process_count', '2', '--process_id', '1')
    ]


def test_the_folder_of_the_sweep_is_all_that_a_machine_needs(emit, tmp_path, monkeypatch, capsys):
    assert emit('slurm', '--nodes', '2') == 0
    root, trained = tmp_path / 'root', []
    (processes,) = {point.experiment.mesh.processes for point in read_points(root)}
    assert processes == 2, 'a machine that is left alone must not train'
    monkeypatch.setattr(
        run, 'train_in_job', lambda experiment, path, job: trained.append((experiment.train.seed, path))
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'sweep.gin').unlink()
    assert main(['sweep', '--run_dir', str(root), '--index', '3']) == 0
    assert trained == [(3, str(root / 'seed-3'))]
    assert main(['sweep', '--run_dir', str(root), '--index', 'seed-2']) == 0
    assert trained[1:] == [(2, str(root / 'seed-2'))]
    assert main(['sweep', '--run_dir', str(root), '--index', 'seed2']) == 2
    assert '--index seed2: no point has this name; did you mean seed-2?' in capsys.readouterr().err
    assert main(['sweep', '--run_dir', str(root), '--count']) == 0
    assert capsys.readouterr().out == '5\n'
    assert main(['sweep', '--run_dir', str(root), '--index', '3', '--gin_param', 'train.seed = 1']) == 2
    assert 'the points in --run_dir are complete' in capsys.readouterr().err
    assert main(['sweep', '--run_dir', str(tmp_path / 'other'), '--index', '0']) == 2
    (root / 'points' / 'seed-1.gin').unlink()
    assert main(['sweep', '--run_dir', str(root), '--index', '3']) == 2
    assert 'seed-1.gin: no such file' in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(emit, tmp_path, capsys):
    (tmp_path / 'slurm').mkdir()
    (tmp_path / 'slurm' / 'thesis.tex').touch()
    assert emit('slurm') == 2
    assert 'holds other files; name an empty folder' in capsys.readouterr().err
    assert not (tmp_path / 'root').exists()
    assert emit('slurm', '--index', '0') == 2
    assert '--emit and --index 0: give one of them' in capsys.readouterr().err
    assert emit('slurm', '--nodes', '0') == 2


def test_a_point_that_is_trained_elsewhere_is_left_out(emit, tmp_path, capsys, monkeypatch):
    assert emit('slurm') == 0
    (tmp_path / 'root' / 'seed-2').mkdir()
    monkeypatch.setattr('lm.sweep.sweep.is_held', lambda path: path.name == 'seed-2')
    assert emit('slurm') == 0
    assert 'seed-2 is being trained and is left out' in capsys.readouterr().out
    assert '#SBATCH --array=0,1,3,4\n' in (tmp_path / 'slurm' / 'sweep.sh').read_text()
    assert sweep_file.read_wrong_machines(tmp_path / 'root') == []
