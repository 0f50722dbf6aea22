"""Shared parts of the tests of mechanisms: inputs, the formula in float64, gradients by its differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.attention import HeadDims
from lm.attention.formulas import base
from lm.attention.formulas.tokens import LayerTokens
from lm.interop.names import ENDINGS

DIMS = HeadDims(n_heads=4, n_kv_heads=2, head_dim=16)
LENGTH = 45
MIXED = [11, 1, 1, 11, 11, *[1] * 10]
"""Pieces of LENGTH tokens: some cross the ends of blocks, some follow one another, some are single tokens. There are
few sizes to compile."""

scores, mix_values = functools.partial(base.scores, np), functools.partial(base.mix_values, np)


def build(config, dims=DIMS, seed=0, nudge=0.1):
    """Returns a module whose parameters differ from their initial values and from zero."""
    module = config.build(dims, nnx.Rngs(params=seed, projections=seed + 1))
    rng = np.random.default_rng(seed + 7)
    parameters = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda x: x + nudge * jnp.asarray(rng.normal(size=x.shape), x.dtype), parameters))
    return module


@nnx.jit
def apply(module, *inputs):
    """Returns the module's outputs; all modules of a configuration, in all tests, share one compiled program."""
    return module(*inputs)


@nnx.jit
def decode_step(module, state, *inputs):
    """Returns (state, outputs); all modules of a configuration share one compiled program."""
    return module.decode_step(state, *inputs)


def draw(batch=2, length=LENGTH, dims=DIMS, dtype=jnp.float32, size=1.0, shift=0.0):
    """Returns queries, keys and values; the vectors have `size` as standard deviation and `shift` as mean."""
    heads = (dims.n_heads, dims.head_dim), (dims.n_kv_heads, dims.head_dim), (dims.n_kv_heads, dims.value_size)
    return [
        (shift + size * jax.random.normal(key, (batch, length, *head))).astype(dtype)
        for key, head in zip(jax.random.split(jax.random.key(3), 3), heads, strict=True)
    ]


