"""Fits feature maps to a kernel on sampled queries and keys (LLoPS, eq. 6 and §4.3).

`configs/papers/llops/table_3_sketches/fit_llops.py` does so with the sketches of LLoPS for the layers of a trained run.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm.attention.base import AttentionModule
from lm.errors import ConfigError
from lm.ops.linear_attention import FeatureMap

LOSSES = ('frobenius', 'relative', 'rmae')


class Fit(NamedTuple):
    """Fitted parameters of the map, for queries and for keys, and how well they do on the samples."""

    q_parameters: Any
    k_parameters: Any
    before: dict[str, float]
    """`errors` of the initial ones."""
    after: dict[str, float]


def fit(
    feature_map: FeatureMap,
    kernel: Callable[[jax.Array], jax.Array],
    start: tuple[Any, Any],
    q_NxD: jax.Array,
    k_NxD: jax.Array,
    *,
    steps: int = 2000,
    learning_rate: float = 1e-2,
    batch_size: int = 256,
    loss: str = 'frobenius',
    seed: int = 0,
) -> Fit:
    """Minimises the error of ⟨φ_Q(q), φ_K(k)⟩ against kernel(q·k) over all pairs of samples, with Adam.

    Args:
        feature_map: φ.
        kernel: of the inner product, element-wise.
        start: the parameters of φ for queries and for keys, to start from.
        q_NxD: sampled queries, after layer normalization where there is one.
        k_NxD: sampled keys.
        steps: of the optimizer, each on `batch_size` queries times as many keys.
        learning_rate: at the start, falling to 0 along a cosine.
        batch_size: queries (and keys) drawn for a step.
        loss: which of the `errors` to minimise; with 'rmae' no pair may be orthogonal.
        seed: of the batches.

    Raises:
        ConfigError: unknown loss, or samples that are not two matrices of one width.
    """
    if loss not in LOSSES:
        raise ConfigError(f'loss = {loss!r}: must be one of {", ".join(LOSSES)}')
    if q_NxD.ndim != 2 or k_NxD.ndim != 2 or q_NxD.shape[1] != k_NxD.shape[1]:
        raise ConfigError(f'samples of shapes {q_NxD.shape} and {k_NxD.shape}: must be matrices of one width')
    batch_key = jax.random.split(jax.random.key(seed))[1]
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps), b2=0.99)

    def evaluate(parameters, q, k):
        return errors(feature_map, kernel, parameters, q, k)

    @jax.jit
    def run(parameters):
        def step(carry, key):
            parameters, state = carry
            q, k = (
                jax.random.choice(each, x, (min(batch_size, len(x)),), replace=False)
                for each, x in zip(jax.random.split(key), (q_NxD, k_NxD), strict=True)
            )
            gradient = jax.grad(lambda p: evaluate(p, q, k)[loss])(parameters)
            update, state = optimizer.update(gradient, state)
            return (optax.apply_updates(parameters, update), state), None

        carry = (parameters, optimizer.init(parameters))
        (parameters, _), _ = jax.lax.scan(step, carry, jax.random.split(batch_key, steps))
        return parameters

    fitted = run(start)
    before, after = (
        {name: float(value) for name, value in jax.jit(evaluate)(p, q_NxD, k_NxD).items()} for p in (start, fitted)
    )
    return Fit(*fitted, before, after)


def samples(
    layers: Iterable[tuple[AttentionModule, jax.Array, jax.Array]], count: int, seed: int = 0
) -> list[tuple[jax.Array, jax.Array]]:
    """Queries and keys of every layer as its kernel sees them: `count` positions and heads drawn from a batch.

    Args:
        layers: what `Transformer.attention_inputs` yields.
        count: of each, where the batch has as many.
        seed: of the draws.

    Returns:
        for each layer ([count, head_dim], [count, head_dim]) float32, after the mechanism's layer normalization where
        it has one.
    """
    key = jax.random.key(seed)

    def draw(key, x_BxLxNxC):
        rows = x_BxLxNxC.reshape(-1, x_BxLxNxC.shape[-1]).astype(jnp.float32)
        return jax.random.choice(key, rows, (min(count, len(rows)),), replace=False)

    found = []
    for i, (module, *inputs) in enumerate(layers):
        pair = module.normalize(*inputs)
        found.append(tuple(draw(jax.random.fold_in(key, 2 * i + j), x) for j, x in enumerate(pair)))
    return found


def errors(
    feature_map: FeatureMap,
    kernel: Callable[[jax.Array], jax.Array],
    parameters: tuple[Any, Any],
    q_NxD: jax.Array,
    k_MxD: jax.Array,
) -> dict[str, jax.Array]:
    """Of the features over all pairs: 'frobenius' (eq. 6 over the kernel's own norm), 'relative' (the sum of absolute
    errors over that of the kernel) and 'rmae' (eq. 21, which pairs with a kernel near zero dominate)."""
    exact_NxM = kernel(q_NxD @ k_MxD.T)
    x_NxF, y_MxF = (feature_map(p, x, i == 0) for i, (p, x) in enumerate(zip(parameters, (q_NxD, k_MxD), strict=True)))
    error_NxM = x_NxF @ y_MxF.T - exact_NxM
    return {
        'frobenius': jnp.sum(error_NxM**2) / jnp.sum(exact_NxM**2),
        'relative': jnp.sum(jnp.abs(error_NxM)) / jnp.sum(jnp.abs(exact_NxM)),
        'rmae': jnp.mean(jnp.abs(error_NxM / exact_NxM)),
    }
