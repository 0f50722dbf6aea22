"""Polysketch attention (PolySketchFormer)."""

import torch
from torch import nn
from torch.nn import functional as F

from lm.interop.formulas.base import EPSILON, NormedMechanism, gelu, layer_norm, score_scale, scores


class SketchNetwork(nn.Module):
    """A network: LayerNorm, m → `hidden`, gelu, → r, LayerNorm, → `hidden`, gelu, → r.

    The first axis of its arrays is the sketch.
    """

    def __init__(self, n, size, r, hidden):
        super().__init__()
        shapes = ((size, hidden), (hidden, r), (r, hidden), (hidden, r))
        self.kernels = nn.ParameterList([torch.zeros(n, *shape) for shape in shapes])
        self.scales = nn.ParameterList([torch.ones(n, 1, m) for m in (size, r)])
        self.biases = nn.ParameterList([torch.zeros(n, 1, m) for m in (size, r)])

    def forward(self, x_BxLxNxGxM):
        for i in range(2):
            normal = F.layer_norm(x_BxLxNxGxM, x_BxLxNxGxM.shape[-1:], eps=EPSILON) * self.scales[i] + self.biases[i]
            x_BxLxNxGxM = gelu(normal @ self.kernels[2 * i]) @ self.kernels[2 * i + 1]
        return x_BxLxNxGxM


class LearnedTree(nn.Module):
    """A tree of learned sketches: √r tanh(√(1/r) f₁(x) ∗ f₂(y)) at each node, the nodes above the leaves first."""

    def __init__(self, n, size, r, power, width):
        super().__init__()
        self.r, self.power = r, power
        self.maps = nn.ModuleList(
            nn.ModuleList(SketchNetwork(n, m, r, width * r) for _ in range(2)) for m in self.inputs(size, r, power)
        )

    @staticmethod
    def inputs(size, r, power):
        """Returns the input size of each node."""
        return [size] * (power // 2) + [r] * max(power // 2 - 1, 0)

    def leaves(self, x):
        return [x] * self.power

    def join(self, node, left, right):
        first, second = self.maps[node]
        return self.r**0.5 * torch.tanh(self.r**-0.5 * first(left) * second(right))

    def forward(self, x_BxLxNxGxM):
        if self.power == 1:
            return x_BxLxNxGxM
        level, node = self.leaves(x_BxLxNxGxM), 0
        while len(level) > 1:
            pairs = list(zip(level[::2], level[1::2], strict=True))
            level = [self.join(node + i, *pair) for i, pair in enumerate(pairs)]
            node += len(pairs)
        return level[0]


class RandomTree(LearnedTree):
    """A tree of random sketches: √(1/r) (x G₁) ∗ (y G₂) at each node."""

    def __init__(self, n, size, r, power, width):
        nn.Module.__init__(self)
        self.r, self.power = r, power
        self.maps = fixed((2, n, m, r) for m in self.inputs(size, r, power))

    def join(self, node, left, right):
        return (left @ self.maps[node][0]) * (right @ self.maps[node][1]) * self.r**-0.5


class HadamardTree(RandomTree):
    """A tree of random sketches with a separate map before each leaf."""

    def __init__(self, n, size, r, power, width):
        nn.Module.__init__(self)
        self.r, self.power = r, power
        self.base = fixed((n, size, r) for _ in range(power if power > 1 else 0))
        self.maps = fixed((2, n, r, r) for _ in range(max(power - 1, 0)))

    def leaves(self, x):
        return [x @ base * self.r**-0.5 for base in self.base]


class MeanTree(nn.Module):
    """√(1/m) [ψ₁, …, ψ_m], whose inner products are means of m trees' inner products."""

    def __init__(self, trees):
        super().__init__()
        self.members = nn.ModuleList(trees)

    def forward(self, x):
        if self.members[0].power == 1:
            return x
        return torch.cat([tree(x) for tree in self.members], -1) * len(self.members) ** -0.5


TREES = {'learned': LearnedTree, 'gaussian': RandomTree, 'srht': HadamardTree}


def fixed(shapes):
    """Registers arrays that are not trained."""
    return nn.ParameterList([nn.Parameter(torch.zeros(shape), requires_grad=False) for shape in shapes])


class PolysketchFormula(NormedMechanism, name='polysketch'):
    """Weights ⟨ψ(q'), ψ(k')⟩², and with `local` ⟨q', k'⟩^degree inside a block."""

    def __init__(
        self, heads, kv_heads, size, *, sketch, sketch_size, degree, local, block, per_head, denominator_bias,
        network_width=8, gate=False, offset=None, sketches=1, sketch_norm=None, far_factor=1.0,
        learn_far_factor=False,
    ):  # fmt: skip
        super().__init__()
        self.make_norms(size)
        self.make_gate(gate, kv_heads)
        self.reach, self.folds = block - 1 if local else 0, True
        self.degree, self.block, self.scale = degree, block if local else None, score_scale(degree, size)
        self.bias = denominator_bias * self.scale**degree
        self.n = kv_heads if per_head else 1
        trees = [TREES[sketch](self.n, size, sketch_size, degree // 2, network_width) for _ in range(sketches)]
        self.sketch = trees[0] if sketches == 1 else MeanTree(trees)
        self.sketch_norm, self.far_factor = sketch_norm, far_factor
        if sketch_norm and sketch != 'learned':
            self.sketch_norms = nn.ModuleList(layer_norm(size) for _ in range(1 if sketch_norm == 'tied' else 2))
        if learn_far_factor:
            self.log_far_factor = nn.Parameter(torch.zeros(heads))

    def far_inputs(self, q, k):
        """Returns what the sketch sees of queries and keys; learned sketches with a norm of their own begin with it."""
        if self.sketch_norm is None:
            return self.normalize(q, k)
        if not hasattr(self, 'sketch_norms'):
            return (F.layer_norm(x, x.shape[-1:], eps=EPSILON) for x in (q, k))
        return self.sketch_norms[0](q), self.sketch_norms[-1](k)

    def factor(self, axes):
        """Returns the factor of far weights, which one number or each head has, for arrays with `axes` behind heads."""
        if not hasattr(self, 'log_far_factor'):
            return self.far_factor
        return self.log_far_factor.exp().reshape(-1, *[1] * axes)

    def map(self, x_BxLxHxC):
        grouped = x_BxLxHxC.reshape(*x_BxLxHxC.shape[:2], self.n, -1, x_BxLxHxC.shape[-1])
        return self.sketch(grouped).reshape(*x_BxLxHxC.shape[:3], -1)

    def sketches(self, q, k):
        """Returns sketches, whose squared products are the weights of far keys."""
        part = self.scale ** (self.degree // 4)  # sketches are multiplied up to the scores' power degree / 2
        return (part * self.map(x) for x in self.far_inputs(q, k))

    def features(self, q, k):
        q, k = ((x[..., :, None] * x[..., None, :]).flatten(-2) for x in self.sketches(q, k))
        return self.factor(1) * q, k

    def decayed(self, q, k, log_decay, seen):
        w = self.factor(2) * scores(*self.sketches(q, k)) ** 2
        if self.block is not None:
            q, k = self.normalize(q, k)
            block = torch.div(seen.positions_BxM, self.block, rounding_mode='floor')
            near = block[:, None, -q.shape[1] :, None] == block[:, None, None]
            w = torch.where(near, (self.scale * scores(q, k)) ** self.degree, w)
        return w if log_decay is None else w * log_decay.exp()
