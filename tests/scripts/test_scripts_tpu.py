"""scripts/tpu: their commands (golden files), gcloud's syntax check, and the supervisor's actions when a pod
disappears.

After an intended change, write the golden files anew: LM_UPDATE_GOLDEN=1 pytest tests/scripts/test_scripts_tpu.py
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
import tiny
from fake_cloud import ROOT, FakeCloud

SCRIPTS = ROOT / 'scripts' / 'tpu'
GOLDEN = pathlib.Path(__file__).parents[1] / 'data' / 'tpu_dry_run'
DATA = """data.path = 'gs://b/it''s a "path"'"""
TRAIN = ('lm', 'train', '--gin_file', 'configs/models/small.gin', '--gin_param', DATA)
SETTINGS = {
    'PROJECT': 'my-project',
    'ZONE': 'us-central2-b',
    'TPU_NAME': 'lm',
    'ACCELERATOR_TYPE': 'v4-32',
    'RUN_DIR': 'gs://my-bucket/runs/small',
    'DATA_PATH': 'gs://my-bucket/tokens/pg19',
}
RESERVED = {
    'ACCELERATOR_TYPE': 'v6e-16',
    'PROVISIONING': 'reserved',
    'RESERVATION': 'our-chips',
    'NETWORK': 'net',
    'SUBNETWORK': 'sub',
    'SERVICE_ACCOUNT': 'lm@my-project.iam.gserviceaccount.com',
    'INTERNAL_IPS': '1',
}
SLICES = {'ACCELERATOR_TYPE': 'v6e-16', 'SLICES': '2'}
GKE = {'XPK_CLUSTER': 'c', 'GCLUSTER_CLUSTER': 'c'}
GKE |= dict.fromkeys(('XPK_IMAGE', 'GCLUSTER_IMAGE'), 'eu-docker.pkg.dev/p/r/lm')
NO_CHECKPOINT = {'AUTOCHECKPOINT': '0'}
DRY_RUNS = {
    'create': (['create.sh', '--wait'], {'VALID_UNTIL_DURATION': '6h'}),
    'create_reserved': (['create.sh'], RESERVED),
    'create_on_demand': (['create.sh'], {'PROVISIONING': 'on-demand', 'AUTOCHECKPOINT': '0'}),
    'create_flex_start': (['create.sh'], {'PROVISIONING': 'flex-start', 'MAX_RUN_DURATION': '7d'} | NO_CHECKPOINT),
    'create_reservation_bound': (['create.sh'], RESERVED | {'PROVISIONING': 'reservation-bound'}),
    'create_slices': (['create.sh'], SLICES),
    'supervise_slices': (['supervise.sh', *TRAIN], SLICES),
    'logs_slices': (['logs.sh'], SLICES),
    'setup': (['setup.sh'], {}),
    'setup_extras': (['setup.sh'], {'EXTRAS': 'tokenizers,wandb'}),
    'run': (['run.sh', *TRAIN], {'LOG_URL': 'gs://my-bucket/logs'}),
    'run_stop': (['run.sh', '--stop'], {'INTERNAL_IPS': '1'}),
    'status': (['status.sh'], {'TUNNEL_THROUGH_IAP': '1'}),
    'logs': (['logs.sh', '-n', '200', '--worker', '3', '--follow'], {}),
    'stacks': (['stacks.sh'], {}),
    'logs_fetch': (['logs.sh', '--fetch', 'logs of today'], {}),
    'preflight': (['preflight.sh', '--fix'], {}),
    'preflight_precision': (['preflight.sh', '--precision', '--gin_param', "model.dtype = 'bfloat16'"], {}),
    'preflight_burn_in': (['preflight.sh', '--burn-in', '30', '--gin_file', 'configs/models/small.gin'], {}),
    'supervise': (['supervise.sh', *TRAIN], {}),
    'sweep': (['sweep.sh', '2', 'lm', 'sweep', '--sweep_file', 'my sweep.gin', '--run_dir', 'gs://b/s'], {}),
    'delete': (['delete.sh'], {}),
    'prepare_data': (['prepare_data.sh', 'lm', 'prepare', *TRAIN[2:]], {'EXTRAS': 'parquet'}),
    'xpk': (['examples/xpk.sh', *TRAIN], GKE),
    'xpk_tpu7x': (['examples/xpk.sh', *TRAIN], GKE | {'ACCELERATOR_TYPE': 'tpu7x-4x4x4', 'SLICES': '2'}),
    'gcluster': (['examples/gcluster.sh', *TRAIN], GKE),
    'gcluster_tpu7x': (['examples/gcluster.sh', *TRAIN], GKE | {'ACCELERATOR_TYPE': 'tpu7x-16'}),
}


def dry_run(arguments: list[str], settings: dict[str, str], folder: pathlib.Path) -> str:
    """Returns the output of the script with DRY_RUN=1, without the names of this machine and of the last commit."""
    (folder / 'settings.env').write_text('\n'.join(f'{k}={v!r}' for k, v in SETTINGS.items()))
    (folder / 'bin').mkdir(exist_ok=True)
    trap = folder / 'bin' / 'gcloud'
    trap.write_text('#!/bin/sh\necho gcloud was called\nexit 1\n')
    trap.chmod(0o755)
    environment = {
        'LM_TPU_SETTINGS': str(folder / 'settings.env'),
        'DRY_RUN': '1',
        'PATH': f'{folder / "bin"}:{os.environ["PATH"]}',
    }
    done = subprocess.run(
        [str(SCRIPTS / arguments[0]), *arguments[1:]],
        env=os.environ | environment | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout
    return re.sub(r'\b[0-9a-f]{40}\b', 'COMMIT', done.stdout.replace(str(ROOT), 'ROOT'))


@pytest.mark.parametrize('name', DRY_RUNS)
def test_dry_run_prints_the_golden_commands(name, tmp_path):
    arguments, settings = DRY_RUNS[name]
    found = dry_run(arguments, settings, tmp_path)
    file = GOLDEN / f'{name}.txt'
    if os.environ.get('LM_UPDATE_GOLDEN'):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text()
    assert 'gcloud was called' not in found
    assert not list(tmp_path.glob('logs of today'))


def test_every_script_has_a_golden_file_and_help():
    scripts = {p.name for p in SCRIPTS.glob('*.sh')} - {'common.sh'}
    assert scripts == {arguments[0] for arguments, _ in DRY_RUNS.values()} - {'examples/xpk.sh', 'examples/gcluster.sh'}
    for script in sorted(scripts):
        done = subprocess.run([str(SCRIPTS / script), '-h'], capture_output=True, text=True, env={'PATH': os.defpath})
        assert done.returncode == 0, done.stderr
        assert f'scripts/tpu/{script}' in done.stdout


def test_the_documented_commands_run_dry(tmp_path):
    pages = [page.read_text() for page in tiny.PAGES if page.parent != ROOT]
    blocks = [block for page in pages for block in re.findall(r'```bash\n(.*?)```', page, re.DOTALL)]
    lines = {line for block in blocks for line in block.splitlines() if line.startswith('scripts/tpu/')}
    assert len(lines) >= 10
    for line in lines:
        words = shlex.split(line, comments=True)
        assert dry_run([words[0].removeprefix('scripts/tpu/'), *words[1:]], {}, tmp_path)


def golden_commands() -> dict[str, str]:
    """Returns one gcloud command line of the golden files per set of flags, with the name of its file."""
    found = {}
    for file in sorted(GOLDEN.glob('*.txt')):
        for line in file.read_text().splitlines():
            if line.startswith('gcloud '):
                words = shlex.split(line)
                key = ' '.join(w.partition('=')[0] for w in words if w.startswith('--')) + ' '.join(words[1:5])
                found.setdefault(key, f'{file.name}: {line}')
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('gcloud') is None, reason='no gcloud on this machine')
def test_gcloud_itself_accepts_every_command(tmp_path):
    environment = os.environ | {'CLOUDSDK_CONFIG': str(tmp_path), 'CLOUDSDK_CORE_DISABLE_PROMPTS': '1'}

    def lint(command: str) -> dict:
        # This runs gcloud's own parser and nothing else: nobody is logged in, and nothing is sent.
        done = subprocess.run(
            ['gcloud', 'meta', 'lint-gcloud-commands', f'--command-string={command}'],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return json.loads(done.stdout)[0]

    commands = [line.partition(': ')[2] for line in golden_commands().values()]
    assert len(commands) >= 12
    if lint('gcloud alpha compute tpus queued-resources list --zone=a')['success'] is not True:
        pytest.skip('gcloud has no alpha commands here')
    assert lint('gcloud compute tpus queued-resources delete a --zone=z --no-such-flag')['success'] is False
    for command in commands:
        # The linter splits badly at quotes; the value of --command may be any text.
        plain = re.sub(r"--command=('(?:[^']|'\\'')*'|\S+)", '--command=true', command)
        answer = lint(plain)
        assert answer['success'] is True, (command, answer['error_message'])


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (
            {'PROVISIONING': 'spott'},
            'PROVISIONING=spott: use spot, flex-start, reserved, reservation-bound or on-demand',
        ),
        ({'PROVISIONING': 'flex-start'}, 'needs MAX_RUN_DURATION, at most 7d'),
        ({'PROVISIONING': 'reservation-bound'}, 'needs RESERVATION, the name of the reservation'),
        ({'EXTRAS': 'wandb tokenizers'}, 'EXTRAS=wandb tokenizers: give names of extras, such as tokenizers,wandb'),
        ({'SLICES': 'two'}, 'SLICES=two: give a whole number of at least 1'),
        ({'MAX_ATTEMPTS': 'unlimited'}, 'MAX_ATTEMPTS=unlimited: give a whole number of at least 1'),
        ({'BACKOFF_SECONDS': '1m'}, 'BACKOFF_SECONDS=1m: give a whole number, without a unit'),
        ({'POLL_SECONDS': '1m'}, 'POLL_SECONDS=1m: give a number, without a unit'),
        ({'DEVICES': '0'}, 'DEVICES=0: give a whole number of at least 1, or nothing'),
        ({'ACCELERATOR_TYPE': 'tpu7x-16'}, 'is served by GKE only; see scripts/tpu/examples/gcluster.sh'),
        ({'ACCELERATOR_TYPE': 'v5e-16'}, 'gcloud calls it v5litepod-16'),
        ({'ACCELERATOR_TYPE': 'v9-16'}, 'unknown kind'),
        ({'RUN_NAME': 'a b'}, 'RUN_NAME=a b: use letters'),
        ({'ZONE': ''}, 'ZONE is not set'),
        *[({'TPU_NAME': name}, f'TPU_NAME={name}: use 1 to 63') for name in ('my_run', 'My', '1run', 'run-', 'a' * 64)],
        ({'RESERVATION': 'chips'}, 'needs PROVISIONING=reserved'),
    ],
)
def test_wrong_settings_are_one_error_line(settings, message, tmp_path):
    done = FakeCloud(tmp_path / 'cloud').run('create.sh', **settings)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / 'cloud' / 'gcloud.calls').exists()


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (['supervise.sh', *TRAIN, '--run_dir', 'runs/a'], '--run_dir runs/a: would be lost with the machines'),
        (['supervise.sh', *TRAIN, '--run_dir=~/a'], '--run_dir ~/a: would be lost'),
        (['sweep.sh', '2', 'lm', 'sweep', '--run_dir', 'sweeps/a'], '--run_dir sweeps/a: would be lost'),
        (['sweep.sh', '2', 'lm', 'sweep', '--sweep_file', 'a.gin'], 'no --run_dir; name the folder of the sweep'),
    ],
)
def test_run_directories_on_the_machines_are_refused(command, message, tmp_path):
    """The pod and its disks are deleted at the end, and by any preemption."""
    done = FakeCloud(tmp_path / 'cloud').run(*command)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / 'cloud' / 'gcloud.calls').exists()


SWEEP = ['lm', 'sweep', '--sweep_file', 'a.gin', '--run_dir', 'gs://b/s']


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (['2', *SWEEP, '--index', '1'], '--index: each point has a pod and an --index of its own'),
        (['2', *SWEEP, '--jobs=2'], '--jobs: each point has a pod'),
        (['2', *SWEEP, '--dry_run'], '--dry_run: each point has a pod'),
        (['2', 'lm', 'train', '--run_dir', 'gs://b/s'], 'lm train --run_dir gs://b/s: give a command of lm sweep'),
        (['5-3', *SWEEP], 'the range 5-3 is empty'),
    ],
)
def test_a_sweep_with_a_wrong_command_creates_no_pod(command, message, tmp_path):
    done = FakeCloud(tmp_path / 'cloud').run('sweep.sh', *command)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / 'cloud' / 'gcloud.calls').exists()


@pytest.mark.parametrize(
    ('counted', 'message'), [('echo 3', ''), ('exit 2', 'could not be counted'), ('echo x', 'in place of')]
)
def test_a_sweep_counts_its_points(counted, message, tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud')
    program = tmp_path / 'bin' / 'lm'
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\n{counted}\n')
    program.chmod(0o755)
    path = f'{program.parent}:{cloud.environment["PATH"]}'
    done = cloud.run('sweep.sh', *SWEEP, DRY_RUN='1', PATH=path)
    assert (tmp_path / 'asked').read_text() == f'{" ".join(SWEEP[1:])} --count\n'
    assert done.returncode == (2 if message else 0), done.stderr
    assert message in done.stderr
    assert [line.rpartition(' ')[2] for line in done.stdout.splitlines()] == ([] if message else ['0', '1', '2'])


def test_a_range_of_a_sweep_may_have_leading_zeros(tmp_path):
    printed = dry_run(['sweep.sh', '08-09', *SWEEP], {}, tmp_path)
    assert [line.rpartition(' ')[2] for line in printed.splitlines()] == ['8', '9']


def test_line_ends_of_windows_are_named(tmp_path):
    (tmp_path / 'settings.env').write_bytes(b'PROJECT=p\r\nZONE=z\r\n')
    environment = os.environ | {'LM_TPU_SETTINGS': str(tmp_path / 'settings.env'), 'DRY_RUN': '1'}
    done = subprocess.run([str(SCRIPTS / 'create.sh')], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert 'settings.env: has the line ends of Windows' in done.stderr


@pytest.mark.parametrize('form', ['--gin_file {}', '--gin_file={}', '--gin_file {root}/{}'])
def test_a_gin_file_that_is_not_committed_is_refused(form, tmp_path):
    name = f'configs/untracked_{os.getpid()}.gin'
    (ROOT / name).write_text('train.steps = 7\n')
    try:
        flags = form.format(name, root=ROOT).split()
        done = FakeCloud(tmp_path / 'cloud').run('supervise.sh', 'lm', 'train', *flags)
    finally:
        (ROOT / name).unlink()
    assert done.returncode == 2
    assert f'{name}: is not in the last commit, which is what the pod gets; commit it' in done.stderr
    assert not (tmp_path / 'cloud' / 'gcloud.calls').exists()


def test_a_misspelt_setting_is_refused(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud')
    cloud.settings['ACCELERATOR_TIPE'] = 'v4-8'
    done = cloud.run('create.sh')
    assert done.returncode == 2
    assert 'ACCELERATOR_TIPE is not a setting' in done.stderr


@pytest.mark.parametrize(
    ('kind', 'processes', 'devices', 'runtime'),
    [
        ('v2-8', 1, 8, 'tpu-ubuntu2204-base'),
        ('v3-32', 4, 32, 'tpu-ubuntu2204-base'),
        ('v4-8', 1, 4, 'tpu-ubuntu2204-base'),
        ('v5litepod-8', 1, 8, 'v2-alpha-tpuv5-lite'),
        ('v5litepod-16', 4, 16, 'v2-alpha-tpuv5-lite'),
        ('v5p-128', 16, 64, 'v2-alpha-tpuv5'),
        ('v6e-256', 64, 256, 'v2-alpha-tpuv6e'),
    ],
)
def test_processes_and_devices_of_an_accelerator_are_known(kind, processes, devices, runtime, tmp_path):
    printed = dry_run(['preflight.sh'], {'ACCELERATOR_TYPE': kind}, tmp_path)
    assert f'--processes {processes} --devices {devices} ' in printed
    assert f'--runtime-version={runtime} ' in dry_run(['create.sh'], {'ACCELERATOR_TYPE': kind}, tmp_path)


def test_processes_and_devices_of_slices_and_of_tpu7x_are_known(tmp_path):
    printed = dry_run(['preflight.sh'], SLICES, tmp_path)
    assert '--processes 8 --devices 32 ' in printed
    for kind, processes in (('tpu7x-8', 2), ('tpu7x-2x2x2', 4), ('tpu7x-128', 32)):
        printed = dry_run(['examples/xpk.sh', 'lm', 'train'], GKE | {'ACCELERATOR_TYPE': kind}, tmp_path)
        assert f'--tpu-type={kind} ' in printed
        assert f'mesh.processes = {processes}' in printed


def test_scripts_hold_no_secret():
    for file in [*SCRIPTS.rglob('*.sh'), SCRIPTS / 'Dockerfile', SCRIPTS / 'settings.env.example']:
        assert not re.search(r'(?i)token=|api_key|password|access-token|print-access-token', file.read_text()), file


def test_arguments_reach_the_workers_unchanged(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=2)
    nasty = ["a.b = 'x y'", 'quote " and \' and `date` and $HOME', '*', '', 'back\\slash', '&& false', 'ü\n2nd line']
    assert cloud.run('create.sh', '--wait').returncode == 0
    assert cloud.run('setup.sh').returncode == 0
    done = cloud.run('run.sh', 'lm', 'evaluate', *nasty)
    assert done.returncode == 0, done.stderr
    assert 'pod-w-0: started' in done.stdout
    assert 'pod-w-1: started' in done.stdout
    wait_for(lambda: cloud.run('status.sh').stdout.count('EXIT 0') == 2)
    for worker in range(2):
        assert cloud.lm_calls(worker=worker) == [['evaluate', *nasty, '--gin_param', 'mesh.processes = 2']]
    assert 'step 1 of 2' in cloud.run('logs.sh').stdout


def test_a_second_start_does_nothing_and_stop_ends_with_42(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    cloud.run('create.sh', '--wait')
    cloud.run('setup.sh')
    patient = ['bash', '-c', 'trap "exit 42" TERM; echo begun; while :; do sleep 0.05; done']
    assert 'started' in cloud.run('run.sh', *patient).stdout
    wait_for(lambda: 'RUNNING -  begun' in cloud.run('status.sh').stdout)
    assert 'already running' in cloud.run('run.sh', *patient).stdout
    other = cloud.run('run.sh', 'lm', 'train')
    assert other.returncode == 2
    assert 'another command' in other.stderr
    assert 'asked to stop' in cloud.run('run.sh', '--stop').stdout
    wait_for(lambda: 'EXIT 42' in cloud.run('status.sh').stdout)
    assert cloud.run('delete.sh').returncode == 0
    assert cloud.pods() == []


def wait_for(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'did not happen'
        time.sleep(0.1)


def test_three_preemptions_then_success_are_four_attempts_of_one_run(tmp_path):
    # The attempts: saved and ended; machines gone without a message; machines that do not answer.
    cloud = FakeCloud(tmp_path / 'cloud', scenario='42 preempt unreachable 0')
    done = cloud.run('supervise.sh', *TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [*TRAIN[1:], '--run_dir', 'gs://my-bucket/runs/small', '--gin_param', 'mesh.processes = 2']
    for worker in range(2):
        assert cloud.lm_calls(worker=worker) == [expected] * 4
    assert 'done after 4 attempt(s)' in done.stdout
    # After 42 the existing pod continues; the other two need a new pod.
    assert len(cloud.gcloud_calls('queued-resources', 'create')) == 3
    assert all('--autocheckpoint-enabled' in call for call in cloud.gcloud_calls('queued-resources', 'create'))
    assert cloud.pods() == []


def test_the_end_of_a_flex_start_term_is_a_preemption_of_all_slices(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario='preempt 0', workers=2)
    term = {'PROVISIONING': 'flex-start', 'MAX_RUN_DURATION': '4h', 'SLICES': '2', 'ACCELERATOR_TYPE': 'v4-8'}
    cloud.settings |= term
    done = cloud.run('supervise.sh', *TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'done after 2 attempt(s)' in done.stdout
    calls = cloud.gcloud_calls('queued-resources', 'create')
    assert len(calls) == 2
    assert all({'--max-run-duration=4h', '--node-count=2', '--node-prefix=pod'} <= set(call) for call in calls)
    assert cloud.lm_calls(worker=1)[0][-1] == 'mesh.processes = 2'
    assert all('--node=all' in call for call in cloud.gcloud_calls('ssh', '--worker=all'))
    assert cloud.gcloud_calls('ssh', '--worker=all')
    assert cloud.pods() == []


@pytest.mark.parametrize('scenario', ['43', '2', '1/43', '44/1'])
def test_codes_that_must_not_be_repeated_are_not_repeated(scenario, tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario=scenario)
    done = cloud.run('supervise.sh', *TRAIN)
    code = max(int(c) for c in scenario.split('/'))
    assert done.returncode == code, done.stdout + done.stderr
    assert len(cloud.lm_calls()) == 1
    assert f'exit code {code} is never repeated' in done.stdout
    assert 'step 1 of 2' in done.stdout, 'the end of the log is shown before the pod goes'
    assert cloud.pods() == []


def test_chips_that_compute_wrongly_are_left_for_another_pod(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario='1/45 0')
    done = cloud.run('supervise.sh', *TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'chips of pod compute wrongly: taking another pod' in done.stdout
    assert len(cloud.gcloud_calls('queued-resources', 'create')) == 2
    cloud = FakeCloud(tmp_path / 'again', scenario='45 45 45 45 45', workers=1)
    assert cloud.run('supervise.sh', *TRAIN).returncode == 45


def test_other_failures_are_repeated_a_few_times_only(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario='1 42 1 1 139 0', workers=1)
    done = cloud.run('supervise.sh', *TRAIN, DELETE_WHEN_DONE='success')
    assert done.returncode == 139, done.stdout + done.stderr
    assert len(cloud.lm_calls()) == 5
    assert cloud.pods() == ['pod']
    assert 'costs money' in done.stdout


def test_a_crash_of_one_worker_is_a_failure_and_its_log_is_shown(tmp_path):
    """The others save and end with 42, as after a preemption."""
    cloud = FakeCloud(tmp_path / 'cloud', scenario='42/137 42/137 42/137 42/137')
    done = cloud.run('supervise.sh', *TRAIN, MAX_FAILURES='2')
    assert done.returncode == 137, done.stdout + done.stderr
    assert len(cloud.lm_calls()) == 2
    assert 'pod-w-1: == exit code 137' in done.stdout
    assert 'pod-w-0: == exit code' not in done.stdout


def test_secrets_reach_the_jobs_and_no_log(tmp_path):
    """A later installation without them leaves none behind."""
    cloud, secrets = FakeCloud(tmp_path / 'cloud', workers=1), tmp_path / 'secrets'
    key = 'PLANTED' + 'KEY'  # the machines get a copy of this file
    secrets.write_text(f'# of the tracker\nWANDB_API_KEY={key}\n')
    secrets.chmod(0o644)
    refused = cloud.run('setup.sh', ENV_FILE=str(secrets))
    assert refused.returncode == 2
    assert 'others can read it; chmod 600' in refused.stderr
    secrets.chmod(0o600)
    assert cloud.run('create.sh', '--wait').returncode == 0
    done = cloud.run('setup.sh', ENV_FILE=str(secrets))
    assert done.returncode == 0, done.stdout + done.stderr
    home = cloud.path / 'pods' / 'pod' / 'home-0'
    assert (home / '.lm-env').stat().st_mode & 0o777 == 0o600
    started = cloud.run('run.sh', 'sh', '-c', '[ "${WANDB_API_KEY%KEY}" = PLANTED ] && echo the job has it')
    assert started.returncode == 0, started.stdout + started.stderr
    log = home / 'lm-jobs' / 'small' / 'log'
    for _ in range(300):
        if log.exists() and 'exit code' in log.read_text():
            break
        time.sleep(0.1)
    assert 'the job has it' in log.read_text()
    holders = [path.name for path in cloud.path.rglob('*') if path.is_file() and key.encode() in path.read_bytes()]
    assert holders == ['.lm-env']
    assert cloud.run('setup.sh').returncode == 0
    assert not (home / '.lm-env').exists()


OURS = {'PROJECT': 'ours', 'RUN_DIR': 'gs://ours/runs/small'}
"""Names that no example has."""


def checking(cloud: FakeCloud, code: int) -> None:
    """Puts an `lm` on this machine that notes its arguments and ends with `code`."""
    program = cloud.path / 'bin' / 'lm'
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{cloud.path}/checked\nexit {code}\n')
    program.chmod(0o755)


@pytest.mark.parametrize('script', ['supervise.sh', 'run.sh', 'sweep.sh'])
def test_no_pod_is_requested_if_the_check_refuses(script, tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    checking(cloud, 2)
    sweep = ['1', 'lm', 'sweep', '--sweep_file', 'a b.gin', '--run_dir=gs://b/s']
    settings = {'CHECK': '1', 'SWEEP_LOG_DIR': str(tmp_path / 'l')}
    done = cloud.run(script, *(sweep if script == 'sweep.sh' else TRAIN), **OURS, **settings)
    assert done.returncode == (1 if script == 'sweep.sh' else 2), done.stdout + done.stderr
    assert cloud.verbs() <= {'describe'}, 'a supervisor asks first whether the run goes on already'
    words = (cloud.path / 'checked').read_text().splitlines()
    run = ['--run_dir', OURS['RUN_DIR']]
    given = ['--sweep_file', 'a b.gin', '--index', '0'] if script == 'sweep.sh' else [*TRAIN[2:], *run]
    assert words == ['check', *given, '--topology', 'v4-8', '--if_possible']
    if script == 'run.sh':
        assert 'CHECK=0' in done.stderr


def test_a_sweep_whose_points_lie_in_its_folder_is_checked(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    checking(cloud, 2)
    command = ['lm', 'sweep', '--run_dir', 'gs://ours/s', '--index', '1']
    assert cloud.run('supervise.sh', *command, **OURS, CHECK='1').returncode == 2
    words = (cloud.path / 'checked').read_text().splitlines()
    assert words == ['check', '--index', '1', *command[2:4], '--topology', 'v4-8', '--if_possible']


def test_the_slice_of_the_settings_is_printed(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    asked = ['sweep.sh', '--slice', 'gs://ours/table']
    assert cloud.run(*asked, **OURS, CHECK='1').stdout == 'v4-8\n'
    assert cloud.run(*asked, **OURS, CHECK='1', SLICES='2').stdout == '2*v4-8\n'
    assert cloud.run(*asked, **OURS, CHECK='0').stdout == ''
    refused = cloud.run(*asked[:2], 'gs://my-bucket/table', **OURS, CHECK='1')
    assert refused.returncode == 2
    assert 'my-bucket is the name in the example' in refused.stderr


@pytest.mark.parametrize(
    ('given', 'settings', 'name'),
    [
        ([], {'RUN_DIR': OURS['RUN_DIR']}, 'PROJECT=my-project: my-project is'),
        ([], {'PROJECT': 'ours'}, 'RUN_DIR=gs://my-bucket/runs/small: my-bucket is'),
        (['--set', 'data.path=gs://my-bucket/tokens/pg19'], OURS, 'data.path=gs://my-bucket/tokens/pg19: my-bucket is'),
    ],
)
def test_names_of_the_examples_are_refused_before_a_pod_is_asked_for(given, settings, name, tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    checking(cloud, 0)
    done = cloud.run('supervise.sh', *TRAIN, *given, CHECK='1', **settings)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f'{name} the name in the example; write the name of your ' in done.stderr
    assert cloud.verbs() <= {'describe'}


def test_a_resumed_or_branched_run_is_checked_first(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    checking(cloud, 2)
    rewound = ['--run_dir', 'gs://b/a b', '--rewind_to', '40', '--gin_param', 'muon.rms = 0.2']
    branch = ['--run_dir=gs://b/new', '--branch_from', 'gs://b/run', '--step', '7']
    for given in (rewound, branch):
        assert cloud.run('run.sh', 'lm', 'train', *given, CHECK='1', **OURS).returncode == 2
    words = (cloud.path / 'checked').read_text().splitlines()
    end = ['--topology', 'v4-8', '--if_possible']
    assert words == [
        *('check', '--gin_param', 'muon.rms = 0.2', '--run_dir', 'gs://b/a b', *end),
        *('check', '--run_dir=gs://b/new', '--branch_from', 'gs://b/run', *end),
    ]


def test_a_supervisor_checks_once(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario='42 0', workers=1)
    checking(cloud, 0)
    done = cloud.run('supervise.sh', *TRAIN, CHECK='1', **OURS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (cloud.path / 'checked').read_text().splitlines().count('check') == 1
    assert len(cloud.lm_calls()) == 2


def test_the_number_of_attempts_has_a_limit(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario='42 42 42 0', workers=1)
    done = cloud.run('supervise.sh', *TRAIN, MAX_ATTEMPTS='3')
    assert done.returncode == 42
    assert len(cloud.lm_calls()) == 3


def test_sweep_has_a_pod_for_each_point(tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', workers=1)
    (tmp_path / 'cloud' / 'pod-2.scenario').write_text('43')
    logs = str(tmp_path / 'logs')
    command = ['lm', 'sweep', '--sweep_file', 'a b.gin', '--run_dir', 'gs://b/s']
    done = cloud.run('sweep.sh', '3', *command, SWEEP_LOG_DIR=logs, PARALLEL='2')
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [['0', '0'], ['1', '0'], ['2', '43']]
    for i in range(3):
        (call,) = cloud.lm_calls(pod=f'pod-{i}')
        assert call == [*command[1:], '--index', str(i), '--gin_param', 'mesh.processes = 1']
    assert cloud.pods() == []


@pytest.mark.parametrize('code', [0, 44])
def test_prepare_data_ends_with_the_code_and_deletes_the_machine(code, tmp_path):
    cloud = FakeCloud(tmp_path / 'cloud', scenario=str(code))
    done = cloud.run('prepare_data.sh', 'lm', 'prepare', '--gin_param', "data.path = 'gs://b/x'")
    assert done.returncode == code, done.stdout + done.stderr
    assert cloud.lm_calls(pod='pod-prepare') == [['prepare', '--gin_param', "data.path = 'gs://b/x'"]]
    (create,) = cloud.gcloud_calls('instances', 'create')
    assert '--instance-termination-action=DELETE' in create
    assert cloud.pods() == []


def test_uncommitted_changes_are_refused(tmp_path):
    clone = tmp_path / 'clone'
    clone.mkdir()
    shutil.copytree(SCRIPTS, clone / 'scripts' / 'tpu')
    git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', str(clone)]
    for command in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'a']):
        subprocess.run([*git, *command], check=True)
    (clone / 'scripts' / 'tpu' / 'run.sh').write_text('changed')
    (tmp_path / 'settings.env').write_text('\n'.join(f'{k}={v}' for k, v in SETTINGS.items()))
    done = subprocess.run(
        [str(clone / 'scripts' / 'tpu' / 'setup.sh')],
        env=os.environ | {'LM_TPU_SETTINGS': str(tmp_path / 'settings.env')},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert 'uncommitted changes would stay behind' in done.stderr


@pytest.fixture
def preflight():
    spec = importlib.util.spec_from_file_location('preflight', SCRIPTS / 'vm' / 'preflight.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_preflight_names_the_fault(preflight, tmp_path, monkeypatch):
    with pytest.raises(preflight.Problem, match='GB free, MIN_FREE_GB is 1e\\+09; remove'):
        preflight.check_disk(1e9)
    assert 'GB free' in preflight.check_disk(0)
    assert 'writable' in preflight.check_writable(str(tmp_path / 'runs'))
    assert list((tmp_path / 'runs').iterdir()) == []
    (tmp_path / 'file').write_text('')
    with pytest.raises(preflight.Problem, match='bucket: cannot write to'):
        preflight.check_writable(str(tmp_path / 'file'))

    monkeypatch.setattr(importlib.metadata, 'version', lambda package: '0.0.44.1')
    assert 'libtpu 0.0.44.1 has a fault' in preflight.check_libtpu()
    monkeypatch.setattr(importlib.metadata, 'version', lambda package: '0.0.42.1')
    assert preflight.check_libtpu() == 'no known fault of libtpu'

    monkeypatch.setattr(preflight, 'LOCK', tmp_path / 'libtpu_lockfile')
    assert preflight.check_lock(fix=False) == 'no lock'
    preflight.LOCK.write_text('')
    with pytest.raises(preflight.Problem, match='no process uses the TPU; remove it with'):
        preflight.check_lock(fix=False)
    assert preflight.check_lock(fix=True) == 'stale lock removed'
    assert not preflight.LOCK.exists()


def test_preflight_sees_a_process_that_has_the_tpu_open(preflight, tmp_path):
    device = tmp_path / 'accel0'
    device.write_text('')
    with subprocess.Popen(['sleep', '30'], stdin=device.open()) as sleeper:
        assert preflight.holders((str(device),)) == [sleeper.pid]
        sleeper.kill()


def test_preflight_ends_with_44_if_the_store_has_another_tokenizer(tokens, tmp_path):
    def run(data: pathlib.Path, devices: int = 1) -> subprocess.CompletedProcess:
        command = [sys.executable, str(SCRIPTS / 'vm' / 'preflight.py'), '--processes', '1', '--devices', str(devices)]
        return subprocess.run(
            [*command, '--min_free_gb', '0', '--writable', str(tmp_path), '--data', str(data)],
            env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'LIBTPU_LOCKFILE': str(tmp_path / 'lock')},
            capture_output=True,
            text=True,
            timeout=120,
        )

    fine = run(tokens)
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert ' ok: ' in fine.stdout
    copy = tmp_path / 'copy'
    shutil.copytree(tokens, copy)
    (copy / 'tokenizer.model').write_bytes((copy / 'tokenizer.model').read_bytes() + b' ')
    wrong = run(copy, devices=4)
    assert wrong.returncode == 44
    assert 'FAIL data: ' in wrong.stdout
    assert 'FAIL devices: 1 instead of DEVICES=4' in wrong.stdout


def test_shellcheck_is_clean():
    # This is the pinned one of the test requirements, beside this Python: other versions have other rules.
    program = shutil.which('shellcheck', path=str(pathlib.Path(sys.executable).parent)) or shutil.which('shellcheck')
    if program is None:
        pytest.skip('shellcheck is not installed: pip install -e .[test]')
    files = sorted(str(p) for p in (ROOT / 'scripts').rglob('*.sh'))
    done = subprocess.run([program, '-x', '-P', 'SCRIPTDIR', *files], capture_output=True, text=True, cwd=SCRIPTS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('name', ['prepare_data', 'create', 'setup', 'run'])
def test_the_page_explains_each_step_of_a_dry_run(name):
    """Its rows are the lines that the script prints, in this order."""
    page = (tiny.ROOT / 'docs' / 'tutorials' / 'pod.md').read_text()
    if name == 'prepare_data':
        part = page.partition('## 4. Prepare the data')[2].partition('## 5.')[0]
        rows = re.findall(r'^\| `([^`]+)` \| [^|]+ \|$', part, re.MULTILINE)
    else:
        rows = re.findall(rf'^\| `{name}\.sh` \| `([^`]+)` \| ', page, re.MULTILINE)
    printed = [line for line in (GOLDEN / f'{name}.txt').read_text().splitlines() if not line.startswith(f'{name}.sh:')]
    assert len(rows) == len(printed) > 1
    assert all(line.startswith(row) for row, line in zip(rows, printed, strict=True))
    # What has a quota has the size that the script asks for.
    if name == 'prepare_data':
        text = ' '.join(printed)
        assert re.search(r'--machine-type=(\S+)', text)[1] in page
        assert f'PREPARE_DISK_GB={re.search(r"--boot-disk-size=([0-9]+)GB", text)[1]}' in page
