"""scripts/tpu against a failing service, a closed terminal and a user who edits files.

No run is lost, no working machine is deleted, and no machine keeps costing money without a message.
"""

import json
import os
import threading
import time

import pytest
from fake_cloud import FakeCloud

COMMAND = ('lm', 'train', '--gin_file', 'a b.gin')
PREPARE = ('lm', 'prepare', '--gin_param', "data.path = 'gs://b/x'")


@pytest.fixture
def cloud(tmp_path) -> FakeCloud:
    return FakeCloud(tmp_path / 'cloud', scenario='0 43', workers=2)


@pytest.fixture
def running(cloud):
    """Starts a pod whose job runs until it is released, without a supervisor."""
    cloud.hold()
    assert cloud.run('create.sh', '--wait').returncode == 0
    assert cloud.run('setup.sh').returncode == 0
    assert cloud.run('run.sh', *COMMAND).returncode == 0
    wait_for(lambda: cloud.lm_calls() and cloud.lm_calls(worker=1))
    yield cloud
    cloud.release()


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, 'did not happen'
        time.sleep(0.1)


def read_to(what: str, stream) -> None:
    for line in stream:
        if what in line:
            return
    pytest.fail(f'{what!r} was never said')


def assert_joins(cloud, **settings: str) -> None:
    supervisor = cloud.start('supervise.sh', *COMMAND, **settings)
    read_to('joining the job that runs on pod', supervisor.stdout)
    cloud.release()
    out, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, out + err
    assert len(cloud.lm_calls()) == len(cloud.lm_calls(worker=1)) == 1
    assert len(cloud.gcloud_calls('queued-resources', 'create')) == 1
    assert len(cloud.gcloud_calls('queued-resources', 'delete')) == 1, 'once, at the end'
    assert cloud.pods() == []


def test_a_supervisor_joins_a_running_job_as_it_is(running):
    set_up = len(running.gcloud_calls('scp'))
    running.change_the_checkout()
    assert_joins(running, ALLOW_DIRTY='0', CHECK='1')
    assert len(running.gcloud_calls('scp')) == set_up


@pytest.mark.parametrize(('what', 'times'), [('all', 25), ('tpu-vm describe', 4), ('tpu-vm ssh', 4)])
def test_failed_requests_are_repeated(what, times, running):
    running.fail(what, times)
    assert_joins(running, POLL_SECONDS='0.02')


def test_a_network_failure_while_a_job_is_watched_is_survived(running):
    supervisor = running.start('supervise.sh', *COMMAND)
    read_to('joining', supervisor.stdout)
    running.fail('all', 12)
    read_to('workers answer', supervisor.stdout)
    running.release()
    out, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, out + err
    assert len(running.lm_calls()) == 1
    assert len(running.gcloud_calls('queued-resources', 'delete')) == 1


def test_a_pod_with_another_command_is_left_alone(running):
    done = running.run('supervise.sh', *COMMAND, '--seed', '1')
    assert done.returncode == 2
    assert 'another command runs on pod, which is left as it is' in done.stdout
    assert running.pods() == ['pod']
    assert running.run('status.sh').stdout.count('RUNNING') == 2


def test_a_pod_on_which_another_run_trains_is_left_alone(running):
    done = running.run('supervise.sh', *COMMAND, RUN_DIR='gs://my-bucket/runs/second')
    assert done.returncode == 2, done.stdout + done.stderr
    assert 'another command runs on pod, which is left as it is: step 1 of 2' in done.stdout
    again = running.run('run.sh', *COMMAND, RUN_DIR='gs://my-bucket/runs/second')
    assert again.returncode != 0
    assert 'the job small runs; stop it with RUN_NAME=small scripts/tpu/run.sh --stop' in again.stderr
    assert running.pods() == ['pod']
    assert len(running.lm_calls()) == 1
    assert running.run('status.sh').stdout.count('RUNNING') == 2


def test_a_pod_that_never_answered_is_kept(running):
    running.fail('tpu-vm ssh', 1000)
    running.fail('tpu-vm scp', 1000)
    done = running.run('supervise.sh', *COMMAND, POLL_SECONDS='0.02')
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'no worker of pod ever answered here' in done.stdout
    assert running.pods() == ['pod']


