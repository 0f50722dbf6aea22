"""The student predicts what the teacher predicts: the second stage of a conversion.

    minimize Σ_v p_v (log p_v − log q_v)     p of the teacher, q of the student, for each token

(Hinton et al. 2015, with a temperature of 1 by default; RADLADS, step 2). The logits exist for a few tokens at a time.
With `top_k` the token store has the most probable tokens of the teacher (`lm.model.distillation.compare_with_cached`).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.configurable import configurable, field
from lm.data.teacher_logits import IDS, LOGS
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.distillation import compare_predictions, compare_with_cached
from lm.model.functions import ModelFunctions, Weights, over_windows
from lm.ops.documents import Documents
from lm.training.objectives.distillation import Distillation, Pair

MEASURES = ('divergence', 'cross_entropy', 'teacher_cross_entropy')


@configurable('distill')
class Distill(Distillation):
    """Trains the whole student on the divergence from the teacher's predictions."""

    temperature: float = field(default=1.0, above=0, help='divides the logits of both models')
    cross_entropy: float = field(
        default=0.0, minimum=0, maximum=1, help='share of the loss that is the cross-entropy of the text itself'
    )

    top_k: int | None = field(
        default=None,
        minimum=1,
        omit_default=True,
        help='so many most probable tokens of the teacher come from the token store (lm distill --cache), all others '
        'are one outcome, and the teacher is not in memory; None: the teacher computes',
    )

    def __post_init__(self) -> None:
        if self.top_k is not None and self.temperature != 1:
            raise ConfigError(
                f'{self.gin_name}.temperature = {self.temperature}: predictions are kept at a temperature of 1; leave '
                f'it out, or {self.gin_name}.top_k'
            )

    @property
    def is_cached(self) -> bool:
        return self.top_k is not None

    def check(self, student: ModelFunctions, teacher: ModelFunctions) -> None:
        super().check(student, teacher)
        ours, theirs = student.config.vocab_size, teacher.config.vocab_size
        if ours != theirs:
            raise ConfigError(f'model.vocab_size = {ours}: the teacher has {theirs}; set it to {theirs}')
        if self.top_k is not None and self.top_k > theirs:
            raise ConfigError(f'{self.gin_name}.top_k = {self.top_k}: the teacher has {theirs} tokens; take fewer')

    def compare(
        self, pair: Pair, documents: Documents | None, tokens_BxL: jax.Array, targets_BxL: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        predict = functools.partial(compare_predictions, temperature=self.temperature)
        return self._mix(pair.over_windows(predict, documents, tokens_BxL, targets_BxL))

    def make_taught(self, tokens_BxL: jax.Array) -> dict[str, jax.Array]:
        k = self.top_k or 1
        ids_BxLxK = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (*tokens_BxL.shape, k))
        return {IDS: ids_BxLxK, LOGS: jnp.full(ids_BxLxK.shape, -math.log(k + 1), jnp.float32)}

    def compare_with_cached(
        self,
        student: ModelFunctions,
        weights: Weights,
        documents: Documents | None,
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        taught: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays = tokens_BxL, targets_BxL, taught[IDS], taught[LOGS]
        return self._mix(over_windows(compare_with_cached, [(student, weights)], documents, *arrays))

    def _mix(self, found: tuple[jax.Array, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the loss of each token, and the measures by name."""
        named = dict(zip(self._measures, found, strict=True))
        mixed_BxL = (1 - self.cross_entropy) * named['divergence'] + self.cross_entropy * named['cross_entropy']
        return mixed_BxL, named

    @property
    def _measures(self) -> tuple[str, ...]:
        """The measures of a step. Cached predictions do not tell the probability of each target."""
        return MEASURES[:2] if self.is_cached else MEASURES

    def read_measures(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], str]:
        """Returns the divergence from the teacher, and both cross-entropies, in nats per token."""
        named = {name: metrics[name] for name in self._measures}
        if self.is_cached:
            return named, f'kl {named["divergence"]:.4f}'
        behind = named['cross_entropy'] - named['teacher_cross_entropy']
        return named, f'kl {named["divergence"]:.4f}  behind {behind:+.4f}'

    def make_measures(self, student: ModelFunctions) -> dict[str, jax.Array]:
        return dict.fromkeys(self._measures, jnp.zeros(()))

    @classmethod
    def name_loss(cls, values: Mapping[str, Any]) -> str:
        share = values.get('cross_entropy') or 0
        if share == 1:
            return 'cross-entropy (nats per token)'
        mixed = f' and {share:.0%} cross-entropy' if share else ''
        return f'divergence{mixed} (nats per token)'

    def flops_per_token(self, student: ModelConfig, teacher: ModelConfig, length: int) -> float:
        return student.flops_per_token(length) + (0 if self.is_cached else teacher.flops_per_token(length) / 3)
