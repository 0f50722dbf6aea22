"""The memory that a run needs at least: what surely does not fit is refused before anything is computed.

`lm check --topology` compiles the step and knows the whole need. This is a lower bound, for any device.
"""

import math

import jax

from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.training.program import StepProgram

MOST_ELEMENTS = 2**32 - 1
"""The most numbers of an array on a device: its counts have 32 bits."""


def check_arrays(program: StepProgram, shards: int) -> None:
    """Raises ConfigError for a parameter with more numbers on each of `shards` devices than a device can count."""
    for path, leaf in jax.tree.leaves_with_path(program.step.functions.abstract['params']):
        if (count := math.prod(leaf.shape)) > MOST_ELEMENTS * shards:
            model = program.step.functions.config
            raise ConfigError(
                f'model.vocab_size = {model.vocab_size}, model.d_model = {model.d_model}, model.n_layers = '
                f'{model.n_layers}: the parameter {jax.tree_util.keystr(path, simple=True, separator=".")} would have '
                f'{count:,} numbers, and {MOST_ELEMENTS:,} is the most on a device (mesh.fsdp = {shards}); make the '
                'model smaller, or share it by more devices'
            )


def check_state(program: StepProgram, shards: int, memory: int) -> None:
    """Raises ConfigError if the state of a step, split over `shards` devices, is larger than the memory of a device."""
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.step.abstract))
    if needed / shards > memory:
        raise ConfigError(
            f'mesh.fsdp = {shards}: parameters and optimizer take {_format(needed / shards)} on each device, which has '
            f'{_format(memory)}; split them over more devices, or make the model smaller'
        )


def check_tokens(field: str, value: int, model: ModelConfig, tokens: float, itemsize: int, memory: int) -> None:
    """Raises ConfigError if a feed-forward layer of so many tokens at once is larger than the memory of a device.

    Args:
        field: the field that decides, and its `value`.
        model: the model.
        tokens: at a time on one device.
        itemsize: of an activation, bytes.
        memory: of a device, bytes.
    """
    shape = model.feed_forward_shape
    hidden = min(model.find_feed_forward(layer).dense_dim(shape) for layer in range(model.n_layers))
    needed = tokens * itemsize * (shape.d_model + (2 if shape.gated else 1) * hidden)
    if needed > memory:
        raise ConfigError(
            f'{field} = {value}: the activations of one layer take {_format(needed)} on each device, which has '
            f'{_format(memory)}; lower it'
        )


def _format(size: float) -> str:
    return f'{size / 2**30:,.1f} GiB'
