"""Compares the configurations of runs, given as the gin text that `lm.config.text.dump` writes."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from lm.config.names import find_class, may_change, update_names


class Change(NamedTuple):
    """A binding whose value differs between two configurations. None: the binding is absent."""

    binding: str
    old: str | None
    new: str | None


def parse_bindings(text: str) -> dict[str, str]:
    """Returns binding → value of dumped gin text, wrapped values joined, in the names of this version."""
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        match = re.match(r'([\w./]+) = (.*)', line)
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip() and not line.lstrip().startswith('#'):
            found[name] = f'{found[name]} {line.strip()}'.strip()
    return update_names(found)


def compare_texts(old: str, new: str) -> list[Change]:
    """Returns the bindings that differ between two dumped configurations, in the names of this version."""
    return compare_bindings(parse_bindings(old), parse_bindings(new))


def compare_bindings(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """Returns the bindings that differ, first the ones that `old` has."""
    names = sorted(old.keys() | new.keys(), key=lambda name: (name not in old, name))
    return [Change(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def is_permitted(change: Change, old: Mapping[str, str], new: Mapping[str, str], rewound: bool) -> bool:
    """Returns whether a run may go on with this change. `rewound`: the run goes back to a checkpoint."""
    return may_change(change.binding, rewound=rewound) or (change.binding == 'train.steps' and _may_grow(old, new))


def _may_grow(old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Returns whether the number of steps grows, under a schedule that does not depend on it."""
    schedule = new.get('optimizer.schedule', '')
    if old.get('optimizer.schedule') != schedule or int(new['train.steps']) <= int(old['train.steps']):
        return False
    chosen = find_class(schedule)
    return chosen is not None and chosen.is_open_ended
