"""The decoder with experts in the place of linear units, which several families share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lm.interop.families.decoder import UNITS, Decoder, count_layers, find_pattern, join_units
from lm.interop.families.exchange import Exchange
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer, FeedForward
from lm.model.feed_forward.experts import Experts

BALANCE = 'router_aux_loss_coef'
"""The entry of config.json with the coefficient of the balance loss of each layer."""


class ExpertDecoder(Decoder):
    """A router with softmax chooses experts; with `shared`, a gated expert is passed by all tokens.

    Attributes:
        block: what stands before the names of the router and of the experts.
        maps: their maps of values, of gates and of the output.
        entries: our field of `Experts` → their entry.
        expert: entries where config.json states none, and so is `balance`, the coefficient of the balance loss.
        normalizes: the weights of the chosen experts have the sum 1; None: `norm_topk_prob` says it.
        has_dense: some layers may be dense.
        shared: there is a shared expert with a gate.
    """

    block: ClassVar[str] = 'mlp.'
    maps: ClassVar[Sequence[str]] = UNITS
    entries: ClassVar[Mapping[str, str]] = {
        'n_experts': 'num_experts',
        'top_k': 'num_experts_per_tok',
        'hidden_dim': 'moe_intermediate_size',
    }
    expert: ClassVar[Mapping[str, object]] = {}
    balance: ClassVar[float] = 0.001
    normalizes: ClassVar[bool | None] = None
    has_dense: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    def options(self, config: Hyperparameters) -> dict[str, object]:
        kinds = find_mixture(self.feed_forward(config, i) for i in count_layers(config))
        return {**super().options(config), 'feed_forward': kinds}

    def feed_forward(self, config: Hyperparameters, layer: int) -> FeedForward:
        """Returns the configuration of the feed-forward part of layer number `layer`: dense, or with experts."""
        # transformers 5 has two names for the number of experts.
        named = {} if 'num_local_experts' not in config else {'num_experts': config['num_local_experts']}
        found = {**self.expert, **named} | config
        is_dense = layer in config.integers('mlp_only_layers') or (layer + 1) % found.integer('decoder_sparse_step', 1)
        sizes: dict[str, Any] = {ours: found.integer(theirs) for ours, theirs in self.entries.items()}
        if self.has_dense and (is_dense or not sizes['n_experts']):
            return DenseLayer()
        return Experts(
            **sizes,
            shared_gate=self.shared,
            normalize=found.flag('norm_topk_prob') if self.normalizes is None else self.normalizes,
            balance=read_balance(found, self.balance),
        )

    def exchange_units(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        kind = model.find_feed_forward(layer)
        if not isinstance(kind, Experts):
            super().exchange_units(tensors, model, layer)
            return
        tensors.move('experts.router.weight', f'{self.block}gate.weight')
        exchange_experts(tensors, f'{self.block}experts.', self.maps, kind.n_experts)
        if self.shared:
            tensors.move('experts.shared_gate.weight', f'{self.block}shared_expert_gate.weight')
            join_units(tensors, f'{self.block}shared_expert.')

    def describe(self, model: ModelConfig) -> dict[str, object]:
        kinds = [model.find_feed_forward(i).settle(model.feed_forward_shape) for i in range(model.n_layers)]
        one = next((kind for kind in kinds if isinstance(kind, Experts)), None)
        found = super().describe(model) | describe_balance(model)
        found['mlp_only_layers'] = [i for i, kind in enumerate(kinds) if not isinstance(kind, Experts)]
        if one is None and self.has_dense:
            return found | {self.entries['n_experts']: 0}
        one = one or Experts(hidden_dim=8, shared_dim=8)  # which differs from the model, so the family is not chosen
        sizes = {theirs: getattr(one, ours) or 1 for ours, theirs in self.entries.items()}
        return found | sizes | {'norm_topk_prob': one.normalize}


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

    Files have three matrices for each expert: `begin`, its number, and a name of the values, the gates or the output.
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
