"""AdamW with the paper's schedule: linear warm-up, then linear decay to zero (PolySketchFormer §4, App. G, I)."""

import optax

from lm.config.configurable import configurable, field
from lm.errors import ConfigError


@configurable('optimizer')
class OptimizerConfig:
    """Adam with decoupled weight decay; defaults are the paper's for 1M-token batches on PG-19 and Wiki-40B."""

    peak_learning_rate: float = field(7e-4, above=0)
    warmup_steps: int = field(10_000, minimum=0)
    decay: str = field('linear', choices=('linear', 'cosine', 'constant'))
    final_fraction: float = field(0.0, minimum=0, maximum=1, help='last learning rate as a fraction of the peak')
    b1: float = field(0.95, minimum=0, below=1)
    b2: float = field(0.98, minimum=0, below=1)
    epsilon: float = field(1e-8, above=0)
    weight_decay: float = field(0.1, minimum=0, help='applied to matrices, not to biases, norms or embeddings')
    clip_norm: float | None = field(1.0, above=0, help='global gradient norm; None: no clipping')

    def schedule(self, steps: int) -> optax.Schedule:
        """Update count → learning rate, over `steps` updates."""
        if self.warmup_steps >= steps:
            raise ConfigError(
                f'optimizer.warmup_steps = {self.warmup_steps}: must be below train.steps = {steps}; '
                'lower it or train longer'
            )
        decay_steps = steps - self.warmup_steps
        last = self.peak_learning_rate * self.final_fraction
        decay = {
            'linear': optax.linear_schedule(self.peak_learning_rate, last, decay_steps),
            'cosine': optax.cosine_decay_schedule(self.peak_learning_rate, decay_steps, self.final_fraction),
            'constant': optax.constant_schedule(self.peak_learning_rate),
        }[self.decay]
        # The first update already moves: warm-up counts 1/w, 2/w, … instead of 0, 1/w, ….
        warmup = optax.linear_schedule(
            self.peak_learning_rate / max(self.warmup_steps, 1), self.peak_learning_rate, max(self.warmup_steps - 1, 1)
        )
        return optax.join_schedules([warmup, decay], [self.warmup_steps]) if self.warmup_steps else decay

    def build(self, steps: int, decayed: dict) -> optax.GradientTransformation:
        """The update rule for `steps` updates; its state is a pytree like the parameters'.

        `decayed`, like the parameters too, says which of them are decayed (`lm.parameters.declarations`).
        """
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity(),
            optax.scale_by_adam(self.b1, self.b2, self.epsilon),
            optax.add_decayed_weights(self.weight_decay, mask=decayed),
            optax.scale_by_learning_rate(self.schedule(steps)),
        )
