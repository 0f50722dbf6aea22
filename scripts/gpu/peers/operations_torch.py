"""The worker of PyTorch: flash-linear-attention's Triton kernels, and softmax attention by flash attention and cuDNN.

Without a GPU it runs flash-linear-attention's formulas, because Triton's kernels need one.

TUNED_PART = 'j/n': the tuner sees each n-th configuration alone, from j on. So n processes fill Triton's cache side by
side.
"""

import collections
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.runtime.autotuner
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from scripts.gpu.peers.operation_case import ARRAYS, FLOAT32, SCALE, OperationCase, list_longest
from scripts.gpu.peers.turns import describe, serve

GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
READY: dict[str, Callable[[], Any]] = {}


def hurry() -> None:
    """Makes Triton's tuner measure 20 instead of 100 ms per configuration, and only some configurations on request."""
    bench = triton.testing.do_bench
    triton.testing.do_bench = functools.partial(bench, warmup=5, rep=20)
    if part := os.environ.get('TUNED_PART'):
        first, step = map(int, part.split('/'))
        tuner = triton.runtime.autotuner.Autotuner
        prune = tuner.prune_configs

        def choose(self, *arguments, **options):
            found = prune(self, *arguments, **options)
            return found[first::step] or found[:1]

        tuner.prune_configs = choose


def retention(q, k, v):
    """Heads fade at constant rates."""
    if GPU:
        from fla.ops.retention import chunk_retention

        return chunk_retention(q, k, v, scale=SCALE)[0]
    gate = (1 - 2.0 ** (-5 - torch.arange(q.shape[2]))).log().expand(q.shape[:3])
    return gated_linear(q, k, v, gate)


def gated_linear(q, k, v, gate):
    """Tokens decide what they leave."""
    if GPU:
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla(q, k, v, g=gate, scale=SCALE)[0]
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    return naive_recurrent_simple_gla(q, k, v, gate, scale=SCALE)[0]


def delta(q, k, v, beta):
    """The delta rule."""
    if GPU:
        from fla.ops.delta_rule import chunk_delta_rule

        return chunk_delta_rule(q, k, v, beta, scale=SCALE)[0]
    return gated_delta(q, k, v, beta, torch.zeros_like(beta))


def gated_delta(q, k, v, beta, gate):
    """The delta rule with factors."""
    if GPU:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, gate, beta, scale=SCALE)[0]
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    return naive_recurrent_gated_delta_rule(q, k, v, beta, gate, scale=SCALE)[0]


def softmax(q, k, v, backend: SDPBackend):
    """PyTorch's attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend if GPU else SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


PEERS: dict[str, dict[str, Callable]] = {
    'retention': {'fla': retention},
    'gated_linear': {'fla': gated_linear},
    'delta': {'fla': delta},
    'gated_delta': {'fla': gated_delta},
    'softmax': {
        'torch flash': functools.partial(softmax, backend=SDPBackend.FLASH_ATTENTION),
        'torch cudnn': functools.partial(softmax, backend=SDPBackend.CUDNN_ATTENTION),
    },
    'polysketch': {},
}
"""Operation → library → function."""


def make_arrays(case: OperationCase) -> list[torch.Tensor]:
    """Returns the arguments, bfloat16, and float32 for gates; the gradient of the output is last."""
    tensors = {name: torch.from_numpy(x).to(DEVICE) for name, x in case.draw().items()}
    return [x if name in FLOAT32 else x.to(torch.bfloat16) for name, x in tensors.items()]


def make_call(function: Callable, case: OperationCase, arrays: list[torch.Tensor]) -> Callable[[], Any]:
    """Returns a call: the output, and all gradients if the case has them."""
    shape = (case.tokens // case.window, case.window)
    *given, do = (x.view(*shape, *x.shape[2:]).detach() for x in arrays)
    if not case.backward:
        return torch.no_grad()(functools.partial(function, *given))
    given = [x.requires_grad_() for x in given]

    def run():
        o = function(*given)
        return o, *torch.autograd.grad(o, given, do.to(o.dtype))

    return run


def tell_machine() -> dict[str, Any]:
    """Returns the versions, and the libraries of each operation."""
    found = {'torch': torch.__version__, 'triton': triton.__version__, 'cudnn': torch.backends.cudnn.version()}
    try:
        import fla

        found['fla'] = fla.__version__
    except Exception as error:
        found['fla'] = describe(error)
    return found | {'peers': {name: list(peers) for name, peers in PEERS.items()}}


def wait() -> None:
    """Waits for the GPU."""
    if GPU:
        torch.cuda.synchronize()


def prepare(cases: list[dict]) -> dict[str, dict]:
    """Calls all cases once, which compiles and tunes; returns case and library → seconds or an error."""
    arrays: dict[str, list[torch.Tensor]] = {}
    found = {}
    for fields in cases:
        case = OperationCase(**fields)
        for name, function in PEERS[case.operation].items():
            start, key = time.perf_counter(), f'{case.key} {name}'
            try:
                if case.operation not in arrays:
                    arrays[case.operation] = make_arrays(case)
                call = make_call(function, case, arrays[case.operation])
                call()
                wait()
                READY[key] = call
                found[key] = {'seconds': round(time.perf_counter() - start, 2)}
            except Exception as error:
                found[key] = {'error': describe(error)}
    return found


def measure(key: str, calls: int) -> float:
    """Returns milliseconds per call, between two events of the GPU."""
    call = READY[key]
    if not GPU:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def compute(case: dict, path: str, peer: str) -> None:
    """Writes output and gradients as float32."""
    made = OperationCase(**case)
    results = make_call(PEERS[made.operation][peer], made, make_arrays(made))()
    names = ('o', *(f'd{name}' for name in ARRAYS[made.operation]))
    np.savez(path, **{name: x.detach().float().cpu().numpy() for name, x in zip(names, results, strict=True)})


def trace(key: str) -> list[dict]:
    """Returns the kernels of a call: name, milliseconds and number, the longest first; 3 calls are traced."""
    calls, sums = 3, collections.defaultdict(lambda: [0.0, 0])
    if not GPU:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        measure(key, calls)
        wait()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = sums[event.name]
            entry[0] += event.device_time_total / 1e3 / calls
            entry[1] += 1
    return list_longest(sums, calls)


if __name__ == '__main__':
    hurry()
    serve({'tell_machine': tell_machine, 'prepare': prepare, 'measure': measure, 'compute': compute, 'trace': trace})
