"""The tokens of a call and the keys that they see. B batch, L queries, M keys, C head size."""

from typing import Any, NamedTuple


def distances(xp, q_BxLxHxC, k_BxMxKxC):
    """Returns i - j of query i and key j, [L, M]; the queries are of the last L tokens."""
    position = xp.arange(k_BxMxKxC.shape[1], device=k_BxMxKxC.device)
    return position[-q_BxLxHxC.shape[1] :, None] - position


class LayerTokens(NamedTuple):
    """The newest tokens of a layer, and what it keeps of earlier ones.

    Attributes:
        xp: the namespace of the arrays.
        mask_BxL: False for padding, which stands on the left of a row.
        positions_BxL: in the text of each row.
        memory: name → array that is kept, with the batch first; None: nothing is kept.
    """

    xp: Any
    mask_BxL: Any
    positions_BxL: Any
    memory: dict | None

    def join(self, name, new, most=None):
        """Returns the kept part of an array and the new one, and keeps the last `most` tokens of both; None: all."""
        if self.memory is None:
            return new
        whole = self.xp.concatenate([self.memory[name], new], 1) if name in self.memory else new
        self.memory[name] = whole if most is None else whole[:, max(0, whole.shape[1] - most) :]
        return whole

    def clear(self, x_BxLxN):
        """Sets the numbers of padding to 0."""
        return x_BxLxN * self.mask_BxL.reshape(*self.mask_BxL.shape, *[1] * (x_BxLxN.ndim - 2))

    def list_seen(self, reach):
        """Returns the tokens [B, M] whose keys a query is compared with: the newest, and `reach` before them."""
        return self._replace(
            mask_BxL=self.join('mask', self.mask_BxL, reach),
            positions_BxL=self.join('positions', self.positions_BxL, reach),
        )

    def hidden(self, distance_LxM, causal=True):
        """Returns True where a query does not see a key of these tokens, [B, 1, L, M].

        Padding sees itself, so that its numbers are finite.
        """
        hidden = ~self.mask_BxL[:, None, None] & (distance_LxM != 0)
        return hidden | (distance_LxM < 0) if causal else hidden
