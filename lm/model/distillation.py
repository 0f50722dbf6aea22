"""The comparison of a student with its teacher on the same tokens: layer by layer, and by predictions.

B batch, L length, N layers, D model width, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lm.model.layers import RotatedLayer, scan_pairs
from lm.model.transformer import PLACES, Transformer

LEAST, NOISE = 1e-30, 1e-6
"""Probabilities below the first count as this much in logarithms. What is left of 1 counts above the second, which is
rounding."""


def compare_predictions(
    student: Transformer,
    teacher: Transformer,
    tokens_BxL: jax.Array,
    targets_BxL: jax.Array,
    positions: jax.Array,
    starts_BxL: jax.Array | None,
    *,
    temperature: float = 1.0,
) -> tuple[jax.Array, ...]:
    """Compares the distributions of the next token. Logits exist for `PLACES` positions at a time.

    The divergence compares both distributions at `temperature`. Its factor, the square of the temperature, keeps the
    size of the gradient (Hinton et al. 2015, §2). The likelihoods are at a temperature of 1.

    Returns:
        (Kullback–Leibler divergence of the student's distribution from the teacher's, negative log-likelihood of the
        target by the student, and by the teacher, without a gradient), each [B, L] float32, in nats.
    """
    x_BxLxD = student.hidden(tokens_BxL, positions, starts_BxL)
    y_BxLxD = jax.lax.stop_gradient(teacher.hidden(tokens_BxL, positions, starts_BxL))

    @jax.checkpoint
    def compare(place: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        x_BxD, y_BxD, targets_B = place
        logits_BxV = student.logits(x_BxD[:, None])[:, 0]
        theirs_BxV = jax.lax.stop_gradient(teacher.logits(y_BxD[:, None])[:, 0])
        ours_BxV, theirs_log_BxV = (jax.nn.log_softmax(z_BxV / temperature) for z_BxV in (logits_BxV, theirs_BxV))
        divergence_B = (jnp.exp(theirs_log_BxV) * (theirs_log_BxV - ours_BxV)).sum(axis=-1)
        nats_B, theirs_B = (
            -jnp.take_along_axis(jax.nn.log_softmax(z_BxV), targets_B[:, None], axis=-1)[:, 0]
            for z_BxV in (logits_BxV, theirs_BxV)
        )
        return divergence_B * temperature**2, nats_B, theirs_B

    return _over_places(compare, x_BxLxD, y_BxLxD, targets_BxL)


def compare_with_cached(
    student: Transformer,
    tokens_BxL: jax.Array,
    targets_BxL: jax.Array,
    ids_BxLxK: jax.Array,
    logs_BxLxK: jax.Array,
    positions: jax.Array,
    starts_BxL: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Compares the student with the K most probable next tokens of the teacher, at a temperature of 1.

    All other tokens are one outcome, whose probability is what is left: with the sets K and rest,

        Σ_{v in K} p_v (log p_v − log q_v) + p_rest (log p_rest − log q_rest),   p_rest = 1 − Σ_{v in K} p_v

    It is never larger than the divergence over all tokens, and equal to it where K has them all.

    Args:
        ids_BxLxK: the tokens.
        logs_BxLxK: their log-probabilities.

    Returns:
        (this divergence, negative log-likelihood of the target by the student), each [B, L] float32, in nats.
    """
    x_BxLxD = student.hidden(tokens_BxL, positions, starts_BxL)

    @jax.checkpoint
    def compare(place: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x_BxD, targets_B, ids_BxK, logs_BxK = place
        ours_BxV = jax.nn.log_softmax(student.logits(x_BxD[:, None])[:, 0])
        chosen_BxK = jnp.take_along_axis(ours_BxV, ids_BxK, axis=-1)
        rows_Bx1 = jnp.arange(ids_BxK.shape[0])[:, None]
        is_rest_BxV = jnp.ones(ours_BxV.shape, bool).at[rows_Bx1, ids_BxK].set(False)
        ours_rest_B = jnp.exp(ours_BxV).sum(axis=-1, where=is_rest_BxV)
        p_BxK = jnp.exp(logs_BxK)
        left_B = 1 - p_BxK.sum(axis=-1)
        rest_B = jnp.where(left_B > NOISE, left_B, 0.0)
        logs_rest_B = jnp.log(jnp.maximum(rest_B, LEAST)) - jnp.log(jnp.maximum(ours_rest_B, LEAST))
        divergence_B = (p_BxK * (logs_BxK - chosen_BxK)).sum(axis=-1) + rest_B * logs_rest_B
        return divergence_B, -jnp.take_along_axis(ours_BxV, targets_B[:, None], axis=-1)[:, 0]

    return _over_places(compare, x_BxLxD, targets_BxL, ids_BxLxK, logs_BxLxK)


def find_most_probable(
    teacher: Transformer, tokens_BxL: jax.Array, positions: jax.Array, starts_BxL: jax.Array | None, *, k: int
) -> tuple[jax.Array, ...]:
    """Returns the k most probable next tokens [B, L, k] and their log-probabilities, float32."""
    x_BxLxD = teacher.hidden(tokens_BxL, positions, starts_BxL)

    def find(place: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (x_BxD,) = place
        logs_BxK, ids_BxK = jax.lax.top_k(jax.nn.log_softmax(teacher.logits(x_BxD[:, None])[:, 0]), k)
        return ids_BxK, logs_BxK

    return _over_places(find, x_BxLxD)


def _over_places(
    compute: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]], *arrays_BxL: jax.Array
) -> tuple[jax.Array, ...]:
    """Calls a function with arrays [B, …] of each position, for `PLACES` positions at a time; results are [B, L, …]."""
    with jax.named_scope('cross_entropy'):
        places = tuple(array.swapaxes(0, 1) for array in arrays_BxL)
        return tuple(array.swapaxes(0, 1) for array in jax.lax.map(compute, places, batch_size=PLACES))


