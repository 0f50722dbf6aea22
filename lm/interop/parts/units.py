"""Feed-forward layers. B batch, L length, D model width, N experts of a token."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

ACTIVATIONS = {'gelu': functools.partial(F.gelu, approximate='tanh'), 'silu': F.silu}


def activate(products, form, gated):
    """Returns the hidden numbers of the products of values and gates; of the only products without gates."""
    if not gated:
        return form(products)
    value, gate = products.chunk(2, dim=-1)
    return value * form(gate)


class LmRouter(nn.Module):
    """Computes logits [B, L, experts] in float32 for any type of the loaded model."""

    def __init__(self, width, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x_BxLxD):
        return F.linear(x_BxLxD.float(), self.weight.float())


class LmExperts(nn.Module):
    """A mixture of experts. `units` has the fields of `Experts`."""

    def __init__(self, config, units):
        super().__init__()
        experts, width, hidden = units['n_experts'], config.hidden_size, units['hidden_dim']
        self.units, self.activation, self.gated = units, ACTIVATIONS[config.activation], config.gated
        self.router = LmRouter(width, experts)
        self.glu_in = nn.Parameter(torch.zeros(experts, width, (1 + config.gated) * hidden))
        self.glu_out = nn.Parameter(torch.zeros(experts, hidden, width))
        self.shared_gate = nn.Linear(width, 1, bias=False) if units['shared_gate'] else None
        self.correction = nn.Parameter(torch.zeros(experts), requires_grad=False) if units['correction'] else None

    def forward(self, x_BxLxD, dense_BxLxD):
        chosen_BxLxN, weights_BxLxN = self.route(x_BxLxD)
        y_BxLxD = torch.zeros_like(x_BxLxD)
        for expert in chosen_BxLxN.unique().tolist():
            *place, choice = torch.where(chosen_BxLxN == expert)
            hidden = activate(x_BxLxD[tuple(place)] @ self.glu_in[expert], self.activation, self.gated)
            weights = weights_BxLxN[(*place, choice)][:, None]
            y_BxLxD = y_BxLxD.index_put(tuple(place), (hidden @ self.glu_out[expert] * weights).to(y_BxLxD.dtype), True)
        if dense_BxLxD is None:
            return y_BxLxD
        if self.shared_gate is not None:
            dense_BxLxD = dense_BxLxD * torch.sigmoid(self.shared_gate(x_BxLxD))
        return y_BxLxD + dense_BxLxD

    def route(self, x_BxLxD):
        """Returns the experts of each token and their weights, [B, L, N]."""
        units = self.units
        logits = self.router(x_BxLxD)
        scores = torch.sigmoid(logits) if units['sigmoid'] else torch.softmax(logits, dim=-1)
        compared = scores if self.correction is None else scores + self.correction.float()
        if units['top_groups'] < units['groups']:
            grouped = compared.unflatten(-1, (units['groups'], -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0].sum(-1).topk(units['top_groups'], dim=-1)[1]
            is_open = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0)[..., None] > 0
            compared = grouped.masked_fill(~is_open, -torch.inf).flatten(-2)
        chosen = compared.topk(units['top_k'], dim=-1)[1]
        weights = scores.gather(-1, chosen)
        if units['normalize']:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * units['scale']
