"""Whole training runs: interrupted runs equal uninterrupted runs, for any devices and processes."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
from corpora import CORPORA

from lm import cli


@pytest.mark.smoke
def test_a_run_reports_its_progress_and_writes_its_files(reference_run):
    run, output = reference_run
    for words in ('tokens per step  256', 'parameters', 'tokens in total  10,240', 'step 40/40', 'perplexity', 'tok/s'):
        assert words in output
    train, evaluation = tiny.losses(run), tiny.losses(run, 'eval')
    assert list(train) == list(range(1, 41))
    assert list(evaluation) == [20, 40]
    assert train[40] < train[1] - 0.5
    assert evaluation[40] < evaluation[20] < np.log(400)
    info = json.loads((run / 'run.json').read_text())
    assert {'parameters', 'data', 'tokenizer'} <= set(json.dumps(info).replace('"', ' ').split())
    line = json.loads((run / 'metrics.jsonl').read_text().splitlines()[0])
    contract = ['kind', 'step', 'loss', 'learning_rate', 'grad_norm', 'tokens', 'tokens_per_second', 'mfu', 'seconds']
    assert set(contract) <= set(line)


def test_the_saved_configuration_repeats_the_run(reference_run, tmp_path):
    run, _ = reference_run
    again = tmp_path / 'again'
    done = tiny.lm('train', '--run_dir', str(again), '--gin_file', str(run / 'config.gin'))
    assert done.returncode == 0, done.stderr
    assert tiny.losses(again) == tiny.losses(run)
    assert (again / 'config.gin').read_text() == (run / 'config.gin').read_text()


def kill_and_resume(tiny_flags, run, kills: int, seed: int, steps: int) -> int:
    """Runs to the end with `kills` SIGKILLs at random moments; returns how many hit a live process."""
    rng, hits = random.Random(seed), 0
    for _ in range(kills):
        process = tiny.start('train', '--run_dir', str(run), *tiny_flags)
        try:
            done = len(tiny.losses(run)) if (run / 'metrics.jsonl').exists() else 0
            tiny.wait_for_step(run, min(done + rng.randint(1, max(2, steps // kills)), steps - 1), process)
        except AssertionError:
            assert process.poll() == 0
            continue
        time.sleep(rng.random() * 0.3)
        tiny.stop(process, signal.SIGKILL)
        hits += 1
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == 0, done.stderr
    return hits


def test_a_killed_run_resumes_without_a_changed_bit(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    assert kill_and_resume(tiny_flags, run, kills=1, seed=0, steps=40) == 1
    assert tiny.losses(run) == tiny.losses(reference_run[0])
    assert tiny.losses(run, 'eval') == tiny.losses(reference_run[0], 'eval')
    assert tiny.checksums(run, 40) == tiny.checksums(reference_run[0], 40)


def test_sigterm_saves_and_exits_42(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    process = tiny.start('train', '--run_dir', str(run), *tiny_flags)
    tiny.wait_for_step(run, 3, process)
    code, output = tiny.stop(process, signal.SIGTERM)
    assert code == 42, output
    assert 'run the same command again' in output.splitlines()[-1]
    again = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert again.returncode == 0, again.stderr
    assert 'resumed from step' in again.stdout
    assert tiny.losses(run) == tiny.losses(reference_run[0])
    assert tiny.checksums(run, 40) == tiny.checksums(reference_run[0], 40)


def local_pod(run, *flags: str, devices: int = 1) -> str:
    """Runs `lm train` to its end in two processes of `devices` devices each; returns its output."""
    command = [sys.executable, '-m', 'lm.cli', 'train', '--run_dir', str(run), *flags]
    done = subprocess.run(
        [str(tiny.ROOT / 'scripts/local_pod.sh'), '--devices', str(devices), '2', '--', *command],
        env=tiny.environment(),
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_losses_agree(run, other, kinds=('train', 'eval'), **tolerance: float) -> None:
    for kind in kinds:
        ours, theirs = tiny.losses(run, kind), tiny.losses(other, kind)
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), **({'atol': 0, 'rtol': 0} | tolerance))


def test_other_device_counts_resume_the_same_run(tiny_flags, reference_run, tmp_path):
    """8 devices, then 1: the batches are the same, and losses agree within 1e-5. The next test has 4 devices and 2
    processes."""
    run = tmp_path / 'run'
    for devices, steps in ((8, 10), (1, 40)):
        process = tiny.start('train', '--run_dir', str(run), *tiny_flags, devices=devices)
        if steps < 40:
            tiny.wait_for_step(run, steps + 1, process)
            assert tiny.stop(process, signal.SIGTERM)[0] == 42
        else:
            assert process.communicate()[0] is not None
            assert process.returncode == 0
    assert_losses_agree(run, reference_run[0], ['train'], atol=1e-5)


def test_devices_and_processes_that_share_a_window_continue_the_same_run(tiny_flags, reference_run, tmp_path):
    """Four devices train until they are killed, then two processes. The losses equal those from one device with whole
    windows."""
    run = tmp_path / 'run'
    split = [*tiny_flags, *tiny.params({'checkpoint.save_every_steps': 5})]
    process = tiny.start('train', '--run_dir', str(run), *split, *tiny.params({'mesh.sequence': 4}), devices=4)
    tiny.wait_for_step(run, 12, process)
    tiny.stop(process, signal.SIGKILL)
    output = local_pod(run, *split, *tiny.params({'mesh.sequence': 2}))
    assert 'data 1, fsdp 1, sequence 2), 2 processes' in output
    assert_losses_agree(run, reference_run[0], rtol=1e-6)


def test_two_processes_of_a_local_pod_equal_one_process_with_two_devices(tiny_flags, tmp_path):
    single = tmp_path / 'single'
    assert tiny.lm('train', '--run_dir', str(single), *tiny_flags, devices=2).returncode == 0
    pair = tmp_path / 'pair'
    local_pod(pair, *tiny_flags)
    assert tiny.losses(pair) == tiny.losses(single)
    assert tiny.losses(pair, 'eval') == tiny.losses(single, 'eval')
    assert tiny.checksums(pair, 40) == tiny.checksums(single, 40)


@pytest.mark.slow  # a whole act of several runs; its parts have tests of their own
def test_two_slices_equal_one(tiny_flags, tmp_path):
    """The devices of a slice, which is one process, share parameters. Gradients are summed over both slices, in another
    order than in one process: losses agree within 1e-5."""
    shared = [*tiny_flags, *tiny.params({'model.d_model': 64, 'mesh.fsdp': 2, 'train.steps': 20})]
    single = tmp_path / 'single'
    assert tiny.lm('train', '--run_dir', str(single), *shared, devices=4).returncode == 0
    slices = tmp_path / 'slices'
    output = local_pod(slices, *shared, *tiny.params({'mesh.slices': 2}), devices=2)
    assert '(data 2, fsdp 2), 2 slices, 2 processes' in output
    assert_losses_agree(slices, single, atol=1e-5)


def test_divergence_exits_43_and_keeps_the_last_good_checkpoint(tiny_flags, tmp_path):
    run = tmp_path / 'run'
    extra = tiny.params({'optimizer.peak_learning_rate': 1e30, 'train.max_nonfinite_steps': 4})
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags, *extra)
    assert done.returncode == 43, done.stdout + done.stderr
    assert 'not finite for 4 steps in a row' in done.stderr.splitlines()[-1]


@pytest.mark.smoke
def test_training_imports_no_tensorflow_no_gin_and_no_clu(tokens, tmp_path):
    code = f"""
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'clu', 'gin'):
    sys.modules[name] = None
