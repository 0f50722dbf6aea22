"""The kernels over windows that are split over devices: they walk a part as `lm.ops.delta_rule.parts` has it."""

import jax

from lm.ops.delta_rule.parts import compute_part, extend
from lm.ops.delta_rule.tpu import rule
from lm.ops.delta_rule.types import DeltaCall, DeltaResult


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the outputs of this part."""
    return DeltaResult(compute_part(rule.delta_rule, call), None)


def unsupported(call: DeltaCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    return rule.unsupported(jax.eval_shape(extend, call))
