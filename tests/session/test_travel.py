"""The way of an experiment through `lm train`: it goes down the layers, and up again only a few times."""

import sys
import types

import pytest
import test_house
from test_set_up import EXPERIMENT

from lm.experiment import Experiment
from lm.session import train as train_module
from lm.session.train import train_in_job
from lm.training.mesh import JobAddress
from lm.training.program import Compilation

MOST_CLIMBS = 7
SECTIONS = tuple(type(section) for section in vars(EXPERIMENT).values())


@pytest.fixture
def stops():
    """Returns the modules of `lm` in which a function is called with the experiment or a section; methods of sections
    count.

    Consecutive calls in the same module are one stop.
    """
    found: list[str] = []

    def see(frame, event, _):
        code, module = frame.f_code, frame.f_globals.get('__name__', '')
        is_resumed = code.co_flags & 0x20 and frame.f_lasti > 8  # a generator that resumes
        is_written = code.co_filename.startswith(str(test_house.ROOT)) and not code.co_name.startswith('<')
        if event != 'call' or is_resumed or not is_written:  # `dataclasses` makes functions too; they do not count
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names]
        if any(isinstance(value, (Experiment, *SECTIONS)) for value in values) and found[-1:] != [module]:
            found.append(module)

    sys.setprofile(see)
    yield found
    sys.setprofile(None)


def test_an_experiment_climbs_only_a_few_times(stops, monkeypatch, tmp_path):
    """A climb is a move from a module in a lower layer to a module in a higher layer."""
    result = types.SimpleNamespace(exception=lambda: None, result=lambda: None)
    monkeypatch.setattr(train_module, 'compile_in_background', lambda *_: Compilation(result, result))
    monkeypatch.setattr(train_module.Trainer, 'run', lambda trainer: trainer.state)
    train_in_job(EXPERIMENT, str(tmp_path / 'run'), JobAddress(), compile_cache='none')
    sys.setprofile(None)
    floors = [test_house.place(module)[0] for module in stops]
    climbs = [pair for *pair, low, high in zip(stops, stops[1:], floors, floors[1:], strict=False) if low < high]
    assert stops[0] == 'lm.session.train'
    assert len(climbs) <= MOST_CLIMBS, (climbs, stops)
