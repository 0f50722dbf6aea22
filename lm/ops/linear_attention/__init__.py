"""Linear attention: causal kernel attention in time and memory linear in the length.

     weight of key j for query i     w_ij = Σ_n powers[n] ⟨x_i, y_j⟩^n     x, y features of queries and keys
     output                          o_i  = Σ_{j ≤ i} w_ij v_j / (denominator_bias + Σ_{j ≤ i} w_ij)

It is computed by block lower triangular multiplication (PolySketchFormer §3.1; draft Theorem 3.1): sums over the keys
of earlier blocks, direct products inside a block. The powers of the features are formed block by block and never exist
whole. `powers = SQUARE` is PolySketchFormer's ψ ⊗ ψ, (1, 1, 1/2) the second-order Taylor series of exp, PLAIN a feature
map as it is. An exact kernel may replace w_ij nearby:

    local, window=None      for the keys of the query's block: key j with j // block == i // block (§3.2)
    local, window=N         for the N most recent keys, the query's included (approximate attention, eq. 2.1)

With decay the weight of key j for query i, exact or not, is also multiplied by the factors of the tokens between:

    log_decay       w_ij · Π_{j < m ≤ i} exp(log_decay_m)        S_i = exp(log_decay_i) S_{i-1} + φ(k_i) v_iᵀ

(RetNet, constant; Mamba-2 and gated linear attention, per token; -inf where a document begins). Sums over keys are then
decayed up to their last key, so that segments compose (`decay_state`).

Letters: B batch, L length, H query heads, K key and value heads, E inputs and F outputs of the feature map (E = F
without one). D is the value size, C the size of the vectors that the exact kernel compares, R the size of the packed
expansion. K divides H; head h reads key head h // (H / K), and sums are kept once per key head.
"""

import dataclasses
from typing import Any

import jax

from lm.ops import platform
from lm.ops.arguments import check_counts, check_heads, check_shapes
from lm.ops.errors import OperationError
from lm.ops.linear_attention.feature_maps import FeatureMap, RescaledMap
from lm.ops.linear_attention.types import (
    LOCAL_BLOCK,
    PLAIN,
    SQUARE,
    ExpKernel,
    LinearCall,
    LinearResult,
    LocalKernel,
    Options,
    PolynomialKernel,
    State,
    decay_state,
)

IMPLEMENTATIONS = platform.Implementations(
    'linear attention',
    __name__,
    reference='reference',
    xla='xla',
    pallas_tpu='tpu.attention',
    pallas_gpu='gpu.attention',
    pallas_gpu_recurrent='gpu.recurrent.attention',
    pallas_gpu_channels='gpu.channels.attention',
)
"""Each module has `linear_attention(call: LinearCall) -> LinearResult`."""
PARTS = platform.Implementations('linear attention on parts of a window', __name__, xla='parts', pallas_tpu='tpu.part')
"""Implementations for windows that are split over devices (`lm.ops.sequence`)."""


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    *,
    powers: tuple[float, ...] = PLAIN,
    feature_map: FeatureMap | None = None,
    q_parameters: Any = None,
    k_parameters: Any = None,
    local: LocalKernel | None = None,
    q_local_BxLxHxC: jax.Array | None = None,
    k_local_BxLxKxC: jax.Array | None = None,
    window: int | None = None,
    block: int | None = None,
    denominator_bias: float = 1.0,
    normalize: bool = True,
    causal: bool = True,
    initial_state: State | None = None,
    log_decay_BxLxK: jax.Array | None = None,
    channel_log_decay_BxLxKxE: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, State]:
    """Computes attention with weights that factor over features, and exact ones nearby.

    Args:
        q_BxLxHxE: features of the queries, or the inputs of `feature_map`.
        k_BxLxKxE: features of the keys, or the inputs of `feature_map`.
        v_BxLxKxD: values.
        powers: coefficients of the polynomial in ⟨x, y⟩; any number, any sign.
        feature_map: computed block by block, and again in the backward pass, so that wide features (Performer's 2048)
            never exist for the whole sequence. None: q and k are features already.
        q_parameters: the pytree that `feature_map` gets with queries; gradients flow to it.
        k_parameters: the pytree that `feature_map` gets with keys; gradients flow to it.
        local: the exact kernel nearby; None uses the features everywhere.
        q_local_BxLxHxC: the queries that the exact kernel compares; required with `local`.
        k_local_BxLxKxC: the keys that the exact kernel compares; required with `local`.
        window: the exact kernel's reach in keys; None: the query's block.
        block: tokens per block. It is part of the definition where `local` is set and `window` is not (default 1024,
            the paper's). Elsewhere the result does not depend on it, and None picks a fast block.
        denominator_bias: added to the denominator.
        normalize: whether to divide by the denominator.
        causal: whether keys after a query are hidden; `local` needs it.
        initial_state: sums over keys before the first, as an earlier call returned them.
        log_decay_BxLxK: logs of the factors, at most 0, by which a token multiplies all before it; float32. Below -104
            (-inf too) exp is 0 in float32: for this token and later ones nothing before it counts, and no gradient
            crosses it. None: no decay. Gradients flow to it.
        channel_log_decay_BxLxKxE: logs of further factors, one per channel of the key; at most 0, float32, -inf too.
            They multiply with the factors of `log_decay_BxLxK`, in S alone: only plain features without a denominator
            have them (gated linear attention). None: no such factors.
        return_state: also return the sums over all keys so far. The exact kernel's keys are among them: a later call
            starts a new block, and cannot reach back with its window (`lm.ops.linear_attention.decode` can).
        implementation: one of `IMPLEMENTATIONS`, on parts of a window one of `PARTS`; None picks the platform's.

    Returns:
        [B, L, H, D] in the dtype of v; with `return_state` also the `State`. Sums and denominators are float32.

    Raises:
        OperationError: arrays or options that do not fit together, or an unknown implementation; on parts of a window
            that are shorter than the `window`, or no multiple of the exact blocks.
    """
    call = LinearCall(
        q_BxLxHxE,
        k_BxLxKxE,
        v_BxLxKxD,
        q_parameters,
        k_parameters,
        q_local_BxLxHxC,
        k_local_BxLxKxC,
        initial_state,
        log_decay_BxLxK,
        channel_log_decay_BxLxKxE,
        Options(tuple(powers), feature_map, local, window, block, denominator_bias, normalize, causal),
        return_state,
    )
    o_BxLxHxD, state = compute(call, implementation)
    return o_BxLxHxD if state is None else (o_BxLxHxD, state)


