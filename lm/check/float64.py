"""The value of a traced function in float64: every number of the trace, whatever its type there.

JAX traces the function (`jax.make_jaxpr`), and computes the trace with float64 in the place of all other real types. So
differences of the result have no noise of the types that the function computes in. A gradient is the gradient that the
trace has, with its own rules (`jax.custom_vjp`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from lm.errors import LmError

CALLS = ('jit', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call', 'remat2', 'checkpoint')
"""Operations that run a trace of their own once."""
ROUNDINGS = ('reduce_precision', 'sharding_constraint', 'device_put')
"""Operations that change no number but by rounding it."""
KERNELS = ('pallas_call', 'ffi_call')
SCATTERS: dict[str, Callable[..., jax.Array]] = {
    'scatter': lax.scatter,
    'scatter-add': lax.scatter_add,
    'scatter-max': lax.scatter_max,
    'scatter-min': lax.scatter_min,
    'scatter-mul': lax.scatter_mul,
}
"""Operations whose traces have a function of numbers of their type, and the functions that make it anew."""


def widen_program(closed: core.ClosedJaxpr) -> Callable[..., list[np.ndarray]]:
    """Returns the function of a trace's flat arguments that computes its results in float64; it is compiled once.

    Raises LmError when it is called, if the trace has a kernel.
    """
    # Most of the time is compilation, which makes the program no better here.
    options = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
    compiled = jax.jit(functools.partial(_run, closed), compiler_options=options)

    def compute(*arguments: Any) -> list[np.ndarray]:
        with jax.enable_x64(True):
            return [np.asarray(x) for x in compiled(*map(_widen, arguments))]

    return compute


def _run(trace: Any, *arguments: Any) -> list[Any]:
    """Computes a trace, or a part of one without its constants."""
    jaxpr = getattr(trace, 'jaxpr', trace)
    values = dict(zip(jaxpr.constvars, map(_widen, getattr(trace, 'consts', ())), strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(variable: Any) -> Any:
        if isinstance(variable, core.Literal):
            aval: Any = variable.aval
            return jnp.asarray(variable.val, _widen_type(aval.dtype))
        return values[variable]

    for equation in jaxpr.eqns:
        found = _compute(equation, [read(variable) for variable in equation.invars])
        found = found if isinstance(found, list | tuple) else [found]
        values.update(zip(equation.outvars, found, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _widen(x: Any) -> Any:
    """Returns an array whose real numbers are float64."""
    if getattr(x, 'dtype', None) == jax.dtypes.float0:  # the gradient of integers
        return np.zeros(x.shape, bool)
    return x.astype(np.float64) if jnp.issubdtype(getattr(x, 'dtype', bool), jnp.floating) else x


def _widen_type(value: Any) -> Any:
    """Returns float64 for a real type, and all other parameters of operations as they are."""
    return np.dtype(np.float64) if isinstance(value, np.dtype | type) and jnp.issubdtype(value, jnp.floating) else value


def _compute(equation: Any, arrays: Sequence[Any]) -> Any:
    name, params = equation.primitive.name, equation.params
    if name in KERNELS:
        raise LmError(f'--gradients: {name}: a kernel has no float64 form; give its operation one that XLA computes')
    if name in CALLS:
        return _run(params.get('call_jaxpr') or params['jaxpr'], *arrays)
    if name in LOOPS:
        return LOOPS[name](params, arrays)
    if name in ROUNDINGS:
        return list(arrays)
    if name == 'bitcast_convert_type':  # the bits are of the traced type
        given = arrays[0].astype(equation.invars[0].aval.dtype)
        return _widen(lax.bitcast_convert_type(given, params['new_dtype']))
    if name in SCATTERS:
        kept = {key: params[key] for key in ('indices_are_sorted', 'unique_indices', 'mode')}
        return SCATTERS[name](*arrays, params['dimension_numbers'], **kept)
    return equation.primitive.bind(*arrays, **{key: _widen_type(value) for key, value in params.items()})


def _branch(params: dict[str, Any], arrays: Sequence[Any]) -> Any:
    which, *inputs = arrays
    return lax.switch(which.astype(np.int32), [functools.partial(_run, each) for each in params['branches']], *inputs)


def _repeat(params: dict[str, Any], arrays: Sequence[Any]) -> Any:
    tests, bodies = params['cond_nconsts'], params['cond_nconsts'] + params['body_nconsts']
    return lax.while_loop(
        lambda carry: _run(params['cond_jaxpr'], *arrays[:tests], *carry)[0],
        lambda carry: _run(params['body_jaxpr'], *arrays[tests:bodies], *carry),
        list(arrays[bodies:]),
    )


def _scan(params: dict[str, Any], arrays: Sequence[Any]) -> Any:
    first, last = params['num_consts'], params['num_consts'] + params['num_carry']

    def step(carry, rows):
        results = _run(params['jaxpr'], *arrays[:first], *carry, *rows)
        return results[: len(carry)], results[len(carry) :]

    carry, rows = list(arrays[first:last]), list(arrays[last:])
    carry, found = lax.scan(step, carry, rows, params['length'], params['reverse'])
    return [*carry, *found]


LOOPS = {'cond': _branch, 'while': _repeat, 'scan': _scan}
"""Operations that choose or repeat traces of their own, and their functions of parameters and arrays."""
