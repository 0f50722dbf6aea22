"""What an update rule is: a configuration that a gin file names, which makes directions out of gradients.

Adding a rule means adding one file. Clipping, weight decay and the learning rate are the same for all of them and
belong to `lm.training.optimizer`.
"""

import jax
import jax.numpy as jnp
import optax

PROBE = 256
"""Rows and columns of the matrix whose state is measured: one that rules which spare small arrays take for large."""


class Rule:
    """Base of the update rules (frozen dataclasses made by `@configurable`)."""

    def build(self) -> optax.GradientTransformation:
        """Gradients → directions. The optimizer subtracts them, with the weight decay added, times the learning rate.
        The state is a pytree of arrays."""
        raise NotImplementedError

    def state_bytes(self) -> float:
        """Bytes that the rule keeps for each parameter of a large float32 matrix; counters are left out."""
        state = jax.eval_shape(self.build().init, jax.ShapeDtypeStruct((PROBE, PROBE), jnp.float32))
        kept = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in kept) / PROBE**2