def compute(call: LinearCall, implementation: str | None = None) -> LinearResult:
    """Computes a call, and raises errors, as `linear_attention` does."""
    _check(call)
    implementations = IMPLEMENTATIONS
    if platform.sequence_shards() > 1:
        _check_part(call)
        implementations = PARTS
    elif call.channel_log_decay_BxLxKxE is not None:
        implementation = implementation or platform.choose_for_short(call.k_BxLxKxE.shape[1])
    return implementations.choose(implementation, call).linear_attention(call)


def _check(call: LinearCall) -> None:
    options = call.options
    _check_arrays(call)
    if not any(options.powers):
        raise OperationError(f'powers = {options.powers}: must hold a coefficient other than 0')
    if options.local is None and options.window is not None:
        raise OperationError(f'window = {options.window}: needs the exact kernel `local`')
    if options.local is not None and call.local is None:
        raise OperationError('local: needs q_local and k_local, the vectors that the exact kernel compares')
    if options.local is not None and not options.causal:
        raise OperationError('causal = False: the exact kernel `local` needs causal attention; leave it out')
    if options.lacks_factors and _stands_beside_others(options):
        raise OperationError(
            'feature_map: leaves factors out of queries, which do not cancel beside these other terms; '
            'set denominator_bias = 0 and leave `local` out, or take the map without rescaling'
        )
    if isinstance(options.local, ExpKernel) and not options.normalize:
        raise OperationError('normalize = False: the weights of this `local` have an unknown common factor')
    check_counts(window=options.window, block=options.block)
    if call.channel_log_decay_BxLxKxE is not None:
        _check_channels(call)
    if call.log_decay_BxLxK is not None and not options.causal:
        raise OperationError('causal = False: decay needs causal attention; leave log_decay out')


def _stands_beside_others(options: Options) -> bool:
    """Returns whether terms stand beside the approximate weights that the factors of queries are not put back for."""
    return not isinstance(options.local, ExpKernel) and (options.local is not None or options.denominator_bias != 0)


def _check_arrays(call: LinearCall) -> None:
    left_out = ('q_parameters', 'k_parameters', 'initial_state', 'options', 'with_state')
    arrays = {f.name: getattr(call, f.name) for f in dataclasses.fields(call) if f.name not in left_out}
    sums = None if call.initial_state is None else call.initial_state.kv_BxKxRxD
    check_shapes(arrays | {'initial_state.kv_BxKxRxD': sums})
    check_heads(call.q_BxLxHxE.shape[2], call.k_BxLxKxE.shape[2])


def _check_channels(call: LinearCall) -> None:
    options = call.options
    if options.powers != PLAIN or options.feature_map is not None or options.local is not None:
        raise OperationError('channel_log_decay: takes plain features alone; leave powers, feature_map and local out')
    if options.normalize or not options.causal:
        raise OperationError('channel_log_decay: has no denominator and is causal; set normalize = False')


def _check_part(call: LinearCall) -> None:
    options, length = call.options, call.q_BxLxHxE.shape[1]
    if not options.causal or call.initial_state is not None or call.with_state:
        raise OperationError('mesh.sequence: a window on many devices needs causal attention without states of its own')
    if options.window is not None and options.window > length:
        raise OperationError(f'mesh.sequence: parts of {length} tokens are shorter than the window of {options.window}')
    if (block := options.exact_block) is not None and length % block:
        raise OperationError(f'mesh.sequence: parts of {length} tokens are no multiple of the exact blocks of {block}')


__all__ = [
    'IMPLEMENTATIONS',
    'LOCAL_BLOCK',
    'PARTS',
    'PLAIN',
    'SQUARE',
    'ExpKernel',
    'FeatureMap',
    'LinearCall',
    'LinearResult',
    'LocalKernel',
    'Options',
    'PolynomialKernel',
    'RescaledMap',
    'State',
    'compute',
    'decay_state',
    'linear_attention',
]
