"""The order in which a kernel's work is written: matrix units take products in that order.

A product whose operand the vector units have still to make holds up every product written after it. So work comes in
pieces, functions without arguments, of several independent kinds that take turns.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax

Piece = Callable[[], None]
Turns = Generator[None, None, Any]
"""A computation that runs beside others: the work after a `yield` waits for the work before it."""


def side_by_side(computations: Iterable[Turns]) -> None:
    """Runs them all, each up to its next `yield`, in turn."""
    running = list(computations)
    while running:
        running = [each for each in running if next(each, StopIteration) is None]


def stagger(computations: Iterable[Turns]) -> Iterable[Turns]:
    """Has each begin one turn after the one before it: products of one then meet vector work of another."""
    return (_wait(turns, each) for turns, each in enumerate(computations))


def _wait(turns: int, computation: Turns) -> Turns:
    for _ in range(turns):
        yield
    return (yield from computation)


def together(computations: Iterable[Turns]) -> Turns:
    """Runs them all, each up to its next `yield`, in turn, and then yields; returns the list of their results."""
    running, results = dict(enumerate(computations)), {}
    while running:
        for number, each in list(running.items()):
            try:
                next(each)
            except StopIteration as done:
                results[number] = done.value
                del running[number]
        if running:
            yield
    return [results[number] for number in sorted(results)]


def ahead(pairs: Iterable[tuple[Callable, Callable]], count: int) -> list[Piece]:
    """Returns pieces of pairs (start, finish), with `count` more starts before each finish.

    A finish takes the result of its start.
    """
    pairs, started, pieces = list(pairs), {}, []

    def begin(i: int) -> None:
        started[i] = pairs[i][0]()

    def end(i: int) -> None:
        pairs[i][1](started.pop(i))

    for i in range(len(pairs) + count):
        if i < len(pairs):
            pieces.append(lambda i=i: begin(i))
        if i >= count:
            pieces.append(lambda i=i - count: end(i))
    return pieces


def in_turn(*kinds: list[Piece]) -> None:
    """Does all pieces, each kind in its order and spread evenly over the other kinds."""
    placed = [
        ((i + 0.5) / len(pieces), number, piece)
        for number, pieces in enumerate(kinds)
        for i, piece in enumerate(pieces)
    ]
    for _, _, piece in sorted(placed, key=lambda each: each[:2]):
        piece()


class Total:
    """Sums of several terms that are formed in any order, one for each tile: the last term hands a sum on."""

    def __init__(self, terms: list[int], done: Callable[[int, jax.Array], None]):
        """Makes one sum per tile.

        Args:
            terms: how many terms each sum has.
            done: takes the number of a tile and its sum.
        """
        self._left, self._done = list(terms), done
        self._sums: list = [None] * len(terms)

    def add(self, i: int, term: jax.Array) -> None:
        self._sums[i] = term if self._sums[i] is None else self._sums[i] + term
        self._left[i] -= 1
        if not self._left[i]:
            self._done(i, self._sums[i])
            self._sums[i] = None
