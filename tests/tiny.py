"""A tiny experiment on real text, for the tests that run whole commands."""

import atexit
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / 'README.md',
    ROOT / 'CONTRIBUTING.md',
    *sorted(
        path
        for path in (ROOT / 'docs').rglob('*.md')
        if '_build' not in path.parts and not path.with_suffix('.ipynb').exists()
    ),
]
"""The README, the guide for contributors and the pages of the site; notebooks are executed by tests of their own."""
COMPILE_QUICKLY = '--xla_backend_optimization_level=0'
"""XLA_FLAGS of tests, whose programs compile far longer than they compute. XLA's own passes are unchanged."""
if tuple(map(int, importlib.metadata.version('jaxlib').split('.')[:2])) < (0, 11):
    # LLVM alone makes fusions, without MLIR: this takes a third of the time. Later versions have no other way.
    COMPILE_QUICKLY += ' --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
sys.path.append(str(ROOT / 'tests' / 'faults'))  # for `warm`

MODEL = {
    'model.vocab_size': 400,
    'model.n_layers': 2,
    'model.d_model': 32,
    'model.n_heads': 2,
    'model.head_dim': 16,
    'train.steps': 40,
    'train.tokens_per_step': 256,
    'train.context_length': 32,
    'train.log_every': 1,
    'train.eval_every': 20,
    'evaluate.batch_size': 16,
    'optimizer.warmup_steps': 5,
    'optimizer.peak_learning_rate': 3e-3,
    'checkpoint.save_every_steps': 10,
}


def write_text(folder: pathlib.Path, characters: int = 60_000) -> pathlib.Path:
    """Writes a PG-19-like folder from the sources of the Python standard library; returns it."""
    library = pathlib.Path(os.__file__).parent
    for split, modules in {'train': ['argparse', 'typing'], 'validation': ['shlex'], 'test': ['bisect']}.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for module in modules:
            text = (library / f'{module}.py').read_text(encoding='utf-8')[: characters if split == 'train' else 6000]
            (folder / split / f'{module}.txt').write_text(text, encoding='utf-8')
    return folder


def prepare(folder: pathlib.Path, characters: int = 60_000) -> pathlib.Path:
    """Returns a token store of `write_text`, prepared by the command."""
    text = write_text(folder / 'text', characters)
    store = folder / 'tokens'
    bindings = {
        'prepare.source': '@text_files()',
        'text_files.path': str(text),
        'prepare.tokenizer': '@tokenizer()',
        'tokenizer.vocab_size': 400,
        'data.path': str(store),
    }
    done = lm('prepare', *params(bindings), '--processes', '1')
    assert done.returncode == 0, done.stderr
    return store


def params(bindings: dict) -> list[str]:
    """Returns gin bindings as command-line flags."""
    flags = []
    for name, value in bindings.items():
        literal = value if isinstance(value, str) and value.startswith(('@', '%', '[')) else repr(value)
        flags += ['--gin_param', f'{name} = {literal}']
    return flags


def train_step(model, optimizer, steps: int = 10, *arguments, platform: str = 'cpu', **options):
    """Returns the training step of a model configuration on a platform; the other arguments go to `TrainStep`."""
    from lm.model.functions import ModelFunctions
    from lm.training.step import TrainStep

    return TrainStep(ModelFunctions(model, model.resolve_dtype(platform)), optimizer, steps, *arguments, **options)


def environment(devices: int = 1, **extra: str) -> dict[str, str]:
    """Returns the variables of a subprocess with `devices` simulated CPU devices."""
    return os.environ | {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices} {COMPILE_QUICKLY}',
        'PYTHONPATH': str(ROOT),
        **extra,
    }


def variables() -> dict[str, str]:
    """Returns this process's variables without pytest's own, which differ per test and do not concern `lm`."""
    return {name: value for name, value in os.environ.items() if not name.startswith('PYTEST_')}


WARM: dict[str, str] = {}
"""The variables with which commands may begin warm, as conftest.py leaves them; empty outside of pytest."""


@functools.cache
def nursery():
    """Returns the process that forks warm commands, whose imports are done; the first call makes it."""
    from warm import Nursery

    with contextlib.chdir(ROOT):
        made = Nursery(environment())
    atexit.register(made.close)
    return made


