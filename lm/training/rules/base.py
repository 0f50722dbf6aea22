"""Update rules: configurations that a gin file names. A rule makes directions out of gradients.

Adding a rule means adding one file. Clipping, weight decay and the learning rate are the same for all of them and
belong to `lm.training.optimizer`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.config.configurable import Configurable
from lm.parameters import Declaration, declare

Declared = Any
"""The declaration of each parameter (`lm.parameters.declarations`): a pytree like the parameters."""
PROBE = 256
"""Rows and columns of the matrix whose state is measured. Rules that skip small arrays treat it as large."""


class Rule(Configurable):
    """Base of the update rules (frozen dataclasses made by `@configurable`)."""

    gin_rewind = True

    def build(self, declared: Declared) -> optax.GradientTransformation:
        """Returns the transformation of gradients into directions.

        The optimizer adds the weight decay to the directions and subtracts them times the learning rate. The state is
        a pytree of arrays. `declared` is for rules that treat matrices and other arrays differently.
        """
        raise NotImplementedError

    def growth(self, declaration: Declaration) -> float:
        """Returns the power of the width with which a step changes the products of a matrix (`lm.model.width`).

        The width is the summed axis. The power is 1 where each element has an independent size, as in Adam: all
        elements may agree with the inputs (Yang et al. 2022, Table 8).
        """
        return 1.0

    def state_bytes(self) -> float:
        """Returns the bytes of state per parameter of a large float32 matrix, without counters."""
        matrix = declare('matrix', 'embed', 'mlp')['declaration']
        state = jax.eval_shape(self.build(matrix).init, jax.ShapeDtypeStruct((PROBE, PROBE), jnp.float32))
        kept = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in kept) / PROBE**2
