"""The recurrent GPU kernels of linear attention, without a GPU; `test_pallas_gpu` explains how."""

import dataclasses
import re

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_gpu import H200, can_compile, interpreted, interpreter
from test_pallas_tpu import quick

from lm.attention.maps.random_features import Hyperbolic, Positive, Projection
from lm.ops import platform
from lm.ops.linear_attention import IMPLEMENTATIONS, PLAIN, linear_attention
from lm.ops.linear_attention.gpu.recurrent import attention as recurrent
from lm.ops.linear_attention.types import LinearCall, Options, PolynomialKernel

POSITIVE = Options(PLAIN, denominator_bias=0.0)
TAYLOR = Options((1.0, 1.0, 0.5), denominator_bias=0.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        options: the options of the operation.
        length: the number of tokens.
        size: the size of queries and keys.
        decay: whether there is decay; it includes resets.
        heads: the number of query heads and of key heads.
        head_dim: the size of values.
        rows: the rows of a random projection, whose features the kernels compute.
        segment: the fewest tokens per segment; None: one segment.
        batch: the number of sequences.
    """

    options: Options
    length: int
    size: int = 64
    decay: bool = False
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 64
    rows: int | None = None
    segment: int | None = None
    batch: int = 1


PERFORMER = Options(PLAIN, Positive(scale=0.125, epsilon=1e-6), denominator_bias=0.0)
CASES = {
    'decay': Case(Options(PLAIN, normalize=False), 150, decay=True),
    'decay, in segments': Case(Options(PLAIN, normalize=False), 300, decay=True, segment=64),
    'odd sizes, grouped': Case(Options(PLAIN, normalize=False), 130, size=40, heads=(4, 2), head_dim=48),
    'sizes of Mamba-2': Case(Options(PLAIN, normalize=False), 150, size=128, decay=True, heads=(4, 1)),
    'values wider than keys': Case(Options(PLAIN), 100, size=32, decay=True, heads=(2, 1)),
    'with denominators': Case(Options(PLAIN), 100),
    'with denominators and decay, in segments': Case(Options(PLAIN), 200, decay=True, heads=(2, 1), segment=64),
    'two sequences of grouped heads, in segments': Case(
        Options(PLAIN, normalize=False), 200, decay=True, heads=(4, 2), segment=64, batch=2
    ),
    'two chunks': Case(POSITIVE, 150, size=128),
    'two slices, in segments': Case(POSITIVE, 200, size=128, segment=64),
    'Taylor': Case(TAYLOR, 100, size=16, decay=True),
    'Performer': Case(PERFORMER, 150, rows=128),
    'Performer, in segments': Case(PERFORMER, 150, rows=128, segment=64),
    'Performer, grouped': Case(PERFORMER, 150, rows=128, segment=64, heads=(2, 1), batch=2),
    'Performer, not rescaled': Case(
        dataclasses.replace(PERFORMER, feature_map=Positive(0.125, rescale=False), normalize=False), 100, rows=128
    ),
    'Performer with decay, hyperbolic': Case(
        dataclasses.replace(PERFORMER, feature_map=Hyperbolic(0.125, 1e-6)), 100, rows=64, decay=True
    ),
}


def example(case: Case) -> tuple[list[jax.Array], jax.Array]:
    """Returns q, k, v, the log factors if there are any, and the gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 5)
    heads, kv_heads = case.heads
    shapes = [(heads, case.size), (kv_heads, case.size), (kv_heads, case.head_dim), (heads, case.head_dim)]
    q, k, v, do = (
        jax.random.normal(key, (case.batch, case.length, *shape)) for key, shape in zip(keys[:4], shapes, strict=True)
    )
    q, k = q / case.size**0.25, k / case.size**0.25
    if case.options.normalize and case.options.powers == PLAIN and case.rows is None:
        q, k = jnp.abs(q), jnp.abs(k)
    arrays = [a.astype(jnp.bfloat16) for a in (q, k, v)]
    if case.decay:
        log_decay = -jax.nn.softplus(jax.random.normal(keys[4], (case.batch, case.length, kv_heads)))
        arrays.append(log_decay.at[:, 37].set(-jnp.inf).at[:, 80:82].set(-jnp.inf))
    return arrays, do.astype(jnp.bfloat16)


def outputs_and_gradients(case: Case, implementation: str, dtype=jnp.bfloat16):
    parameters = case.rows and Projection(jax.random.normal(jax.random.key(9), (case.rows, case.size)))

    def function(q, k, v, log_decay=None):
        call = LinearCall(q, k, v, parameters, parameters, log_decay_BxLxK=log_decay, options=case.options)
        return IMPLEMENTATIONS[implementation].linear_attention(call).o_BxLxHxD

    def both(arrays, do):
        o, vjp = jax.vjp(function, *(a if a.dtype == jnp.float32 else a.astype(dtype) for a in arrays))
        return [o, *vjp(do.astype(o.dtype))]

    return both


def errors(got, want) -> dict[str, float]:
    """Returns relative errors by name."""
    triples = zip(('o', 'dq', 'dk', 'dv', 'dlog_decay')[: len(want)], got, want, strict=True)
    return {n: float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for n, a, b in triples}