def arrays(module):
    """Returns path → float64 array of all parameters and buffers."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module)))
    return {'/'.join(str(entry.key) for entry in path): np.asarray(x, np.float64) for path, x in leaves}


def draw_inputs(config, dims=DIMS, **options):
    """Returns queries, keys, values and the further inputs of the mechanism."""
    qkv, widths = draw(dims=dims, **options), config.projections(dims).values()
    keys = jax.random.split(jax.random.key(9), len(widths))
    shapes = [(*qkv[1].shape[:2], width) for width in widths]
    return [*qkv, *(jax.random.normal(key, shape, qkv[0].dtype) for key, shape in zip(keys, shapes, strict=True))]


def make_formula(config, dims, xp, values, **changes):
    """Returns the formula of a mechanism with arrays of `values`, path → array."""
    options = config.portable(dims) | changes
    formula = base.FORMULAS[config.gin_name](dims.n_heads, dims.n_kv_heads, dims.head_dim, **options)
    formula.causal = formula.causal and dims.causal
    named = {}
    for path, x in values.items():
        *folders, last = path.split('/')
        named['.'.join([*folders, ENDINGS.get(last, last)])] = xp.asarray(x.T if last == 'kernel' else x)
    assert {name: array.shape for name, array in formula.arrays.items()} == {n: x.shape for n, x in named.items()}
    return formula.bind(xp, named)


def run_formula(formula, module, inputs, mask=None, memory=None, start=0):
    """Returns what a formula gives for tokens from `start` on; `memory` holds what it keeps of the tokens before."""
    xp, (q, k, v, *others) = formula.xp, inputs
    mask = xp.ones(q.shape[:2], dtype=bool) if mask is None else mask
    positions = xp.clip(xp.cumsum(mask, 1) - 1, 0, None)[:, start:]
    named = dict(zip(module.config.projections(module.dims), others, strict=True))
    return formula.mix(q, k, v, LayerTokens(xp, mask[:, start:], positions, memory), **named)


def compute(module, values, *inputs):
    """Returns what the formula of a module gives in float64, with arrays of `values`."""
    formula = make_formula(module.config, module.dims, np, values)
    return run_formula(formula, module, [np.asarray(x, np.float64) for x in inputs])


def check_values(module, inputs, tolerance=1e-5, half_tolerance=2e-2, compute=compute):
    """Compares outputs with the formula: in float32, and in bfloat16 on inputs that bfloat16 holds exactly."""
    inputs = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in inputs]
    expected = compute(module, arrays(module), *inputs)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(apply(module, *inputs), expected, rtol=0, atol=tolerance * largest)
    half = apply(module, *(x.astype(jnp.bfloat16) for x in inputs))
    assert half.dtype == jnp.bfloat16
    difference = np.asarray(half, np.float64) - expected
    assert np.linalg.norm(difference) < half_tolerance * np.linalg.norm(expected)


def check_gradients(module, inputs, tolerance=1e-5, compute=compute):
    """Compares derivatives by every input and parameter, along random directions, with differences of the formula."""
    rng = np.random.default_rng(5)
    cotangent = rng.normal(size=inputs[0].shape[:3] + inputs[2].shape[3:])
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)

    def loss(parameters, *inputs):
        return jnp.sum(nnx.merge(graph, parameters, rest)(*inputs) * cotangent)

    of_inputs = 'qkvgh'[: len(inputs)]  # the inputs of gates come last
    d_parameters, *d_inputs = jax.jit(jax.grad(loss, range(1 + len(inputs))))(parameters, *inputs)
    names = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(d_parameters))
    gradients = {'/'.join(str(entry.key) for entry in path): x for path, x in names}
    gradients |= dict(zip(of_inputs, d_inputs, strict=True))
    values = arrays(module) | {name: np.asarray(x, np.float64) for name, x in zip(of_inputs, inputs, strict=True)}

    def exact(values):
        arrays = {name: value for name, value in values.items() if name not in of_inputs}
        return np.sum(compute(module, arrays, *(values[name] for name in of_inputs)) * cotangent)

    for name, gradient in gradients.items():
        gradient = np.asarray(gradient, np.float64)
        assert np.isfinite(gradient).all(), name
        for _ in range(3):
            direction = rng.normal(size=gradient.shape)
            direction /= np.linalg.norm(direction)
            along = 1e-5 * max(1.0, np.abs(values[name]).max()) * direction
            ahead, behind = (exact(values | {name: values[name] + sign * along}) for sign in (1, -1))
            difference = (ahead - behind) / (2 * np.linalg.norm(along))
            found = np.sum(gradient * direction)
            assert abs(found - difference) <= tolerance * max(np.linalg.norm(gradient), abs(difference)), name


def check_steps(module, inputs, tolerance=1e-5):
    """Compares token-by-token, all-at-once and piecewise decoding with the whole; the state must not grow."""
    batch, length = inputs[0].shape[:2]
    whole = apply(module, *inputs)
    atol = tolerance * float(jnp.abs(whole).max())
    for parts in ([1] * length, [length], MIXED):
        assert sum(parts) == length
        state = module.init_state(batch, length, inputs[0].dtype)
        shapes = jax.tree.map(jnp.shape, state)
        outputs, at = [], 0
        for part in parts:
            state, o = decode_step(module, state, *(x[:, at : at + part] for x in inputs))
            outputs.append(o)
            at += part
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, rtol=0, atol=atol, err_msg=str(parts[:5]))
        assert jax.tree.map(jnp.shape, state) == shapes
    return shapes


def check_no_leak(module, inputs, at=17):
    """Checks that a very large token changes no bit before it, and something from its position on."""
    before = apply(module, *inputs)
    after = apply(module, *(x.at[:, at].set(100 * x[:, at] + 3) for x in inputs))
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    assert not np.array_equal(before[:, at], after[:, at])
