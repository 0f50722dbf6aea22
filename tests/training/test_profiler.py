"""A failing trace loses the trace, and not the run."""

import jax
import pytest

from lm.training.profiler import Profiler


@pytest.mark.parametrize('broken', ['start_trace', 'stop_trace'])
@pytest.mark.parametrize('last', [3, 99])
def test_a_trace_that_cannot_be_written_is_given_up(broken, last, monkeypatch, caplog, tmp_path):
    calls = []

    def call(name):
        def made(*_):
            calls.append(name)
            if name == broken:
                raise RuntimeError("UNIMPLEMENTED: File system scheme 's3' not implemented\nmore")

        return made

    for name in ('start_trace', 'stop_trace'):
        monkeypatch.setattr(jax.profiler, name, call(name))
    with Profiler((2, last), tmp_path) as profiler:
        for step in range(1, 7):
            profiler.begin_step(step)
    assert calls == ['start_trace'] if broken == 'start_trace' else ['start_trace', 'stop_trace']
    (record,) = caplog.records
    assert record.getMessage() == (
        f"train.profile: no trace in {tmp_path}: UNIMPLEMENTED: File system scheme 's3' not implemented"
    )
