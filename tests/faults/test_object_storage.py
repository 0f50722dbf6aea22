"""Data, configurations, run directories, checkpoints and locks in buckets, on servers of this machine."""

import json
import os
import random
import signal
import subprocess
import sys
import threading

import buckets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from lm import cli, lease
from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.snapshot import COMMITTED
from lm.compilation.cache import CompileCache
from lm.errors import ConfigError
from lm.files import open_path, read_bytes, write_atomically
from lm.runs.lock import RunLock

pytest.importorskip('s3fs', reason='needs the extra [servers]')
pytest.importorskip('gcsfs', reason='needs the extra [servers]')

if not buckets.are_available():
    pytest.skip('needs the servers of the extra [servers]', allow_module_level=True)


@pytest.fixture(scope='module')
def s3(tmp_path_factory):
    with buckets.s3(tmp_path_factory.mktemp('s3')):
        yield open_path(f's3://{buckets.BUCKET}')


@pytest.fixture(scope='module')
def gs(tmp_path_factory):
    with buckets.gs(tmp_path_factory.mktemp('gs')):
        yield open_path(f'gs://{buckets.BUCKET}')


@pytest.fixture
def bucket(request):
    return request.getfixturevalue(request.param)


BOTH = pytest.mark.parametrize('bucket', ['s3', 'gs'], indirect=True)
S3_AND_SLOW_GS = pytest.mark.parametrize('bucket', ['s3', pytest.param('gs', marks=pytest.mark.slow)], indirect=True)


def state_of(step: int) -> dict:
    return {'a': jnp.arange(1000.0) + step, 'b': {'c': jnp.full((3, 4), step, jnp.bfloat16)}}


@BOTH
def test_checkpoints_in_a_bucket_are_complete_or_absent(bucket):
    folder = bucket / 'checkpoints'
    config = CheckpointConfig(save_every_steps=1, keep_last=2)

    def newest() -> int:
        with Checkpointer(folder, config) as checkpointer:
            state, step, metadata = checkpointer.restore(jax.eval_shape(lambda: state_of(0)))
        assert metadata == {'of': step}
        assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(state_of(step))))
        return step

    def save(*steps: int) -> list[int]:
        with Checkpointer(folder, config) as checkpointer:
            checkpointer.restore(jax.eval_shape(lambda: state_of(0)))  # the damaged steps are known from here on
            for step in steps:
                assert checkpointer.save(step, state_of(step), metadata={'of': step})
        return checkpointer.all_steps()

    assert save(1, 2, 3) == [2, 3]
    assert newest() == 3
    (folder / '3' / COMMITTED).unlink()  # as a kill leaves it
    assert newest() == 2
    assert save(3) == [2, 3]
    assert newest() == 3
    for part in (folder / '3' / 'state' / 'd').iterdir():
        data = part.read_bytes()
        part.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert newest() == 2
    assert save(4) == [2, 4]
    assert newest() == 4


def test_one_of_many_simultaneous_processes_gets_the_lock_of_a_bucket(s3):
    directory = s3 / 'locked'
    for _ in range(3):
        together, held, refused = threading.Barrier(4), [], []

        def take(together=together, held=held, refused=refused) -> None:
            together.wait()
            try:
                with RunLock(directory):
                    held.append(1)
                    together.wait()
            except ConfigError as error:
                refused.append(str(error))
                together.wait()

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1, refused
        assert all(f'process {os.getpid()} on' in message for message in refused)
    assert not (directory / lease.NAME).exists()


def test_a_lock_in_a_bucket_is_taken_over_only_from_a_dead_owner(s3, monkeypatch):
    monkeypatch.setattr(lease, 'HEARTBEAT', 0.2)
    directory = s3 / 'inherited'
    ended = subprocess.Popen([sys.executable, '-c', ''])
    ended.wait()
    with RunLock(directory) as first:
        owner = json.loads((directory / lease.NAME).read_text())
        (directory / lease.NAME).write_text(json.dumps(owner | {'pid': ended.pid}))
        with RunLock(directory):
            assert first._lease._heart.join(20) is None
            with pytest.raises(ConfigError, match='another process took it over'):
                first.check()
    assert not (directory / lease.NAME).exists()


