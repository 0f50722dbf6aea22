"""Polysketch attention (PolySketchFormer)."""

from lm.attention.formulas.base import FormulaArray, NormedFormula, score_scale, scores, square_features
from lm.ops.formulas import apply_network, climb_tree, join_sketches, standardize


class PolysketchFormula(NormedFormula, name='polysketch'):
    """Weights ⟨ψ(q'), ψ(k')⟩², and with `local` ⟨q', k'⟩^degree inside a block.

    ψ is a tree whose nodes join two children, x and y: √r tanh(√(1/r) f₁(x) ∗ f₂(y)) with learned networks f, or
    √(1/r) (x G₁) ∗ (y G₂) with random maps G. 'srht' has a separate map before each leaf. Several sketches are side by
    side: their inner product is the mean of the trees' inner products.
    """

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
        self.kind, self.r = sketch, sketch_size
        self.trees = ['sketch'] if sketches == 1 else [f'sketch.members.{i}' for i in range(sketches)]
        for tree in self.trees if degree > 2 else ():
            self.make_tree(tree, size, network_width * sketch_size)
        self.sketch_norm, self.far_factor = sketch_norm, far_factor
        if sketch_norm and sketch != 'learned':
            for i in range(1 if sketch_norm == 'tied' else 2):
                self.make_layer_norm(f'sketch_norms.{i}', size)
        if learn_far_factor:
            self.arrays['log_far_factor'] = FormulaArray((heads,))

    def make_tree(self, name, size, hidden):
        """Adds the arrays of a tree; the nodes above the leaves come first."""
        leaves, r = self.degree // 2, self.r
        inputs = [r if self.kind == 'srht' or node >= leaves // 2 else size for node in range(leaves - 1)]
        if self.kind == 'srht':
            for i in range(leaves):
                self.arrays[f'{name}.base.{i}'] = FormulaArray((self.n, size, r), trained=False)
        for node, m in enumerate(inputs):
            if self.kind != 'learned':
                self.arrays[f'{name}.maps.{node}'] = FormulaArray((2, self.n, m, r), trained=False)
                continue
            for network in (f'{name}.maps.{node}.{side}' for side in range(2)):
                for i, shape in enumerate(((m, hidden), (hidden, r), (r, hidden), (hidden, r))):
                    self.arrays[f'{network}.kernels.{i}'] = FormulaArray((self.n, *shape))
                for i, width in enumerate((m, r)):
                    self.arrays[f'{network}.scales.{i}'] = FormulaArray((self.n, 1, width), 1.0)
                    self.arrays[f'{network}.biases.{i}'] = FormulaArray((self.n, 1, width))

    def levels(self, name):
        """Returns the arrays of a network level by level."""
        paths = (f'scales.{i} biases.{i} kernels.{2 * i} kernels.{2 * i + 1}'.split() for i in range(2))
        return [[self.p[f'{name}.{path}'] for path in level] for level in paths]

    def join(self, name, left, right):
        """Computes a node of a tree."""
        if self.kind == 'learned':
            sides = enumerate((left, right))
            return join_sketches(self.xp, *(apply_network(self.xp, self.levels(f'{name}.{i}'), x) for i, x in sides))
        first, second = self.p[name]
        return (left @ first) * (right @ second) * self.r**-0.5

    def climb(self, tree, x_BxLxNxGxM):
        """Computes a tree."""
        leaves = [x_BxLxNxGxM] * (self.degree // 2)
        if self.kind == 'srht' and len(leaves) > 1:
            leaves = [x @ self.p[f'{tree}.base.{i}'] * self.r**-0.5 for i, x in enumerate(leaves)]
        return climb_tree([f'{tree}.maps.{node}' for node in range(len(leaves) - 1)], leaves, self.join)

    def map(self, x_BxLxHxC):
        grouped = x_BxLxHxC.reshape(*x_BxLxHxC.shape[:2], self.n, -1, x_BxLxHxC.shape[-1])
        trees = self.trees if self.degree > 2 else self.trees[:1]  # without a node they are equal
        sketches = self.xp.concatenate([self.climb(tree, grouped) for tree in trees], -1) * len(trees) ** -0.5
        return sketches.reshape(*x_BxLxHxC.shape[:3], -1)

    def far_inputs(self, q, k):
        """Returns what the sketch sees of queries and keys; learned sketches with a norm of their own begin with it."""
        if self.sketch_norm is None:
            return self.normalize(q, k)
        if self.kind == 'learned':
            return standardize(self.xp, q), standardize(self.xp, k)
        last = 'sketch_norms.0' if self.sketch_norm == 'tied' else 'sketch_norms.1'
        return self.layer_norm('sketch_norms.0', q), self.layer_norm(last, k)

    def factor(self, axes):
        """Returns the factor of far weights, which one number or each head has, for arrays with `axes` behind heads."""
        if 'log_far_factor' not in self.p:
            return self.far_factor
        return self.xp.exp(self.p['log_far_factor']).reshape(-1, *[1] * axes)

    def sketches(self, q, k):
        """Returns sketches, whose squared products are the weights of far keys."""
        part = self.scale ** (self.degree // 4)  # sketches are multiplied up to the scores' power degree / 2
        return (part * self.map(x) for x in self.far_inputs(q, k))

    def features(self, q, k):
        q, k = (square_features(x) for x in self.sketches(q, k))
        return self.factor(1) * q, k

    def decayed(self, q, k, log_decay, seen):
        w = self.factor(2) * scores(self.xp, *self.sketches(q, k)) ** 2
        if self.block is not None:
            block = seen.positions_BxL // self.block
            near = block[:, None, -q.shape[1] :, None] == block[:, None, None]
            w = self.xp.where(near, (self.scale * scores(self.xp, *self.normalize(q, k))) ** self.degree, w)
        return w if log_decay is None else w * self.xp.exp(log_decay)
