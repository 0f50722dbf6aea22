"""The second half of a layer: a feed-forward layer, added to the residual stream.

D model width. A feed-forward layer has width F.
"""

import jax
from flax import nnx

from lm.model.dense import Dense, run_on_gathered
from lm.model.feed_forward.base import FeedForwardShape, RoutedPart, Routing
from lm.model.parts.branch import apply_part, read_norm
from lm.ops.gated_units import ACTIVATIONS, Norm, gated_units
from lm.ops.platform import shares_parameters
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
        if (matrices := self._lone_matrices()) and (norm := self._read_lone_norm(x_TxD)):
            with jax.named_scope('glu'):
                return self._apply_units(x_TxD, matrices, norm), None
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
        if not self.shape.gated:
            return self.glu_out(ACTIVATIONS[self.shape.activation](tokens_on_lanes(self.glu_in(x_TxD))))
        if matrices := self._lone_matrices():
            return self._apply_units(x_TxD, matrices)
        parts = self.glu_in.pieces(x_TxD, [self.glu_out.in_features] * 2)
        values_TxF, gates_TxF = map(tokens_on_lanes, parts)
        return self.glu_out(values_TxF * ACTIVATIONS[self.shape.activation](gates_TxF))

    def _lone_matrices(self) -> tuple[jax.Array, jax.Array] | None:
        """Returns the matrices of gated units that have nothing else; None for other units."""
        if not self.shape.gated or self.glu_in is None or self.glu_out is None:
            return None
        into_DxN, out_FxD = self.glu_in.lone_matrix(), self.glu_out.lone_matrix()
        return None if into_DxN is None or out_FxD is None else (into_DxN, out_FxD)

    def _read_lone_norm(self, x_TxD: jax.Array) -> Norm | None:
        """Returns the norm of a branch that has no other parts than its units, in the type of x; else None."""
        has_others = any(part is not None for part in (self.experts, self.glu_out_norm, self.glu_branch))
        if has_others or self.glu_in is None or x_TxD.dtype != self.glu_in.dtype:
            return None
        return read_norm(self.glu_norm)

    def _apply_units(
        self, x_TxD: jax.Array, matrices: tuple[jax.Array, jax.Array], norm: Norm | None = None
    ) -> jax.Array:
        """Computes gated units, or with a norm the residual branch around them."""
        parts, tree = jax.tree.flatten((*matrices, norm))

        def compute(x_TxD: jax.Array, *parts: jax.Array) -> jax.Array:
            into_DxN, out_FxD, norm = tree.unflatten(parts)
            return gated_units(x_TxD, into_DxN, out_FxD, self.shape.activation, norm)

        x_TxD = x_TxD.astype(matrices[0].dtype)
        return run_on_gathered(compute, [x_TxD], parts) if shares_parameters() else compute(x_TxD, *parts)
