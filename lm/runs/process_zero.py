"""Work of process 0 whose outcome all processes of a job share, and facts on which all of them must agree."""

import json
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.errors import ConfigError, LmError, exit_code_of

FAILED = 1000
"""Added to the exit code that process 0 sends to the others."""


def run_on_process_zero(work: Callable[[], bool]) -> bool:
    """Returns the result of `work` in process 0; where it fails, all processes fail with the same exit code."""
    if _is_alone():
        return work()
    outcome, error = 0, None
    if jax.process_index() == 0:
        try:
            outcome = int(work())
        except Exception as problem:
            error, outcome = problem, FAILED + exit_code_of(problem)
    outcome = int(multihost_utils.broadcast_one_to_all(np.int32(outcome)))
    if error:
        raise error
    if outcome >= FAILED:
        failure = LmError('process 0 refused the run directory: see its message')
        failure.exit_code = outcome - FAILED
        raise failure
    return bool(outcome)


def broadcast_text(text: str) -> str:
    """Returns the `text` of process 0."""
    if _is_alone():
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    return bytes(multihost_utils.broadcast_one_to_all(np.resize(data, size))).decode()


def check_all(problem: str | None) -> None:
    """Raises ConfigError in all processes where one of them has a problem. Its own message is `problem`."""
    if _is_alone():
        return
    refused = multihost_utils.process_allgather(np.int32(problem is not None)).ravel()
    if problem is not None:
        raise ConfigError(problem)
    if refused.any():
        raise ConfigError(f'process {refused.argmax()} of {refused.size} cannot take part: see its message')


def check_same(facts: Mapping[str, object]) -> None:
    """Raises ConfigError in all processes unless each has the same facts, by name, as process 0: others would be
    trained to the end in silence, by steps that are not the same."""
    if _is_alone():
        return
    mine, leaders = json.loads(json.dumps(facts)), json.loads(broadcast_text(json.dumps(facts)))
    differing = [name for name in sorted(mine.keys() | leaders.keys()) if mine.get(name) != leaders.get(name)]
    problem = None
    if differing:
        name = differing[0]
        more = f' (and {len(differing) - 1} more differ)' if differing[1:] else ''
        problem = (
            f'{name}: process {jax.process_index()} has {mine.get(name)}, process 0 has {leaders.get(name)}{more}; '
            'start the same command, with the same files, on all of them'
        )
    check_all(problem)


def _is_alone() -> bool:
    # Asking for the count before the processes are connected would keep them from connecting.
    return not jax.distributed.is_initialized() or jax.process_count() == 1
