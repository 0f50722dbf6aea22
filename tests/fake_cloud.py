"""A simulated Google Cloud: a `gcloud` for the PATH whose machines are folders, and an `lm` that plays a scenario.

This file, run as a program, is that `gcloud`. ssh runs the command with bash, once per worker, in the worker's own home
directory. So quoting, set-up and the scripts of the machines are real; uv, hostname and lm are simulated. The machines
get a repository of one commit in place of this one, whose history takes each of them a second.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

LM = r"""#!/usr/bin/env python3
import json, os, pathlib, sys, time
if sys.argv[1:] == ['--help']:
    sys.exit(0)
cloud, pod, worker = (os.environ[name] for name in ('FAKE_CLOUD', 'FAKE_POD', 'FAKE_WORKER'))
calls = pathlib.Path(cloud, f'{pod}.{worker}.calls')
number = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open('a') as file:
    file.write(json.dumps(sys.argv[1:]) + '\n')
print('step 1 of 2', flush=True)
scenario = pathlib.Path(cloud, f'{pod}.scenario')
if not scenario.exists():
    scenario = pathlib.Path(cloud, 'scenario')
what = scenario.read_text().split()[number]
end = time.monotonic() + 120
while pathlib.Path(cloud, 'hold').exists() and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.1)
if what == 'preempt':  # the machines vanish, nothing is written down
    state = pathlib.Path(cloud, 'pods', pod, 'state')
    new = state.with_name(f'state.{worker}')
    new.write_text('SUSPENDED')
    new.replace(state)
    time.sleep(0.5)
    sys.exit(1)
if what == 'unreachable':  # the service says that all is well, ssh does not answer
    pathlib.Path(cloud, 'pods', pod, 'unreachable').touch()
    time.sleep(0.5)
    sys.exit(1)
first, _, others = what.partition('/')
sys.exit(int(first if worker == '0' or not others else others))
"""

UV = r"""#!/usr/bin/env bash
# `uv venv` and `uv pip install` of vm/setup.sh; the machine gets the working tree's scripts, not the last commit's.
set -euo pipefail
if [ "$1" = venv ]; then
  mkdir -p "${@: -1}/bin" lm/scripts/tpu
  cp "$FAKE_CLOUD/lm" "${@: -1}/bin/lm"
  ln -sf "$FAKE_PYTHON" "${@: -1}/bin/python"
  rm -rf lm/scripts/tpu/vm
  cp -r "$FAKE_ROOT/scripts/tpu/vm" lm/scripts/tpu/vm
fi
"""

GIT = r"""#!/bin/sh
case "$*" in
  *' rev-parse HEAD' | *' bundle create '*)
    shift 2
    set -- -C "$FAKE_CLOUD/repository" "$@"
    ;;
