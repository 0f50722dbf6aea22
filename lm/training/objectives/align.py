"""The student's attention computes what the teacher's computes, layer by layer: the first stage of a conversion.

    minimize Σ_l mean |student_l(n_l) − teacher_l(n_l)|²

n_l is the teacher's normalized input of layer l. Both sides are outputs of attention after its output matrix, before
they are added to the residual stream. The teacher runs once. No gradient crosses layers, so the memory holds
the backward pass of one layer at a time (RADLADS, Goldstein et al. 2025, §3, step 1; HALO, 2026, stage 1).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.configurable import configurable, field
from lm.model import ModelConfig
from lm.model.distillation import compare_layers
from lm.model.functions import ModelFunctions
from lm.model.layers import BLOCKS, find_copied, find_same_layers
from lm.ops.documents import Documents
from lm.training.objectives.distillation import Distillation, Pair

MOST_SHOWN = 16
"""The layers whose errors the line of a step shows one by one."""
TRAINED = ('new', 'attention')


@configurable('align')
class Align(Distillation):
    """Trains attention to give the outputs of the teacher's attention, on the teacher's inputs."""

    trains_feed_forward = False
    trains_adapters = False

    trains: str = field(
        default='attention',
        choices=TRAINED,
        help="what learns: all of attention, or only the new parameters, which the teacher's attention lacks",
    )

    def compare(
        self, pair: Pair, documents: Documents | None, tokens_BxL: jax.Array, targets_BxL: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        errors_BxLxN, sizes_BxLxN = pair.over_windows(compare_layers, documents, tokens_BxL)
        measures = {'layer_errors': errors_BxLxN, 'layer_sizes': sizes_BxLxN}
        return errors_BxLxN.sum(axis=-1), measures

    def make_measures(self, student: ModelFunctions) -> dict[str, jax.Array]:
        zeros_N = jnp.zeros(student.config.n_layers)
        return {'layer_errors': zeros_N, 'layer_sizes': zeros_N}

    def read_measures(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], str]:
        """Returns each layer's error relative to the teacher's output: Σ |difference|² / Σ |output|²."""
        pairs = zip(metrics['layer_errors'], metrics['layer_sizes'], strict=True)
        errors = [error / size if size else math.inf for error, size in pairs]
        named = {f'layer_error/{i:02d}': error for i, error in enumerate(errors)}
        shown = errors if len(errors) <= MOST_SHOWN else sorted(errors)[:: -(len(errors) - 1) // 2]
        what = 'layers' if len(errors) <= MOST_SHOWN else 'worst, median and best layer'
        return named, f'{what} {" ".join(f"{error:.3f}" for error in shown)}'

    def choose_frozen(self, student: ModelFunctions, teacher: ModelFunctions) -> dict:
        """Returns True outside of attention and in layers that equal the teacher's.

        If only new parameters learn, it is True for what the teacher has too.
        """
        source = self.find_source(teacher)
        copied = find_copied(source, student)
        same = find_same_layers(source, student)

        def is_frozen(path, declaration, is_copied):
            if declaration.part not in ('attention', 'mechanism') or (path[0].key == BLOCKS and path[1].key in same):
                return True
            return is_copied and self.trains == 'new'

        return jax.tree_util.tree_map_with_path(is_frozen, student.declared, copied)

    @classmethod
    def name_loss(cls, values: Mapping[str, Any]) -> str:
        return 'squared error of attention, summed over the layers'

    def flops_per_token(self, student: ModelConfig, teacher: ModelConfig, length: int) -> float:
        """Returns the operations of the teacher's layers, and of a forward and a backward pass of the student's
        attention."""
        logits = 2 * teacher.d_model * teacher.vocab_size
        outside = 2 * (student.feed_forward_products + student.d_model * student.vocab_size)
        return teacher.flops_per_token(length) / 3 - logits + student.flops_per_token(length) - 3 * outside
