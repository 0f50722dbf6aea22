"""The run that `lm check` is about, as far as this machine sees it: another machine trains, with its own disks."""

import os
import queue
import sys
import threading

from lm.errors import AbsentError, ConfigError, LmError
from lm.experiment import Experiment
from lm.files import is_remote
from lm.runs.paths import check_path
from lm.runs.run_dir import RunDir

PATIENCE_SECONDS = 20.0
"""The longest wait for a bucket."""


def is_in_reach(run_dir: str | None, branch_from: str | None, has_gin_files: bool, *, if_possible: bool) -> bool:
    """Returns whether this machine can read the runs whose configuration `lm train` would change.

    With `if_possible` the function prints the reason if not; otherwise reading raises it. An absent local run may be on
    the disk of the machine that trains; an absent run in a bucket is new.
    """
    for run in filter(None, (run_dir, branch_from)):
        if not (if_possible and is_remote(run)):
            check_path(run)
    if not if_possible or (has_gin_files and not branch_from):
        return True
    needed = branch_from or run_dir
    if needed and not is_remote(needed) and not RunDir(needed).config.exists():
        reasons = [f'{needed}: no run is there on this machine']
    else:
        reasons = [f'{run}: {why}' for run in (run_dir, branch_from) if (why := out_of_reach(run))]
    for reason in reasons:
        print(f'not checked: {reason}', file=sys.stderr, flush=True)
    return not reasons


def refuse_waste(experiment: Experiment) -> None:
    """Refuses what machines would be paid for in vain, as far as it is known here.

    Raises ConfigError as `refuse_absent_tokens`, and where the context is so short that layers which could approximate
    compute all weights exactly.
    """
    refuse_absent_tokens(experiment)
    length = experiment.train.context_length
    reasons = [attention.why_exact(length) for attention in experiment.model.pattern]
    if all(reasons):
        raise ConfigError(
            f'{reasons[0]}; train.context_length = {length:,} must be larger: --set train.context_length={8 * length}'
        )


def refuse_absent_tokens(experiment: Experiment) -> None:
    """Raises ConfigError for tokens that are not there or that lie in a folder of this machine."""
    data, length = experiment.data, experiment.train.context_length
    if data.task is None and data.path:
        if not is_remote(data.path) and not os.path.isabs(os.path.expanduser(data.path)):
            raise ConfigError(
                f'data.path = {data.path!r}: is a folder of this machine, which a pod does not have; prepare tokens '
                f'in a bucket and name them: --set data.path=gs://BUCKET/{data.path}'
            )
        try:
            data.open(length, PATIENCE_SECONDS)
        except AbsentError as error:
            if is_remote(data.path):
                raise ConfigError(f'{error}; scripts/tpu/prepare_data.sh lm prepare … makes it') from None
        except LmError:
            pass  # this machine may have no rights there


def has_begun(run_dir: str | None, branch_from: str | None, init_from: str | None) -> bool:
    """Returns whether the run goes on from a checkpoint, so that train.init_from is not read; False if this
    is unknown."""
    if branch_from or not (run_dir and init_from):
        return bool(branch_from)
    return out_of_reach(run_dir) is None and RunDir(run_dir).has_checkpoint()


def out_of_reach(run: str | None) -> str | None:
    """Returns why a run in a bucket cannot be read from here.

    None: it can, or there is no run, or its path is local.
    """
    if run is None or not is_remote(run):
        return None
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def look() -> None:
        try:
            RunDir(run).config.read_bytes()
        except FileNotFoundError:
            found.put(None)
        except Exception as error:
            found.put(' '.join(str(error).split())[:300] or type(error).__name__)
        else:
            found.put(None)

    threading.Thread(target=look, name='look', daemon=True).start()
    try:
        return found.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        return f'no answer within {PATIENCE_SECONDS:g} seconds'
