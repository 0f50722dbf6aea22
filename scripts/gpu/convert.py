#!/usr/bin/env python3
"""Converts the softmax model of the study at 25M parameters with 5 % of its tokens: trains the teacher on the common
corpus, then both stages of each student, and saves the figures after each.

    python scripts/gpu/convert.py --save RESULT

PACK and CACHE are as in `scripts/gpu/study.py`. A row that is stopped saves the students that it has.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import time

from study import CONFIG, ROOT, TINY, prepare, prepare_tiny, read_run, run_lm

WINDOW, FULL = '@window_linear()', '@softmax()'
STUDENTS = {
    'window_linear': f'[{WINDOW}, {WINDOW}, {WINDOW}, {WINDOW}]',
    'three_to_one': f'[{WINDOW}, {WINDOW}, {WINDOW}, {FULL}]',
}
"""Student → its pattern of mechanisms."""
STAGES = {'align': (96, 3e-3), 'distill': (160, 3e-4)}
"""Stage → its steps of 8,192 tokens, and its highest rate."""


def list_flags(*settings: str) -> list[str]:
    return [word for setting in settings for word in ('--gin_param', setting)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--save', type=pathlib.Path, required=True, help='the file for the figures')
    parser.add_argument('--tiny', action='store_true', help='tiny models on a few texts, for tests')
    given = parser.parse_args()
    cache = pathlib.Path(os.environ.get('CACHE', ROOT / 'build'))
    packed = pathlib.Path(os.environ.get('PACK', ROOT / '.gpu_pack')) / 'corpus'
    runs = cache / 'runs' / given.save.stem
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    result: dict = {'seconds': {}}

    def save() -> None:
        found = {path.name: read_run(path) for path in sorted(runs.iterdir()) if path.is_dir()}
        given.save.write_text(json.dumps(result | {'runs': found}) + '\n')

    def stop(*_) -> None:
        result['stopped'] = True
        save()
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    flags = []
    if given.tiny:
        flags = list_flags(f"data.path = '{prepare_tiny(cache)}'", *TINY)
    elif packed.exists():
        flags = list_flags(f"data.path = '{prepare(packed, cache)[0]}'")

    def call(name: str, *arguments: str) -> None:
        begun = time.monotonic()
        run_lm(*arguments, '--run_dir', str(runs / name), check=True)
        result['seconds'][name] = round(time.monotonic() - begun, 1)
        save()

    call('teacher', 'train', '--gin_file', CONFIG, '--gin_file', 'configs/attention/softmax.gin', *flags)
    for student, pattern in STUDENTS.items():
        source = []
        for stage, (steps, rate) in STAGES.items():
            name = f'{student}_{stage}'
            settings = [
                f'model.attention = {pattern}',
                'train.tokens_per_step = 8192',
                f'train.steps = {steps}',
                'optimizer.rule = @adamw()',
                'optimizer.schedule = @linear()',
                f'optimizer.peak_learning_rate = {rate}',
                'optimizer.warmup_steps = 8',
                'optimizer.weight_decay = 0.0',
            ]
            settings += [*TINY[-7:-1], 'optimizer.warmup_steps = 1'] if given.tiny else []
            command = ['distill', '--stage', stage, '--teacher', str(runs / 'teacher'), *source]
            call(name, *command, '--gin_file', 'configs/attention/window_linear.gin', *list_flags(*settings))
            source = ['--init_from', str(runs / name)]
    shutil.rmtree(runs)
    return 0


if __name__ == '__main__':
    sys.exit(main())
