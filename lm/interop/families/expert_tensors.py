"""The tensors of experts, and the coefficient of their balance loss.

Files have three matrices for each expert, and models here one array for all of them.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lm.interop.families.base import Tensors
from lm.interop.families.decoder import LayerTensors, find_pattern
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


def stack_experts(theirs: LayerTensors, begin: str, names: Sequence[str], count: int) -> Tensors:
    """Returns glu_in [E, D, 2F], values before gates, and glu_out [E, F, D].

    Args:
        theirs: the tensors of the layer.
        begin: what stands before the number of an expert.
        names: the maps of values, of gates and of the output.
        count: the number of experts.
    """
    values, gates, outs = (
        np.stack([theirs.take(f'{begin}{expert}.{name}.weight').T for expert in range(count)]) for name in names
    )
    return {'experts.glu_in': np.concatenate([values, gates], axis=-1), 'experts.glu_out': outs}


def unstack_experts(ours: Tensors, begin: str, names: Sequence[str]) -> Tensors:
    """Undoes `stack_experts`."""
    arrays = [*np.split(ours['experts.glu_in'], 2, axis=-1), ours['experts.glu_out']]
    return {
        f'{begin}{expert}.{name}.weight': matrix.T
        for name, array in zip(names, arrays, strict=True)
        for expert, matrix in enumerate(array)
    }
