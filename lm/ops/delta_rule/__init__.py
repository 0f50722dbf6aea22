"""The delta rule: a state that unlearns what a key held before it learns the key's new value, linear in the length.

    S_i = a_i S_{i-1} + β_i k_i (v_i - a_i S_{i-1}ᵀ k_i)ᵀ          o_i = S_iᵀ q_i

(Schlag et al. 2021; Yang et al. 2024, DeltaNet; with factors a Yang et al. 2025, Gated DeltaNet, eq. 10.) A token
multiplies the state by a_i (I - β_i k_i k_iᵀ). With keys of length 1 and β from 0 to 1 it removes a part β of what
stands at the key; with β up to 2 it can also turn it around (Grazzi et al. 2025). Each key channel may have a factor of
its own. a_i is then a diagonal matrix, and the formula is Kimi delta attention (Kimi Team 2025, Kimi Linear, eq. 1).

B batch, L length, H query heads, K key and value heads (K divides H; head h reads key head h // (H / K)), E key size,
D value size.
"""

import dataclasses

import jax

from lm.ops import platform
from lm.ops.arguments import check_heads, check_shapes
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.errors import OperationError

IMPLEMENTATIONS = platform.Implementations(
    'the delta rule',
    __name__,
    reference='reference',
    xla='xla',
    pallas_tpu='tpu.rule',
    pallas_gpu='gpu.rule',
    pallas_gpu_channels='gpu.channels.rule',
)
"""Each module has `delta_rule(call: DeltaCall) -> DeltaResult`."""
PARTS = platform.Implementations('the delta rule on parts of a window', __name__, xla='parts', pallas_tpu='tpu.parts')
"""Implementations for windows that are split over devices (`lm.ops.sequence`)."""


def delta_rule(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    beta_BxLxK: jax.Array,
    log_decay_BxLxK: jax.Array | None = None,
    *,
    channel_log_decay_BxLxKxE: jax.Array | None = None,
    query_length: float | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes what each query reads of the state after its token.

    Args:
        q_BxLxHxE: queries.
        k_BxLxKxE: keys; the state grows where β ⟨k, k⟩ > 2.
        v_BxLxKxD: values.
        beta_BxLxK: the share of the difference that is learned; float32.
        log_decay_BxLxK: logs of the factors a, at most 0; float32. -inf, and all below -104, reset the state
            (`lm.ops.decay`). None: no factors.
        channel_log_decay_BxLxKxE: logs of further factors, one per channel of the key; at most 0, float32, -inf too.
            They multiply with the factors of `log_decay_BxLxK`. None: no such factors.
        query_length: queries are scaled to this length first, and keys to length 1; None: neither is scaled.
        initial_state: [B, K, E, D] float32, as an earlier call returned it; None: zeros.
        return_state: also return the state after the last token.
        implementation: one of `IMPLEMENTATIONS`, on parts of a window one of `PARTS`; None picks the platform's.

    Returns:
        [B, L, H, D] in the dtype of v; with `return_state` also the state. Sums are float32.

    Raises:
        OperationError: arrays that do not fit, an unknown implementation, or a state on parts of a window.
    """
    call = DeltaCall(
        q_BxLxHxE,
        k_BxLxKxE,
        v_BxLxKxD,
        beta_BxLxK,
        log_decay_BxLxK,
        initial_state,
        channel_log_decay_BxLxKxE,
        query_length,
    )
    if return_state and platform.sequence_shards() > 1:
        raise OperationError('mesh.sequence: a window on many devices has no states of its own')
    o_BxLxHxD, state_BxKxExD = compute(call, implementation)
    return o_BxLxHxD if state_BxKxExD is None or not return_state else (o_BxLxHxD, state_BxKxExD)


def compute(call: DeltaCall, implementation: str | None = None) -> DeltaResult:
    """Computes a call, and raises errors, as `delta_rule` does."""
    check_shapes({f.name: getattr(call, f.name) for f in dataclasses.fields(call) if f.name != 'query_length'})
    check_heads(call.q_BxLxHxE.shape[2], call.k_BxLxKxE.shape[2])
    if platform.sequence_shards() > 1:
        if call.initial_state_BxKxExD is not None:
            raise OperationError('mesh.sequence: a window on many devices has no states of its own')
        return PARTS.choose(implementation, call).delta_rule(call)
    implementation = implementation or platform.choose_for_short(call.k_BxLxKxE.shape[1])
    return IMPLEMENTATIONS.choose(implementation, call).delta_rule(call)


__all__ = ['IMPLEMENTATIONS', 'PARTS', 'DeltaCall', 'DeltaResult', 'compute', 'delta_rule']
