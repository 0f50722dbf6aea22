"""The worker of JAX: operations of `lm.ops`, compiled, timed, compared and traced on request."""

import collections
import concurrent.futures
import functools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.ops import platform
from lm.ops.decay import constant
from lm.ops.delta_rule import delta_rule
from lm.ops.exact_attention import softmax_attention
from lm.ops.linear_attention import SQUARE, PolynomialKernel, linear_attention
from scripts.gpu.peers.operation_case import ARRAYS, FLOAT32, SCALE, OperationCase, list_longest
from scripts.gpu.peers.turns import describe, serve

THREADS = 8
"""Programs that are compiled at a time."""
READY: dict[str, Callable[[], Any]] = {}
"""Case → the compiled call with its arrays."""


def retention(q, k, v, **options):
    """Heads fade at constant rates."""
    batch, length, heads = k.shape[:3]
    fading = constant(jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(heads)))), batch, length)
    return linear_attention(q, k, v, log_decay_BxLxK=fading, normalize=False, **options)


def gated_linear(q, k, v, gate, **options):
    """Tokens decide what they leave."""
    return linear_attention(q, k, v, log_decay_BxLxK=gate, normalize=False, **options)


def polysketch(x, y, v, q, k, **options):
    """Sketches are given, and blocks are exact."""
    near = {'local': PolynomialKernel(degree=4), 'block': 1024, 'q_local_BxLxHxC': q, 'k_local_BxLxKxC': k}
    return linear_attention(x, y, v, powers=SQUARE, **near, **options)


OPERATIONS: dict[str, Callable] = {
    'retention': retention,
    'gated_linear': gated_linear,
    'delta': delta_rule,
    'gated_delta': delta_rule,
    'softmax': softmax_attention,
    'polysketch': polysketch,
}
SCALED = ('retention', 'gated_linear', 'delta', 'gated_delta')
"""Operations without a scale of their own."""


def make_arrays(case: OperationCase, dtype: Any) -> list[jax.Array]:
    """Returns the arguments, rounded to bfloat16, as `dtype`; float32 for gates. The gradient of the output is last."""
    drawn = case.draw()
    if case.operation in SCALED:
        drawn['q'] *= SCALE
    rounded = {n: jnp.asarray(x) if n in FLOAT32 else jnp.asarray(x, jnp.bfloat16) for n, x in drawn.items()}
    return [x if n in FLOAT32 else x.astype(dtype) for n, x in rounded.items()]


def make_program(case: OperationCase, implementation: str | None = None) -> Callable:
    """Returns a function of the arrays: the output, and all gradients if the case has them."""
    function = functools.partial(OPERATIONS[case.operation], implementation=implementation)

    def run(*arrays):
        if not case.backward:
            return function(*arrays[:-1])
        o, vjp = jax.vjp(function, *arrays[:-1])
        return o, *vjp(arrays[-1].astype(o.dtype))

    return jax.jit(run)


def tell_machine() -> dict[str, Any]:
    """Returns the device and the version."""
    device = jax.devices()[0]
    return {'device': device.device_kind, 'jax': jax.__version__}


def prepare(cases: list[dict]) -> dict[str, dict]:
    """Compiles all cases side by side; returns case → seconds, implementation and memory, or an error."""
    made = [OperationCase(**case) for case in cases]
    arrays: dict[str, list[jax.Array]] = {}
    for case in made:
        arrays.setdefault(case.operation, make_arrays(case, jnp.bfloat16))

    def compile_one(case: OperationCase) -> dict:
        start = time.perf_counter()
        shape = (case.tokens // case.window, case.window)
        own = [x.reshape(*shape, *x.shape[2:]) for x in arrays[case.operation]]
        try:
            with platform.choices() as chosen:
                compiled = make_program(case).lower(*own).compile()
            READY[case.key] = functools.partial(compiled, *own)
            memory = compiled.memory_analysis()
            mib = round(memory.temp_size_in_bytes / 2**20, 1) if memory else None
            seconds = round(time.perf_counter() - start, 2)
            return {'seconds': seconds, 'implementation': ', '.join(chosen.values()), 'temporary_mib': mib}
        except Exception as error:
            return {'error': describe(error)}

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        found = dict(zip([case.key for case in made], pool.map(compile_one, made), strict=True))
    for key, call in list(READY.items()):
        start = time.perf_counter()
        try:
            jax.block_until_ready(call())
            found.get(key, {})['first_call_seconds'] = round(time.perf_counter() - start, 2)
        except Exception as error:
            found[key] = {'error': describe(error)}
            del READY[key]
    return found


def measure(key: str, calls: int) -> float:
    """Returns milliseconds per call; the host waits once, at the end."""
    start, result = time.perf_counter(), None
    for _ in range(calls):
        result = READY[key]()
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - start) / calls


def compute(case: dict, path: str, reference: bool = False) -> str:
    """Writes output and gradients as float32; returns the implementation.

    `reference`: the formulas, in float32 with products of full precision.
    """
    made = OperationCase(**case)
    arrays = make_arrays(made, jnp.float32 if reference else jnp.bfloat16)
    with platform.choices() as chosen, jax.default_matmul_precision('highest' if reference else 'default'):
        results = make_program(made, 'reference' if reference else None)(*arrays)
    names = ('o', *(f'd{name}' for name in ARRAYS[made.operation]))
    found = {name: np.array(x, np.float32) for name, x in zip(names, results, strict=True)}
    if made.operation in SCALED:
        found['dq'] *= SCALE
    np.savez(path, **found)
    return ', '.join(chosen.values())


def trace(key: str) -> list[dict]:
    """Returns the kernels of a call: name, milliseconds and number, the longest first; 3 calls are traced."""
    calls, sums = 3, collections.defaultdict(lambda: [0.0, 0])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            measure(key, calls)
        (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith('/device:GPU'):
                continue
            for line in plane.lines:
                for event in line.events if line.name.startswith('Stream') else ():
                    entry = sums[event.name]
                    entry[0] += event.duration_ns / 1e6 / calls
                    entry[1] += 1
    return list_longest(sums, calls)


if __name__ == '__main__':
    serve({'tell_machine': tell_machine, 'prepare': prepare, 'measure': measure, 'compute': compute, 'trace': trace})
