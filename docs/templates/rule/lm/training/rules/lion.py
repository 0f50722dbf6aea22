"""Lion: the sign of a mean of gradient and momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms",
Algorithm 2)."""

import optax

from lm.config.configurable import configurable, field
from lm.training.rules.base import Declared, Rule


# Clipping, weight decay and the learning rate are the same for all rules. `declared` has the kind of each parameter,
# for rules that treat matrices and others differently; `Rule.growth` is for rules whose steps depend on the width.
@configurable('lion')
class Lion(Rule):
    """sign(b1 · momentum + (1 − b1) · gradient); the authors use a third to a tenth of Adam's learning rate."""

    b1: float = field(default=0.9, minimum=0, below=1, help='share of the momentum in the direction')
    b2: float = field(default=0.99, minimum=0, below=1, help='share of the old momentum in the new one')

    def build(self, declared: Declared) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)
