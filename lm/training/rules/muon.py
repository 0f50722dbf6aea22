"""Muon: steps of equal size along all directions of a matrix (Jordan et al., 2024; scale: Liu et al., 2025, §2.2).

The momentum of a matrix, U S Vᵀ, is replaced by about U Vᵀ, with five iterations of matrix products. Embeddings, gains
and biases multiply no vector, so another rule moves them.

If `mesh.fsdp` cuts the matrices, each device takes whole matrices of some layers for the iteration. This takes two
exchanges of 1/fsdp of the bytes, and no exchange inside the iteration.
"""

import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from lm.config.configurable import configurable, field
from lm.parameters import LAYER, Declaration
from lm.training.rules.adamw import AdamW
from lm.training.rules.base import Declared, Rule

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the iteration x ← a·x + b·(x xᵀ)x + c·(x xᵀ)²x; it moves singular values in (0, 1] to 0.7 …
1.2."""


@configurable('muon')
class Muon(Rule):
    """Orthogonalized momentum for matrices, `rest` for everything else."""

    momentum: float = field(default=0.95, minimum=0, below=1, help="Nesterov's")
    rms: float = field(
        default=0.2,
        above=0,
        help="root mean square of a matrix's step at a learning rate of 1; Adam's steps have 0.2 to 0.4",
    )
    rest: Rule = field(default=AdamW(), help='the rule of embeddings, gains and biases')

    def build(self, declared: Declared) -> optax.GradientTransformation:
        declarations = dict(jax.tree_util.tree_leaves_with_path(declared))

        def direction(path, momentum):
            declaration = declarations[path]
            return self.rms * _orthogonal(_by_layer(momentum, declaration), declaration)

        matrices = optax.chain(
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(direction, updates)),
        )
        labels = jax.tree.map(lambda declaration: 'matrices' if _is_turned(declaration) else 'rest', declared)
        return optax.partition({'matrices': matrices, 'rest': self.rest.build(declared)}, labels)

    def growth(self, declaration: Declaration) -> float:
        """Returns ½ for orthogonalized matrices.

        Elements of mean square 1 give singular values of √D for any inputs, and these must be equal at all widths
        (Yang, Simon & Bernstein 2023, Condition 1).
        """
        return 0.5 if _is_turned(declaration) else self.rest.growth(declaration)


def _is_turned(declaration: Declaration) -> bool:
    """Returns whether a parameter is orthogonalized; an untied output layer has one row per token, as an
    embedding has."""
    return declaration.kind == 'matrix' and 'vocabulary' not in declaration.axes


def _by_layer(x: jax.Array, declaration: Declaration) -> jax.Array:
    """Moves the layers of x to the devices of the mesh's axis `fsdp`, if there is one."""
    if jax.sharding.get_abstract_mesh().shape.get('fsdp', 1) == 1 or LAYER not in declaration.axes:
        return x
    return jax.lax.with_sharding_constraint(
        x, PartitionSpec(*('fsdp' if axis == LAYER else None for axis in declaration.axes))
    )


def _orthogonal(x: jax.Array, declaration: Declaration) -> jax.Array:
    """Returns U Vᵀ of each matrix x [..., m, n] = U S Vᵀ, scaled so that full rank gives elements of mean square 1.

    The pieces on the last axis (`Declaration.pieces`) are separate matrices.
    """
    cuts = [sum(declaration.pieces[:i]) for i in range(1, len(declaration.pieces))]
    whole = [_orthogonal_piece(piece) for piece in jnp.split(x, cuts, axis=-1)]
    return jnp.concatenate(whole, axis=-1) if cuts else whole[0]


def _orthogonal_piece(x_xMxN: jax.Array) -> jax.Array:
    m, n = x_xMxN.shape[-2:]
    if m > n:
        return _orthogonal_piece(x_xMxN.mT).mT
    # Where a gradient has long been 0, the momentum is tiny, and its squares leave the range of float32.
    tiny = jnp.finfo(jnp.float32).tiny
    largest = jnp.max(jnp.abs(x_xMxN), axis=(-2, -1), keepdims=True)
    # The divisor is a power of two, so the division rounds nothing.
    x = x_xMxN / jnp.maximum(jax.lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=0), tiny)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), tiny)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square_xMxM = x @ x.mT
        x = a * x + (b * square_xMxM + c * square_xMxM @ square_xMxM) @ x
    return math.sqrt(n) * x