@pytest.fixture
def healthy(running):
    """The same pod, whose run renews its lease in the bucket. No worker answers."""
    lease = running.path / 'bucket' / 'my-bucket' / 'runs' / 'small' / 'lock.json'
    lease.parent.mkdir(parents=True)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.02):
            new = lease.with_suffix('.new')
            new.write_text(json.dumps({'host': 'pod-w-0', 'renewed': time.time()}))
            new.replace(lease)

    heart = threading.Thread(target=renew)
    heart.start()
    yield running
    over.set()
    heart.join()


def test_a_healthy_run_whose_workers_do_not_answer_is_left_alone(healthy):
    supervisor = healthy.start('supervise.sh', *COMMAND, MAX_LOST_POLLS='2')
    read_to('joining', supervisor.stdout)
    healthy.fail('tpu-vm ssh', 30)
    read_to('the run renews its lease, so it is healthy', supervisor.stdout)
    healthy.fail('tpu-vm ssh', 0)
    healthy.release()
    out, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, out + err
    assert len(healthy.lm_calls()) == 1
    assert len(healthy.gcloud_calls('queued-resources', 'create')) == 1


def test_a_supervisor_that_never_reaches_a_healthy_run_deletes_nothing(healthy):
    healthy.fail('tpu-vm ssh', 1000)
    healthy.fail('tpu-vm scp', 1000)
    done = healthy.run('supervise.sh', *COMMAND, MAX_ATTEMPTS='3', POLL_SECONDS='0.02')
    assert done.returncode == 42, done.stdout + done.stderr
    assert 'renews its lease: pod is left as it is, and costs money' in done.stdout
    assert healthy.pods() == ['pod']


def test_a_silent_lease_saves_no_pod(healthy):
    lease = healthy.path / 'bucket' / 'my-bucket' / 'runs' / 'old' / 'lock.json'
    lease.parent.mkdir()
    lease.write_text('{}')
    (healthy.path / 'pods' / 'pod' / 'state').write_text('SUSPENDED')
    healthy.release()
    done = healthy.run('supervise.sh', *COMMAND, RUN_DIR='gs://my-bucket/runs/old')
    assert done.returncode == 43, done.stdout + done.stderr  # the second start of the scenario
    assert len(healthy.gcloud_calls('queued-resources', 'create')) == 2


@pytest.mark.parametrize('state', ['SUSPENDED', 'FAILED'])
def test_a_pod_of_somebody_else_is_never_deleted(state, cloud):
    theirs = cloud.path / 'pods' / 'pod'
    theirs.mkdir(parents=True)
    (theirs / 'state').write_text(state)
    done = cloud.run('supervise.sh', *COMMAND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'pod was not created from this checkout, and is left as it is' in done.stdout
    assert cloud.pods() == ['pod']
    assert cloud.run('delete.sh').returncode == 0
    assert cloud.pods() == []


def test_stacks_reach_a_program_that_expects_the_signal_and_no_other(cloud):
    program = 'import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); print("begun", flush=True)'
    assert cloud.run('create.sh', '--wait').returncode == 0
    assert cloud.run('setup.sh').returncode == 0
    for body, shown in (
        (f'{program}; time.sleep(30)', 'most recent call first'),
        ('time.sleep(30)', 'no lm runs here'),
    ):
        assert cloud.run('run.sh', 'python', '-c', f'import time; {body}').returncode == 0
        wait_for(lambda body=body: 'begun' in cloud.run('status.sh').stdout or 'faulthandler' not in body)
        assert cloud.run('stacks.sh').stdout.count(shown) == 2
        assert cloud.run('status.sh').stdout.count('RUNNING') == 2
        cloud.run('run.sh', '--stop')
        wait_for(lambda: cloud.run('status.sh').stdout.count('EXIT') == 2)


def test_uncommitted_changes_are_refused_before_a_pod_is_asked_for(cloud):
    cloud.change_the_checkout()
    done = cloud.run('supervise.sh', *COMMAND, ALLOW_DIRTY='0')
    assert done.returncode == 2
    assert 'uncommitted changes would stay behind' in done.stderr
    assert cloud.verbs() == {'describe'}


def test_a_clone_without_history_is_refused_before_a_pod_is_asked_for(cloud):
    cloud.answer_git('--is-shallow-repository', 'true')
    done = cloud.run('supervise.sh', *COMMAND)
    assert done.returncode == 2
    assert 'a clone without its history cannot be shipped; git fetch --unshallow completes it' in done.stderr
    assert cloud.verbs() == {'describe'}


def test_a_worker_that_did_not_start_is_started(running):
    # The state is as if ssh had not reached the second worker when the job was started.
    home = running.path / 'pods' / 'pod' / 'home-1'
    (home / 'lm-jobs').rename(home / 'others')
    running.path.joinpath('scenario').write_text('0 0')
    supervisor = running.start('supervise.sh', *COMMAND)
    wait_for(lambda: len(running.lm_calls(worker=1)) == 2)
    running.release()
    out, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, out + err
    assert (len(running.lm_calls()), len(running.lm_calls(worker=1))) == (1, 2)


def test_failures_after_progress_do_not_count_as_consecutive(cloud):
    cloud.path.joinpath('scenario').write_text('1 1 1 1 0')
    done = cloud.run('supervise.sh', *COMMAND, RESET_SECONDS='0')
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cloud.lm_calls()) == 5


