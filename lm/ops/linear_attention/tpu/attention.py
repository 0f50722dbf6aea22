"""Causal linear attention on TPUs: fused Pallas kernels, forward and backward.

They support φ(x) = x ⊗ x (polysketch), quadratic series (Taylor), plain features, and feature maps φ(x) = f(W x, x)
(Performer, LLoPS). Each works with or without an exact polynomial kernel inside each block, decay and denominators.
Calls with a factor per key channel have kernels of their own (`channels`).
Expansions, packed by symmetry, and the maps' features are formed in VMEM. Sums over earlier keys stay there across the
blocks of a sequence. The forward kernel leaves a rounded copy per block for the backward sweep; with many features
forming the sums again is better. Inside the kernels everything is feature by token ([N, F, L], N = batch · heads).

Static cycles per token and head are measured by `scripts.kernels.cycles`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.linear_attention.feature_maps import ProductMap
from lm.ops.linear_attention.tpu.backward import backward
from lm.ops.linear_attention.tpu.channels import attention as channels
from lm.ops.linear_attention.tpu.fold import sum_before
from lm.ops.linear_attention.tpu.forward import forward
from lm.ops.linear_attention.tpu.maps import make_operands
from lm.ops.linear_attention.tpu.plan import (
    KernelInputs,
    Sizes,
    TpuPlan,
    count_made,
    estimate_vmem,
    is_quadratic,
    make_plan,
)
from lm.ops.linear_attention.types import LOCAL_BLOCK, PLAIN, LinearCall, LinearResult, PolynomialKernel, Sides
from lm.ops.residuals import save_residual
from lm.ops.tpu import LANES, ROWS, by_head, by_token
from lm.ops.tpu.decay import LogSums, arrange_log_decay, block_sums

DEGREES = (1, 2, 4, 8, 16)


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call, which `unsupported` must not refuse."""
    if call.channel_log_decay_BxLxKxE is not None:
        return channels.linear_attention(call)
    return LinearResult(run_per_device(_attend_whole, call), None)


def run_per_device(function: Callable[[LinearCall], jax.Array], call: LinearCall) -> jax.Array:
    """Applies `function`, LinearCall → [B, L, H, D], to each device's rows of the batch."""
    parameters = None if call.options.feature_map is None else call.parameters
    tokens = dataclasses.replace(call, q_parameters=None, k_parameters=None)
    if call.options.local is None:
        tokens = dataclasses.replace(tokens, q_local_BxLxHxC=None, k_local_BxLxKxC=None)

    def run(parameters, tokens):
        if parameters is not None:
            tokens = dataclasses.replace(tokens, q_parameters=parameters.queries, k_parameters=parameters.keys)
        return function(tokens)

    return platform.per_device(run, split=(False, True))(parameters, tokens)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    return refuse(call, part=False)


def refuse(call: LinearCall, part: bool) -> str | None:
    """Returns why the kernels cannot compute a call, on a part of a window or on a whole window; or None."""
    options, local = call.options, call.options.local
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    if call.channel_log_decay_BxLxKxE is not None:
        return channels.refuse(call)
    if not options.causal:
        return 'is causal only'
    if not options.normalize and options.feature_map is not None:
        return 'is normalised with a feature map'
    if call.log_decay_BxLxK is not None and options.feature_map is not None:
        return 'has no decay with a feature map'
    if call.initial_state is not None or call.with_state:
        return 'takes no state in and gives none out'
    if reason := _refuse_map(call):
        return reason
    if options.powers != PLAIN and not is_quadratic(options.powers):
        return f'takes powers {PLAIN} or (c0, c1, c2) ≥ 0 with c2 above 0, not {options.powers}'
    if options.denominator_bias < 0:
        return f'takes no negative denominator_bias, {options.denominator_bias}'
    if local is not None:
        if options.window is not None:
            return 'takes exact blocks, not a window'
        if not isinstance(local, PolynomialKernel) or local.degree not in DEGREES:
            return f'takes a polynomial of degree {DEGREES} as exact kernel'
        block = options.block or LOCAL_BLOCK
        if block % LANES and (part or call.q_BxLxHxE.shape[1] > block):
            return f'takes blocks that are multiples of {LANES}, not {block}'
    # The inputs of a map may be more precise than its features.
    inputs = [a for a in (call.q_BxLxHxE, call.k_BxLxKxE) if options.feature_map is None or a.dtype != jnp.float32]
    return (
        platform.mixed_types(call.v_BxLxKxD, *(call.local or ()), *inputs)
        or platform.uneven_batch(call.q_BxLxHxE.shape[0])
        or _refuse_sizes(call, part)
    )


def _refuse_map(call: LinearCall) -> str | None:
    feature_map, powers = call.options.feature_map, call.options.powers
    if feature_map is None:
        return None
    if not isinstance(feature_map, ProductMap) or jax.eval_shape(feature_map.matrix, call.q_parameters) is None:
        return f'does not compute the feature map {feature_map}'
    if powers != PLAIN:
        return f'takes a feature map with powers {PLAIN} only, not {powers}'
    queries = count_made(feature_map, call.q_BxLxHxE, call.q_parameters)
    keys = count_made(feature_map, call.k_BxLxKxE, call.k_parameters)
    if any(size % ROWS for size in queries) or queries != keys:
        return f'takes multiples of {ROWS} features, as many of keys as of queries'
    return None


