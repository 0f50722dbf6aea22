"""What a model holds beside its parameters."""

from flax import nnx


class Buffer(nnx.Variable):
    """A non-trainable array (a random projection): saved in checkpoints, never updated by the optimizer."""
