"""The tensors of experts, and the coefficient of their balance loss.

Files have three matrices for each expert, and models here one array for all of them.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lm.interop.families.decoder import find_pattern
from lm.interop.families.exchange import Exchange
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer, FeedForward
from lm.model.feed_forward.experts import Experts

BALANCE = 'router_aux_loss_coef'
"""The entry of config.json with the coefficient of the balance loss of each layer."""


def read_balance(config: Hyperparameters, default: float = 0.0) -> float:
    """Returns the coefficient of the balance loss in a config.json; null stands for none."""
    return config.find_number(BALANCE, default) or 0.0


def describe_balance(model: ModelConfig) -> dict[str, float]:
    """Returns the entry with the coefficient of the first layer that has experts; empty without experts."""
    found = [kind.balance for kind in model.feed_forwards if isinstance(kind, Experts)]
    return {BALANCE: found[0]} if found else {}


def find_mixture(layers: Iterable[FeedForward]) -> FeedForward | tuple[FeedForward, ...] | None:
    """Returns the feed-forward layers that repeat; None where all are dense."""
    found = list(layers)
    return None if all(isinstance(one, DenseLayer) for one in found) else find_pattern(found)


def exchange_experts(tensors: Exchange, begin: str, names: Sequence[str], count: int) -> None:
    """Moves glu_in [E, D, 2F], values before gates, and glu_out [E, F, D].

    Args:
        tensors: the tensors of the layer.
        begin: what stands before the number of an expert.
        names: the maps of values, of gates and of the output.
        count: the number of experts.
    """

    def stack(*matrices: np.ndarray) -> list[np.ndarray]:
        values, gates, outs = (
            np.stack([matrix.T for matrix in matrices[i * count : (i + 1) * count]]) for i in range(len(names))
        )
        return [np.concatenate([values, gates], axis=-1), outs]

    def unstack(glu_in: np.ndarray, glu_out: np.ndarray) -> list[np.ndarray]:
        return [matrix.T for array in (*np.split(glu_in, 2, axis=-1), glu_out) for matrix in array]

    theirs = [f'{begin}{expert}.{name}.weight' for name in names for expert in range(count)]
    tensors.change(['experts.glu_in', 'experts.glu_out'], theirs, stack, unstack)