@pytest.fixture
def no_cache():
    """Resets JAX to its state without a named compilation cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update('jax_compilation_cache_dir', None)
    yield
    jax.config.update('jax_compilation_cache_dir', before)


def test_compiled_programs_are_kept_in_a_bucket(s3, no_cache):
    with CompileCache(s3 / 'compiled') as cache:
        (cache._private / 'program-cache').write_bytes(b'code')
        cache.publish()
    with CompileCache(s3 / 'compiled') as cache:
        assert (cache._private / 'program-cache').read_bytes() == b'code'
        for path in cache.folder.iterdir():
            path.write_bytes(b'cod')
    with CompileCache(s3 / 'compiled') as cache:
        assert not list(cache._private.iterdir())


def training(bucket, folder) -> list[str]:
    """Prepares data in the bucket; returns the command that trains on them, with gin files in the bucket."""
    settings = tiny.MODEL | {'data.path': f'{bucket}/tokens'}
    (bucket / 'gin').mkdir(parents=True, exist_ok=True)
    (bucket / 'gin' / 'tiny.gin').write_text(''.join(f'{name} = {value!r}\n' for name, value in settings.items()))
    (bucket / 'gin' / 'top.gin').write_text("include 'tiny.gin'\n")
    if not (bucket / 'tokens' / 'dataset.json').exists():
        source = {
            'prepare.source': '@text_files()',
            'text_files.path': str(tiny.write_text(folder / 'text')),
            'prepare.tokenizer': '@tokenizer()',
            'tokenizer.vocab_size': 400,
            'data.path': f'{bucket}/tokens',
        }
        assert cli.main(['prepare', *tiny.params(source), '--processes', '1']) == 0
    return ['train', '--gin_file', f'{bucket}/gin/top.gin', '--run_dir']


def is_like(run, reference) -> bool:
    return (
        tiny.losses(run) == tiny.losses(reference)
        and tiny.losses(run, 'eval') == tiny.losses(reference, 'eval')
        and tiny.checksums(run, 40) == tiny.checksums(reference, 40)
    )


@S3_AND_SLOW_GS
def test_a_run_in_a_bucket_killed_in_a_save_ends_like_a_run_on_disk(bucket, reference_run, tokens, tmp_path):
    run = bucket / 'run'
    command = [*training(bucket, tmp_path), str(run)]
    made = json.loads((bucket / 'tokens' / 'dataset.json').read_text())
    assert made['fingerprint'] == json.loads((tokens / 'dataset.json').read_text())['fingerprint']

    completion = rb'(PUT [^ ]*|"name": ?"[^"]*)checkpoints/20/' + COMMITTED.encode()
    with buckets.Stall(str(bucket).partition(':')[0], completion) as way:
        first = tiny.start(*command)
        assert way.stalled.wait(240), tiny.stop(first, signal.SIGKILL)[1]
        with pytest.raises(ConfigError, match=f'process {first.pid} on .* trains in it'), RunLock(run):
            pass
        tiny.stop(first, signal.SIGKILL)
    assert (run / 'checkpoints' / '20' / 'metadata' / 'metadata').exists()
    assert not (run / 'checkpoints' / '20' / COMMITTED).exists()

    second = tiny.lm(*command)
    assert second.returncode == 0, second.stderr
    assert f'process {first.pid} on' in second.stderr
    assert 'resumed from step 10' in second.stdout
    assert is_like(run, reference_run[0])
    assert not (run / lease.NAME).exists()


@S3_AND_SLOW_GS
def test_every_verb_reads_a_run_in_a_bucket(bucket, tmp_path, capfd):
    run = bucket / 'run'
    if not (run / 'config.gin').exists():
        done = tiny.lm(*training(bucket, tmp_path), str(run))
        assert done.returncode == 0, done.stderr
    for verb, *arguments in (
        ('inspect', str(run), '--verify'),
        ('inspect', f'{bucket}/tokens', '--verify'),
        ('evaluate', '--run_dir', str(run)),
        ('generate', '--run_dir', str(run), '--prompt', 'def', '--max_tokens', '4'),
        ('report', f'{bucket}/ru*', '--out', str(tmp_path / 'report')),
    ):
        code = cli.main([verb, *arguments])
        output, errors = capfd.readouterr()
        assert code in (0, None), (verb, errors)
        assert verb != 'inspect' or arguments[0] != str(run) or output.count('verified') == 2
    assert list((run / 'evaluations').glob('*.json'))
    assert str(run) in (tmp_path / 'report' / 'runs.csv').read_text()


@pytest.mark.slow
def test_a_sweep_in_a_bucket(s3, tmp_path):
    command = training(s3, tmp_path)[1:-1]
    (s3 / 'gin' / 'sweep.gin').write_text('train.seed = [0, 1]\n')
    command = ['sweep', *command, '--sweep_file', f'{s3}/gin/sweep.gin', '--gin_param', 'train.steps = 10']
    done = tiny.lm(*command, '--run_dir', f'{s3}/sweep')
    assert done.returncode == 0, done.stderr
    rows = json.loads((s3 / 'sweep' / 'sweep.json').read_text())['points']
    assert [row['status'] for row in rows] == ['done', 'done']


@pytest.mark.slow
@BOTH
def test_kills_at_any_moment_lose_nothing_in_a_bucket(bucket, reference_run, tmp_path):
    draw = random.Random(0)
    for number in range(3):
        run = bucket / f'killed-{number}'
        command = [*training(bucket, tmp_path), str(run)]
        for step in sorted(draw.sample((10, 20, 30, 40), 2)):
            process = tiny.start(*command)
            while process.poll() is None and not (run / 'checkpoints' / str(step)).exists():
                pass
            if process.poll() is None:
                threading.Event().wait(draw.uniform(0, 0.4))
                tiny.stop(process, signal.SIGKILL)
        done = tiny.lm(*command)
        assert done.returncode == 0, done.stderr
        assert is_like(run, reference_run[0])


@BOTH
def test_a_file_that_is_replaced_all_the_time_can_be_read(bucket):
    path, is_over = bucket / 'replaced' / 'run.json', threading.Event()
    path.parent.mkdir(parents=True)
    path.write_bytes(b'[0]')

    def replace() -> None:
        for number in range(100_000):
            if is_over.is_set():
                return
            write_atomically(path, json.dumps([number] * (number % 7 + 1)))

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        found = [json.loads(read_bytes(path)) for _ in range(100)]
    finally:
        is_over.set()
        writer.join()
    assert len({tuple(numbers) for numbers in found}) > 1
    assert all(numbers == [numbers[0]] * (numbers[0] % 7 + 1) for numbers in found)


@BOTH
def test_machines_that_share_a_preparation_in_a_bucket_make_the_bytes_of_one_machine(bucket, tmp_path):
    """The second machine is repeated before the first has come."""
    source = {'prepare.source': '@text_files()', 'text_files.path': str(tiny.write_text(tmp_path / 'text'))}
    source |= {'prepare.tokenizer': '@tokenizer()', 'tokenizer.vocab_size': 400}
    flags = ['prepare', '--processes', '1', *tiny.params(source)]
    place = bucket / 'in_parts'
    for share in ('1/2', '1/2', '0/2'):
        assert not (place / 'dataset.json').exists()
        assert cli.main([*flags, *tiny.params({'data.path': str(place)}), '--shard', share]) == 0
    assert cli.main([*flags, *tiny.params({'data.path': str(tmp_path / 'one')})]) == 0
    for path in (path for path in (tmp_path / 'one').rglob('*') if path.is_file()):
        assert (place / path.relative_to(tmp_path / 'one')).read_bytes() == path.read_bytes()
    assert not (place / 'parts' / 'settings.json').exists()