@pytest.mark.smoke  # on Python 3.12 pip has a JAX that can interpret them
@interpreter
@pytest.mark.parametrize('name', grids.draw(CASES, 6))
def test_outputs_and_gradients(name, monkeypatch):
    """The portable path in float32, which has its own tests against the formulas, is the reference."""
    case = CASES[name]
    monkeypatch.setattr(recurrent, 'SHORTEST', case.segment or 10**6)
    monkeypatch.setattr(recurrent, 'BUSY', 1 if case.segment is None else 132)
    monkeypatch.setattr(recurrent, 'MOST_GIVEN', 64 if case.rows else 512)
    arrays, do = example(case)
    with interpreted():
        got = quick(outputs_and_gradients(case, 'pallas_gpu_recurrent'))(arrays, do)
    want = outputs_and_gradients(case, 'xla', jnp.float32)(arrays, do)
    found = errors(got, want)
    assert len(found) == len(arrays) + 1
    assert all(error <= 1e-2 for error in found.values()), found


def test_segments_and_chunks_side_by_side():
    """Few heads are cut in segments. With enough heads, two chunks are computed side by side."""
    assert recurrent.choose_pieces(64, heads=12, length=65_536, decay=True) == (16, 1, 1)
    assert recurrent.choose_pieces(64, heads=12, length=1000, decay=True) == (1, 1, 1)
    assert recurrent.choose_pieces(128, heads=96, length=8192, decay=True) == (1, 2, 1)
    assert recurrent.choose_pieces(256, heads=96, length=8192, decay=False) == (1, 2, 2)
    assert recurrent.choose_pieces(2048, heads=12, length=65_536, decay=False) == (1, 16, 2)


REFUSED = {
    'causal': (dataclasses.replace(POSITIVE, causal=False), {}),
    'exact kernel': (Options(PLAIN, local=PolynomialKernel(4)), {}),
    'bfloat16, not float32': (POSITIVE, {'dtype': jnp.float32}),
    'heads of up to 64': (POSITIVE, {'head_dim': 80}),
    'up to 512 features': (POSITIVE, {'size': 600}),
    'multiples of 64 features': (PERFORMER, {'rows': 600}),
}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
    monkeypatch.setattr(platform, 'MOSAIC_GPU_JAX', (0, 1))


def make_call(options, dtype=jnp.bfloat16, size=64, head_dim=64, rows=None):
    q, v = jnp.zeros((1, 100, 2, size), dtype), jnp.zeros((1, 100, 2, head_dim), dtype)
    parameters = rows and Projection(jnp.zeros((rows, size)))
    return LinearCall(q, q, v, parameters, parameters, options=options)


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_calls_say_why(reason, hopper):
    assert recurrent.unsupported(make_call(POSITIVE)) is None
    assert recurrent.unsupported(make_call(PERFORMER, rows=2048)) is None
    options, sizes = REFUSED[reason]
    assert reason in recurrent.unsupported(make_call(options, **sizes))


def test_states_and_maps_of_two_kinds_are_refused(hopper):
    assert 'state' in recurrent.unsupported(dataclasses.replace(make_call(POSITIVE), with_state=True))
    call = make_call(PERFORMER, rows=2048)
    theirs = Projection(call.q_parameters.projection_RxE + 1)
    assert 'same parameters' in recurrent.unsupported(dataclasses.replace(call, k_parameters=theirs))


def test_hoppers_get_them(hopper, monkeypatch):
    for kind, name in (('NVIDIA H200', 'pallas_gpu_recurrent'), ('NVIDIA A100-SXM4-80GB', 'xla')):
        monkeypatch.setattr(platform, 'device_kind', lambda kind=kind: kind)
        for options, sizes in ((POSITIVE, {}), (TAYLOR, {'size': 16}), (PERFORMER, {'rows': 2048})):
            chosen = IMPLEMENTATIONS.choose(None, make_call(options, **sizes))
            assert chosen is IMPLEMENTATIONS[name]


@pytest.mark.skipif(not can_compile(), reason="needs JAX's CUDA plugin and ptxas")
@pytest.mark.parametrize('name', ['decay', 'with denominators', 'two chunks', 'Performer'])
def test_compiles_for_an_h200(name):
    from jax.experimental import topologies

    case = dataclasses.replace(CASES[name], length=3000, heads=(12, 12))
    topology = topologies.get_topology_desc(topology_name='h200', platform='cuda', target_config=H200, topology='1x1x1')
    mesh = jax.sharding.Mesh(np.array(topology.devices), ('data',))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    parameters = (
        None if case.rows is None else Projection(jax.ShapeDtypeStruct((2048, 64), jnp.float32, sharding=replicated))
    )
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated) for a in example(case)[0]]
    batch = 8 if name == 'two chunks' else 1
    arrays = [jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype, sharding=replicated) for a in arrays]

    def loss(arrays, parameters):
        q, k, v, *log_decay = arrays
        o = linear_attention(
            q,
            k,
            v,
            feature_map=case.options.feature_map,
            q_parameters=parameters,
            k_parameters=parameters,
            normalize=case.options.normalize,
            denominator_bias=case.options.denominator_bias,
            log_decay_BxLxK=log_decay[0] if log_decay else None,
            implementation='pallas_gpu_recurrent',
        )
        return jnp.sum(o.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).trace(arrays, parameters).lower().compile()
    assert compiled.memory_analysis().output_size_in_bytes > 0
    # Kernels read and write arrays as layers have them: XLA transposes none of them.
    transposed = re.findall(r'= bf16\[[\d,]*\]\S* transpose\(', compiled.as_text())
    assert not transposed, transposed