def _refuse_sizes(call: LinearCall, part: bool) -> str | None:
    """Returns why the kernels would not fit the memory on chip, or None."""
    sizes = dataclasses.replace(Sizes.of_call(call, part), heads=1)
    plan = make_plan(sizes)
    # On v4 the operand made of the sums over later queries counts too (r = 96, heads of 128: 17 MiB); on v5e r = 128
    # compiles with 1.1 times the estimate as it is.
    small = plan.squared and plan.vmem_limit_bytes is None
    operand = sizes.itemsize * math.prod(plan.state_shape(sizes.input_rows, sizes.head_dim)) if small else 0
    if 1.1 * (estimate_vmem(plan, sizes) + operand) > platform.vmem()[0]:
        features = plan.features or call.q_BxLxHxE.shape[-1]
        return f'would not fit its VMEM with {features} features and blocks of {plan.block}'
    return None


def _attend_whole(call: LinearCall) -> jax.Array:
    block = call.options.exact_block
    if block is not None and call.local is not None and call.q_BxLxHxE.shape[1] <= block:
        # One block of exact weights needs no other weights.
        q, k = call.local
        options = dataclasses.replace(call.options, feature_map=None)
        call = dataclasses.replace(call, q_BxLxHxE=q, k_BxLxKxE=k, q_local_BxLxHxC=None, k_local_BxLxKxC=None)
        call = dataclasses.replace(call, q_parameters=None, k_parameters=None, options=options)
    return by_head(attend(*arrange(call, part=False)), call.q_BxLxHxE, call.v_BxLxKxD.shape[-1])


def arrange(call: LinearCall, part: bool) -> tuple[TpuPlan, KernelInputs, Sides[jax.Array] | None]:
    """Plans a call and lays its arrays out feature by token.

    `part` is True where the tokens are a part of a window, with sums over keys before it.

    Returns:
        (the plan, the arrays, the matrices of the feature map). L is a multiple of plan.block, and N of plan.heads.
        The matrices are [R, E] float32; None without a map.
    """
    length, heads = call.q_BxLxHxE.shape[1:3]
    sizes = Sizes.of_call(call, part)
    plan = make_plan(sizes)
    padded = -(-length // plan.block) * plan.block

    maps = None
    if plan.feature_map is not None:
        matrices = (cast(jax.Array, plan.feature_map.matrix(each)).astype(jnp.float32) for each in call.parameters)
        maps = Sides(*(jnp.pad(w, ((0, 0), (0, sizes.input_rows - w.shape[1]))) for w in matrices))
    # Zero tokens after the last one change nothing, whatever their features: no earlier query sees them, and the
    # gradients of their outputs are 0. Zero features change nothing either.
    arrays = [call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, *(call.local or ())]
    inputs = KernelInputs(*(by_token(a, padded, heads) for a in arrays))
    if call.log_decay_BxLxK is not None:
        log_decay_Nx1xL = arrange_log_decay(call.log_decay_BxLxK, padded, heads)
        c, rest = cast(LogSums, block_sums(log_decay_Nx1xL, plan.block, inputs.v_NxDxL.dtype))
        inputs = inputs._replace(c_Nx1xL=c, rest_Nx1xL=rest)
    return plan, inputs, maps


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: TpuPlan, inputs: KernelInputs, maps: Sides[jax.Array] | None) -> jax.Array:
    """Runs the kernels on what `arrange` returns, and returns outputs [N, D, L]."""
    return forward(plan, False, inputs, make_operands(maps, inputs)).o_NxDxL


def _attend_forward(plan: TpuPlan, inputs: KernelInputs, maps: Sides[jax.Array] | None):
    operands = make_operands(maps, inputs)
    results = jax.tree.map(save_residual, forward(plan, not plan.sums_again, inputs, operands))
    return results.o_NxDxL, (inputs, (maps, operands), results)


def _attend_backward(plan: TpuPlan, residuals, do: jax.Array):
    inputs, (maps, operands), results = residuals
    if plan.sums_again and operands is not None:
        results = results._replace(sums=sum_before(plan, inputs.y_NxFxL, inputs.v_NxDxL, operands.keys))
    gradients = backward(plan, operands, inputs, results, do)
    return gradients.inputs, sum_steps(maps, gradients.maps)


def sum_steps(maps: Sides[jax.Array] | None, dmaps: Sides[jax.Array] | None) -> Sides[jax.Array] | None:
    """Sums the gradients of the matrices over the steps' heads; zeros where the map does not learn."""
    return jax.tree.map(jnp.zeros_like, maps) if dmaps is None else jax.tree.map(lambda d: d.sum(0), dmaps)


attend.defvjp(_attend_forward, _attend_backward)
