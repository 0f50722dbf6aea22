"""Stands in for `python -m lm.sweep.child PARENT train --run_dir DIR --gin_file FILE`, and imports nothing heavy.

The loss falls towards a value that the learning rate and the number of layers decide. $FAKE_TRAINER names a folder. A
file there called TRIAL.CODE makes the next training of that trial end with CODE, half-way.
"""

import json
import math
import os
import pathlib
import re
import signal
import sys
import time


def main(arguments: list[str]) -> int:
    folder, source = (pathlib.Path(arguments[arguments.index(flag) + 1]) for flag in ('--run_dir', '--gin_file'))
    text = source.read_text()

    def number(name: str) -> float:
        return float(re.search(rf'^{re.escape(name)} = (.*)$', text, re.MULTILINE)[1])

    steps, every = int(number('train.steps')), int(number('train.eval_every'))
    end = 2 + math.log10(number('optimizer.peak_learning_rate') / 1e-3) ** 2 + 0.1 * number('model.n_layers')
    notes = pathlib.Path(os.environ['FAKE_TRAINER'])
    with open(notes / 'log', 'a') as log:
        log.write(f'{folder.name}\n')
    fault = next(notes.glob(f'{folder.name}.*'), None)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'new').write_text(text)
    (folder / 'new').rename(folder / 'config.gin')  # as lm writes it, whole
    path = folder / 'metrics.jsonl'
    done = len(path.read_text().splitlines()) if path.exists() else 0
    for i in range(done + 1, steps // every + 1):
        if fault and i > steps // every // 2:
            fault.unlink()
            return int(fault.suffix[1:])
        if stopped:
            return 42
        record = {'kind': 'eval', 'step': i * every, 'loss': end + 5 / i, 'perplexity': 1.0, 'split': 'validation'}
        with open(path, 'a') as file:
            file.write(json.dumps(record) + '\n')
        time.sleep(float(os.environ.get('FAKE_SECONDS', '0')))
    target = folder / 'checkpoints' / str(steps)
    target.mkdir(parents=True, exist_ok=True)
    (target / 'commit_success.txt').write_text('')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
