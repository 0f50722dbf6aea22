"""The second half of a layer: a feed-forward layer, added to the residual stream.

D model width. A feed-forward layer has width F.
"""

import jax
from flax import nnx

from lm.model.dense import Dense
from lm.model.feed_forward.base import ACTIVATIONS, FeedForwardShape, RoutedPart, Routing
from lm.model.parts.branch import apply_part
from lm.ops.tpu import tokens_on_lanes


class FeedForwardBranch(nnx.Module):
    """x += units(norm(x)), where the units are those that all tokens pass, experts, or both."""

    shape: FeedForwardShape
    glu_norm: nnx.Module | None
    glu_in: Dense | None
    glu_out: Dense | None
    experts: RoutedPart | None
    glu_out_norm: nnx.Module | None
    glu_branch: nnx.Module | None

    def add_units(self, x_TxD: jax.Array) -> tuple[jax.Array, Routing | None]:
        """Adds the output of the feed-forward layer; the tokens may have any number of axes."""
        with jax.named_scope('norms'):
            normed_TxD = apply_part(self.glu_norm, x_TxD)
        with jax.named_scope('glu'):
            y_TxD, routing = self.transform(normed_TxD)
            return x_TxD + apply_part(self.glu_branch, apply_part(self.glu_out_norm, y_TxD)), routing

    def transform(self, x_TxD: jax.Array) -> tuple[jax.Array, Routing | None]:
        """Computes the feed-forward layer of normalized inputs, and the choices of its router, if it has one.

        The tokens may have any number of axes.
        """
        if self.experts is None:
            return self._transform_all(x_TxD), None
        return self.experts.compute(x_TxD, None if self.glu_in is None else self._transform_all(x_TxD))

    def _transform_all(self, x_TxD: jax.Array) -> jax.Array:
        """Computes the linear units that all tokens pass."""
        assert self.glu_in is not None
        assert self.glu_out is not None
        activate = ACTIVATIONS[self.shape.activation]
        if self.shape.gated:
            products = self.glu_in.pieces(x_TxD, [self.glu_out.in_features] * 2)
            value_TxF, gate_TxF = map(tokens_on_lanes, products)
            hidden_TxF = value_TxF * activate(gate_TxF)
        else:
            hidden_TxF = activate(tokens_on_lanes(self.glu_in(x_TxD)))
        return self.glu_out(hidden_TxF)
