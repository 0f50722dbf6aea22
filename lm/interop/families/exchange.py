"""Tensors of a layer between the names of a family and ours. A family states each map once, and it goes either way."""

import abc
from collections.abc import Callable, Sequence

import numpy as np

from lm.interop.families.base import Tensors

Change = Callable[[np.ndarray], np.ndarray]


def keep(tensor: np.ndarray) -> np.ndarray:
    """Changes nothing."""
    return tensor


def turn_convolution(kernel_Nx1xS: np.ndarray) -> np.ndarray:
    """Returns the kernel of a convolution with the newest token first, [N, S]."""
    return kernel_Nx1xS[:, 0, ::-1]


def turn_back(kernel_NxS: np.ndarray) -> np.ndarray:
    """Undoes `turn_convolution`."""
    return kernel_NxS[:, None, ::-1]


class Exchange(abc.ABC):
    """The tensors of one layer on their way. `made` has the ones that have arrived, by their new names."""

    def __init__(self) -> None:
        self.made: Tensors = {}

    @abc.abstractmethod
    def has(self, our: str, their: str) -> bool:
        """Tells whether the side that the tensors come from has this one."""

    @abc.abstractmethod
    def change(
        self,
        ours: Sequence[str],
        theirs: Sequence[str],
        to_ours: Callable[..., Sequence[np.ndarray]],
        to_theirs: Callable[..., Sequence[np.ndarray]],
    ) -> None:
        """Makes some tensors of others; the functions take and return arrays in the order of the names."""

    def move(self, our: str, their: str, to_ours: Change = keep, to_theirs: Change = keep) -> None:
        """Moves one tensor."""
        self.change([our], [their], lambda x: [to_ours(x)], lambda x: [to_theirs(x)])

    def join(
        self,
        our: str,
        theirs: Sequence[str],
        rows: Sequence[int] | None = None,
        part: str = 'weight',
        to_ours: Change = keep,
        to_theirs: Change = keep,
    ) -> None:
        """Moves the matrices or biases of several of their maps, which stand one below the other in one of ours.

        Args:
            our: the map, without `part`.
            theirs: the maps, without `part`.
            rows: of all of them but the last; None: all have as many.
            part: the kind of tensor.
            to_ours: a change of the joined tensor.
            to_theirs: undoes `to_ours`.
        """
        parts = len(theirs) if rows is None else np.cumsum(rows).astype(int)
        self.change(
            [f'{our}.{part}'],
            [f'{their}.{part}' for their in theirs],
            lambda *pieces: [to_ours(np.concatenate(pieces))],
            lambda whole: np.split(to_theirs(whole), parts),
        )


class Incoming(Exchange):
    """Tensors under their names, which all begin with `begin`. Those that are taken are removed from `theirs`."""

    def __init__(self, theirs: Tensors, begin: str):
        super().__init__()
        self.theirs, self.begin = theirs, begin

    def has(self, our: str, their: str) -> bool:
        return self.begin + their in self.theirs

    def change(self, ours, theirs, to_ours, to_theirs) -> None:
        found = to_ours(*[self.theirs.pop(self.begin + name) for name in theirs])
        self.made |= zip(ours, found, strict=True)


class Outgoing(Exchange):
    """Tensors under our names."""

    def __init__(self, ours: Tensors):
        super().__init__()
        self.ours = ours

    def has(self, our: str, their: str) -> bool:
        return our in self.ours

    def change(self, ours, theirs, to_ours, to_theirs) -> None:
        self.made |= zip(theirs, to_theirs(*[self.ours[name] for name in ours]), strict=True)
