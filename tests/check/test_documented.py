"""Every documented training command fits the slice that it names, compiled for that slice.

Commands of README.md and docs/ go to the pod of scripts/tpu/settings.env.example. Commands in the header of an
experiment go to the slice in its line "Hardware".
"""

import importlib.util
import itertools
import re
import shlex

import pytest
import shipped
import tiny

from lm.config.setting import write_binding
from lm.cost_model.compiled_step import check
from lm.experiment import load
from lm.hardware import parse

POD = re.search(
    r'^ACCELERATOR_TYPE=(\S+)', (tiny.ROOT / 'scripts' / 'tpu' / 'settings.env.example').read_text(), re.MULTILINE
)[1]


def lines() -> list[tuple[str, str]]:
    """Returns (slice, command) of each training line."""
    found = []
    for page in tiny.PAGES:
        blocks = re.findall(r'```bash\n(.*?)```', page.read_text(), re.DOTALL)
        found += [(POD, line) for block in blocks for line in block.splitlines() if re.search(r'\blm train\b', line)]
    for file in shipped.EXPERIMENTS:
        header = file.read_text().partition('\n\n')[0].replace('\\\n#', ' ')
        hardware = re.search(r'^# Hardware: (v\d\w*-\d+)', header, re.MULTILINE)
        if hardware:
            found += [(hardware[1], line) for line in re.findall(r'^#\s+(lm train .*)', header, re.MULTILINE)]
    return list(dict.fromkeys(found))


def configuration(line: str) -> tuple[list[str], list[str]]:
    """Returns (gin files, gin parameters) of a command."""
    words = shlex.split(line, comments=True)
    pairs = list(itertools.pairwise(words))
    given = {flag: [b for a, b in pairs if a == flag] for flag in ('--gin_file', '--gin_param', '--set')}
    return given['--gin_file'], [*given['--gin_param'], *map(write_binding, given['--set'])]


def is_for_a_laptop(line: str) -> bool:
    return 'quickstart.gin' in line


def programs() -> dict[str, tuple[str, str]]:
    """Returns test name → (slice, command): one entry per program, whatever its name and data are."""
    found: dict[tuple, tuple[str, str]] = {}
    for topology, line in lines():
        if not is_for_a_laptop(line):
            experiment = load(*configuration(line))
            found.setdefault((topology, experiment.model, experiment.train, experiment.optimizer), (topology, line))
    return {f'{topology}: {line[-70:]}': (topology, line) for topology, line in found.values()}


def test_there_are_lines_of_each_kind(monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    slices = [topology for topology, _ in lines()]
    assert slices.count(POD) >= 5
    assert len(slices) - slices.count(POD) >= 10
    # All commands of a pod have this in common, wherever they are written.
    parsed = [load(*configuration(line)) for topology, line in lines() if topology == POD and not is_for_a_laptop(line)]
    devices = parse(POD).chips
    for experiment in parsed:
        experiment.train.check_divides(devices)
        tokens = experiment.train.tokens_per_step // experiment.train.microbatches // devices
        # 64k tokens of the small model need 54 GiB per device, 16k tokens need 15 GiB.
        assert tokens <= 2**14


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_the_documented_lines_fit(monkeypatch):
    """Each program takes one to three minutes."""
    monkeypatch.chdir(tiny.ROOT)
    failed = []
    for name, (topology, line) in programs().items():
        found = check(load(*configuration(line)), topology)
        if not found.fits:
            failed.append(f'{name} needs {found.memory.needed_gib:.2f} of {found.memory.limit_gib} GiB')
    assert not failed
