"""Compares the configurations of runs, given as the gin text that `lm.config.text.dump` writes."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from lm.config.configurable import REGISTRY
from lm.config.names import may_change, up_to_date


class Change(NamedTuple):
    """A binding whose value differs between two configurations. None: the binding is absent."""

    binding: str
    old: str | None
    new: str | None


def parse_bindings(text: str) -> dict[str, str]:
    """Returns binding → value of dumped gin text, in the names of this version.

    Comments and blank lines are skipped, and wrapped values are joined.
    """
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        match = re.match(r'([\w./]+) = (.*)', line)
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip() and not line.lstrip().startswith('#'):
            found[name] = f'{found[name]} {line.strip()}'.strip()
    return up_to_date(found)


def compare_texts(old: str, new: str) -> list[Change]:
    """Returns the bindings that differ between two dumped configurations, in the names of this version."""
    return compare_bindings(parse_bindings(old), parse_bindings(new))


def compare_bindings(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """Returns the bindings that differ, those of `old` first."""
    names = sorted(old.keys() | new.keys(), key=lambda name: (name not in old, name))
    return [Change(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def is_permitted(change: Change, old: Mapping[str, str], new: Mapping[str, str], rewound: bool) -> bool:
    """Returns whether a run may go on with this change. A run that is rewound may also change its optimizer."""
    name = change.binding
    return may_change(name) or (rewound and _belongs_to_optimizer(name)) or _lengthens(name, old, new)


def _lengthens(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Returns whether `name` is the number of steps, and it grows under a schedule that does not depend on it."""
    schedule = new.get('optimizer.schedule', '')
    if name != 'train.steps' or old.get('optimizer.schedule') != schedule or int(new[name]) <= int(old[name]):
        return False
    return getattr(REGISTRY.get(schedule.strip('@()').rpartition('/')[2]), 'is_open_ended', False)


def _belongs_to_optimizer(name: str) -> bool:
    """Returns whether a binding such as `a/adamw.b2` belongs to the optimizer, its rules or its schedules."""
    return getattr(REGISTRY.get(name.rpartition('/')[2].partition('.')[0]), 'is_of_optimizer', False)
