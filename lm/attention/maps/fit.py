"""Fits the sketches of LLoPS to a kernel on sampled queries and keys (LLoPS, eq. 6 and §4.3).

`scripts/fit_llops.py` does so for the layers of a trained run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm.attention.llops import Llops, Sketch
from lm.errors import ConfigError
from lm.model import Transformer

LOSSES = ('frobenius', 'relative', 'rmae')


class Fit(NamedTuple):
    """Fitted factors, [factors, rank, D (+ 1), n_features], and how well they do on the samples."""

    q_factors: jax.Array
    k_factors: jax.Array
    before: dict[str, float]
    """`errors` of the initial factors."""
    after: dict[str, float]


def fit(
    config: Llops,
    q_NxD: jax.Array,
    k_NxD: jax.Array,
    *,
    kernel: Callable[[jax.Array], jax.Array] | None = None,
    steps: int = 2000,
    learning_rate: float = 1e-2,
    batch_size: int = 256,
    loss: str = 'frobenius',
    seed: int = 0,
    factors: tuple[jax.Array, jax.Array] | None = None,
) -> Fit:
    """Minimises the error of ⟨φ_Q(q), φ_K(k)⟩ against kernel(q·k) over all pairs of samples, with Adam.

    Args:
        config: the sketch. Layer normalization is not part of it: give vectors that have been through it.
        q_NxD: sampled queries.
        k_NxD: sampled keys.
        kernel: of the inner product, element-wise; None is the power `config.degree`.
        steps: of the optimizer, each on `batch_size` queries times as many keys.
        learning_rate: at the start, falling to 0 along a cosine.
        batch_size: queries (and keys) drawn for a step.
        loss: which of the `errors` to minimise; with 'rmae' no pair may be orthogonal.
        seed: of the initial factors and the batches.
        factors: where to start from; None draws them as `config.init` says.

    Raises:
        ConfigError: unknown loss, or samples that are not two matrices of one width.
    """
    if loss not in LOSSES:
        raise ConfigError(f'loss = {loss!r}: must be one of {", ".join(LOSSES)}')
    if q_NxD.ndim != 2 or k_NxD.ndim != 2 or q_NxD.shape[1] != k_NxD.shape[1]:
        raise ConfigError(f'samples of shapes {q_NxD.shape} and {k_NxD.shape}: must be matrices of one width')
    kernel = kernel or (lambda s: jax.lax.integer_pow(s, config.degree))
    sketch = Sketch(config.nonnegative, config.affine)
    init_key, batch_key = jax.random.split(jax.random.key(seed))
    start = factors or config.init_factors(init_key, q_NxD.shape[1])
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps), b2=0.99)

    def evaluate(factors, q, k):
        return errors(sketch, kernel, factors, q, k)

    @jax.jit
    def run(factors):
        def step(carry, key):
            factors, state = carry
            q, k = (
                jax.random.choice(each, x, (min(batch_size, len(x)),), replace=False)
                for each, x in zip(jax.random.split(key), (q_NxD, k_NxD), strict=True)
            )
            gradient = jax.grad(lambda f: evaluate(f, q, k)[loss])(factors)
            update, state = optimizer.update(gradient, state)
            return (optax.apply_updates(factors, update), state), None

        carry = (factors, optimizer.init(factors))
        (factors, _), _ = jax.lax.scan(step, carry, jax.random.split(batch_key, steps))
        return factors

    fitted = run(start)
    before, after = (
        {name: float(value) for name, value in jax.jit(evaluate)(f, q_NxD, k_NxD).items()} for f in (start, fitted)
    )
    return Fit(*fitted, before, after)


def samples(model: Transformer, tokens_BxL: jax.Array, count: int, seed: int = 0) -> list[tuple[jax.Array, jax.Array]]:
    """Queries and keys of every layer as its kernel sees them: `count` positions and heads drawn from a batch.

    Returns:
        for each layer ([count, head_dim], [count, head_dim]) float32, after the mechanism's layer normalization where
        it has one.
    """
    key = jax.random.key(seed)

    def draw(key, x_BxLxNxC):
        rows = x_BxLxNxC.reshape(-1, x_BxLxNxC.shape[-1]).astype(jnp.float32)
        return jax.random.choice(key, rows, (min(count, len(rows)),), replace=False)

    found = []
    for i, (block, q_BxLxHxC, k_BxLxKxC) in enumerate(model.attention_inputs(tokens_BxL)):
        if hasattr(block.attention, 'normalize'):
            q_BxLxHxC, k_BxLxKxC = block.attention.normalize(q_BxLxHxC, k_BxLxKxC)
        pair = (q_BxLxHxC, k_BxLxKxC)
        found.append(tuple(draw(jax.random.fold_in(key, 2 * i + j), x) for j, x in enumerate(pair)))
    return found


def errors(
    sketch: Sketch,
    kernel: Callable[[jax.Array], jax.Array],
    factors: tuple[jax.Array, jax.Array],
    q_NxD: jax.Array,
    k_MxD: jax.Array,
) -> dict[str, jax.Array]:
    """Of the sketch over all pairs: 'frobenius' (eq. 6 over the kernel's own norm), 'relative' (the sum of absolute
    errors over that of the kernel) and 'rmae' (eq. 21, which pairs with a kernel near zero dominate)."""
    exact_NxM = kernel(q_NxD @ k_MxD.T)
    error_NxM = sketch(factors[0], q_NxD) @ sketch(factors[1], k_MxD).T - exact_NxM
    return {
        'frobenius': jnp.sum(error_NxM**2) / jnp.sum(exact_NxM**2),
        'relative': jnp.sum(jnp.abs(error_NxM)) / jnp.sum(jnp.abs(exact_NxM)),
        'rmae': jnp.mean(jnp.abs(error_NxM / exact_NxM)),
    }
