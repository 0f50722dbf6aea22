"""The call of the delta rule."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.ops.channel_decay import add_logs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCall:
    """One call of the operation: the arguments of `delta_rule`, as all implementations take them.

    The arrays are the pytree's leaves; `query_length` is static.
    """

    q_BxLxHxE: jax.Array
    k_BxLxKxE: jax.Array
    v_BxLxKxD: jax.Array
    beta_BxLxK: jax.Array
    log_decay_BxLxK: jax.Array | None = None
    initial_state_BxKxExD: jax.Array | None = None
    channel_log_decay_BxLxKxE: jax.Array | None = None
    query_length: float | None = dataclasses.field(default=None, metadata={'static': True})

    @property
    def first_state_BxKxExD(self) -> jax.Array:
        """The state before the first token, float32."""
        if self.initial_state_BxKxExD is not None:
            return self.initial_state_BxKxExD
        batch, _, heads, size = self.k_BxLxKxE.shape
        return jnp.zeros((batch, heads, size, self.v_BxLxKxD.shape[-1]), jnp.float32)

    @property
    def all_log_decay_BxLxKxE(self) -> jax.Array | None:
        """The logs of the factors of all channels, float32; None where channels have no factors of their own."""
        channels = self.channel_log_decay_BxLxKxE
        return None if channels is None else add_logs(channels, self.log_decay_BxLxK)

    @property
    def groups(self) -> int:
        """Queries per key head."""
        return self.q_BxLxHxE.shape[2] // self.k_BxLxKxE.shape[2]

    def fill_state(self) -> 'DeltaCall':
        """Returns the call with the state before the first token filled in."""
        return dataclasses.replace(self, initial_state_BxKxExD=self.first_state_BxKxExD)


class DeltaResult(NamedTuple):
    """Outputs in the dtype of v, and the state after the last token; None for a part of a window."""

    o_BxLxHxD: jax.Array
    state_BxKxExD: jax.Array | None
