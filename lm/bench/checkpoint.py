"""`lm bench checkpoint`: the time and the host memory that saving and restoring a training state takes.

Each is measured in a separate process, whose peak the kernel counts. Imports and thread pools do not count, because a
small state is saved first. The state itself does not count if the devices use the memory of the host. The temporaries
of programs on such devices count.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from lm.bench import results
from lm.bench.options import CheckpointOptions
from lm.checkpoint.checkpointer import Checkpointer
from lm.config.text import dump
from lm.errors import ConfigError, LmError
from lm.experiment import Experiment, load
from lm.files import local_path
from lm.hardware import Target
from lm.plan import plan_step
from lm.training.step import State

DEFAULT = 'configs/models/small.gin'
STATUS = pathlib.Path('/proc/self/status')
RESET = pathlib.Path('/proc/self/clear_refs')
Row = dict[str, str | float]
"""A save or a restore: name → value, as `--save` writes it."""


def bench_checkpoint(options: CheckpointOptions) -> None:
    """Measures in separate processes, prints a table and writes it to a file, if there is one."""
    output = results.Output(options.save)
    if not RESET.exists():
        raise ConfigError('lm bench checkpoint: only Linux counts the peak of a process; run it there')
    parent = None if options.folder is None else local_path(options.folder, '--folder')
    if parent is not None and not parent.is_dir():
        raise ConfigError(f'--folder {parent}: no such folder; make it')
    experiment = load(options.gin_file or [DEFAULT], options.gin_param, allow_imports=options.allow_gin_imports)
    rows = []
    with tempfile.TemporaryDirectory(prefix='lm-bench-', dir=parent) as folder:
        pathlib.Path(folder, 'config.gin').write_text(dump(experiment))
        for name in MEASURED:
            command = [sys.executable, '-m', 'lm.bench.checkpoint', name, folder]
            done = subprocess.run(command, capture_output=True, text=True)
            # This process starts no JAX before they have ended: the devices belong to one process at a time.
            if done.returncode == ConfigError.exit_code:
                raise ConfigError(done.stderr.strip().splitlines()[-1])
            if done.returncode:
                raise LmError(f'lm bench checkpoint: {name} failed: {done.stderr.strip()[-500:]}')
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    printer, machine = results.Printer(), results.machine()
    printer.line(results.heading('lm bench checkpoint', machine, ('jax', 'tensorstore')))
    printer.table(rows, COLUMNS)
    settings = {'gin_files': list(options.gin_file), 'gin_params': list(options.gin_param), 'folder': options.folder}
    output.write('checkpoint', machine, settings, rows)


COLUMNS = {
    'name': ('', str),
    'state_mib': ('state MiB', '{:,.0f}'.format),
    'blocked_seconds': ('s blocked', '{:.2f}'.format),
    'seconds': ('s', '{:.2f}'.format),
    'host_mib': ('host MiB more', '{:,.0f}'.format),
    'host_over_state': ('÷ state', '{:.2f}'.format),
}


# ------------------------------------------------------------------------------------------- in a process of their own


class _Peak:
    """Counts the peak of this process's memory from now on."""

    def __init__(self) -> None:
        RESET.write_text('5')
        self.before = self._read('VmRSS')

    def mib(self) -> float:
        """Returns the peak above the memory that the process had at the beginning."""
        return self._read('VmHWM') - self.before

    @staticmethod
    def _read(name: str) -> float:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f'{name}:'))
        return int(line.split()[1]) / 1024


def _save(folder: pathlib.Path, abstract: State, size: float) -> Row:
    draw = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(draw.random(leaf.shape, 'float32').astype(leaf.dtype), leaf.sharding)

    state = jax.block_until_ready(jax.tree.map(fill, abstract))
    with Checkpointer(folder / 'small') as small:
        small.save(1, {'x': jax.numpy.zeros(8)})
    with Checkpointer(folder / 'whole') as checkpoints:
        peak, begin = _Peak(), time.monotonic()
        checkpoints.save(1, state)
        blocked = time.monotonic() - begin
        checkpoints.wait()
        return _row('save', size, blocked, time.monotonic() - begin, peak.mib())


def _restore(folder: pathlib.Path, abstract: State, size: float) -> Row:
    with Checkpointer(folder / 'small') as small:
        small.restore({'x': jax.ShapeDtypeStruct((8,), 'float32')})
    with Checkpointer(folder / 'whole') as checkpoints:
        peak, begin = _Peak(), time.monotonic()
        jax.block_until_ready(checkpoints.restore(abstract))
        seconds = time.monotonic() - begin
    own = size if jax.default_backend() == 'cpu' else 0.0
    return _row('restore', size, seconds, seconds, peak.mib() - own)


def _row(name: str, size: float, blocked: float, seconds: float, host: float) -> Row:
    return {
        'name': name,
        'state_mib': size,  # of all arrays
        'blocked_seconds': blocked,  # the time that a training waits
        'seconds': seconds,  # until everything is on disk, or on the devices
        'host_mib': host,  # the most host memory on top of the state's own
        'host_over_state': host / size,
    }


MEASURED = {'save': _save, 'restore': _restore}


def _measure(name: str, folder: str) -> None:
    experiment: Experiment = load([f'{folder}/config.gin'], allow_imports=True)  # `run` has allowed it
    plan = plan_step(experiment, Target.of_devices(jax.devices()))
    mesh = plan.mesh.arrange(jax.devices())
    with jax.set_mesh(mesh):
        abstract = plan.program.place_state(mesh)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) / 2**20
        print(json.dumps(MEASURED[name](pathlib.Path(folder), abstract, size)))


if __name__ == '__main__':
    try:
        _measure(*sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
