"""Runs on every machine of a pod before training. Reports each problem in one line.

Exit codes: 0 all is well, 44 the tokenizer does not match the data, 1 anything else.
"""

import argparse
import glob
import os
import pathlib
import shutil
import socket
import sys
import threading
import uuid

LOCK = pathlib.Path(os.environ.get('LIBTPU_LOCKFILE', '/tmp/libtpu_lockfile'))
JOIN_SECONDS = 300
"""The limit of the wait. Without it, the others would wait for ever for a missing worker."""


class Problem(Exception):
    """A problem and its remedy, in one line."""

    exit_code = 1


class WrongTokenizer(Problem):
    exit_code = 44


def check_disk(least_gb: float) -> str:
    free = shutil.disk_usage(pathlib.Path.home()).free / 1e9
    if free < least_gb:
        raise Problem(f'disk: {free:.1f} GB free, MIN_FREE_GB is {least_gb:g}; remove old files or recreate the pod')
    return f'{free:.0f} GB free'


def holders(patterns: tuple[str, ...] = ('/dev/accel', '/dev/vfio/')) -> list[int]:
    """Returns the processes with an open TPU, among the processes that this user may inspect."""
    found = set()
    for link in glob.glob('/proc/[0-9]*/fd/*'):
        try:
            if os.readlink(link).startswith(patterns):
                found.add(int(link.split('/')[2]))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return sorted(found - {os.getpid()})


def check_lock(fix: bool) -> str:
    """Checks the file that libtpu leaves behind when a process is killed. The file stops the next process."""
    using = holders()
    if using:
        raise Problem(f'tpu: in use by process {using[0]}; stop it with scripts/tpu/run.sh --stop, or kill {using[0]}')
    if not LOCK.exists():
        return 'no lock'
    remedy = f'remove it with scripts/tpu/preflight.sh --fix, or sudo rm {LOCK}'
    if not fix:
        raise Problem(f'lock: {LOCK} is there but no process uses the TPU; {remedy}')
    try:
        LOCK.unlink()
    except OSError as error:
        raise Problem(f'lock: {LOCK}: {error.strerror}; sudo rm {LOCK}') from None
    return 'stale lock removed'


def check_writable(url: str) -> str:
    """Writes, reads and removes a small file through the library that writes the run directory."""
    from etils import epath

    probe = epath.Path(url) / f'.preflight-{socket.gethostname()}-{uuid.uuid4().hex[:8]}'
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text('lm')
        if probe.read_text() != 'lm':
            raise OSError('reads back something else')
        probe.unlink()
    except Exception as error:  # every file system raises another type
        text = ' '.join(str(error).split())[:300]
        raise Problem(
            f'bucket: cannot write to {url} ({type(error).__name__}: {text}); give the service account of the TPU '
            'the role Storage Object Admin on the bucket'
        ) from None
    return f'{url} writable'


def check_tokenizer(path: str) -> str:
    from lm.data.store import TokenStore
    from lm.errors import LmError

    try:
        store = TokenStore.open(path)
        store.tokenizer()
    except LmError as error:
        raise WrongTokenizer(f'data: {error}') from None
    return f'tokenizer {store.info["tokenizer"]["sha256"][:12]}'


def check_libtpu() -> str:
    from lm.hardware import describe_libtpu_fault

    return describe_libtpu_fault() or 'no known fault of libtpu'


def check_devices(processes: int, devices: int) -> str:
    def give_up():
        print(f'{socket.gethostname()} FAIL processes: not all {processes} joined within {JOIN_SECONDS} s; '
              'run scripts/tpu/status.sh and look for a worker that is down', flush=True)  # fmt: skip
        os._exit(1)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    import jax

    from lm.errors import LmError
    from lm.pod.job import JobAddress, initialize_distributed
    from lm.pod.mesh import MeshConfig

    try:
        initialize_distributed(MeshConfig(processes=processes), JobAddress())
        found = jax.device_count()
    except LmError as error:
        raise Problem(f'processes: {error}') from None
    except RuntimeError as error:
        raise Problem(f'tpu: {" ".join(str(error).split())[:300]}; reboot or recreate the pod') from None
    finally:
        timer.cancel()
    if found != devices:
        raise Problem(f'devices: {found} instead of DEVICES={devices}; correct the setting, or recreate the pod')
    return f'{processes} process(es), {found} × {jax.devices()[0].device_kind}'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--processes', type=int, required=True)
    parser.add_argument('--devices', type=int, required=True)
    parser.add_argument('--min_free_gb', type=float, default=20)
    parser.add_argument('--writable', metavar='URL')
    parser.add_argument('--data', metavar='PATH')
    parser.add_argument('--fix', action='store_true', help='remove a stale lock')
    options = parser.parse_args()
    checks = [lambda: check_disk(options.min_free_gb), lambda: check_lock(options.fix), check_libtpu]
    if options.writable:
        checks.append(lambda: check_writable(options.writable))
    if options.data:
        checks.append(lambda: check_tokenizer(options.data))
    # This check runs last, and also after a failure: a missing worker would make the others wait.
    checks.append(lambda: check_devices(options.processes, options.devices))
    host, fine, code = socket.gethostname(), [], 0
    for check in checks:
        try:
            fine.append(check())
        except Problem as problem:
            print(f'{host} FAIL {problem}', flush=True)
            code = max(code, problem.exit_code)
    if code == 0:
        print(f'{host} ok: {", ".join(fine)}', flush=True)
    return code


if __name__ == '__main__':
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))
    sys.exit(main())
