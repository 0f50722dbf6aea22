#!/usr/bin/env python3
"""Runs one row of the study at 25M parameters: prepares the common corpus, trains, evaluates, and saves the figures.

    python scripts/gpu/study.py --save RESULT [--evaluate_context 8192] [flags of lm train]

PACK/corpus holds the packed corpus, and CACHE what the rows share: the token store, made by the first row while the
others wait, and the runs. Without them the data of the given configuration must be there. A row that is stopped saves
what it has learned until then, with `stopped` set.
"""

import argparse
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = 'configs/papers/study/size/size.gin'
TINY = (
    'model.vocab_size = 512',
    'model.n_layers = 4',
    'model.d_model = 32',
    'model.n_heads = 2',
    'model.head_dim = 16',
    'train.steps = 4',
    'train.tokens_per_step = 256',
    'train.context_length = 64',
    'train.log_every = 1',
    'train.eval_every = 2',
    'train.eval_tokens = 1024',
    'optimizer.warmup_steps = 1',
)
"""The bindings of `--tiny`."""
KEPT = ('step', 'tokens', 'loss', 'perplexity', 'tokens_per_second', 'seconds', 'time')
"""The fields of metrics.jsonl that a result keeps."""


def run_lm(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-m', 'lm', *arguments], cwd=ROOT, **options)


def prepare(packed: pathlib.Path, cache: pathlib.Path) -> tuple[pathlib.Path, float]:
    """Returns the folder of the token store, and the seconds that its making took, 0 where another row has made it."""
    store, text = cache / 'common_corpus', cache / 'corpus_text'
    with (cache / 'common_corpus.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = time.monotonic()
        if (done := cache / 'common_corpus.done').exists():
            return store, 0.0
        unpack = [sys.executable, str(ROOT / 'scripts/gpu/corpus.py'), 'unpack', str(packed), str(text)]
        subprocess.run(unpack, check=True)
        settings = [f"data.path = '{store}'", f"jsonl.path = '{text}'"]
        if (model := packed / 'tokenizer.model').exists():
            settings.append(f"tokenizer.model_path = '{model}'")
        flags = [word for setting in settings for word in ('--gin_param', setting)]
        run_lm('prepare', '--gin_file', 'data/common_corpus.gin', *flags, check=True)
        done.touch()
        return store, round(time.monotonic() - begun, 1)


def prepare_tiny(cache: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a token store of some sources of `lm`, for `--tiny`."""
    store, text = cache / 'tiny_corpus', cache / 'tiny_text'
    with (cache / 'tiny_corpus.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            _prepare_tiny(store, text)
    return store


def _prepare_tiny(store: pathlib.Path, text: pathlib.Path) -> None:
    text.mkdir(parents=True, exist_ok=True)
    for split, folder in {'train': 'data', 'validation': 'config', 'test': 'runs'}.items():
        texts = [path.read_text() for path in sorted((ROOT / 'lm' / folder).glob('*.py'))]
        (text / f'{split}.jsonl').write_text(''.join(json.dumps({'text': one}) + '\n' for one in texts))
    settings = [f"data.path = '{store}'", f"jsonl.path = '{text}'", 'tokenizer.vocab_size = 512']
    flags = [word for setting in settings for word in ('--gin_param', setting)]
    run_lm('prepare', '--processes', '1', '--gin_file', 'data/common_corpus.gin', *flags, check=True)


def read_run(run: pathlib.Path) -> dict:
    """Returns the parameters and curves of a run, so far as it got."""
    if not (run / 'metrics.jsonl').exists():
        return {}
    lines = []
    for line in (run / 'metrics.jsonl').read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # being written
            continue
    kinds = {kind: [line for line in lines if line.get('kind') == kind] for kind in ('train', 'eval')}
    curves = {kind: [{k: line[k] for k in KEPT if k in line} for line in found] for kind, found in kinds.items()}
    rates = sorted(line['tokens_per_second'] for line in kinds['train'] if line.get('tokens_per_second'))
    last = kinds['eval'][-1] if kinds['eval'] else {}
    return {
        'tokens_per_second': rates[len(rates) // 2] if rates else None,
        'curves': curves,
        'last_evaluation': {name: value for name, value in last.items() if name != 'time'},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--save', type=pathlib.Path, required=True, help='the file for the figures')
    parser.add_argument('--evaluate_context', type=int, help='evaluate at this context, too')
    parser.add_argument('--tiny', action='store_true', help='a tiny model on a few texts, for tests')
    given, flags = parser.parse_known_args()
    cache = pathlib.Path(os.environ.get('CACHE', ROOT / 'build'))
    packed = pathlib.Path(os.environ.get('PACK', ROOT / '.gpu_pack')) / 'corpus'
    run = cache / 'runs' / given.save.stem
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    result = {'flags': flags, 'seed': 0}
    seeds = [flag.partition('=')[2] for flag in flags if flag.replace(' ', '').startswith('train.seed=')]
    if seeds:
        result['seed'] = int(seeds[-1])

    def save() -> None:
        given.save.write_text(json.dumps(result | read_run(run)) + '\n')

    def stop(*_) -> None:
        result['stopped'] = True
        save()
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    if given.tiny:
        settings = [f"data.path = '{prepare_tiny(cache)}'", *TINY]
        flags = [*flags, *(word for setting in settings for word in ('--gin_param', setting))]
    elif packed.exists():
        store, result['prepare_seconds'] = prepare(packed, cache)
        flags = ['--gin_param', f"data.path = '{store}'", *flags]
    begun = time.monotonic()
    code = run_lm('train', '--run_dir', str(run), '--gin_file', CONFIG, *flags).returncode
    result['train_seconds'] = round(time.monotonic() - begun, 1)
    save()
    if code == 0:
        inspected = run_lm('inspect', str(run), '--json', capture_output=True, text=True)
        if inspected.returncode == 0:
            result['run'] = json.loads(inspected.stdout)
        if given.evaluate_context:
            context = ['--context_length', str(given.evaluate_context), '--json']
            done = run_lm('evaluate', '--run_dir', str(run), *context, capture_output=True, text=True)
            result['evaluation'] = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-500:]
        save()
        shutil.rmtree(run / 'checkpoints', ignore_errors=True)
    return code


if __name__ == '__main__':
    sys.exit(main())
