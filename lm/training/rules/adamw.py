"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter, 2019); the momenta are the paper's (§4)."""

import optax

from lm.config.configurable import configurable, field
from lm.training.rules.base import Declared, Rule


@configurable('adamw')
class AdamW(Rule):
    """Divides the running mean of gradients by the root of the running mean of squares, both corrected for
    the start."""

    b1: float = field(default=0.95, minimum=0, below=1, formerly='optimizer.b1', help='decay rate of the mean gradient')
    b2: float = field(default=0.98, minimum=0, below=1, formerly='optimizer.b2', help='decay rate of the mean square')
    epsilon: float = field(
        default=1e-8, above=0, formerly='optimizer.epsilon', help='added to the root of the mean square'
    )

    def build(self, declared: Declared) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)
