"""What process 0 alone does and all processes of a job share the outcome of."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.errors import LmError

FAILED = 1000
"""Added to the exit code that process 0 tells the others."""


def on_leader(work: Callable[[], bool]) -> bool:
    """The result of `work` in process 0; where it fails, all processes fail with the same exit code."""
    # To ask for the count before the processes have met would keep them from meeting.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return work()
    outcome, error = 0, None
    if jax.process_index() == 0:
        try:
            outcome = int(work())
        except Exception as problem:
            error, outcome = problem, FAILED + getattr(problem, 'exit_code', LmError.exit_code)
    outcome = int(multihost_utils.broadcast_one_to_all(np.int32(outcome)))
    if error:
        raise error
    if outcome >= FAILED:
        failure = LmError('process 0 refused the run directory: see its message')
        failure.exit_code = outcome - FAILED
        raise failure
    return bool(outcome)
