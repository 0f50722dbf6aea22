"""The delta rule."""

import functools

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.ops.delta_rule import DeltaCall, compute
from lm.ops.delta_rule.parts import extend
from lm.ops.delta_rule.tpu.plan import make_plan
from lm.ops.tpu.chunks import CHUNK
from scripts.kernels.cases.base import Case, KernelCall, Steps


def cases() -> dict[str, Case]:
    found: dict[str, Case] = dict(delta=delta_call)
    return found | {'delta channel': functools.partial(delta_call, channels=True)}


def delta_call(dims: HeadDims, length: int, channels: bool = False) -> KernelCall:
    """Returns a call with decay, in bfloat16; with `channels` each key channel has a factor of its own."""

    def function(call):
        return compute(call, 'pallas_tpu').o_BxLxHxD

    q, k = (jax.ShapeDtypeStruct((1, length, n, dims.head_dim), jnp.bfloat16) for n in (dims.n_heads, dims.n_kv_heads))
    gate = jax.ShapeDtypeStruct(k.shape[:3], jnp.float32)
    decay = {'log_decay_BxLxK': gate}
    if channels:
        decay = {'channel_log_decay_BxLxKxE': jax.ShapeDtypeStruct(k.shape, jnp.float32)}
    make_call = functools.partial(DeltaCall, query_length=dims.head_dim**-0.5)
    call = jax.eval_shape(make_call, q, k, k, gate, **decay)

    def steps(call: DeltaCall) -> Steps:
        tokens = make_plan(call).heads * call.groups * CHUNK
        return {(name, f'delta_rule_{name}'): tokens for name in ('forward', 'backward')}

    # A part of a window also computes its effect on the state. This effect has one column per number of a key.
    return KernelCall(function, (call,), steps(call), part_steps=steps(jax.eval_shape(extend, call)))
