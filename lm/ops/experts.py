"""Products of tokens with the matrices of the experts that each token chose.

    y_t = Σ_n w_tn W'_e σ(W_e x_t)      e = the n-th choice of token t; σ maps the G numbers of a product to F numbers

T tokens, N choices per token, E experts, D width, R = T·N rows: a token has one row per choice.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import platform
from lm.ops.arguments import check_shapes
from lm.ops.custom_vjp import custom_vjp

Activate = Callable[[jax.Array], jax.Array]


def apply_experts(
    x_TxD: jax.Array,
    chosen_TxN: jax.Array,
    weights_TxN: jax.Array,
    into_ExDxG: jax.Array,
    out_ExFxD: jax.Array,
    activate: Activate,
) -> jax.Array:
    """Computes y, [T, D] in the dtype of x; sums are float32. Only the matrices of chosen experts are multiplied.

    Rows are sorted by expert, and each expert's rows are multiplied with its matrices (`jax.lax.ragged_dot`, which has
    kernels on TPUs; on CPUs XLA multiplies all rows with all experts). Fewer rows than experts, as in decoding, take a
    copy of their matrices instead. No expert drops a token.

    Args:
        x_TxD: tokens.
        chosen_TxN: the experts of each token, int32.
        weights_TxN: their weights, float32.
        into_ExDxG: W of each expert.
        out_ExFxD: W' of each expert.
        activate: σ, of arrays [R, G].

    Raises:
        OperationError: arrays that do not fit together.
    """
    arrays = {'x_TxD': x_TxD, 'chosen_TxN': chosen_TxN, 'weights_TxN': weights_TxN}
    check_shapes(arrays | {'into_ExDxG': into_ExDxG, 'out_ExFxD': out_ExFxD})
    experts, choices = into_ExDxG.shape[0], chosen_TxN.shape[1]
    chosen_R, rows_RxD = chosen_TxN.reshape(-1), jnp.repeat(x_TxD, choices, axis=0)
    if chosen_R.shape[0] < experts:
        hidden_RxF = activate(_multiply_each(rows_RxD, into_ExDxG[chosen_R]).astype(x_TxD.dtype))
        y_RxD = _multiply_each(hidden_RxF, out_ExFxD[chosen_R])
    else:
        order_R = jnp.argsort(chosen_R, stable=True)
        back_R = jnp.argsort(order_R)
        sizes_E = jnp.bincount(chosen_R, length=experts).astype(jnp.int32)
        sorted_RxD = permute(rows_RxD, order_R, back_R)
        hidden_RxF = activate(_multiply_sorted(sorted_RxD, into_ExDxG, sizes_E).astype(x_TxD.dtype))
        y_RxD = permute(_multiply_sorted(hidden_RxF, out_ExFxD, sizes_E), back_R, order_R)
    y_TxNxD = y_RxD.reshape(*chosen_TxN.shape, -1)
    return (y_TxNxD * weights_TxN[..., None]).sum(axis=1).astype(x_TxD.dtype)


@custom_vjp()
def permute(x_RxD: jax.Array, order_R: jax.Array, back_R: jax.Array) -> jax.Array:
    """Returns the rows in the order `order_R`; `back_R` is the inverse.

    The gradient gathers rows too. JAX's own would scatter them, in an order that GPUs do not repeat.
    """
    return x_RxD[order_R]


def _permute_backward(kept, d_RxD):
    return d_RxD[kept], None, None


permute.defvjp(lambda x_RxD, order_R, back_R: (x_RxD[order_R], back_R), _permute_backward)


def _multiply_sorted(x_RxD: jax.Array, kernel_ExDxG: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Multiplies the first rows with the first matrix, and so on; `sizes_E` says how many, float32."""
    if platform.target_platform() == 'cpu':  # it refuses products of bfloat16 with a float32 result
        x_RxD, kernel_ExDxG = x_RxD.astype(jnp.float32), kernel_ExDxG.astype(jnp.float32)
    return lax.ragged_dot(x_RxD, kernel_ExDxG, sizes_E, preferred_element_type=jnp.float32)


def _multiply_each(x_RxD: jax.Array, kernel_RxDxG: jax.Array) -> jax.Array:
    """Multiplies each row with a matrix of its own, float32."""
    return jnp.einsum('rd,rdg->rg', x_RxD.astype(jnp.float32), kernel_RxDxG.astype(jnp.float32))
