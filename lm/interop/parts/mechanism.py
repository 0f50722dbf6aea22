"""A mechanism as a module of PyTorch. B batch, L length, H query heads, K key heads, C head size."""

import torch
from torch import nn

from lm.attention.formulas.base import FORMULAS


class LmMechanism(nn.Module):
    """The formula of a mechanism, with parameters of the names of its arrays."""

    def __init__(self, name, heads, kv_heads, size, **options):
        super().__init__()
        self.formula = FORMULAS[name](heads, kv_heads, size, **options)
        for path, array in self.formula.arrays.items():
            *folders, last = path.split('.')
            place = self
            for folder in folders:
                if folder not in dict(place.named_children()):
                    place.add_module(folder, nn.Module())
                place = place.get_submodule(folder)
            place.register_parameter(last, nn.Parameter(torch.full(array.shape, array.first), array.trained))

    def initialize(self, spread):
        """Fills the arrays as a new model has them: matrices are random, and vectors have their first values.

        Random projections keep the variance 1, and other matrices have `spread`.
        """
        for name, parameter in self.named_parameters():
            array = self.formula.arrays[name]
            if parameter.ndim == 1:
                nn.init.constant_(parameter, array.first)
            else:
                nn.init.normal_(parameter, array.first, spread if array.trained else 1.0)

    def forward(self, q_BxLxHxC, k_BxLxKxC, v_BxLxKxC, tokens, **inputs):
        """Returns [B, L, H, C] of the newest tokens, computed in float32 for any type of the loaded model.

        `inputs` are the further inputs of the mechanism, [B, L, width] each.
        """
        formula = self.formula.bind(torch, {name: parameter.float() for name, parameter in self.named_parameters()})
        inputs = {name: x.float() for name, x in inputs.items()}
        mixed = formula.mix(q_BxLxHxC.float(), k_BxLxKxC.float(), v_BxLxKxC.float(), tokens, **inputs)
        return mixed.to(q_BxLxHxC.dtype)
