"""The attention of every mechanism of `lm` in PyTorch, as its formulas read; `modeling_lm` builds the model on it.

All weights of a sequence are in memory at once, in float32. A mechanism x is the class `XFormula`.

B batch, L length (queries), M length (keys), H query heads, K key heads, C head size, r numbers of a sketch.
"""

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

EPSILON = 1e-5
"""Of all normalizations."""
LIMIT = 35.0
"""Of exponents of random features that are not rescaled."""


def gelu(x):
    """The tanh approximation."""
    return F.gelu(x, approximate='tanh')


def scores(q_BxLxHxE, k_BxMxKxE):
    """Inner products [B, H, L, M]; head h reads key head h // (H / K)."""
    k_BxMxHxE = k_BxMxKxE.repeat_interleave(q_BxLxHxE.shape[2] // k_BxMxKxE.shape[2], dim=2)
    return torch.einsum('blhe,bmhe->bhlm', q_BxLxHxE, k_BxMxHxE)


def distances(length, device):
    """i - j of query i and key j, [L, M]."""
    position = torch.arange(length, device=device)
    return position[:, None] - position


def layer_norm(size):
    return nn.LayerNorm(size, eps=EPSILON)


NORMS = {'layer': layer_norm, 'rms': lambda size: nn.RMSNorm(size, eps=EPSILON)}


class Mechanism(nn.Module):
    """One layer's attention: a subclass `XFormula`, of the mechanism x, gives the weights of all pairs before the mask.

    Attributes:
        bias: added to the sum of the weights.
        divides: whether weights are divided by their sum.
        epsilon: a sum of signed weights within epsilon of 0 is moved by twice that; None: they are never negative.
        causal: whether later tokens are hidden.
    """

    bias, divides, epsilon, causal = 0.0, True, None, True

    def weights(self, q_BxLxHxC, k_BxMxKxC):
        """[B, H, L, M]."""
        raise TypeError(f'{type(self).__name__} gives no weights')

    def forward(self, q_BxLxHxC, k_BxMxKxC, v_BxMxKxC):
        """[B, L, H, C] of whole sequences, computed in float32 whatever type the model was loaded in."""
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            own = {name: parameter.float() for name, parameter in self.named_parameters()}
            return functional_call(self, own, (q_BxLxHxC, k_BxMxKxC, v_BxMxKxC))
        return self.mixed(q_BxLxHxC.float(), k_BxMxKxC.float(), v_BxMxKxC.float()).to(q_BxLxHxC.dtype)

    def mixed(self, q_BxLxHxC, k_BxMxKxC, v_BxMxKxC):
        """[B, L, H, C]."""
        w_BxHxLxM = self.weights(q_BxLxHxC, k_BxMxKxC)
        if self.causal:
            w_BxHxLxM = w_BxHxLxM.masked_fill(distances(w_BxHxLxM.shape[-1], w_BxHxLxM.device) < 0, 0.0)
        if self.divides:
            total = self.bias + w_BxHxLxM.sum(-1, keepdim=True)
            if self.epsilon is not None:
                total = total + 2 * self.epsilon * (total.abs() <= self.epsilon)
            w_BxHxLxM = w_BxHxLxM / total
        v_BxMxHxC = v_BxMxKxC.repeat_interleave(q_BxLxHxC.shape[2] // v_BxMxKxC.shape[2], dim=2)
        return torch.einsum('bhlm,bmhc->blhc', w_BxHxLxM, v_BxMxHxC)


class NormedMechanism(Mechanism):
    """With layer normalizations of queries and keys."""

    def make_norms(self, size):
        self.q_norm, self.k_norm = layer_norm(size), layer_norm(size)

    def normalize(self, q, k):
        return self.q_norm(q), self.k_norm(k)


class SoftmaxFormula(Mechanism):
    """exp(scale ⟨q, k⟩), of the `window` newest keys."""

    divides = False  # torch.softmax has done it

    def __init__(self, heads, kv_heads, size, *, scale, window, gate=False):
        super().__init__()
        self.scale, self.window = scale or size**-0.5, window

    def weights(self, q, k):
        distance = distances(k.shape[1], k.device)
        hidden = (distance < 0) | (distance >= (self.window or k.shape[1]))
        return torch.softmax((scores(q, k) * self.scale).masked_fill(hidden, -torch.inf), dim=-1)


def score_scale(degree, size):
    """A power of two that keeps high powers of scores in float32; with the bias times its power the same weights."""
    return 2.0 ** -min(round(math.log2(size)), 112 // degree) if degree > 8 else 1.0


class PolynomialFormula(NormedMechanism):
    """⟨q', k'⟩^degree."""

    def __init__(self, heads, kv_heads, size, *, degree, denominator_bias, gate=False, offset=None):
        super().__init__()
        self.make_norms(size)
        self.degree, self.scale = degree, score_scale(degree, size)
        self.bias = denominator_bias * self.scale**degree

    def weights(self, q, k):
        return (self.scale * scores(*self.normalize(q, k))) ** self.degree


class SketchNetwork(nn.Module):
    """LayerNorm, m → `hidden`, gelu, → r, LayerNorm, → `hidden`, gelu, → r; its arrays have an axis over n sketches in
    front."""

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
    """√r tanh(√(1/r) f₁(x) ∗ f₂(y)) at each node, the nodes above the leaves first."""

    def __init__(self, n, size, r, power, width):
        super().__init__()
        self.r, self.power = r, power
        self.maps = nn.ModuleList(
            nn.ModuleList(SketchNetwork(n, m, r, width * r) for _ in range(2)) for m in self.inputs(size, r, power)
        )

    @staticmethod
    def inputs(size, r, power):
        """The size of the children of each node."""
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
    """√(1/r) (x G₁) ∗ (y G₂) at each node."""

    def __init__(self, n, size, r, power, width):
        nn.Module.__init__(self)
        self.r, self.power = r, power
        self.maps = fixed((2, n, m, r) for m in self.inputs(size, r, power))

    def join(self, node, left, right):
        return (left @ self.maps[node][0]) * (right @ self.maps[node][1]) * self.r**-0.5


class HadamardTree(RandomTree):
    """With a map of its own in front of each leaf."""

    def __init__(self, n, size, r, power, width):
        nn.Module.__init__(self)
        self.r, self.power = r, power
        self.base = fixed((n, size, r) for _ in range(power if power > 1 else 0))
        self.maps = fixed((2, n, r, r) for _ in range(max(power - 1, 0)))

    def leaves(self, x):
        return [x @ base * self.r**-0.5 for base in self.base]


TREES = {'learned': LearnedTree, 'gaussian': RandomTree, 'srht': HadamardTree}


def fixed(shapes):
    """Arrays that are not trained."""
    return nn.ParameterList([nn.Parameter(torch.zeros(shape), requires_grad=False) for shape in shapes])


class PolysketchFormula(NormedMechanism):
    """⟨ψ(q'), ψ(k')⟩², and with `local` ⟨q', k'⟩^degree inside a block."""

    def __init__(
        self, heads, kv_heads, size, *, sketch, sketch_size, degree, local, block, per_head, denominator_bias,
        network_width=8, gate=False, offset=None,
    ):  # fmt: skip
        super().__init__()
        self.make_norms(size)
        self.degree, self.block, self.scale = degree, block if local else None, score_scale(degree, size)
        self.bias = denominator_bias * self.scale**degree
        self.n = kv_heads if per_head else 1
        self.sketch = TREES[sketch](self.n, size, sketch_size, degree // 2, network_width)

    def features(self, x_BxLxHxC):
        grouped = x_BxLxHxC.reshape(*x_BxLxHxC.shape[:2], self.n, -1, x_BxLxHxC.shape[-1])
        return self.sketch(grouped).reshape(*x_BxLxHxC.shape[:3], -1)

    def weights(self, q, k):
        q, k = self.normalize(q, k)
        part = self.scale ** (self.degree // 4)  # sketches multiply to scores' power degree / 2
        far = scores(part * self.features(q), part * self.features(k)) ** 2
        if self.block is None:
            return far
        block = torch.arange(k.shape[1], device=k.device) // self.block
        return torch.where(block[:, None] == block, (self.scale * scores(q, k)) ** self.degree, far)


class HybridFormula(Mechanism):
    """exp(scale ⟨q, k⟩) of the `window` newest keys, a product of polynomials of parts of it of older ones."""

    def __init__(
        self, heads, kv_heads, size, *, window, degree, parts, coefficients, scale, approximation=None, radius=None
    ):  # fmt: skip
        super().__init__()
        self.window, self.coefficients, self.parts, self.scale = window, coefficients, parts, scale or size**-0.5

    def weights(self, q, k):
        distance = distances(k.shape[1], k.device)
        recent = (distance >= 0) & (distance < self.window)
        far = torch.ones((), device=q.device)
        for a, b in zip(q.chunk(self.parts, dim=-1), k.chunk(self.parts, dim=-1), strict=True):
            s = scores(a, b) * self.scale
            far = far * sum(c * s**n for n, c in enumerate(self.coefficients))
        s = scores(q, k) * self.scale
        largest = s.masked_fill(~recent, -torch.inf).amax(-1, keepdim=True)
        largest = torch.where((distance >= self.window).any(-1, keepdim=True), largest.clamp(min=0.0), largest)
        older = torch.where(distance >= self.window, far * torch.exp(-largest), 0.0)
        return torch.where(recent, torch.exp(torch.where(recent, s - largest, 0.0)), older)


class HedgehogFormula(Mechanism):
    """⟨φ(q), φ(k)⟩ with φ(x) = [softmax(W x), softmax(-W x)] + 1e-12."""

    def __init__(self, heads, kv_heads, size, *, per_head):
        super().__init__()
        lead = ((heads,), (kv_heads,)) if per_head else ((), ())
        self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(*n, size, size)) for n in lead)

    def weights(self, q, k):
        return scores(self.features(q, self.q_weight), self.features(k, self.k_weight))

    @staticmethod
    def features(x, weight):
        wx = torch.einsum('nre,blne->blnr' if weight.ndim == 3 else 're,blne->blnr', weight, x)
        return torch.cat([torch.softmax(wx, dim=-1), torch.softmax(-wx, dim=-1)], dim=-1) + 1e-12


class TaylorFormula(Mechanism):
    """1 + s + s²/2 with s = ⟨W_q q, W_k k⟩ / √r."""

    def __init__(self, heads, kv_heads, size, *, feature_dim, per_head):
        super().__init__()
        self.r = feature_dim or size
        if feature_dim:
            lead = (heads, kv_heads) if per_head else (1, 1)
            self.q_weight, self.k_weight = (nn.Parameter(torch.zeros(n, size, feature_dim)) for n in lead)
        else:
            self.q_weight = self.k_weight = None

    def weights(self, q, k):
        s = scores(self.compressed(q, self.q_weight), self.compressed(k, self.k_weight)) * self.r**-0.5
        return 1 + s + s**2 / 2

    @staticmethod
    def compressed(x, weight):
        if weight is None:
            return x
        return torch.einsum('blnd,ndr->blnr', x, weight.expand(x.shape[2], -1, -1))


class LlopsFormula(NormedMechanism):
    """⟨φ_Q(q), φ_K(k)⟩ with φ a sum of products of learned projections, squared where it is `nonnegative`."""

    def __init__(
        self, heads, kv_heads, size, *, degree, n_features, rank, nonnegative, affine, layer_norm, renormalize,
        denominator_bias, stabilizer, init=None, offset=None,
    ):  # fmt: skip
        super().__init__()
        shape = (degree // 2 if nonnegative else degree, rank, size + affine, n_features)
        self.q_factors, self.k_factors = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
        self.normed, self.nonnegative, self.affine = layer_norm, nonnegative, affine
        self.divides, self.bias = renormalize, denominator_bias
        self.epsilon = None if nonnegative else stabilizer
        if layer_norm:
            self.make_norms(size)

    def weights(self, q, k):
        q, k = self.normalize(q, k) if self.normed else (q, k)
        return scores(self.features(q, self.q_factors), self.features(k, self.k_factors))

    def features(self, x, factors):
        x = F.pad(x, (0, 1), value=1.0) if self.affine else x
        products = torch.einsum('blnd,ftdm->ftblnm', x, factors).prod(dim=0).sum(dim=0)
        return products**2 if self.nonnegative else products


class RetentionFormula(Mechanism):
    """γ^(i - j) ⟨q, k⟩ / √C, normalized after the mixture instead of divided."""

    divides = False

    def __init__(self, heads, kv_heads, size):
        super().__init__()
        self.rates = [1 - 2.0 ** (-5 - h // (heads // kv_heads)) for h in range(heads)]
        self.out_norm = nn.RMSNorm(size, eps=EPSILON)

    def weights(self, q, k):
        distance = distances(k.shape[1], k.device).clamp(min=0)
        rates = torch.tensor(self.rates, device=k.device)[:, None, None]
        return scores(q, k) * q.shape[-1] ** -0.5 * rates**distance

    def mixed(self, q, k, v):
        return self.out_norm(super().mixed(q, k, v))


GENERALIZED = {
    'relu': torch.relu,
    'sigmoid': torch.sigmoid,
    'exp': lambda x: torch.exp(x.clamp(max=LIMIT)),
    'abs': torch.abs,
    'gelu': gelu,
    'cos': torch.cos,
    'tanh': torch.tanh,
    'identity': lambda x: x,
}
EXPONENTIAL = {'positive': (1, 0), 'hyperbolic': (2, 0), 'trigonometric': (2, None), 'random_phases': (1, None)}
"""Features a row of the projection, and None where their products can be negative."""
SIGNED = {'trigonometric', 'random_phases', 'gelu', 'cos', 'tanh', 'identity'}


class PerformerFormula(Mechanism):
    """⟨φ(q), φ(k)⟩ with random features φ."""

    def __init__(
        self, heads, kv_heads, size, *, features, n_features, renormalize, causal, scale, stabilizer, kernel_epsilon,
        projection=None, redraw_every=None, block=None,
    ):  # fmt: skip
        super().__init__()
        self.kind, self.divides, self.causal = features, renormalize, causal
        self.scale, self.stabilizer, self.kernel_epsilon = scale or size**-0.5, stabilizer, kernel_epsilon
        self.epsilon = stabilizer if features in SIGNED else None
        rows = n_features // EXPONENTIAL.get(features, (1, 0))[0]
        self.projection = nn.Parameter(torch.zeros(rows, size), requires_grad=False)
        self.phases = nn.Parameter(torch.zeros(rows), requires_grad=False) if features == 'random_phases' else None

    def weights(self, q, k):
        return scores(self.features(q, self.divides), self.features(k, False))

    def features(self, x, rescale):
        wx = math.sqrt(self.scale) * x @ self.projection.T
        wx = wx if self.phases is None else wx + self.phases
        half = self.scale / 2 * (x**2).sum(-1, keepdim=True)
        if self.kind in GENERALIZED:
            return (GENERALIZED[self.kind](wx) + self.kernel_epsilon) / math.sqrt(wx.shape[-1])
        if EXPONENTIAL[self.kind][1] is None:
            outer = 1.0 if rescale else torch.exp(half.clamp(max=LIMIT))
            if self.phases is not None:
                return outer * wx.cos() * math.sqrt(2 / wx.shape[-1])
            return outer * torch.cat([wx.sin(), wx.cos()], dim=-1) / math.sqrt(wx.shape[-1])
        wx = wx if EXPONENTIAL[self.kind][0] == 1 else torch.cat([wx, -wx], dim=-1)
        shift = wx.amax(-1, keepdim=True) if rescale else half
        exponent = wx - (shift + math.log(wx.shape[-1]) / 2)
        exponent = exponent if rescale else exponent.clamp(max=LIMIT)
        return torch.exp(exponent) + self.stabilizer / math.sqrt(wx.shape[-1])


MECHANISMS = {
    name.removesuffix('Formula').lower(): cls for name, cls in list(globals().items()) if name.endswith('Formula')
}
