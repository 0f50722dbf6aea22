"""Holders of equal bits that disagree: which of them is wrong, and how to say so."""

import collections
import dataclasses
import socket
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lm.checkpoint.snapshot import list_last
from lm.hardware import Device
from lm.pod.job import joined
from lm.text import format_count

HOST_SECONDS = 10
"""Seconds that a process waits for the name of another one's host."""


def find_minority(votes: Iterable[tuple[int, Hashable]]) -> tuple[frozenset[int], bool]:
    """Returns (the holders that differ from the most frequent value, whether a single value is the most frequent).

    Args:
        votes: (holder, value); a holder may vote several times, and is wrong once it differs.

    If two values are equally frequent nobody can tell which is right, and all holders are returned. A single holder
    that differs from itself is wrong in any case.
    """
    votes = list(votes)
    holders = frozenset(holder for holder, _ in votes)
    counts = collections.Counter(value for _, value in votes).most_common(2)
    if len(counts) > 1 and (len(holders) == 1 or counts[0][1] == counts[1][1]):
        return holders, len(holders) == 1
    return frozenset(holder for holder, value in votes if value != counts[0][0]), True


@dataclasses.dataclass(frozen=True)
class Difference:
    """Bits that should be equal, and are not.

    Attributes:
        what: what was compared, as a phrase.
        arrays: the names of the arrays that differ.
        groups: the devices that may be wrong; a group computes together, and one of its devices is wrong.
        is_certain: a majority of other devices agrees, so that the groups are wrong, and not only suspected.
        stays: the difference came again; None: the comparison cannot be repeated.
    """

    what: str
    arrays: Sequence[str]
    groups: Sequence[Sequence[Device]]
    is_certain: bool
    stays: bool | None = None

    def describe(self, hosts: Mapping[int, str]) -> str:
        """Describes the difference in one line. `hosts` gives the host of each process."""
        groups = [' + '.join(name_device(device, hosts) for device in group) for group in self.groups]
        who = 'computed wrongly' if self.is_certain else 'disagree, and one of them computed wrongly'
        again = {None: '', True: '; it came again in a repetition', False: '; it did not come again in a repetition'}
        arrays = ', '.join(self.arrays[:3]) + (', …' if len(self.arrays) > 3 else '')
        where = f'{format_count(len(self.arrays), "array")} ({arrays})'
        return f'{list_last(groups)} {who}: {self.what} differ in {where}{again[self.stays]}'

    def record(self, step: int, hosts: Mapping[int, str]) -> dict[str, Any]:
        """Returns the difference as JSON, for run.json."""
        return {
            'step': step,
            'what': self.what,
            'arrays': list(self.arrays)[:100],
            'groups': [[name_device(device, hosts) for device in group] for group in self.groups],
            'certain': self.is_certain,
            'stays': self.stays,
        }


def name_device(device: Device, hosts: Mapping[int, str]) -> str:
    """Names a device and its host, such as 'cpu:2 on worker-0 (process 0)'."""
    return f'{device} on {hosts.get(device.process_index, "another host")} (process {device.process_index})'


def find_hosts(groups: Iterable[Iterable[Device]]) -> dict[int, str]:
    """Returns process → host name for the devices. All processes call it together; it uses no device."""
    index, count = joined()
    mine = socket.gethostname()
    if count == 1:
        return {0: mine}
    from jax._src.distributed import global_state

    client = global_state.client
    assert client is not None, 'there are several processes'
    client.key_value_set(f'lm/hosts/{index}', mine, allow_overwrite=True)
    found = {index: mine}
    for other in {device.process_index for group in groups for device in group} - {index}:
        try:
            found[other] = client.blocking_key_value_get(f'lm/hosts/{other}', HOST_SECONDS * 1000)
        except jax.errors.JaxRuntimeError:
            found[other] = 'another host'
    return found


def compare_rows(sums_RxGxN: np.ndarray) -> tuple[frozenset[int], bool, np.ndarray]:
    """Compares the checksums of N arrays by G groups in R runs.

    Returns:
        the wrong groups, or all suspected ones; whether they are certain; and which arrays differ, [N].
    """
    runs, groups, _ = sums_RxGxN.shape
    votes = [(group, sums_RxGxN[run, group].tobytes()) for run in range(runs) for group in range(groups)]
    wrong, is_certain = find_minority(votes)
    differs_N = (sums_RxGxN != sums_RxGxN[:1, :1]).any((0, 1))
    return wrong, is_certain, differs_N
