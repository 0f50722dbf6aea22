#!/usr/bin/env python
"""Times linear attention or the delta rule with a factor per key channel, forward and backward, by implementation.

    python scripts/gpu/time_channels.py FILE --implementations xla,pallas_gpu_channels

It writes milliseconds as JSON: the median, the least and the greatest of calls that take turns. An implementation that
refuses the call has the reason instead.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from lm.bench.timing import in_turns
from lm.ops import delta_rule, linear_attention
from lm.ops.errors import OperationError


def draw(batch: int, length: int, heads: int, size: int) -> list[jax.Array]:
    """Returns q, k, v, β and logs of factors, as the layers have them."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, x = (jax.random.normal(key, (batch, length, heads, size)) for key in keys[:4])
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (batch, length, heads)))
    wide = [y.astype(jnp.bfloat16) for y in (q / size**0.5, k, v)]
    return [*wide, beta, jax.nn.log_sigmoid(x) / 16]


def attend(q, k, v, beta, log, implementation: str) -> jax.Array:
    """Computes gated linear attention."""
    return linear_attention.linear_attention(
        q, k, v, channel_log_decay_BxLxKxE=log, normalize=False, implementation=implementation
    )


def learn(q, k, v, beta, log, implementation: str) -> jax.Array:
    """Computes the delta rule."""
    return delta_rule.delta_rule(
        q, k, v, beta, channel_log_decay_BxLxKxE=log, query_length=1.0, implementation=implementation
    )


OPERATIONS = {'linear_attention': attend, 'delta_rule': learn}


def differentiate(operation: str, implementation: str, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the gradients for a cotangent of the outputs' shape."""
    function = functools.partial(OPERATIONS[operation], implementation=implementation)
    return jax.vjp(function, *arrays)[1](arrays[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('file', type=pathlib.Path)
    parser.add_argument('--operation', choices=OPERATIONS, default='linear_attention')
    parser.add_argument('--implementations', default='xla,pallas_gpu_channels')
    parser.add_argument('--contexts', default='8192,65536')
    parser.add_argument('--tokens', type=int, default=65_536, help='tokens per call')
    parser.add_argument('--heads', type=int, default=12)
    parser.add_argument('--size', type=int, default=64, help='of keys and of values')
    parser.add_argument('--repeats', type=int, default=7)
    arguments = parser.parse_args()
    found: dict[str, dict] = {}
    for context in map(int, arguments.contexts.split(',')):
        arrays = draw(arguments.tokens // context, context, arguments.heads, arguments.size)
        calls, result = {}, found.setdefault(str(context), {})
        for name in arguments.implementations.split(','):
            run = jax.jit(functools.partial(differentiate, arguments.operation, name))
            try:
                jax.eval_shape(run, *arrays)
            except OperationError as error:
                result[name] = str(error)
                continue
            calls[name] = functools.partial(run, *arrays)
        for name, times in in_turns(calls, arguments.repeats).items():
            result[name] = times and [round(1000 * x, 3) for x in (times.seconds, times.least, times.greatest)]
        arguments.file.write_text(json.dumps(found))


if __name__ == '__main__':
    main()
