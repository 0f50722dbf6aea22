"""The student predicts what the teacher predicts: the second stage of a conversion.

    minimize Σ_v p_v (log p_v − log q_v)     p of the teacher, q of the student, for each token

(Hinton et al. 2015, with a temperature of 1 by default; RADLADS, step 2). The logits exist for a few tokens at a time.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.distillation import compare_predictions
from lm.model.functions import ModelFunctions
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

    def check(self, student: ModelFunctions, teacher: ModelFunctions) -> None:
        super().check(student, teacher)
        ours, theirs = student.config.vocab_size, teacher.config.vocab_size
        if ours != theirs:
            raise ConfigError(f'model.vocab_size = {ours}: the teacher has {theirs}; set it to {theirs}')

    def compare(
        self, pair: Pair, documents: Documents | None, tokens_BxL: jax.Array, targets_BxL: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        predict = functools.partial(compare_predictions, temperature=self.temperature)
        found = pair.over_windows(predict, documents, tokens_BxL, targets_BxL)
        divergence_BxL, nats_BxL, _ = found
        mixed_BxL = (1 - self.cross_entropy) * divergence_BxL + self.cross_entropy * nats_BxL
        return mixed_BxL, dict(zip(MEASURES, found, strict=True))

    def read_measures(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], str]:
        """Returns the divergence from the teacher, and both cross-entropies, in nats per token."""
        named = {name: metrics[name] for name in MEASURES}
        behind = named['cross_entropy'] - named['teacher_cross_entropy']
        return named, f'kl {named["divergence"]:.4f}  behind {behind:+.4f}'

    def make_measures(self, student: ModelFunctions) -> dict[str, jax.Array]:
        return dict.fromkeys(MEASURES, jnp.zeros(()))

    @classmethod
    def name_loss(cls, values: Mapping[str, Any]) -> str:
        share = values.get('cross_entropy') or 0
        if share == 1:
            return 'cross-entropy (nats per token)'
        mixed = f' and {share:.0%} cross-entropy' if share else ''
        return f'divergence{mixed} (nats per token)'

    def flops_per_token(self, student: ModelConfig, teacher: ModelConfig, length: int) -> float:
        return student.flops_per_token(length) + teacher.flops_per_token(length) / 3
