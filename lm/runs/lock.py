"""lock.json: one training at a time writes a run directory (`lm.lease`)."""

import contextlib
import socket
import time

import jax
from etils import epath

from lm.errors import ConfigError, LmError
from lm.lease import NAME, HeldError, Lease, read_owner
from lm.runs.process_zero import broadcast_text, check_all, run_on_process_zero

SEES = 30.0
"""Seconds that a shared disk may take to show one host what another has written."""


class OccupiedError(ConfigError):
    """Another training is at work in the run directory. The refused one may be right in all else."""


class RunLock:
    """A context inside which this job alone writes `directory`; process 0 holds the lease for all its processes.

    Raises OccupiedError on entry where another training is alive, before anything is written. Raises ConfigError where
    a process does not find the lease, because each host has a disk of its own: the first checkpoint would wait for its
    parts in vain. Raises LmError where the lease cannot be written.
    """

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self._lease = Lease(directory)
        self._held = contextlib.ExitStack()

    def __enter__(self) -> 'RunLock':
        run_on_process_zero(self._take)
        with self._held as held:  # which ends what has begun, if the next line fails
            check_all(self._why_not_seen(broadcast_text(self._lease.uuid)))
            self._held = held.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._held.close()

    def _take(self) -> bool:
        try:
            self._held.enter_context(self._lease)
        except HeldError as error:
            raise OccupiedError(
                f'--run_dir {self.directory}: {error.owner} trains in it; wait for it or end it, or choose another '
                '--run_dir'
            ) from None
        except OSError as error:
            raise LmError(
                f'--run_dir {self.directory}: its {NAME} cannot be written ({error}); make room, or choose a directory '
                'that can be written to'
            ) from None
        return True

    def _why_not_seen(self, uuid: str) -> str | None:
        """Explains why this process does not see the lease of process 0; None: it does."""
        end = time.monotonic() + SEES
        while uuid not in (self._lease.uuid, (read_owner(self.directory) or {}).get('uuid')):
            if time.monotonic() > end:
                return (
                    f'--run_dir {self.directory}: process {jax.process_index()}, on {socket.gethostname()}, does not '
                    'find there what process 0 writes; name a folder that all hosts share, such as gs://BUCKET/runs/NAME'
                )
            time.sleep(0.5)
        return None

    @property
    def is_lost(self) -> bool:
        """True if the lease is known to be another's, or gone."""
        return self._lease.lost is not None

    def check(self) -> None:
        """Raises ConfigError if the lease is another's by now, after a suspension, or gone with its folder."""
        if self.is_lost:
            raise ConfigError(f'--run_dir {self.directory}: {self._lease.lost}; nothing more is written here')
