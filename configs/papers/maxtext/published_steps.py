#!/usr/bin/env python3
"""Compares step times that others measured on TPUs with what `lm check` predicts.

    python configs/papers/maxtext/published_steps.py [NAME …] [--list]

Compiles each step for the slice that the row names. This takes minutes and needs no TPU: `pip install -e '.[tpu]'`.
Prints the Markdown table of docs/lab/tpu_steps.md.
"""

import argparse
import dataclasses
import sys
from typing import Any

from lm.cost_model.compiled_step import check
from lm.experiment import Experiment, load
from lm.hardware import parse
from lm.text import make_markdown_table

MAXTEXT = {
    'model.norm': 'rms',
    'model.activation': 'silu',
    'model.sinusoids': False,
    'model.tied': False,
    'model.vocab_size': 32_000,
    'model.head_dim': 128,
    'softmax.implementation': 'splash',
    'model.remat': 'full',
    'train.context_length': 2048,
}
"""Bindings that the models below share, unless they set others."""
OF_8B = {
    'model.d_model': 4096,
    'model.n_heads': 32,
    'model.n_kv_heads': 8,
    'model.n_layers': 32,
    'model.hidden_dim': 14_336,
    'train.context_length': 8192,
}
QWEN_NEXT = {
    'model.d_model': 4096,
    'model.n_heads': 16,
    'model.n_kv_heads': 4,
    'model.head_dim': 256,
    'model.n_layers': 32,
    'model.hidden_dim': 12_288,
    'model.rotary_base': 10_000_000.0,
    'model.rotary_fraction': 0.25,
    'delta.gate': True,
    'delta.n_heads': 16,
    'delta.n_kv_heads': 16,
    'delta.n_value_heads': 32,
    'delta.head_dim': 128,
    'delta.convolution': 4,
    'delta.output_gate': 'silu',
    'delta.rotary_base': None,
    'delta.norm_epsilon': 1e-6,
    'softmax.qk_norm': True,
    'softmax.output_gate': 'sigmoid',
}
"""Three layers of the gated delta rule before each of softmax. The authors name heads of the former, tokens, and 8B
parameters. We assume layers, widths, vocabulary and heads of softmax: Qwen3.5-9B has them. It has 7.9B parameters
without its output matrix."""
BEFORE_GATES = {'model.gated': False, 'model.activation': 'gelu', 'model.head_dim': 256}
"""MaxText's first models. With these heads, and without gates, they have the parameters of their names."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A measurement.

    Attributes:
        windows: windows per chip and step.
        bindings: the model and `model.remat`, on top of `MAXTEXT`; all chips share the parameters.
        attention: the layers' mechanisms, as gin writes them; '': softmax alone.
        seconds: seconds per step, where they are published.
        teraflops: else TFLOP/s per chip by MaxText's count, in which attention is a whole square.
        difference: between the published program and ours.
    """

    source: str
    topology: str
    windows: int
    bindings: dict[str, Any]
    seconds: float | None = None
    teraflops: float | None = None
    difference: str = ''
    attention: str = ''

    def experiment(self) -> Experiment:
        bindings = MAXTEXT | self.bindings
        chips = parse(self.topology).chips
        bindings['train.tokens_per_step'] = chips * self.windows * bindings['train.context_length']
        bindings['mesh.fsdp'] = chips
        given = [f'{name} = {value!r}' for name, value in bindings.items()]
        return load([], given + [f'model.attention = {self.attention}'] * bool(self.attention))

    def seconds_per_step(self, experiment: Experiment) -> float:
        if self.seconds is not None:
            return self.seconds
        model, length = experiment.model, experiment.train.context_length
        other_half = 6 * length * model.n_layers * model.layer.n_heads * model.layer.head_dim
        flops = (model.flops_per_token(length) + other_half) * self.windows * length
        assert self.teraflops is not None, 'a measurement has one of the two'
        return flops / (self.teraflops * 1e12)


def scaled(d_model: int, n_layers: int) -> dict[str, int]:
    return {'model.d_model': d_model, 'model.n_heads': 64, 'model.hidden_dim': 28_672, 'model.n_layers': n_layers}


