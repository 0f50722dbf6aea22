"""The TPU kernels on windows that are split over devices: kernels of whole windows, with sums from other parts.

Forward, a kernel folds the keys of this part, and a logarithmic number of exchanges gives the sums of all parts before
(`lm.ops.linear_attention.parts.carry_sums`). The forward kernel starts from them. The backward pass is the mirror
image. The same kernel folds the queries of this part with the gradients of their outputs, for earlier keys. The
exchange runs in the other direction, and the backward kernel starts from the sums of the parts after this one.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops.linear_attention.parts import carry_sums
from lm.ops.linear_attention.tpu import attention
from lm.ops.linear_attention.tpu.backward import backward
from lm.ops.linear_attention.tpu.channels import attention as channels
from lm.ops.linear_attention.tpu.features import expand, make_moment_operand, make_state_operand
from lm.ops.linear_attention.tpu.fold import fold
from lm.ops.linear_attention.tpu.forward import ForwardResults, forward
from lm.ops.linear_attention.tpu.maps import make_operands
from lm.ops.linear_attention.tpu.plan import KernelInputs, KernelSums, TpuPlan
from lm.ops.linear_attention.types import LinearCall, LinearResult, Sides
from lm.ops.residuals import save_residual
from lm.ops.tpu import ROWS, by_head
from lm.ops.tpu.decay import multiply_tokens


class PartFactors(NamedTuple):
    """The factors of the part's tokens beyond its ends.

    No gradient flows to these factors; `attend` gives it to the running sums.

    Attributes:
        keys_BxKxL: the factor of each key at the part's end; 0 in the padding.
        queries_BxKxL: the factor of the sums before the part, for each query; None: no decay.
        log_whole_BxK: the log factor from the part's first token to its last; None: no decay.
    """

    keys_BxKxL: jax.Array
    queries_BxKxL: jax.Array | None
    log_whole_BxK: jax.Array | None


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the outputs of this part of a call, which `unsupported` must not refuse."""
    if call.channel_log_decay_BxLxKxE is not None:
        return channels.linear_attention_on_part(call)
    return LinearResult(attention.run_per_device(_attend_part, call), None)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    return attention.refuse(call, part=True)


def _attend_part(call: LinearCall) -> jax.Array:
    plan, inputs, maps = attention.arrange(call, part=True)
    factors = _make_factors(call, inputs.v_NxDxL.shape[-1])
    return by_head(attend(plan, inputs, maps, factors), call.q_BxLxHxE, call.v_BxLxKxD.shape[-1])


