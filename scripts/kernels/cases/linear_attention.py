"""Linear attention: each mechanism's call of the operation, and calls with given features."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention import HeadDims, mechanisms
from lm.attention.linear import LinearAttention
from lm.ops.linear_attention import LinearCall, Options, compute
from lm.ops.linear_attention.tpu.channels import attention as channels
from lm.ops.linear_attention.tpu.plan import Sizes, make_plan
from lm.ops.tpu.chunk_sizes import ChunkSizes
from lm.ops.tpu.chunks import CHUNK
from scripts.kernels.cases.base import Case, KernelCall, Steps

N_FEATURES = 256


def cases() -> dict[str, Case]:
    linear = [mechanism for mechanism in mechanisms().values() if issubclass(mechanism, LinearAttention)]
    forms = {name: form for mechanism in linear for name, form in mechanism.kernel_forms().items()}
    found: dict[str, Case] = {name: functools.partial(mechanism_call, form) for name, form in forms.items()}
    return found | {f'features {N_FEATURES}': features_call, 'gated_linear channel': channel_call}


def mechanism_call(attention: LinearAttention, dims: HeadDims, length: int) -> KernelCall:
    """Returns the call of the operation that a mechanism makes for queries, keys and values in bfloat16."""

    def make_call(q, k, v):
        module = attention.build(dims, nnx.Rngs(0))
        return module.make_call(*module.normalize(q, k), v)

    heads = (dims.n_heads, dims.n_kv_heads, dims.n_kv_heads)
    qkv = (jax.ShapeDtypeStruct((1, length, n, dims.head_dim), jnp.bfloat16) for n in heads)
    return operation_call(jax.eval_shape(make_call, *qkv))


def features_call(dims: HeadDims, length: int) -> KernelCall:
    """Returns a call whose features are arrays in memory."""
    x, v = (jax.ShapeDtypeStruct((1, length, dims.n_heads, n), jnp.bfloat16) for n in (N_FEATURES, dims.head_dim))
    return operation_call(jax.eval_shape(LinearCall, x, x, v))


def channel_call(dims: HeadDims, length: int) -> KernelCall:
    """Returns a call in which each key channel has a factor of its own, in bfloat16."""

    def function(call):
        return compute(call, 'pallas_tpu').o_BxLxHxD

    q, k = (jax.ShapeDtypeStruct((1, length, n, dims.head_dim), jnp.bfloat16) for n in (dims.n_heads, dims.n_kv_heads))
    log_decay = jax.ShapeDtypeStruct(k.shape, jnp.float32)
    make_call = functools.partial(LinearCall, options=Options(normalize=False))
    call = jax.eval_shape(make_call, q, k, k, channel_log_decay_BxLxKxE=log_decay)
    plan = channels.make_plan(ChunkSizes.measure(call))
    tokens = plan.heads * plan.groups * CHUNK
    steps: Steps = {(kernel, f'channel_attention_{kernel}'): tokens for kernel in ('forward', 'backward')}
    return KernelCall(function, (call,), steps, part_steps=steps)


def operation_call(call: LinearCall) -> KernelCall:
    """Returns the function to compile for a call of the operation on abstract arrays."""

    def function(call):
        return compute(call, 'pallas_tpu').o_BxLxHxD

    plan, part = make_plan(Sizes.of_call(call)), make_plan(Sizes.of_call(call, part=True))
    names = ('forward', 'sums', 'backward') if plan.sums_again else ('forward', 'backward')
    steps: Steps = {(kernel, f'linear_attention_{kernel}'): plan.block * plan.heads for kernel in names}
    tokens = part.block * part.heads
    part_steps: dict[tuple[str, str], float] = {
        (kernel, f'linear_attention_{kernel}'): tokens for kernel in ('forward', 'backward')
    }
    part_steps['2 folds', 'linear_attention_fold'] = tokens / 2  # over keys, and backward over queries
    return KernelCall(function, (call,), steps, part_steps=part_steps)
