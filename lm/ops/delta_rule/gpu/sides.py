"""The arrays of the walk from chunk to chunk of the delta rule on Hopper GPUs."""

from typing import Any, NamedTuple


class WalkSides(NamedTuple):
    """The arrays of the walk n_t = c_t + a_t S_t, S_{t+1} = w_t S_t + b_tᵀ n_t + d_t (`states`).

    They are bfloat16, but w float32, [N, T] or [N, T, E]. d: None for 0. Forwards, c is U: the values that the chunk
    would add at its keys if the state before it were 0. a is -W: its product with the state is what the chunk adds
    because of the state. b are keys times the factors until the chunk's end, and w are the factors of the whole chunk.
    Inside of the kernel they are references, or lists of references to the parts of keys.
    """

    a_NxTxCxE: Any
    b_NxTxCxE: Any
    c_NxTxCxD: Any
    w: Any
    d_NxTxExD: Any = None