def start(*arguments: str, devices: int = 1, cold: bool = False, errors_apart: bool = False):
    """Starts the `lm` command in the background; returns a `subprocess.Popen`, or an object with the methods that tests
    need.

    Its output is kept. Most commands start warm: their imports, half of their time, are done, and nothing else is.
    `cold`
    starts from scratch. So does every command in a test that has changed an environment variable.
    """
    if variables() == WARM and not cold:
        return nursery().start(['--', *arguments], environment(devices)['XLA_FLAGS'], errors_apart)
    return subprocess.Popen(
        [sys.executable, '-m', 'lm.cli', *arguments],
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors_apart else subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def lm(*arguments: str, devices: int = 1, timeout: float = 600, cold: bool = False) -> subprocess.CompletedProcess:
    """Runs the `lm` command to its end."""
    process = start(*arguments, devices=devices, cold=cold, errors_apart=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def losses(run_dir: pathlib.Path, kind: str = 'train') -> dict[int, float]:
    """Returns step → loss of metrics.jsonl; fails if a step is written twice."""
    found = {}
    for line in (run_dir / 'metrics.jsonl').read_text().splitlines():
        record = json.loads(line)
        if record['kind'] == kind:
            assert record['step'] not in found, f'step {record["step"]} is logged twice'
            found[record['step']] = record['loss']
    return found


def free_port() -> int:
    """Returns a port on which nobody listens. It is below the ports that the system gives to connections, and so stays
    free."""
    while True:
        candidate = random.SystemRandom().randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(('127.0.0.1', candidate)):
            return candidate


def checksums(run_dir: pathlib.Path, step: int) -> dict[str, int]:
    """Returns array name → checksum of a checkpoint, read completely: parameters, optimizer state, counters."""
    from lm.checkpoint.checkpointer import Checkpointer

    with Checkpointer(run_dir / 'checkpoints') as saved:
        saved.verify(step)
        return {name: leaf['checksum'] for name, leaf in saved.read_record(step)['leaves'].items()}


def wait_for_step(run_dir: pathlib.Path, step: int, process: subprocess.Popen, timeout: float = 300) -> None:
    """Returns when metrics.jsonl has a line of `step` or of a later step."""
    path, lines = run_dir / 'metrics.jsonl', [f'"step": {n},' for n in range(step, step + 20)]
    if not _wait(lambda: path.exists() and any(line in path.read_text() for line in lines), process, timeout):
        output = process.stdout.read() if process.poll() is not None else ''
        raise AssertionError(f'step {step} was not reached:\n{output}')


def wait_for_checkpoint(run_dir: pathlib.Path, step: int, process: subprocess.Popen, timeout: float = 300) -> None:
    """Returns when the checkpoint of `step` is whole: saves go on behind the steps after it."""
    if not _wait((run_dir / 'checkpoints' / str(step)).exists, process, timeout):
        raise AssertionError(f'no checkpoint of step {step} was written before the process ended')


def _wait(is_met: Callable[[], bool], process: subprocess.Popen, timeout: float) -> bool:
    """Returns whether the condition was met while the process ran, within `timeout` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if is_met():
            return True
        time.sleep(0.02)
    return False


def stop(process: subprocess.Popen, how: signal.Signals, timeout: float = 300) -> tuple[int, str]:
    """Sends a signal and returns (exit code, output)."""
    process.send_signal(how)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def write_array(path, split: str, name: str, elements) -> None:
    """Writes all files of an array of a token store."""
    from lm.data import store

    for number, start in enumerate(range(0, len(elements), store.SHARD)):
        part = elements[start : start + store.SHARD]
        store.write_array_file(str(path), split, name, number, part, len(elements))


def write_store(path: pathlib.Path, splits: dict[str, list[str]], tokenizer) -> pathlib.Path:
    """Writes a token store of these documents by split, without `lm prepare`, with the tokenizer of another store."""
    import hashlib

    import numpy as np

    from lm.data import store

    counts = {}
    for split, texts in splits.items():
        tokens, lengths = tokenizer.encode_documents(texts)
        ends = np.cumsum(lengths)
        write_array(path, split, 'tokens', tokens)
        write_array(path, split, 'document_ends', ends)
        counts[split] = {
            'documents': len(texts),
            'bytes': sum(len(text.encode()) for text in texts),
            'words': sum(len(text.split()) for text in texts),
            'tokens': len(tokens),
            'sha256': hashlib.sha256(tokens.tobytes() + ends.astype('<i8').tobytes()).hexdigest(),
        }
    store.write_file(str(path), 'tokenizer.model', tokenizer.model)
    facts = {'sha256': tokenizer.sha256, 'vocab_size': tokenizer.vocab_size, 'eod_id': tokenizer.eod_id}
    info = {'source': {'kind': 'text_files'}, 'dtype': tokenizer.dtype.name, 'splits': counts, 'tokenizer': facts}
    store.write_info(str(path), info)
    return path