def test_edits_during_a_run_do_not_change_the_run(cloud):
    cloud.path.joinpath('scenario').write_text('42 preempt 0')
    cloud.settings['ALLOW_DIRTY'] = '0'
    # The state of this test's own checkout must not matter: the fake git shows a clean one until it is changed.
    cloud.answer_git(' status ', '')
    cloud.hold()
    supervisor = cloud.start('supervise.sh', *COMMAND)
    wait_for(lambda: cloud.lm_calls())
    cloud.change_the_checkout()
    settings = cloud.path / 'settings.env'
    settings.write_text(settings.read_text().replace("TPU_NAME='pod'", "TPU_NAME='other'\nMISSPELT=1"))
    cloud.release()
    out, err = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, out + err
    assert len(cloud.lm_calls()) == 3
    assert not [call for call in cloud.gcloud_calls() if 'other' in call]
    assert cloud.pods() == []


def start_preparation(cloud):
    """Starts a preparation that works until it is released."""
    cloud.hold()
    preparation = cloud.start('prepare_data.sh', *PREPARE)
    wait_for(lambda: cloud.lm_calls(pod='pod-prepare'))
    return preparation


def test_a_preparation_is_waited_for_while_its_machine_does_not_answer(cloud):
    preparation = start_preparation(cloud)
    cloud.fail('compute ssh', 15)
    cloud.fail('instances describe', 5)
    wait_for(lambda: cloud.fails_left('compute ssh') == 0)
    cloud.release()
    out, err = preparation.communicate(timeout=60)
    assert preparation.returncode == 0, out + err
    assert len(cloud.lm_calls(pod='pod-prepare')) == 1
    assert cloud.pods() == []


def test_a_preparation_is_joined_from_a_changed_checkout(cloud):
    preparation = start_preparation(cloud)
    preparation.terminate()
    assert preparation.wait(20) == 130
    assert 'Join again' in preparation.communicate()[1]
    cloud.change_the_checkout()
    again = cloud.start('prepare_data.sh', *PREPARE, ALLOW_DIRTY='0')
    read_to('joining', again.stderr)
    cloud.release()
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, out + err
    assert len(cloud.lm_calls(pod='pod-prepare')) == 1
    assert cloud.pods() == []


def test_a_preparation_whose_machine_is_gone_ends_with_1(cloud):
    preparation = start_preparation(cloud)
    os.rename(cloud.path / 'pods' / 'pod-prepare', cloud.path / 'gone')
    out, err = preparation.communicate(timeout=60)
    assert preparation.returncode == 1, out + err
    assert 'pod-prepare is gone' in err
    cloud.release()


def test_a_machine_that_another_preparation_uses_is_left_alone(cloud):
    preparation = start_preparation(cloud)
    for more, settings in ((['--seed', '1'], {}), ([], {'RUN_DIR': 'gs://my-bucket/runs/second'})):
        done = cloud.run('prepare_data.sh', *PREPARE, *more, **settings)
        assert done.returncode == 2
        assert 'another command runs; pod-prepare is left as it is' in done.stderr
    assert len(cloud.lm_calls(pod='pod-prepare')) == 1
    cloud.release()
    out, err = preparation.communicate(timeout=60)
    assert preparation.returncode == 0, out + err
