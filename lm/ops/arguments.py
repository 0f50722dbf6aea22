"""The checks of arguments that operations share.

Names state shapes: `q_BxLxHxE` has the axes batch, length, heads and features.
"""

from collections.abc import Mapping

import jax

from lm.ops.errors import OperationError


def check_shapes(arrays: Mapping[str, jax.Array | None], **sizes: int) -> None:
    """Compares arrays with the shapes that their names state. A letter means the same number in all of them.

    Args:
        arrays: name → array; None: the call has no such array. The first array with a letter decides its size.
        sizes: letter → size, for letters whose size does not come from an array; it may be 0.

    Raises:
        OperationError: an array that is empty, or does not fit the arrays before it.
    """
    for name, array in arrays.items():
        if array is None:
            continue
        label, _, axes = name.rpartition('_')
        letters, found = axes.split('x'), f'{label} of shape {array.shape}'
        if len(letters) != array.ndim:
            raise OperationError(f'{found}: must have {len(letters)} axes, {axes}')
        if any(size == 0 and letter not in sizes for letter, size in zip(letters, array.shape, strict=True)):
            raise OperationError(f'{found}: must not be empty')
        own = dict(zip(letters, array.shape, strict=True))
        wanted = tuple(int(letter) if letter.isdigit() else sizes.get(letter, own[letter]) for letter in letters)
        if array.shape != wanted:
            raise OperationError(f'{found}: must be {wanted}, {axes} like the other arguments')
        sizes |= own


def check_heads(heads: int, key_heads: int) -> None:
    """Raises OperationError unless each key head has equally many queries."""
    if heads % key_heads:
        raise OperationError(f'n_kv_heads = {key_heads}: must divide n_heads = {heads}')


def check_counts(**counts: int | None) -> None:
    """Raises OperationError for a number of tokens below 1; None: the call has no such number."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OperationError(f'{name} = {count}: must be at least 1')


def check_cap(name: str, cap: float | None) -> None:
    """Raises OperationError unless a soft cap is above 0; None: there is no cap."""
    if cap is not None and not cap > 0:
        raise OperationError(f'{name} = {cap}: must be above 0; None caps nothing')