def compare_layers(
    student: Transformer,
    teacher: Transformer,
    tokens_BxL: jax.Array,
    positions: jax.Array,
    starts_BxL: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Compares the outputs of attention of each layer, both computed from the teacher's normalized input of the layer.

    The residual stream is the teacher's, and it has no gradient: no gradient crosses layers.

    Returns:
        (mean squares over the channels of the difference between student and teacher, and of the teacher's output),
        both [B, L, N] float32.
    """

    def compare(x_BxLxD: jax.Array, ours: RotatedLayer, theirs: RotatedLayer) -> tuple[jax.Array, tuple]:
        normed_BxLxD = theirs.block.normalize(x_BxLxD)
        taught_BxLxD = theirs.block.mix(normed_BxLxD, theirs.rotation, starts_BxL)
        after_BxLxD = theirs.block.finish(x_BxLxD, taught_BxLxD)
        normed_BxLxD, taught_BxLxD, after_BxLxD = jax.lax.stop_gradient((normed_BxLxD, taught_BxLxD, after_BxLxD))
        learned_BxLxD = ours.block.mix(normed_BxLxD, ours.rotation, starts_BxL)
        return after_BxLxD, (_mean_squares(taught_BxLxD, learned_BxLxD), _mean_squares(taught_BxLxD))

    x_BxLxD = jax.lax.stop_gradient(teacher.embed(tokens_BxL, positions))
    _, (errors_NxBxL, sizes_NxBxL) = scan_pairs(student, teacher, positions, compare, x_BxLxD)
    return jnp.moveaxis(errors_NxBxL, 0, -1), jnp.moveaxis(sizes_NxBxL, 0, -1)


def _mean_squares(x_BxLxD: jax.Array, y_BxLxD: jax.Array | float = 0.0) -> jax.Array:
    """Returns the mean over the channels of the squared difference, [B, L] float32."""
    return jnp.square(x_BxLxD.astype(jnp.float32) - y_BxLxD).mean(axis=-1)


def score_swapped(
    student: Transformer,
    teacher: Transformer,
    tokens_BxL: jax.Array,
    targets_BxL: jax.Array,
    positions: jax.Array,
    starts_BxL: jax.Array | None,
    *,
    swapped_N: jax.Array,
) -> jax.Array:
    """Scores the targets by the teacher with the student's attention in some layers, [B, L] in nats.

    `swapped_N` is True in these layers. One program serves all choices, and computes one kind of attention per layer.
    """

    def apply(
        x_BxLxD: jax.Array, ours: RotatedLayer, theirs: RotatedLayer, is_swapped: jax.Array
    ) -> tuple[jax.Array, None]:
        normed_BxLxD = theirs.block.normalize(x_BxLxD)
        mixed_BxLxD = jax.lax.cond(
            is_swapped,
            lambda: ours.block.mix(normed_BxLxD, ours.rotation, starts_BxL),
            lambda: theirs.block.mix(normed_BxLxD, theirs.rotation, starts_BxL),
        )
        return theirs.block.finish(x_BxLxD, mixed_BxLxD), None

    x_BxLxD, _ = scan_pairs(student, teacher, positions, apply, teacher.embed(tokens_BxL, positions), swapped_N)
    return teacher.losses(teacher.final_norm(x_BxLxD), targets_BxL)