def _make_factors(call: LinearCall, padded: int) -> PartFactors:
    batch, length, heads, _ = call.k_BxLxKxE.shape
    if call.log_decay_BxLxK is None:
        return PartFactors(jnp.broadcast_to((jnp.arange(padded) < length) * 1.0, (batch, heads, padded)), None, None)
    decay = decays.accumulate(jax.lax.stop_gradient(call.log_decay_BxLxK))
    first, each, last = (decays.entries(decay, *ends) for ends in ((0, 1), (1,), (length,)))
    pairs = (decays.between(last, each), decays.between(each, first))
    keys, queries = (jnp.pad(jnp.exp(g), ((0, 0), (0, 0), (0, padded - length))) for g in pairs)
    return PartFactors(keys, queries, decays.between(last, first)[..., 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: TpuPlan, inputs: KernelInputs, maps: Sides[jax.Array] | None, factors: PartFactors) -> jax.Array:
    """Runs the kernels as `lm.ops.linear_attention.tpu.attention.attend` does, on a part of a window."""
    results, _, _ = _forward(plan, False, inputs, make_operands(maps, inputs), factors)
    return results.o_NxDxL


def _forward(
    plan: TpuPlan, save: bool, inputs: KernelInputs, operands: Sides[jax.Array] | None, factors: PartFactors
) -> tuple[ForwardResults[jax.Array], KernelSums[jax.Array], Callable]:
    """Computes the outputs of this part.

    Returns:
        (the results of the kernel, the sums over the keys of this part, a function). The sums have decayed up to its
        end, [B, K, rows, columns]. The function takes the gradients of the sums before this part as queries read them,
        and returns the gradients of these sums and of the log factor of the part.
    """
    part_sums = jax.tree.map(save_residual, _fold_keys(plan, inputs, operands, factors))
    read_factors = _make_read_factors(plan, inputs)

    def carry(part_sums, log_whole_BxK):
        """Returns the sums before this part as queries read them, and as they are."""
        before = carry_sums(part_sums, log_whole_BxK)
        return jax.tree.map(jnp.multiply, before, read_factors), before

    _, pull, before = jax.vjp(carry, part_sums, factors.log_whole_BxK, has_aux=True)
    groups = inputs.x_NxFxL.shape[0] // math.prod(factors.keys_BxKxL.shape[:2])
    before = jax.tree.map(lambda a: jnp.repeat(a, groups, axis=1).reshape(-1, *a.shape[2:]), before)
    return forward(plan, save, inputs, operands, before), part_sums, pull


def _fold_keys(
    plan: TpuPlan, inputs: KernelInputs, operands: Sides[jax.Array] | None, factors: PartFactors
) -> KernelSums[jax.Array]:
    """Computes the sums over the keys of this part, decayed up to its end, [B, K, rows, columns]."""
    batch, heads, length = factors.keys_BxKxL.shape
    groups, w_Nx1xL = inputs.v_NxDxL.shape[0] // (batch * heads), factors.keys_BxKxL.reshape(-1, 1, length)
    y, v = inputs.y_NxFxL[::groups], inputs.v_NxDxL[::groups]
    u = multiply_tokens(v, w_Nx1xL) if plan.decay else v
    sums = fold(plan, False, y, u, w_Nx1xL, operands and operands.keys)
    return jax.tree.map(lambda a: a.reshape(batch, heads, *a.shape[1:]), sums)


def _make_read_factors(plan: TpuPlan, inputs: KernelInputs) -> KernelSums[jax.Array]:
    """Makes the factors by which the kernels multiply each number of the sums when they read it."""
    features, head_dim = inputs.x_NxFxL.shape[1], inputs.v_NxDxL.shape[1]
    if not plan.squared:
        # The rows below the values are all the same and count once.
        return KernelSums(jnp.where(jnp.arange(head_dim + ROWS) < head_dim, 1.0, 1.0 / ROWS)[:, None], None)
    moment, one_Fx1 = plan.sums_shapes(features, head_dim).moment, jnp.ones((features, 1), jnp.float32)
    if moment is not None:
        moment = make_moment_operand(plan, jnp.ones(moment, jnp.float32), jnp.dtype('float32'))
    state = expand(plan, one_Fx1, weighted=True).T
    return KernelSums(make_state_operand(plan, state, features, jnp.dtype('float32')), moment)


def _attend_forward(plan: TpuPlan, inputs: KernelInputs, maps: Sides[jax.Array] | None, factors: PartFactors):
    operands = make_operands(maps, inputs)
    results, part_sums, pull = _forward(plan, True, inputs, operands, factors)
    results = jax.tree.map(save_residual, results)
    return results.o_NxDxL, ((inputs, (maps, operands), results), factors, (part_sums if plan.decay else None, pull))


def _attend_backward(plan: TpuPlan, residuals, do: jax.Array):
    (inputs, (maps, operands), results), factors, (part_sums, pull) = residuals
    o, inverse = results.o_NxDxL, results.inverse_Nx1xL
    batch, heads, length = factors.keys_BxKxL.shape
    groups = inputs.v_NxDxL.shape[0] // (batch * heads)
    e_Nx1xL = jnp.zeros_like(inverse)
    if plan.normalize:
        e_Nx1xL = -inverse * jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=1, keepdims=True)
    g_NxDxL = do.astype(jnp.float32) * inverse
    if factors.queries_BxKxL is not None:
        read_Nx1xL = jnp.repeat(factors.queries_BxKxL, groups, axis=1).reshape(-1, 1, length)
        g_NxDxL, e_Nx1xL = g_NxDxL * read_Nx1xL, e_Nx1xL * read_Nx1xL
    g_NxDxL = g_NxDxL.astype(inputs.v_NxDxL.dtype)
    to_earlier = fold(plan, True, inputs.x_NxFxL, g_NxDxL, e_Nx1xL, operands and operands.queries)
    dread = jax.tree.map(lambda a: a.reshape(batch, heads, groups, *a.shape[1:]).sum(2), to_earlier)
    down, dlog_BxK = pull(dread)
    read_factors = _make_read_factors(plan, inputs)

    def arrange_after(down, factor):
        after = jnp.where(factor == 0.0, 0.0, down / factor)
        # The kernels' gradients of keys are summed over the heads that share them, so one head takes all.
        first = jnp.pad(after[:, :, None], [(0, 0), (0, 0), (0, groups - 1), (0, 0), (0, 0)])
        return first.reshape(-1, *first.shape[3:])

    after = jax.tree.map(arrange_after, down, read_factors)
    gradients = backward(plan, operands, inputs, results, do, after)
    dinputs = gradients.inputs
    if part_sums is not None and dinputs.c_Nx1xL is not None:
        # All reads of later parts, of this part and of parts before, have decayed with its tokens after the last reset.
        products = zip(jax.tree.leaves(part_sums), jax.tree.leaves(down), strict=True)
        dlast_BxK = dlog_BxK + cast(jax.Array, sum((a * d).sum((2, 3)) for a, d in products))
        inside = jnp.where(jnp.arange(length) < plan.part, dinputs.c_Nx1xL, 0.0)
        dc_BxKxGxL = inside.reshape(batch, heads, groups, length)
        dc_Nx1xL = dc_BxKxGxL.at[:, :, 0, plan.part - 1].add(dlast_BxK).reshape(-1, 1, length)
        dinputs = dinputs._replace(c_Nx1xL=dc_Nx1xL)
    return dinputs, attention.sum_steps(maps, gradients.maps), None


attend.defvjp(_attend_forward, _attend_backward)
