"""Sketches ψ of polynomial kernels: ⟨ψ(x), ψ(y)⟩ ≈ ⟨x, y⟩^P with r numbers a vector, P a power of two.

All are binary trees over P copies of the vector (PolySketchFormer, Algorithms 1 and 2; draft, Figure 3): a node maps
its two children to r numbers each and multiplies them entry by entry. Squaring ⟨ψ(x), ψ(y)⟩, as ψ ⊗ ψ does, gives
weights that approximate ⟨x, y⟩^2P and are never negative (Theorem 2.4).

One sketch may serve all heads of a layer, or there is one per key head and its queries: N sketches, each for G heads. M
is the size of a vector, r the size of a sketch.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.attention.maps.projections import hadamard_matrix
from lm.ops import sketch_networks as networks
from lm.ops.dots import dense
from lm.ops.formulas import climb_tree
from lm.ops.residuals import recompute
from lm.ops.sketch_networks import Sketched
from lm.parameters import Buffer, declare


class Sketch(nnx.Module):
    """Base: the tree. A kind of sketch defines its leaves and how a node joins its children.

    The nodes of the level above the leaves come first, the root last: P - 1 of them.
    """

    normalizes = False
    """The maps normalize their inputs, with gains and biases of their own."""

    def __init__(self, n: int, size: int, r: int, power: int, width: int, rngs: nnx.Rngs):
        """n sketches of `power` copies of vectors of `size` numbers, whose networks, if they are learned, have
        `width` r hidden units."""
        self.power = power
        self.r = r

    def leaves(self, x_BxLxNxGxM: jax.Array) -> list[jax.Array]:
        """Returns the vectors at the leaves of the tree."""
        return [x_BxLxNxGxM] * self.power

    def join(self, node: int, left: jax.Array, right: jax.Array) -> jax.Array:
        """Computes [B, L, N, G, r] of a node from its children's."""
        raise NotImplementedError

    def __call__(self, x_BxLxNxGxM: jax.Array) -> jax.Array:
        """Computes ψ(x), [B, L, N, G, r] in the dtype of x; returns x itself for P = 1."""
        if self.power == 1:
            return x_BxLxNxGxM
        return climb_tree(range(self.power - 1), self.leaves(x_BxLxNxGxM), self.join)

    def of_each(self, *xs_BxLxNxGxM: jax.Array) -> Sketched:
        """Computes ψ of the vectors of each array, and returns the arrays for their other readers."""
        if self.power == 1:
            return Sketched(xs_BxLxNxGxM, xs_BxLxNxGxM)
        graph, state = nnx.split(self)
        sketch = recompute(lambda state, x_BxLxNxGxM: nnx.merge(graph, state)(x_BxLxNxGxM))
        return Sketched(tuple(sketch(state, x_BxLxNxGxM) for x_BxLxNxGxM in xs_BxLxNxGxM), xs_BxLxNxGxM)

    @classmethod
    def flops(cls, size: int, r: int, power: int, width: int) -> float:
        """Counts the floating-point operations of ψ of one vector."""
        return sum(2 * cls.map_flops(m, r, width) for m in _node_inputs(size, r, power))

    @classmethod
    def map_flops(cls, size: int, r: int, width: int) -> float:
        """Returns the operations of one of a node's two maps."""
        return 2.0 * size * r


class Gaussian(Sketch):
    """√(1/r) [(M₁ G₁) ∗ (M₂ G₂)] with Gaussian G₁, G₂ (Algorithm 1). The published code divides both matrices by √r,
    which makes these weights r² times smaller than the exact ones beside them (`polysketch.far_factor`)."""

    def __init__(self, n: int, size: int, r: int, power: int, width: int, rngs: nnx.Rngs):
        super().__init__(n, size, r, power, width, rngs)
        sizes = _node_inputs(size, r, power)
        # Rounded to bfloat16, so that the sketch is the same in either precision.
        draws = (jax.random.normal(rngs.projections(), (2, n, m, r), jnp.bfloat16) for m in sizes)
        self.maps = nnx.List([Buffer(draw.astype(jnp.float32)) for draw in draws])

    def join(self, node: int, left: jax.Array, right: jax.Array) -> jax.Array:
        return _product(self.maps[node][...], left, right)


class Srht(Sketch):
    """TensorSRHT nodes over SRHT leaves (draft, Definitions 2.3 and 2.4).

    The matrices √(1/r) D H P are kept dense: at these sizes one matrix product is faster than the transform. Vectors
    whose size is not a power of two count as padded with zeros.
    """

    def __init__(self, n: int, size: int, r: int, power: int, width: int, rngs: nnx.Rngs):
        super().__init__(n, size, r, power, width, rngs)
        n_nodes = max(power - 1, 0)
        n_leaves = power if power > 1 else 0
        self.base = nnx.List([Buffer(_subsampled(rngs.projections(), (n,), size, r)) for _ in range(n_leaves)])
        self.maps = nnx.List([Buffer(_subsampled(rngs.projections(), (2, n), r, r)) for _ in range(n_nodes)])

    def leaves(self, x_BxLxNxGxM: jax.Array) -> list[jax.Array]:
        return [(dense(x_BxLxNxGxM, base[...]) * self.r**-0.5).astype(x_BxLxNxGxM.dtype) for base in self.base]

    def join(self, node: int, left: jax.Array, right: jax.Array) -> jax.Array:
        return _product(self.maps[node][...], left, right)

    @classmethod
    def flops(cls, size: int, r: int, power: int, width: int) -> float:
        if power == 1:
            return 0.0
        return power * cls.map_flops(size, r, width) + 2 * (power - 1) * cls.map_flops(r, r, width)