from lm.data.dataset import DataConfig
from lm.experiment import Experiment
from lm.model import ModelConfig
from lm.training.optimizer import OptimizerConfig
from lm.training.config import TrainConfig
from lm.session.train import train
state = train(Experiment(
    model=ModelConfig(vocab_size=400, n_layers=1, d_model=16, n_heads=1, head_dim=16),
    data=DataConfig(path={str(tokens)!r}),
    optimizer=OptimizerConfig(warmup_steps=1),
    train=TrainConfig(steps=2, tokens_per_step=64, context_length=32, eval_every=None),
), {str(tmp_path / 'run')!r})
assert int(state['step']) == 2
"""
    subprocess.run([sys.executable, '-c', code], env=tiny.environment(), check=True, cwd=tiny.ROOT)


def test_the_mean_of_the_weights_resumes_exactly_and_is_evaluated(tokens, tmp_path):
    changes = {'data.path': str(tokens), 'train.steps': 10, 'train.eval_every': 5, 'checkpoint.save_every_steps': 5}
    changes |= {'optimizer.warmup_steps': 2, 'optimizer.average_steps': 4}
    flags = tiny.params(tiny.MODEL | changes)
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    assert tiny.lm('train', '--run_dir', str(whole), *flags).returncode == 0
    process = tiny.start('train', '--run_dir', str(parts), *flags)
    tiny.wait_for_step(parts, 6, process)
    tiny.stop(process, signal.SIGKILL)
    assert tiny.lm('train', '--run_dir', str(parts), *flags).returncode == 0
    assert tiny.checksums(parts, 10) == tiny.checksums(whole, 10)
    assert tiny.losses(parts, 'eval') == tiny.losses(whole, 'eval')
    assert any(name.startswith('average.') for name in tiny.checksums(whole, 10))
    losses = []
    for more in ([], tiny.params({'optimizer.average_steps': None})):
        assert cli.main(['evaluate', '--run_dir', str(whole), *more]) == 0
        newest = max((whole / 'evaluations').glob('*.json'), key=lambda path: path.stat().st_mtime_ns)
        losses.append(json.loads(newest.read_text())['loss'])
    assert losses[0] == pytest.approx(tiny.losses(whole, 'eval')[10], rel=1e-6)
    assert losses[-1] != losses[0]


def test_projections_are_redrawn_and_resume_exactly(tokens, tmp_path):
    bindings = {'model.attention': '@performer()', 'performer.n_features': 16, 'performer.redraw_every': 7}
    changes = {'data.path': str(tokens), 'train.steps': 10, 'train.eval_every': None, 'checkpoint.save_every_steps': 5}
    changes |= {'optimizer.warmup_steps': 2, 'train.eval_tokens': 40, 'train.seed': 2**40}
    performer = tiny.params(tiny.MODEL | changes | bindings)
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    done = tiny.lm('train', '--run_dir', str(whole), *performer)
    assert done.returncode == 0, done.stderr
    process = tiny.start('train', '--run_dir', str(parts), *performer)
    tiny.wait_for_step(parts, 6, process)
    tiny.stop(process, signal.SIGKILL)
    assert tiny.lm('train', '--run_dir', str(parts), *performer).returncode == 0
    assert tiny.losses(parts) == tiny.losses(whole)
    first, last = tiny.checksums(whole, 5), tiny.checksums(whole, 10)
    buffers = [name for name in last if name.startswith('buffers')]
    assert buffers
    assert all(first[name] != last[name] for name in buffers)  # redrawn after step 7
    assert tiny.checksums(parts, 10) == last
    evaluation = json.loads((whole / 'metrics.jsonl').read_text().splitlines()[-1])
    assert (evaluation['kind'], evaluation['tokens']) == ('eval', 40)


def test_a_mixture_of_experts_resumes_exactly(tokens, tmp_path, capsys):
    """Routers in groups with corrections, a shared expert behind a gate, a balance loss, and a dense layer."""
    bindings = {'model.feed_forward': '[@dense(), @experts()]', 'experts.n_experts': 4, 'experts.hidden_dim': 16}
    bindings |= {'experts.shared_dim': 16, 'experts.shared_gate': True, 'experts.sigmoid': True, 'experts.groups': 2}
    bindings |= {'experts.top_groups': 1, 'experts.correction': True, 'experts.balance': 0.01}
    changes = {'data.path': str(tokens), 'train.steps': 10, 'train.eval_every': 5, 'checkpoint.save_every_steps': 4}
    flags = tiny.params(tiny.MODEL | changes | {'optimizer.warmup_steps': 2} | bindings)
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    done = tiny.lm('train', '--run_dir', str(whole), *flags)
    assert done.returncode == 0, done.stderr
    process = tiny.start('train', '--run_dir', str(parts), *flags)
    tiny.wait_for_checkpoint(parts, 4, process)
    tiny.stop(process, signal.SIGKILL)
    again = tiny.lm('train', '--run_dir', str(parts), *flags)
    assert 'resumed from step' in again.stdout
    assert tiny.losses(parts) == tiny.losses(whole)
    assert tiny.losses(parts, 'eval') == tiny.losses(whole, 'eval')
    record = json.loads((whole / 'metrics.jsonl').read_text().splitlines()[0])
    assert record['balance_loss'] > 0.9
    assert (sum(record['expert_load']), record['expert_load_layer']) == (pytest.approx(2), 1)
    assert record['expert_load_max'] == max(record['expert_load'])
    assert cli.main(['inspect', str(whole)]) == 0
    assert 'the busiest expert gets' in capsys.readouterr().out
    first, last = tiny.checksums(whole, 8), tiny.checksums(whole, 10)
    assert tiny.checksums(parts, 10) == last
    moved = {part for name in last if first[name] != last[name] for part in name.split('.')}
    assert {'router', 'shared_gate', 'glu_in', 'glu_out', 'experts'} <= moved


def test_a_wrong_tokenizer_or_configuration_is_refused_and_nothing_written(
    tiny_flags, reference_run, other_tokens, tmp_path, capsys
):
    run = tmp_path / 'run'
    shutil.copytree(reference_run[0], run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob('*')}
    cases = {
        'data is': tiny.params({'data.path': str(other_tokens)}),
        'model.d_model was 32, now 64': tiny.params({'model.d_model': 64}),
        'model.vocab_size = 300': tiny.params({'model.vocab_size': 300}),
    }
    for words, change in cases.items():
        assert cli.main(['train', '--run_dir', str(run), *tiny_flags, *change]) == 44
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert words in message
        assert message.startswith('lm train: error: ')
        assert {path: path.stat().st_mtime_ns for path in run.rglob('*')} == before
    assert cli.main(['evaluate', '--run_dir', str(run), '--gin_param', f'data.path = {str(other_tokens)!r}']) == 44
    assert 'tokenizer is' in capsys.readouterr().err


def test_impossible_runs_are_refused_before_any_file_is_written(tiny_flags, tmp_path, capsys):
    cases = {
        'nothing is called modle; did you mean model': ({'modle.n_layers': 2}, 2),
        "'/nowhere': no finished token store": ({'data.path': '/nowhere'}, 44),
        'train.context_length = 1000000: the split has only': (
            {'train.context_length': 1_000_000, 'train.tokens_per_step': 8_000_000}, 2,
        ),
    }  # fmt: skip
    for words, (change, code) in cases.items():
        run = tmp_path / 'run'
        assert cli.main(['train', '--run_dir', str(run), *tiny_flags, *tiny.params(change)]) == code
        assert words in capsys.readouterr().err.strip().splitlines()[-1]
        assert not run.exists()
    for name in (str(tmp_path / 'a b'), str(tmp_path / ('x' * 300))):
        assert cli.main(['train', '--run_dir', name, *tiny_flags]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    done = tiny.lm('train', '--run_dir', '../escape', *tiny_flags)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    done = tiny.lm('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, devices=3)
    assert done.returncode == 2
    assert '3 devices cannot share equally' in done.stderr


def test_the_profiler_window_survives_a_resume_inside_it_and_the_end_of_the_run(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(reference_run[0], run)
    shutil.rmtree(run / 'checkpoints' / '40')  # the run continues from step 30
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags, *tiny.params({'train.profile': '[25, 99]'}))
    assert done.returncode == 0, done.stderr
    assert list((run / 'profile').rglob('*.xplane.pb'))
    assert tiny.losses(run) == tiny.losses(reference_run[0])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(CORPORA is None, reason='the test corpora are not there')
def test_a_training_on_books_survives_five_kills(tmp_path):
    """This is the quickest form of the whole promise: real books, 2.6M parameters, 300 steps, five SIGKILLs."""
    store = tmp_path / 'tokens'
    bindings = {
        'prepare.source': '@text_files()',
        'text_files.path': str(CORPORA / 'pg19'),
        'tokenizer.vocab_size': 4096,
        'data.path': str(store),
    }
    done = tiny.lm('prepare', *tiny.params(bindings))
    assert done.returncode == 0, done.stderr
    changes = {
        'data.path': str(store),
        'train.steps': 300,
        'train.tokens_per_step': 512,
        'train.context_length': 128,
        'train.log_every': 1,
        'train.eval_every': None,
        'optimizer.warmup_steps': 30,
        'checkpoint.save_every_steps': 20,
    }
    flags = ['--gin_file', 'configs/models/tiny.gin', *tiny.params(changes)]
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    done = tiny.lm('train', '--run_dir', str(whole), *flags, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert kill_and_resume(flags, parts, kills=5, seed=1, steps=300) == 5
    assert tiny.losses(parts) == tiny.losses(whole)
    assert tiny.losses(parts, 'eval') == tiny.losses(whole, 'eval')
    assert tiny.checksums(parts, 300) == tiny.checksums(whole, 300)
