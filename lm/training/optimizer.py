"""The optimizer: an update rule and a schedule, with what all of them share: warm-up, weight decay and clipping.

The defaults are the paper's: AdamW, linear warm-up, then linear decay to zero (PolySketchFormer §4, App. G, I).
"""

import operator
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.model.width import compute_rate_scale
from lm.parameters import PARTS, Declaration
from lm.training.rules import Declared, Rule
from lm.training.rules.adamw import AdamW
from lm.training.schedules import Schedule
from lm.training.schedules.linear import Linear


def _check_parts(names: tuple[str, ...]) -> str | None:
    return None if set(names) <= set(PARTS) else f'must be parts of the model: {", ".join(PARTS)}'


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
    cautious: bool = field(
        default=False, help='weight decay applies only to numbers that the step of the rule moves towards zero as well'
    )
    embedding_rate: float = field(default=1.0, minimum=0, help='factor of the steps of embeddings')
    head_rate: float = field(default=1.0, minimum=0, help='factor of the steps of an untied output matrix')
    gain_rate: float = field(default=1.0, minimum=0, help='factor of the steps of gains and biases')
    frozen: tuple[str, ...] = field(
        default=(),
        check=_check_parts,
        help='parts of the model that stay as they are, such as ["embedding", "glu"]',
    )
    average_steps: int | None = field(
        default=None,
        minimum=1,
        inherit=False,
        help='evaluation, generation and export use the mean of the weights after about the last so many steps; '
        'None: the last weights',
    )
    clip_norm: float | None = field(default=1.0, minimum=1e-8, help='global gradient norm; None: no clipping')
    z_loss: float = field(
        default=0.0,
        minimum=0,
        inherit=False,
        help='times the mean squared log-normalizer of the logits, added to what is minimized, but not with a teacher; '
        '1e-4',
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

    def choose_frozen(self, declared: Declared) -> object:
        """Returns True for each parameter that `frozen` names, a nested dict like `declared`."""
        return jax.tree.map(lambda declaration: declaration.part in self.frozen, declared)

    def build(
        self, steps: int, declared: Declared, widening: float = 1.0, frozen: Any = None
    ) -> optax.GradientTransformation:
        """Builds the transformation for `steps` updates.

        Args:
            steps: updates of the whole training.
            declared: the declaration of each parameter.
            widening: the model's width over the base width.
            frozen: True for each parameter that stays as it is, a tree like `declared`; it has no optimizer state.
                None: those that `frozen` of the configuration names.
        """
        frozen = self.choose_frozen(declared) if frozen is None else frozen
        if not any(jax.tree.leaves(frozen)):
            return self._build(steps, declared, widening)
        moved = jax.tree.map(lambda one, fixed: optax.MaskedNode() if fixed else one, declared, frozen)
        kinds: dict[Hashable, optax.GradientTransformation] = {
            'moved': self._build(steps, moved, widening),
            'frozen': optax.set_to_zero(),
        }
        return optax.partition(kinds, jax.tree.map(lambda fixed: 'frozen' if fixed else 'moved', frozen))

    def _build(self, steps: int, declared: Declared, widening: float) -> optax.GradientTransformation:
        decayed = jax.tree.map(lambda declaration: declaration.decayed, declared)
        decays = jax.tree.map(
            lambda one: self.weight_decay * self._factor(one) if one.decayed else optax.MaskedNode(), declared
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity(),
            self._directions(declared, widening),
            optax.masked(_decay(decays, self.cautious), decayed),
            optax.scale_by_learning_rate(self.build_schedule(steps)),
        )

    def _directions(self, declared, widening):
        """Returns the directions of the rule, scaled per parameter if some kinds have a rate of their own,
        or if the rate is given for another width."""
        rule = self.rule.build(declared)

        def scale(declaration: Declaration) -> float:
            width = compute_rate_scale(declaration, widening, self.rule.growth(declaration)) if widening != 1 else 1.0
            return width * self._factor(declaration)

        scales = jax.tree.map(scale, declared)
        if all(scale == 1 for scale in jax.tree.leaves(scales)):
            return rule

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            directions, state = rule.update(updates, state, params)
            return jax.tree.map(operator.mul, directions, scales), state

        return optax.GradientTransformation(rule.init, update)

    def _factor(self, declaration: Declaration) -> float:
        """Returns the factor of a parameter's steps that the configuration gives its kind."""
        if declaration.kind == 'embedding':
            return self.embedding_rate
        if declaration.kind == 'matrix':
            return self.head_rate if declaration.output else 1.0
        return self.gain_rate

    def average(self, mean: object, params: object, updates: jax.Array) -> Any:
        """Returns the running mean of the parameters after one more update.

        mean ← mean + (params − mean) / min(average_steps, 1 + updates / 10). So early means cover the last tenth of
        the training, and later ones have the weights (1 − 1/average_steps)^age.

        Args:
            mean: of the parameters after earlier updates.
            params: after the new update.
            updates: the number of updates, the new one included.
        """
        share = 1 / jnp.minimum(self.average_steps or 1, 1 + updates.astype(jnp.float32) / 10)
        return jax.tree.map(lambda mean, new: mean + (new - mean) * share, mean, params)


def _decay(rates: object, is_cautious: bool) -> optax.GradientTransformation:
    """Returns the transformation that adds the weights times their `rates`, a tree like them.

    A cautious one does so where direction and weight have one sign. The optimizer subtracts the result: elsewhere the
    direction moves the weight away from zero, and decay would work against it (modded-nanogpt's cautious weight decay;
    Chen et al. 2025, "Cautious Weight Decay").
    """

    def add(update: jax.Array, weight: jax.Array, rate: float) -> jax.Array:
        return update + rate * weight * (update * weight > 0) if is_cautious else update + rate * weight

    return optax.stateless(lambda updates, params: jax.tree.map(add, updates, params, rates))