esac
exec "$FAKE_GIT" "$@"
"""


class FakeCloud:
    """A folder `path` with bin/gcloud; `scenario` lists what each start of `lm` does: an exit code, preempt,
    unreachable."""

    def __init__(self, path: pathlib.Path, scenario: str = '0', workers: int = 2):
        self.path = path
        (path / 'bin').mkdir(parents=True)
        (path / 'scenario').write_text(scenario)
        programs = {
            'bin/gcloud': f'#!/bin/sh\nexec {sys.executable} {pathlib.Path(__file__)} "$@"\n',
            'bin/git': GIT,
            'bin/uv': UV,
            'bin/hostname': '#!/bin/sh\necho "$FAKE_POD-w-$FAKE_WORKER"\n',
            'lm': LM,
        }
        for name, text in programs.items():
            (path / name).write_text(text)
            (path / name).chmod(0o755)
        self.make_repository()
        self.settings = {
            'PROJECT': 'my-project',
            'ZONE': 'us-central2-b',
            'TPU_NAME': 'pod',
            'ACCELERATOR_TYPE': f'v4-{8 * workers}',
            'RUN_DIR': 'gs://my-bucket/runs/small',
            'POLL_SECONDS': '0.1',
            'LEASE_SECONDS': '0.05',
            'BACKOFF_SECONDS': '0',
            'ALLOW_DIRTY': '1',
            'CHECK': '0',
        }
        self.environment = {
            'PATH': f'{path / "bin"}:{os.environ["PATH"]}',
            'FAKE_CLOUD': str(path),
            'FAKE_GIT': shutil.which('git'),
            'FAKE_ROOT': str(ROOT),
            'FAKE_PYTHON': sys.executable,
            'FAKE_WORKERS': str(workers),
            'RETRY_SECONDS': '0',
            'LM_TPU_STATE': str(path / 'state'),
        }

    def make_repository(self) -> None:
        """Makes the repository of one commit that the machines get."""
        git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', str(self.path / 'repository')]
        subprocess.run(['git', 'init', '-q', self.path / 'repository'], check=True)
        subprocess.run([*git, 'commit', '-q', '--allow-empty', '-m', 'a'], check=True)

    def run(self, script: str, *arguments: str, timeout: float = 120, **settings: str) -> subprocess.CompletedProcess:
        """Runs scripts/tpu/SCRIPT with these arguments, settings and environment, to its end."""
        process = self.start(script, *arguments, **settings)
        with process:
            out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, script: str, *arguments: str, **settings: str) -> subprocess.Popen:
        """Starts the same without waiting."""
        file = self.path / 'settings.env'
        file.write_text(''.join(f"{k}='{v}'\n" for k, v in self.settings.items()))
        return subprocess.Popen(
            [str(ROOT / 'scripts' / 'tpu' / script), *arguments],
            env=os.environ | self.environment | {'LM_TPU_SETTINGS': str(file)} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.path,
        )

    def hold(self) -> None:
        """Makes every `lm` run on until `release`."""
        (self.path / 'hold').touch()

    def release(self) -> None:
        (self.path / 'hold').unlink(missing_ok=True)

    def change_the_checkout(self) -> None:
        """Makes git report an uncommitted change from now on."""
        self.answer_git(' status ', ' M lm/cli.py')

    def answer_git(self, words: str, answer: str) -> None:
        """Makes git answer this to calls with these words from now on."""
        program = self.path / 'bin' / 'git'
        program.write_text(GIT.replace('esac', f'  *"{words}"*) echo "{answer}"; exit ;;\nesac'))

    def fail(self, what: str, times: int) -> None:
        """Makes the next `times` calls of gcloud fail: `all` calls, or the calls of a `KIND VERB` such as
        `tpu-vm ssh`."""
        write(self.path / f'fails {what}', str(times))

    def fails_left(self, what: str) -> int:
        return int((self.path / f'fails {what}').read_text())

    def lm_calls(self, pod: str = 'pod', worker: int = 0) -> list[list[str]]:
        """Returns the arguments of each start of `lm` on this worker."""
        file = self.path / f'{pod}.{worker}.calls'
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def gcloud_calls(self, *words: str) -> list[list[str]]:
        """Returns the calls of gcloud whose arguments contain all these words."""
        calls = [json.loads(line) for line in (self.path / 'gcloud.calls').read_text().splitlines()]
        return [call for call in calls if all(word in call for word in words)]

    def verbs(self) -> set[str]:
        """Returns the verbs with which gcloud was called: create, describe, ssh, …"""
        file = self.path / 'gcloud.calls'
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {word for call in calls for word in call if word in ('create', 'describe', 'delete', 'ssh', 'scp')}

    def pods(self) -> list[str]:
        """Returns the pods and machines that exist, and so cost money."""
        folder = self.path / 'pods'
        return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def main() -> int:
    arguments = sys.argv[1:]
    cloud = pathlib.Path(os.environ['FAKE_CLOUD'])
    with (cloud / 'gcloud.calls').open('a') as file:
        file.write(json.dumps(arguments) + '\n')
    words = [a for a in arguments if not a.startswith('--') and a != 'alpha']
    flags = dict(a[2:].partition('=')[::2] for a in arguments if a.startswith('--'))
    kind, *rest = words[2:] if words[1] == 'tpus' else words[1:]
    if words[0] == 'storage':  # gcloud storage cat gs://…: files of the folder `bucket`; nothing else of it is there
        file = cloud / 'bucket' / words[-1].removeprefix('gs://')
        if words[1] != 'cat' or not file.exists():
            return 1
        print(file.read_text())
        return 0
    if kind in ('ssh', 'scp'):  # gcloud compute ssh
        kind, rest = 'compute', [kind, *rest]
    verb, *rest = rest
    if fails(cloud, f'{kind} {verb}') or fails(cloud, 'all'):
        print('ERROR: the connection was reset', file=sys.stderr)
        return 1
    if verb == 'scp':
        *sources, target = rest
        pod, _, name = target.partition(':')
        return copy(cloud / 'pods' / pod, sources, name)
    pod = cloud / 'pods' / rest[0]
    if kind == 'tpu-vm' and not pod.exists():  # one of several slices
        pod = pod.with_name(pod.name.rpartition('-')[0])
    if verb == 'create':
        pod.mkdir(parents=True)
        (pod / 'state').write_text('WAITING_FOR_RESOURCES' if kind == 'queued-resources' else 'ACTIVE')
        return 0
    if not pod.exists():
        print(f'ERROR: ({".".join(words[:4])}) NOT_FOUND: Resource {rest[0]!r} was not found', file=sys.stderr)
        return 1
    state = (pod / 'state').read_text()
    if verb == 'describe':
        if kind == 'queued-resources':
            print(state)
            following = {'WAITING_FOR_RESOURCES': 'PROVISIONING', 'PROVISIONING': 'ACTIVE'}
            if state in following:
                write(pod / 'state', following[state])
        else:
            print('READY' if state == 'ACTIVE' else 'PREEMPTED')
        return 0
    if verb == 'delete':
        shutil.rmtree(pod)
        return 0
    if verb == 'ssh':
        if not is_reachable(pod):
            return 255
        chosen = range(workers(pod)) if flags.get('worker', 'all') == 'all' else [int(flags['worker'])]
        answers = [ssh(pod, worker, flags['command']) for worker in chosen]
        if not is_reachable(pod):  # the machine has gone meanwhile: a deleted machine says nothing
            return 255
        for answer in answers:
            sys.stdout.write(answer.stdout)
            sys.stderr.write(answer.stderr)
        return next((answer.returncode for answer in answers if answer.returncode), 0)
    raise SystemExit(f'fake gcloud: {arguments}')


def write(file: pathlib.Path, text: str) -> None:
    """Writes the file in one step, since other processes read it meanwhile."""
    new = file.with_name(f'{file.name}.{os.getpid()}')
    new.write_text(text)
    new.replace(file)


def fails(cloud: pathlib.Path, what: str) -> bool:
    file = cloud / f'fails {what}'
    left = int(file.read_text()) if file.exists() else 0
    if left:
        write(file, str(left - 1))
    return left > 0


def workers(pod: pathlib.Path) -> int:
    return 1 if pod.name.endswith('-prepare') else int(os.environ['FAKE_WORKERS'])


def is_reachable(pod: pathlib.Path) -> bool:
    try:
        return (pod / 'state').read_text() == 'ACTIVE' and not (pod / 'unreachable').exists()
    except FileNotFoundError:
        return False


def copy(pod: pathlib.Path, sources: list[str], name: str) -> int:
    if not is_reachable(pod):
        return 255
    for worker in range(workers(pod)):
        home = pod / f'home-{worker}'
        home.mkdir(exist_ok=True)
        for source in sources:
            shutil.copy(source, home / name)
    return 0


def ssh(pod: pathlib.Path, worker: int, command: str) -> subprocess.CompletedProcess:
    home = pod / f'home-{worker}'
    home.mkdir(exist_ok=True)
    environment = os.environ | {'HOME': str(home), 'FAKE_POD': pod.name, 'FAKE_WORKER': str(worker)}
    for name in [n for n in environment if n.isupper() and n in ('PROJECT', 'ZONE', 'TPU_NAME', 'RUN_NAME', 'RUN_DIR')]:
        del environment[name]
    return subprocess.run(['bash', '-c', command], env=environment, cwd=home, capture_output=True, text=True)


if __name__ == '__main__':
    sys.exit(main())
