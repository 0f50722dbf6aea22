"""Run directories with invented figures, for tests of the modules that read run directories."""

import json
import math
import pathlib

from lm.attention import Attention
from lm.config.text import dump
from lm.data.dataset import DataConfig
from lm.experiment import Experiment
from lm.model import ModelConfig
from lm.tasks import Task
from lm.training.config import TrainConfig


def write_run(
    folder: pathlib.Path,
    attention: Attention,
    *,
    context: int = 1024,
    seed: int = 0,
    quality: float = 0.0,
    slowness: float = 0.0,
    steps: int = 2000,
    accuracy: bool = False,
    noise: float = 0.02,
    data: str | Task = 'data/pg19',
    log_every: int = 10,
    model: dict[str, int] | None = None,
    tokens_per_step: int = 2**20,
    devices: tuple[int, str] = (32, 'TPU v5 lite'),
) -> pathlib.Path:
    """Writes config.gin, run.json and metrics.jsonl of a finished run.

    Args:
        quality: nats by which the loss is worse.
        slowness: microseconds per token that each 1,024 tokens of context add to 0.2.
        model: fields of the model that differ from the default.
        devices: their number and kind.
    """
    experiment = Experiment(
        model=ModelConfig(attention=attention, **(model or {})),
        data=DataConfig(task=data) if isinstance(data, Task) else DataConfig(path=data),
        train=TrainConfig(steps=steps, context_length=context, seed=seed, tokens_per_step=tokens_per_step),
    )
    folder.mkdir(parents=True)
    (folder / 'config.gin').write_text(dump(experiment))
    info = {'parameters': 110_000_000, 'device_kind': devices[1], 'device_count': devices[0], 'data': 'd' * 64}
    info |= {'tokenizer': 't' * 64, 'started': '2026-01-01T00:00:00+00:00', 'resumed': [], 'git_commit': 'c' * 40}
    (folder / 'run.json').write_text(json.dumps(info))
    rate = 1e6 / (0.2 + slowness * context / 1024)
    lines = []

    def loss(n: int) -> float:
        return 2.3 + 7 * n**-0.35 + quality + 0.5 / math.log2(context)

    for n in [1, *range(log_every, steps + 1, log_every)]:
        wobble = noise * math.sin(12.9898 * (n + 1000 * seed)) * (1 + 30 / n)
        line = {'kind': 'train', 'step': n, 'loss': loss(n) + wobble, 'learning_rate': 7e-4, 'grad_norm': 0.5}
        line |= {
            'tokens': n * tokens_per_step,
            'tokens_per_second': rate / (10 if n == 1 else 1 + 0.02 * math.sin(n)),
            'mfu': 0.4,
        }
        lines.append(line | {'seconds': n * tokens_per_step / rate, 'skipped_steps': 0})
        if n % 250 == 0 or n == steps:
            value = loss(n) + 0.01 * math.sin(seed * 7.0)
            record = {'kind': 'eval', 'step': n, 'loss': value, 'perplexity': math.exp(value), 'split': 'validation'}
            record |= {'context_length': context, 'seconds': 1.0}
            if accuracy:
                record |= {
                    'accuracy': 1 / (1 + math.exp(min(50, (steps * 0.6 - n) / 100 + quality * 5))),
                    'task': 'copying',
                }
            else:
                positions = [(0, 1), *((2**i, min(2 ** (i + 1), context)) for i in range((context - 1).bit_length()))]
                record |= {
                    'loss_by_position': [
                        {'start': a, 'end': b, 'tokens': 1000 * (b - a), 'loss': value + 2 / (1 + math.log2(b))}
                        for a, b in positions
                    ],
                    'word_perplexity': math.exp(1.3 * value),
                    'bits_per_byte': value / 3,
                    'window': 'disjoint',
                    'tokens': 10_000,
                    'tokenizer_sha256': 't' * 64,
                }
            lines.append(record)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    done = folder / 'checkpoints' / str(steps)
    done.mkdir(parents=True)
    (done / 'commit_success.txt').write_text('')
    return folder


def evaluate(folder: pathlib.Path, **changes: object) -> None:
    """Adds a file of `lm evaluate`: the last periodic evaluation with changes."""
    last = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()][-1]
    target = folder / 'evaluations'
    target.mkdir(exist_ok=True)
    result = last | changes
    (target / f'{len(list(target.iterdir()))}.json').write_text(json.dumps(result))
