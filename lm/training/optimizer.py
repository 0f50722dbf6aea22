"""The optimizer: an update rule and a schedule, with what all of them share: warm-up, weight decay and clipping.

The defaults are the paper's: AdamW, linear warm-up, then linear decay to zero (PolySketchFormer §4, App. G, I).
"""

import operator
from typing import Any

import jax
import optax

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.model.width import compute_rate_scale
from lm.training.rules import Declared, Rule
from lm.training.rules.adamw import AdamW
from lm.training.schedules import Schedule
from lm.training.schedules.linear import Linear


@configurable('optimizer')
class OptimizerConfig(Configurable):
    """The conversion of gradients into steps; defaults are the paper's for 1M-token batches on PG-19 and Wiki-40B."""

    gin_rewind = True
    """A rewound run may go on with other values, and so it may with other values of rules and schedules."""

    rule: Rule = field(default=AdamW(), help='what makes directions out of gradients')
    schedule: Schedule = field(
        default=Linear(), formerly='decay', help='how the learning rate goes on after the warm-up'
    )
    peak_learning_rate: float = field(default=7e-4, above=0, help='the learning rate at the end of the warm-up')
    warmup_steps: int = field(default=10_000, minimum=0, help='steps over which the learning rate rises linearly')
    weight_decay: float = field(
        default=0.1, minimum=0, maximum=1000, help='applied to matrices, not to biases, norms or embeddings'
    )
    clip_norm: float | None = field(default=1.0, minimum=1e-8, help='global gradient norm; None: no clipping')
    z_loss: float = field(
        default=0.0,
        minimum=0,
        help='times the mean squared log-normalizer of the logits, added to what is minimized; 1e-4',
    )

    def build_schedule(self, steps: int) -> optax.Schedule:
        """Returns update count → learning rate, over `steps` updates."""
        if self.warmup_steps >= steps:
            raise ConfigError(
                f'optimizer.warmup_steps = {self.warmup_steps}: must be below train.steps = {steps}; '
                'lower it or train longer'
            )
        after = self.schedule.build(self.peak_learning_rate, steps - self.warmup_steps)
        # The first update already moves: warm-up counts 1/w, 2/w, … instead of 0, 1/w, ….
        warmup = optax.linear_schedule(
            self.peak_learning_rate / max(self.warmup_steps, 1), self.peak_learning_rate, max(self.warmup_steps - 1, 1)
        )
        return optax.join_schedules([warmup, after], [self.warmup_steps]) if self.warmup_steps else after

    def build(self, steps: int, declared: Declared, widening: float = 1.0) -> optax.GradientTransformation:
        """Builds the transformation for `steps` updates.

        `declared` describes the parameters. `widening` is the model's width over the base width.
        """
        decayed = jax.tree.map(lambda declaration: declaration.decayed, declared)
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity(),
            self._directions(declared, widening),
            optax.add_decayed_weights(self.weight_decay, mask=decayed),
            optax.scale_by_learning_rate(self.build_schedule(steps)),
        )

    def _directions(self, declared, widening):
        """Returns the directions of the rule, scaled per parameter if the learning rate is given for another width."""
        rule = self.rule.build(declared)
        if widening == 1:
            return rule
        scales = jax.tree.map(
            lambda declaration: compute_rate_scale(declaration, widening, self.rule.growth(declaration)), declared
        )

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            directions, state = rule.update(updates, state, params)
            return jax.tree.map(operator.mul, directions, scales), state

        return optax.GradientTransformation(rule.init, update)
