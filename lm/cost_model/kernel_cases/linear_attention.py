"""Linear attention: each mechanism on the operation, and the operation on features that are given."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention import HeadDims, mechanisms
from lm.attention.linear import PARAMETERS, TOKENS, LinearAttention
from lm.cost_model.kernel_cases.base import Case, KernelCall, Steps
from lm.ops.linear_attention import linear_attention
from lm.ops.linear_attention.tpu import attention as kernels
from lm.ops.linear_attention.types import Options

N_FEATURES = 256


def cases() -> dict[str, Case]:
    linear = [mechanism for mechanism in mechanisms().values() if issubclass(mechanism, LinearAttention)]
    forms = {name: form for mechanism in linear for name, form in mechanism.kernel_forms().items()}
    found: dict[str, Case] = {name: functools.partial(mechanism_call, form) for name, form in forms.items()}
    return found | {f'features {N_FEATURES}': features_call}


def mechanism_call(attention: LinearAttention, dims: HeadDims, length: int) -> KernelCall:
    """Returns the call of the operation that a mechanism makes for queries, keys and values in bfloat16."""
    options = {}

    def arrays(q, k, v):
        module = attention.build(dims, nnx.Rngs(0))
        arguments = module.arguments(*module.normalize(q, k), v)
        given = {name: arguments.pop(name) for name in (*TOKENS, *PARAMETERS) if name in arguments}
        options.update(arguments)
        return given

    heads = (dims.n_heads, dims.n_kv_heads, dims.n_kv_heads)
    qkv = (jax.ShapeDtypeStruct((1, length, n, dims.head_dim), jnp.bfloat16) for n in heads)
    return operation_call(jax.eval_shape(arrays, *qkv), options)


def features_call(dims: HeadDims, length: int) -> KernelCall:
    """Returns a call whose features are arrays in memory."""
    x, v = (jax.ShapeDtypeStruct((1, length, dims.n_heads, n), jnp.bfloat16) for n in (N_FEATURES, dims.head_dim))
    return operation_call({'q_BxLxHxE': x, 'k_BxLxKxE': x, 'v_BxLxKxD': v}, {})


def operation_call(inputs: dict[str, Any], options: dict[str, Any]) -> KernelCall:
    """Returns a call of the operation.

    Args:
        inputs: name of the argument → abstract array, or a pytree of them.
        options: name of the argument → value, for all other arguments.
    """
    options = {name: value for name, value in options.items() if name != 'implementation'}

    def function(*arrays):
        return linear_attention(**dict(zip(inputs, arrays, strict=True)), **options, implementation='pallas_tpu')

    q, v, local = inputs['q_BxLxHxE'], inputs['v_BxLxKxD'], inputs.get('q_local_BxLxHxC')
    sizes = (q.shape[-1], v.shape[-1], 0 if local is None else local.shape[-1], v.dtype.itemsize)
    made = kernels.made_by(options.get('feature_map'), q, inputs.get('q_parameters'))
    decay = 'log_decay_BxLxK' in inputs
    shape = (Options(**options), q.shape[1], q.shape[2], *sizes, *made, decay)
    plan, part = kernels.plan_for(*shape), kernels.plan_for(*shape, part=True)
    names = ('forward', 'sums', 'backward') if plan.sums_again else ('forward', 'backward')
    steps: Steps = {(kernel, f'linear_attention_{kernel}'): plan.block * plan.heads for kernel in names}
    tokens = part.block * part.heads
    part_steps: dict[tuple[str, str], float] = {
        (kernel, f'linear_attention_{kernel}'): tokens for kernel in ('forward', 'backward')
    }
    part_steps['2 folds', 'linear_attention_fold'] = tokens / 2  # over keys, and backward over queries
    return KernelCall(function, tuple(inputs.values()), steps, part_steps=part_steps)