V4_22B = BEFORE_GATES | {
    'model.d_model': 6144,
    'model.n_heads': 24,
    'model.hidden_dim': 24_576,
    'model.n_layers': 48,
}
V4_52B = BEFORE_GATES | {
    'model.d_model': 12_288,
    'model.n_heads': 32,
    'model.hidden_dim': 49_152,
    'model.n_layers': 32,
}
DELTA_AND_SOFTMAX = '[@delta(), @delta(), @delta(), @softmax()]'
OFFLOADED = 'theirs keeps the inputs and products of attention, in the memory of the host'
PUBLISHED = {
    'v5e-16b': Published('MaxText, configs/v5e', 'v5e:16x16', 6, scaled(4096, 32), teraflops=120),
    'v5e-32b': Published('MaxText, configs/v5e', 'v5e:16x16', 4, scaled(8192, 32), teraflops=132),
    'v5e-64b': Published('MaxText, configs/v5e', 'v5e:16x16', 2, scaled(8192, 64), teraflops=118),
    'v4-22b': Published('MaxText, configs/v4', 'v4:4x4x4', 13, V4_22B, teraflops=156),
    'v4-52b': Published('MaxText, configs/v4', 'v4:4x4x12', 7, V4_52B, teraflops=154),
    'v5p-32b': Published(
        'MaxText, configs/v5p',
        'v5p:4x4x4',
        6,
        scaled(8192, 32) | {'model.remat': 'dense'},
        teraflops=328,
        difference='theirs shares each product by four chips',
    ),
    'v6e-llama3.1-8b': Published(
        'tpu-recipes, Llama3.1-8B v6e-8',
        'v6e:2x4',
        3,
        OF_8B | {'model.vocab_size': 128_256},
        seconds=3.443,
        difference=OFFLOADED,
    ),
    'v6e-mistral-7b': Published(
        'tpu-recipes, Mistral-7B v6e-8',
        'v6e:2x4',
        6,
        OF_8B | {'train.microbatches': 2},
        seconds=6.320,
        difference='the same; ours takes two microbatches, else it does not fit',
    ),
    'v5e-qwen3-next-8b': Published(
        'MaxText, pull request 4348',
        'v5e:16x16',
        1,
        QWEN_NEXT | {'model.vocab_size': 151_936, 'train.context_length': 4096},
        seconds=2.571,
        difference='theirs has other kernels of the delta rule, and 3.373 s without kernels',
        attention=DELTA_AND_SOFTMAX,
    ),
    'v6e-qwen3.5-9b': Published(
        'MaxText, issue 4347',
        'v6e:2x4',
        1,
        QWEN_NEXT | {'model.vocab_size': 248_320, 'train.context_length': 8192},
        seconds=2.548,
        difference='theirs has no kernels of the delta rule, and products of experts in its FFN',
        attention=DELTA_AND_SOFTMAX,
    ),
}


def row_of(name: str, published: Published) -> list[str]:
    experiment = published.experiment()
    found = check(experiment, published.topology)
    measured = published.seconds_per_step(experiment)
    row = [name, published.source, f'{measured:.2f} s']
    if not found.fits:
        return [*row, f'needs {found.memory.needed_gib:.1f} of {found.memory.limit_gib:.1f} GiB', '', '', '', '']
    assert found.predicted is not None
    assert found.speed is not None
    assert found.predicted_step is not None
    predicted, bound = found.predicted.seconds_per_step, found.speed.seconds_per_step
    upper = f'{found.predicted_step.upper_seconds:.2f} s'
    return [*row, f'{bound:.2f} s', f'{predicted:.2f} s', f'{predicted / measured:.2f}', upper, published.difference]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', metavar='NAME', help=f'of {", ".join(PUBLISHED)}; default: all')
    parser.add_argument('--list', action='store_true', help='print what would be compiled, and end')
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in PUBLISHED]:
        parser.error(f'{unknown[0]}: not published; choose of {", ".join(PUBLISHED)}')
    rows = []
    for name in arguments.names or PUBLISHED:
        published = PUBLISHED[name]
        if arguments.list:
            experiment = published.experiment()
            print(f'{name:16} {published.topology:10} {published.seconds_per_step(experiment):6.2f} s a step')
            continue
        rows.append(row_of(name, published))
        print(*rows[-1], sep='  ', file=sys.stderr, flush=True)
    if rows:
        columns = ['model', 'source', 'published', 'bound', 'predicted', 'predicted ÷ published']
        columns += ["with XLA's estimates", 'difference']
        print(make_markdown_table(rows, columns))
    return 0


if __name__ == '__main__':
    sys.exit(main())
