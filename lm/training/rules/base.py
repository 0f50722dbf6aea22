"""The base of update rules: configurations that a gin file names. They make directions out of gradients.

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
"""Rows and columns of the matrix whose state is measured: rules that treat small arrays differently take it for
large."""


class Rule(Configurable):
    """Base of the update rules (frozen dataclasses made by `@configurable`)."""

    gin_rewind = True

    def build(self, declared: Declared) -> optax.GradientTransformation:
        """Gradients → directions. The optimizer subtracts them, with the weight decay added, times the learning rate.
        The state is a pytree of arrays; `declared` is for rules that treat matrices and others differently."""
        raise NotImplementedError

    def growth(self, declaration: Declaration) -> float:
        """Power of the width with which grows what directions for a matrix add to its products, where the summed axis
        is the width (`lm.model.width`). 1 where each element has a size of its own, as in Adam: all of them may agree
        with the inputs (Yang et al. 2022, Table 8)."""
        return 1.0

    def state_bytes(self) -> float:
        """Bytes that the rule keeps for each parameter of a large float32 matrix; counters are left out."""
        matrix = declare('matrix', 'embed', 'mlp')['declaration']
        state = jax.eval_shape(self.build(matrix).init, jax.ShapeDtypeStruct((PROBE, PROBE), jnp.float32))
        kept = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in kept) / PROBE**2
