"""The TPU kernels of the learned sketch, interpreted on the CPU: uninitialised memory is NaN and races are detected."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels

from lm.ops import sketch_networks as op
from lm.ops.errors import OperationError
from lm.ops.residuals import RESIDUAL_NAME
from lm.ops.sketch_networks import folding, reference, xla
from lm.ops.sketch_networks.tpu import networks as pallas_tpu

pytestmark = pytest.mark.usefixtures('no_races')


def example(length, *, batch=1, sketches=1, heads=(1,), size=16, r=16, hidden=None, power=2, dtype=jnp.float32):
    """Returns nodes, arrays of vectors and gradients of their sketches; layer norms are far from their
    initial values."""
    rng = np.random.default_rng(0)
    hidden = hidden or 2 * r

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def network(m):
        shapes = ((m, hidden), (hidden, r), (r, hidden), (hidden, r))
        kernels = [draw(sketches, *shape) * shape[0] ** -0.5 for shape in shapes]
        scales = [1.0 + 0.3 * draw(sketches, 1, n) for n in (m, r)]
        biases = [0.3 * draw(sketches, 1, n) for n in (m, r)]
        levels = zip(scales, biases, kernels[::2], kernels[1::2], strict=True)
        return op.NetworkWeights(*(op.LevelWeights(*level) for level in levels))

    sizes = [size] * (power // 2) + [r] * (power // 2 - 1)
    nodes = tuple(op.Node(network(m), network(m)) for m in sizes)
    xs = tuple((0.5 + draw(batch, length, sketches, h, size)).astype(dtype) for h in heads)
    return nodes, xs, tuple(draw(batch, length, sketches, h, r).astype(dtype) for h in heads)


def outputs_and_gradients(function, nodes, xs, *gradients):
    """Returns sketches and gradients; `gradients` are given for the sketches, and for the vectors if other code reads
    them."""

    def both(nodes, xs, gradients):
        found, vjp = jax.vjp(lambda *call: tuple(function(op.SketchCall(*call)))[: len(gradients)], nodes, xs)
        return found, vjp(gradients)

    # Compilation takes most of the time here.
    return jax.jit(both, compiler_options={'xla_backend_optimization_level': 0})(nodes, xs, gradients)


def by_definition(*arrays):
    """Computes in float64, from the same rounded inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), arrays)
        return jax.tree.map(np.asarray, outputs_and_gradients(reference.sketch_networks, *wide))


def by_kernels(*arrays):
    with interpret_kernels():
        return outputs_and_gradients(pallas_tpu.sketch_networks, *arrays)


def errors(got, want) -> dict[str, float]:
    """Returns relative errors by name."""
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    return {
        jax.tree_util.keystr(path): np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for (path, a), (_, b) in zip(got, want, strict=True)
    }


CASES = {
    'one block': {'length': 256},
    'odd length': {'length': 301, 'heads': (2, 1)},
    'short': {'length': 131, 'batch': 2},
    'several blocks': {'length': 1300},
    'two parts': {'length': 2001, 'batch': 2},
    'a sketch a head': {'length': 200, 'sketches': 2, 'heads': (2, 1), 'batch': 2},
    'degree 8': {'length': 140, 'power': 4, 'size': 32},
    'r = 32': {'length': 257, 'size': 64, 'r': 32, 'hidden': 256, 'heads': (2, 2)},
}
ROUNDED = ('odd length', 'a sketch a head', 'r = 32')
EXAMPLES = [(name, 'float32') for name in CASES] + [(name, 'bfloat16') for name in ROUNDED]


@pytest.mark.parametrize('case', grids.draw((pytest.param(one, id=', '.join(one)) for one in EXAMPLES), 5))
def test_outputs_and_gradients(case):
    name, dtype = case
    arrays = example(**CASES[name], dtype=dtype)
    found = errors(by_kernels(*arrays), by_definition(*arrays))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert {key: error for key, error in found.items() if not error <= limit} == {}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_vector_units_that_compute_in_bfloat16(dtype, monkeypatch):
    """v6e and v7x have such units. Float32 inputs are computed in float32 there too."""
    assert not pallas_tpu.plan_for(256, 1, 16, 32, 16, 2).narrow
    monkeypatch.setattr(pallas_tpu.platform, 'matrix_side', lambda: 256)
    assert pallas_tpu.plan_for(256, 1, 16, 32, 16, 2).narrow
    arrays = example(200, heads=(2, 1), dtype=dtype)
    found = errors(by_kernels(*arrays), by_definition(*arrays))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert {key: error for key, error in found.items() if not error <= limit} == {}


