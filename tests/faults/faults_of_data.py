"""Faults of data, configuration and the surroundings of a training; and tests of other folders, run from here."""

import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import numpy as np
import tiny
from faults_of_runs import PLAIN
from tally import Tally, side_by_side
from workshop import Session, Workshop, damage, need

from lm.data.batches import Windows

STEPS = 1000
HASHES = """
import json, sys, zlib
import numpy as np
from lm.data.batches import Batches, Windows
from lm.data.dataset import DataConfig
from lm.pod.job import JobAddress, initialize_distributed
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh

path, count, index, address, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if count > 1:
    initialize_distributed(MeshConfig(), JobAddress(address, count, index))
store = DataConfig(path=path).open(32)
windows = Windows(store.tokens('train'), 32, 8, seed=0)
batches = Batches(store, 'train', windows, 1, batch_sharding(make_mesh(MeshConfig()), axis=1))
for step in range(steps):
    for shard in batches(step).addressable_shards:
        print('rows', step, shard.index[1].start or 0, zlib.crc32(np.asarray(shard.data).tobytes()))
"""


def data_hosts(shop: Workshop, tally: Tally) -> None:
    """4. One, two and four hosts see the same batches in each of 1,000 steps, over more than two epochs."""
    found = {}
    for count in (1, 2, 4):
        with tally.attempt(f'{count} hosts'):
            rest = [str(shop.tokens), str(count)], [f'localhost:{tiny.free_port()}', str(STEPS)]
            commands = [[sys.executable, '-c', HASHES, *rest[0], str(i), *rest[1]] for i in range(count)]
            session = shop.session(commands, 4 // count)
            need(session.end() == 0, session.output())
            lines = [line for lines in session.lines for _, line in lines if line.startswith('rows ')]
            need(len(lines) == 4 * STEPS, f'{len(lines)} lines')
            found[count] = sorted(lines)
            need(found[count] == found[min(found)], f'{count} hosts see other batches')


def poisoned_records(shop: Workshop, tally: Tally) -> None:
    """12. Bad records are counted and named, or stop; a cut-off source and a flipped byte of the store are refused."""
    folder = shop.place('records')
    folder.mkdir(parents=True)
    source = (shop.tokens.parent / 'text' / 'train' / 'argparse.txt').read_text()
    good = [json.dumps({'text': source[i : i + 2000]}).encode() for i in range(0, 20_000, 2000)]
    bad = [b'{"text": "caf\xe9"}', b'{"text": ""}', b'{"text": "\\ud800"}', b'{"text": "' + b'x' * 10_000_000 + b'"}']
    (folder / 'train.jsonl').write_bytes(b'\n'.join([*good[:3], *bad, *good[3:]]))
    (folder / 'validation.jsonl').write_bytes(b'\n'.join(good[:3]))

    def prepare(name: str, **changes) -> Session:
        bindings = {
            'prepare.source': '@jsonl()',
            'jsonl.path': str(folder),
            'prepare.max_document_bytes': 1_000_000,
            'prepare.tokenizer': '@tokenizer()',
            'tokenizer.vocab_size': 400,
            'data.path': str(folder.parent / name),
        }
        named = {key.replace('__', '.'): value for key, value in changes.items()}
        return shop.lm('prepare', *tiny.params(bindings | named), '--processes', '1')

    with tally.attempt('skipped', count=4):
        session = prepare('skipped')
        need(session.codes() == [0], session.output())
        info = json.loads((folder.parent / 'skipped' / 'dataset.json').read_text())['splits']['train']
        need((info['bad_records'], info['documents']) == (4, 10), info)
        named = (folder.parent / 'skipped' / 'bad_records.jsonl').read_text().splitlines()
        need(len(named) == 4 and all('train.jsonl@' in json.loads(line)['document'] for line in named), named)
    with tally.attempt('strict'):
        session = prepare('strict', prepare__strict=True)
        need(session.codes() == [44] and 'train.jsonl@' in session.output(), session.output())
    with tally.attempt('a cut-off gzip'):
        subprocess.run(['gzip', '-k', str(folder / 'train.jsonl')], check=True)
        (folder / 'train.jsonl').unlink()
        whole = (folder / 'train.jsonl.gz').read_bytes()
        (folder / 'train.jsonl.gz').write_bytes(whole[: len(whole) // 2])
        session = prepare('cut')
        need(session.codes() == [44] and 'Traceback' not in session.output(), session.output())
    with tally.attempt('a token id that the model has not'):
        session = shop.start(PLAIN, shop.place('vocabulary'), model__vocab_size=300)
        need(session.end() == 44 and 'model.vocab_size = 300' in session.output(), session.output())
    store, draw = folder.parent / 'skipped', random.Random(12)
    shards = sorted(p for p in (store / 'train' / 'tokens').rglob('*') if p.is_file() and p.name != 'zarr.json')
    for how in ('flip', 'truncate', 'delete'):
        with tally.attempt(f'{how} {shards[0].name}'):
            intact = damage(shards[0], how, draw)
            session = shop.start(PLAIN, shop.place('shard'), data__path=str(store))
            need(session.end() == 44 and 'Traceback' not in session.output(), f'{session.codes()}:\n{session.output()}')
            shards[0].write_bytes(intact)


def data_order(shop: Workshop, tally: Tally) -> None:
    """13. Each window comes once per epoch; seeds and epochs have other orders; a start at any of 200 steps reads the
    same batches."""
    del shop
    draw = random.Random(13)
    for _ in range(20):
        with tally.attempt('epochs'):
            count, batch, seed = draw.randint(50, 3000), draw.randint(1, 16), draw.randrange(1000)
            windows = Windows(count * 8 + 1, 8, batch, seed)
            order = np.concatenate([windows.starts(step) for step in range(-(-2 * count // batch))])[: 2 * count] // 8
            for epoch in (order[:count], order[count:]):
                need((np.sort(epoch) == np.arange(count)).all(), f'{count} windows, seed {seed}')
            other = Windows(count * 8 + 1, 8, batch, seed + 1)
            need((order[:count] != order[count:]).any(), 'two epochs are alike')
            need((other.starts(0) != windows.starts(0)).any() or batch < 3, 'two seeds are alike')
    whole = Windows(24_001, 8, 8, 3)
    batches = [whole.starts(step) for step in range(1020)]
    for _ in range(200):
        step = draw.randrange(1000)
        with tally.attempt(f'step {step}'):
            resumed = Windows(24_001, 8, 8, 3)
            resumed.resume(step, [])
            need(all((resumed.starts(s) == batches[s]).all() for s in range(step, step + 20)), 'other batches')


def hostile(shop: Workshop, tally: Tally) -> None:
    """16. Gin files and names that would run code or leave their folder are refused before any file is written."""
    place = shop.place('hostile').parent
    place.mkdir()
    sentinel = place / 'sentinel'
    code = f"__import__('pathlib').Path({str(sentinel)!r}).touch()"
    texts = [
        'import os\n',
        'import antigravity\n',
        'from os import system\n',
        'from __gin__ import dynamic_registration\nimport os\n',
        f'train.steps = {code}\n',
        f'train.steps = @{code}\n',
        f'x = @os.system()\nos.system.command = "touch {sentinel}"\n',
        "include '../../../etc/passwd'\n",
        f"include '{place}/../../etc/passwd'\n",
        "include '/etc/passwd'\n",
        'train.steps = %NOBODY\n',
        'train.steps = 1e400\n',
        'optimizer.peak_learning_rate = 1e400\n',
        'model.attention = @subprocess.Popen()\n',
        "data.path = 'http://localhost:1/store'\n",
        "data.path = '~nosuchuser'\n",
    ]
    names = ['../lm_faults_x', '/etc/../x', 'a\nb', 'x' * 300]

    def refuse(case) -> None:
        number, text, name = case
        with tally.attempt(repr((text, name))[:80]):
            file, run = place / f'{number}.gin', name or str(place / f'run{number}')
            file.write_text(text)
            before = {*pathlib.Path(tiny.ROOT).glob('[!.]*')}
            session = shop.lm('train', '--gin_file', str(file), '--run_dir', run, *shop.flags(PLAIN) * bool(name))
            need(session.codes()[0] in (2, 44), f'{session.codes()}:\n{session.output()}')
            need('Traceback' not in session.output() and 'error:' in session.output(), session.output())
            need(not sentinel.exists() and not os.path.exists(run), 'something was written')
            new = {*pathlib.Path(tiny.ROOT).glob('[!.]*')} - before
            need(not new, f'{new} was written here')

    side_by_side(refuse, [(i, t, n) for i, (t, n) in enumerate([(t, '') for t in texts] + [('', n) for n in names])])


def imports(shop: Workshop, tally: Tally) -> None:
    """18. A training from a token store runs without TensorFlow, clu, grain and tfds."""
    missing = ('tensorflow', 'tensorflow_datasets', 'clu', 'grain')
    run = shop.place('imports')
    with tally.attempt('train'):
        shop.finish(PLAIN, run, launcher=('without', *missing))
        shop.same_end(PLAIN, run)
    with tally.attempt('inspect'):
        need(shop.lm('inspect', str(run)).codes() == [0], 'lm inspect')


def no_pickle(shop: Workshop, tally: Tally) -> None:
    """19. No code in lm/ unpickles, evaluates text or opens a plain http address."""
    del shop
    words = {
        r'^\s*(import|from) (pickle|cloudpickle|dill|marshal|shelve|joblib)\b': 'pickle',
        r'allow_pickle\s*=\s*True|torch\.load': 'unpickles',
        r'\bnp\.load\((?!.*allow_pickle=False)': 'np.load without allow_pickle=False',
        r'(?<![\w.])(eval|exec)\(': 'runs text',
        r'urlopen\(|requests\.(get|post)|http\.client': 'opens addresses',
        r'shell\s*=\s*True|os\.system': 'a shell',
    }
    users_own = {'opens addresses': {'lm/trackers/webhook.py'}}  # it calls the user's address
    text = {str(p.relative_to(tiny.ROOT)): p.read_text() for p in (tiny.ROOT / 'lm').rglob('*.py')}
    for word, what in words.items():
        with tally.attempt(what):
            files = text.keys() - users_own.get(what, set())
            hits = [f'{p}: {m[0]}' for p in sorted(files) for m in re.finditer(word, text[p], re.MULTILINE)]
            need(not hits, hits)


def tests_of(tally: Tally, path: str, words: str) -> None:
    """Counts the tests of a file whose names contain one of the `words`."""
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-n', '0', path, '-k', words, '-rfE']
    done = subprocess.run(command, cwd=tiny.ROOT, env=tiny.environment(8), capture_output=True, text=True, timeout=900)
    counts = collections.Counter({word: int(n) for n, word in re.findall(r'(\d+) (passed|failed|error)', done.stdout)})
    failed = re.findall(r'^(?:FAILED|ERROR) (\S+)', done.stdout, re.MULTILINE)
    tally.tries += sum(counts.values()) - len(failed)
    for name in failed:
        with tally.attempt(name):
            need(False, done.stdout)
    with tally.attempt(path, count=0):
        need(failed or (done.returncode == 0 and counts['passed']), done.stdout)


def perplexity(shop: Workshop, tally: Tally) -> None:
    """15. Perplexity does not depend on batch size, devices or order, and equals numpy's (tests/evaluation)."""
    del shop
    tests_of(tally, 'tests/evaluation/test_evaluate.py', 'batch_size_and_devices or numpy or scored_once or windows')


def launch_scripts(shop: Workshop, tally: Tally) -> None:
    """20. Commands are as recorded; one run takes four attempts over three preemptions; 43 and 44 are never repeated;
    shellcheck passes."""
    del shop
    words = 'dry_run or preemptions or not_be_repeated or other_failures or shellcheck'
    tests_of(tally, 'tests/scripts/test_scripts_tpu.py', words)
