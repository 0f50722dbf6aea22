"""Preparations without worker processes, which take a second to start."""

import concurrent.futures
import contextlib

import pytest

from lm.data.prepare import stages


@contextlib.contextmanager
def _start_thread(processes):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool, [0, 0]


def stay_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives preparations a thread in place of their processes."""
    monkeypatch.setattr(stages, 'start_workers', _start_thread)