@pytest.mark.parametrize('case', ['several blocks', 'degree 8', 'r = 32'])
def test_vectors_that_other_code_reads_get_all_gradients(case):
    nodes, xs, dpsis = example(**CASES[case])
    dxs = tuple(jnp.sin(x) for x in xs)
    found = errors(by_kernels(nodes, xs, dpsis, dxs), by_definition(nodes, xs, dpsis, dxs))
    assert {key: error for key, error in found.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize('read', [False, True])
def test_blocks_of_several_tiles(read, monkeypatch):
    """Blocks have several tiles if longer tiles do not fit. Gradients of all but a block's last tile wait for the next
    step."""
    monkeypatch.setattr(pallas_tpu, 'TILE', 128)
    assert pallas_tpu.plan_for(900, 1, 16, 32, 16, 4).tile == 128
    arrays = example(900)
    if read:
        arrays = (*arrays, tuple(jnp.cos(x) for x in arrays[1]))
    found = errors(by_kernels(*arrays), by_definition(*arrays))
    assert {key: error for key, error in found.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize(
    ('power', 'dtype', 'length'), [(2, 'float32', 45), (4, 'float32', 150), (2, 'bfloat16', 45), (2, 'bfloat16', 150)]
)
def test_xla_path(power, dtype, length):
    """The path runs in one piece, and on CPUs on 64 of 150 tokens at a time."""
    arrays = example(length, batch=2, sketches=2, heads=(3, 1), size=12, r=8, power=power, dtype=dtype)
    found = errors(outputs_and_gradients(xla.sketch_networks, *arrays), by_definition(*arrays))
    limit = 1e-5 if dtype == 'float32' else 3e-2
    assert {key: error for key, error in found.items() if not error <= limit} == {}


def test_batch_split_over_a_mesh():
    nodes, xs, dpsis = example(130, batch=4, heads=(2, 1))
    want = by_definition(nodes, xs, dpsis)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'fsdp'))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))
    with jax.set_mesh(mesh), interpret_kernels():
        xs, dpsis = jax.device_put((xs, dpsis), rows)
        got = outputs_and_gradients(pallas_tpu.sketch_networks, nodes, xs, dpsis)
    assert all(psi.sharding.is_equivalent_to(rows, psi.ndim) for psi in got[0][0])
    assert max(errors(got, want).values()) <= 1e-5


def test_policies_can_save_the_sketches(capfd):
    nodes, xs, _ = example(256)
    for names, saved in (((RESIDUAL_NAME,), True), ((), False)):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def sine(x):
            return jnp.sin(pallas_tpu.sketch_networks(op.SketchCall(nodes, (x,))).sketches[0])

        sketch = jax.checkpoint(sine, policy=policy)
        jax.ad_checkpoint.print_saved_residuals(sketch, xs[0])
        assert (f"u32[1,1,16,256] named '{RESIDUAL_NAME}'" in capfd.readouterr().out) == saved


REFUSED = {
    'vectors whose size': {'size': 20},
    'sketches whose size': {'r': 8},
    'tokens or more': {'length': 100},
    'bfloat16 or all float32': {'dtype': jnp.float16},
    'VMEM': {'r': 128, 'hidden': 4096},
}


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_calls_say_why(reason, monkeypatch):
    monkeypatch.setattr(pallas_tpu.platform, 'target_platform', lambda: 'tpu')
    assert pallas_tpu.unsupported(op.SketchCall(*example(300)[:2])) is None
    assert reason in pallas_tpu.unsupported(op.SketchCall(*example(**{'length': 300} | REFUSED[reason])[:2]))


def test_implementations_by_name():
    nodes, xs, _ = example(16)
    np.testing.assert_allclose(
        *(op.sketch_networks(nodes, *xs, implementation=name).sketches[0] for name in (None, 'reference')), atol=1e-5
    )
    with pytest.raises(OperationError, match='needs a TPU'):
        op.sketch_networks(nodes, *xs, implementation='pallas_tpu')
    with pytest.raises(OperationError, match='only pallas_gpu, pallas_tpu'):
        op.sketch_networks(nodes, *xs, implementation='gpu')


def test_gelu_is_the_definition():
    x = np.linspace(-8, 8, 1001)
    ours = folding.gelu(folding.CUBIC * x / 2) / folding.CUBIC
    np.testing.assert_allclose(ours, jax.nn.gelu(jnp.asarray(x, jnp.float32)), atol=2e-6)
