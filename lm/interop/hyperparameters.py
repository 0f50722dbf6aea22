"""The entries of a checkpoint's config.json, or of the metadata of a GGUF file."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeGuard, TypeVar

T = TypeVar('T')


class Hyperparameters(Mapping[str, object]):
    """Entries by their names, which are read with their kinds.

    A default stands for an entry that is missing. `find_integer` and the readers of lists and sections take null too.
    Raises KeyError for an entry that is missing, and ValueError, which names it, for a value of another kind:
    `families.reading_config` adds the file.
    """

    def __init__(self, entries: Mapping[str, object] | None = None):
        self._entries = dict(entries or {})

    def __getitem__(self, name: str) -> object:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, other: Mapping[str, object]) -> 'Hyperparameters':
        return Hyperparameters({**self, **other})

    def __ror__(self, other: Mapping[str, object]) -> 'Hyperparameters':
        """Returns these entries, with the ones of `other` that are missing here."""
        return Hyperparameters({**other, **self})

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._take(name, default)
        if not _is_integer(value):
            raise ValueError(f'{name} = {value!r} is no whole number')
        return value

    def find_integer(self, name: str, default: int | None = None) -> int | None:
        return None if self.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._take(name, default)
        if not _is_number(value):
            raise ValueError(f'{name} = {value!r} is no number')
        return float(value)

    def find_number(self, name: str, default: float | None = None) -> float | None:
        return None if self.get(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns whether an entry is true; null is false."""
        value = self.get(name, default)
        if not isinstance(value, int | None):
            raise ValueError(f'{name} = {value!r} is neither true nor false')
        return bool(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._take(name, default)
        if not _is_text(value):
            raise ValueError(f'{name} = {value!r} is no text')
        return value

    def find_text(self, name: str) -> str | None:
        return None if self.get(name) is None else self.text(name)

    def texts(self, name: str) -> list[str]:
        """Returns a list of texts; [] where there is none."""
        return self._list(name, _is_text, 'texts')

    def integers(self, name: str) -> list[int]:
        """Returns a list of whole numbers; [] where there is none."""
        return self._list(name, _is_integer, 'whole numbers')

    def numbers(self, name: str) -> list[float]:
        """Returns a list of numbers; [] where there is none."""
        return [float(value) for value in self._list(name, _is_number, 'numbers')]

    def section(self, name: str) -> 'Hyperparameters':
        """Returns the entries of an object; none where there is no object."""
        value = self.get(name)
        if not isinstance(value or {}, dict):
            raise ValueError(f'{name} = {value!r} is no object')
        return Hyperparameters({str(key): entry for key, entry in value.items()} if isinstance(value, dict) else {})

    def _take(self, name: str, default: object) -> object:
        return self[name] if default is None else self.get(name, default)

    def _list(self, name: str, is_kind: Callable[[object], TypeGuard[T]], what: str) -> list[T]:
        values = self.get(name) or []
        found = [value for value in values if is_kind(value)] if isinstance(values, list) else None
        if found is None or found != values:
            raise ValueError(f'{name} is no list of {what}')
        return found


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
