"""The checks of the machine: versions, devices, memory, disks, the kernel's protections and the environment."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from lm.buckets import IDENTITIES
from lm.doctor.finding import Examination, Finding, doubt, fine, wrong
from lm.hardware import describe_libtpu_fault, read_host_memory
from lm.runs.info import find_versions, git_commit

DEVICE_SECONDS = 90.0
LEAST_BYTES = 2 * 2**30
"""Less free memory, or room on a disk, is named."""
PROTECTIONS = ('protected_symlinks', 'protected_hardlinks', 'protected_fifos', 'protected_regular')
"""Settings of Linux that keep a user's programs from following what others put into a shared folder."""
KEYS = ('WANDB_API_KEY', 'HF_TOKEN', 'LM_WEBHOOK', 'COMET_API_KEY')
"""Variables that hold secrets: only their names are printed."""
FLAGS = ('JAX_PLATFORMS', 'XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'JAX_DEFAULT_MATMUL_PRECISION', 'JAX_ENABLE_X64')
"""Variables that change what JAX computes, and on what."""
LIST_DEVICES = """
import json, jax
devices = jax.devices()
first = devices[0]
memory = None if first.platform == 'cpu' else (first.memory_stats() or {}).get('bytes_limit')
print(json.dumps({'count': len(devices), 'kind': first.device_kind, 'platform': first.platform, 'bytes': memory}))
"""


def make_checks() -> list[Examination]:
    """Returns the checks that need no path."""
    return [
        Examination('versions', check_versions),
        Examination('devices', check_devices, DEVICE_SECONDS + 10),
        Examination('memory', check_memory),
        Examination('disk', check_disks),
        Examination('kernel', check_kernel),
        Examination('variables', check_variables),
    ]


def check_versions() -> Iterator[Finding]:
    """Names the versions, and what is known against them."""
    versions = find_versions()
    yield fine('versions', ', '.join(f'{name} {version}' for name, version in versions.items() if version))
    yield fine('versions', f'lm lies in {pathlib.Path(__file__).parents[1]}, commit {git_commit() or "unknown"}')
    if fault := describe_libtpu_fault():
        yield wrong('versions', fault, 'install another libtpu')


def check_devices() -> Iterator[Finding]:
    """Lists the devices, in another process: a driver that hangs must not hang this one."""
    try:
        done = subprocess.run(
            [sys.executable, '-c', LIST_DEVICES], capture_output=True, text=True, timeout=DEVICE_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield wrong(
            'devices',
            f'JAX has not found its devices in {DEVICE_SECONDS:.0f} s',
            'end other programs that hold them (lsof /dev/accel* /dev/vfio/*), or restart the machine',
        )
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ['no message'])[-1][:300]
        yield wrong('devices', f'JAX finds none: {last}', 'end other programs that hold them, or set JAX_PLATFORMS=cpu')
        return
    found = json.loads(done.stdout.splitlines()[-1])
    memory = f', {found["bytes"] / 2**30:.1f} GiB each' if found['bytes'] else ''
    text = f'{found["count"]} × {found["kind"]} ({found["platform"]}){memory}'
    chips = [path for path in ('/dev/accel0', '/dev/vfio/0', '/dev/nvidia0') if os.path.exists(path)]
    if found['platform'] == 'cpu' and chips:
        yield doubt('devices', f'{text}, although there is {chips[0]}', "install 'jax[tpu]' or 'jax[cuda12]'")
    else:
        yield fine('devices', text)


def check_memory() -> Iterator[Finding]:
    """Reads the memory of the host."""
    free, total = map(read_host_memory, ('MemAvailable', 'MemTotal'))
    if free is None or total is None:
        yield doubt('memory', 'this system has no /proc/meminfo', 'look at the free memory yourself')
        return
    text = f'{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free'
    if free < LEAST_BYTES:
        yield doubt('memory', text, 'end other programs')
    else:
        yield fine('memory', text)


def check_disks() -> Iterator[Finding]:
    """Names the room in this folder, in the folder of temporary files and in /dev/shm."""
    for path in dict.fromkeys((os.getcwd(), tempfile.gettempdir(), '/dev/shm')):
        if not os.path.isdir(path):
            continue
        free = shutil.disk_usage(path).free
        text = f'{path}: {free / 2**30:.1f} GiB are free'
        if free < LEAST_BYTES and path != '/dev/shm':
            yield doubt('disk', text, 'make room, or choose another folder (TMPDIR)')
        else:
            yield fine('disk', text)


def check_kernel() -> Iterator[Finding]:
    """Reads what the kernel does against links and pipes of other users, and the rights of new files."""
    values = {}
    for name in PROTECTIONS:
        try:
            values[name] = int(pathlib.Path('/proc/sys/fs', name).read_text())
        except (OSError, ValueError):
            continue
    off = [name for name, value in values.items() if not value]
    if off:
        yield doubt(
            'kernel',
            f'fs.{", fs.".join(off)} {"is" if len(off) == 1 else "are"} 0: other users of this machine can plant links',
            f'sudo sysctl {" ".join(f"fs.{name}=1" for name in off)}',
        )
    elif values:
        yield fine('kernel', 'links and pipes of other users in shared folders are not followed')
    status = []
    with contextlib.suppress(OSError):
        status = pathlib.Path('/proc/self/status').read_text().splitlines()
    mask = next((int(line.split()[1], 8) for line in status if line.startswith('Umask:')), None)
    if mask is not None and not mask & 0o002:
        yield doubt('kernel', f'umask {mask:03o}: everybody can write the files that you make', 'umask 022')


def check_variables() -> Iterator[Finding]:
    """Names the variables that matter. The value of a secret is never printed."""
    files = {'GOOGLE_APPLICATION_CREDENTIALS'}
    identities = [name for names, _ in IDENTITIES.values() for name in names]
    for name in (*identities, *KEYS):
        value = os.environ.get(name)
        if value and name in files and not os.path.isfile(value):
            yield wrong('variables', f'{name} names a file that is not there', f'unset {name}, or correct it')
        elif value:
            yield fine('variables', f'{name} is set')
    for name in FLAGS:
        if value := os.environ.get(name):
            yield fine('variables', f'{name}={value}')