class Learned(Sketch):
    """√r tanh(√(1/r) [f₁(M₁) ∗ f₂(M₂)]) with a small network for each f (Algorithm 2, App. D)."""

    normalizes = True

    def __init__(self, n: int, size: int, r: int, power: int, width: int, rngs: nnx.Rngs):
        super().__init__(n, size, r, power, width, rngs)
        sizes = _node_inputs(size, r, power)
        self.maps = nnx.List([nnx.List([Network(n, m, r, width, rngs) for _ in range(2)]) for m in sizes])

    def __call__(self, x_BxLxNxGxM: jax.Array) -> jax.Array:
        return self.of_each(x_BxLxNxGxM).sketches[0]

    def of_each(self, *xs_BxLxNxGxM: jax.Array) -> Sketched:
        if self.power == 1:
            return super().of_each(*xs_BxLxNxGxM)
        nodes = tuple(networks.Node(left.parameters(), right.parameters()) for left, right in self.maps)
        return networks.sketch_networks(nodes, *xs_BxLxNxGxM)

    @classmethod
    def map_flops(cls, size: int, r: int, width: int) -> float:
        return 2.0 * width * r * (size + 3 * r)


class Network(nnx.Module):
    """LayerNorm, M → `width` r, gelu, → r, LayerNorm, → `width` r, gelu, → r, without biases (App. D: 8 r)."""

    def __init__(self, n: int, size: int, r: int, width: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        shapes = ((size, width * r), (width * r, r), (r, width * r), (width * r, r))
        matrix, gain, bias = (declare(kind, 'sketch', 'in', 'out') for kind in ('matrix', 'gain', 'bias'))
        self.kernels = nnx.List([nnx.Param(init(rngs.params(), (n, *shape)), **matrix) for shape in shapes])
        self.scales = nnx.List([nnx.Param(jnp.ones((n, 1, m)), **gain) for m in (size, r)])
        self.biases = nnx.List([nnx.Param(jnp.zeros((n, 1, m)), **bias) for m in (size, r)])

    def parameters(self) -> networks.NetworkWeights:
        levels = zip(self.scales, self.biases, self.kernels[::2], self.kernels[1::2], strict=True)
        return networks.NetworkWeights(*(networks.LevelWeights(*(one[...] for one in level)) for level in levels))


class MeanSketch(nnx.Module):
    """√(1/m) [ψ₁, …, ψ_m]: its inner products are the means of m independent sketches' inner products.

    Their variance is m times smaller. Gaussian sketches with P = 2 are then one sketch of m r numbers.

    Means of m squares would need m r² features in place of (m r)². Their expected weights have the variance of one
    sketch, whatever m is. This excess is the fault of random sketches, and only wider sketches lower it.
    """

    def __init__(self, sketches: Sequence[Sketch]):
        self.members = nnx.List(sketches)

    def of_each(self, *xs_BxLxNxGxM: jax.Array) -> Sketched:
        """Computes [ψ₁, …, ψ_m] / √m of the vectors of each array, and returns the arrays for their other readers.

        For P = 1, ψ is the vector itself, and so is the mean.
        """
        if self.members[0].power == 1:
            return self.members[0].of_each(*xs_BxLxNxGxM)
        found = []
        for member in self.members:
            sketches, xs_BxLxNxGxM = member.of_each(*xs_BxLxNxGxM)
            found.append(sketches)
        factor = len(self.members) ** -0.5
        joined = (jnp.concatenate(parts, axis=-1) * factor for parts in zip(*found, strict=True))
        return Sketched(tuple(joined), xs_BxLxNxGxM)


SKETCHES: dict[str, type[Sketch]] = {'learned': Learned, 'gaussian': Gaussian, 'srht': Srht}


def _node_inputs(size: int, r: int, power: int) -> list[int]:
    """Returns the size of the children of each node."""
    return [size] * (power // 2) + [r] * max(power // 2 - 1, 0)


def _product(maps_2xNxMxR: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    product = dense(left, maps_2xNxMxR[0]) * dense(right, maps_2xNxMxR[1])
    return (product * maps_2xNxMxR.shape[-1] ** -0.5).astype(left.dtype)


def _subsampled(key: jax.Array, lead: tuple[int, ...], size: int, r: int) -> jax.Array:
    """Draws D H P [*lead, size, r]: random signs times r random columns of the unnormalised Walsh-Hadamard matrix."""
    side = 1 << (size - 1).bit_length()
    sign_key, column_key = jax.random.split(key)
    signs = jax.random.rademacher(sign_key, (*lead, size, 1), jnp.float32)
    columns = jax.random.randint(column_key, (*lead, r), 0, side)
    matrix = jnp.asarray(np.sqrt(side) * hadamard_matrix(side)[:, :size])
    return signs * jnp.swapaxes(matrix[columns], -1, -2)
