"""Pathfinder of the Long Range Arena (Tay et al. 2021, §2.2.5; Linsley et al. 2018): does a path join two dots?

    . - . o . .
    . . . . - .      → joined, or not: each picture holds two long paths and several short ones
    . . o . . -

A path is a walk of dashes of two pixels with one free pixel between them. Its direction turns by up to `turn` from dash
to dash; dashes do not touch. In half of the pictures the dots are the two ends of one long path, in the others an
end of each of the two. The pictures are drawn here, from three symbols; the Arena's, 200,000 in 256 levels of grey,
were drawn by its authors' program.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.tasks.draws import Draws
from lm.tasks.long_range_arena.classification import Classification

DASH, DOT = 1, 2
"""The symbols; 0 is an empty pixel."""
PITCH = 3
"""Pixels from dash to dash; the last of them is free."""
TURNS, BACK, STEPS, WALKS = 6, 3, 80, 20
"""Turns to try before a walk goes back this many dashes, its most steps, and walks before a new picture."""
PICTURES = 1000
"""Pictures that are begun for one example, at most. A time limit would make the examples depend on the machine."""

Pixel = tuple[int, int]


Dash = tuple[list[Pixel], set[Pixel], tuple[float, float, float]]
"""Two pixels of a path, the pixels around them that must stay free, and the start and direction of the next dash."""


@configurable('pathfinder')
class Pathfinder(Classification):
    """Decide whether one path joins the dots of a picture."""

    size: int = field(default=32, minimum=16, maximum=256, help='pixels of an edge; the picture is read row by row')
    contour_length: int = field(default=14, minimum=3, maximum=20, help='dashes of the two long paths')
    distractors: int = field(default=6, minimum=0, maximum=10, help='short paths')
    distractor_length: int = field(default=4, minimum=1, maximum=6, help='dashes of a short path')
    turn: float = field(
        default=1.0, minimum=0.0, maximum=2.0, help='radians that a path turns by from dash to dash, at most'
    )
    train_examples: int = field(default=160_000, minimum=1, help='they come again every epoch')
    eval_examples: int = field(default=20_000, minimum=1, help='in each of validation and test')

    symbols = 3
    classes = 2

    def shortest_context(self) -> int:
        return self.size**2 + 1

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        rows = []
        for one in draws.each():
            picture, label = self.picture(one)
            rows.append(self.row(picture.reshape(-1), label, length))
        return np.stack(rows)

    def picture(self, draws: Draws) -> tuple[np.ndarray, int]:
        """Draws symbols [size, size]; returns them and whether the dots are joined.

        Raises ConfigError if the paths find room in none of `PICTURES` pictures.
        """
        numbers = itertools.chain.from_iterable(draws.uniform(512)[0].tolist() for _ in itertools.count())
        lengths = [self.contour_length] * 2 + [self.distractor_length] * self.distractors
        paths = next(filter(None, (self._paths(lengths, numbers) for _ in range(PICTURES))), None)
        if paths is None:
            raise ConfigError(
                f'pathfinder.size = {self.size}: two paths of pathfinder.contour_length = {self.contour_length} and '
                f'pathfinder.distractors = {self.distractors} found no room in {PICTURES:,} pictures; raise size, or '
                'lower one of the others'
            )
        symbols = np.zeros((self.size, self.size), np.int64)
        for path in paths:
            symbols[tuple(zip(*path, strict=True))] = DASH
        joined = next(numbers) < 0.5
        other = paths[0] if joined else paths[1]
        end = -1 if joined or next(numbers) < 0.5 else 0
        for pixel in (paths[0][0], other[end]):
            symbols[pixel] = DOT
        return symbols, int(joined)

    def _paths(self, lengths: list[int], numbers: Iterator[float]) -> list[list[Pixel]] | None:
        """Returns the pixels of each path in order; None if a path finds no room."""
        taken: set[Pixel] = set()
        paths = []
        for length in lengths:
            walks = (self._walk(length, taken, numbers) for _ in range(WALKS))
            path = next((walk for walk in walks if walk), None)
            if path is None:
                return None
            taken |= around(path)
            paths.append(path)
        return paths

    def _walk(self, length: int, taken: set[Pixel], numbers: Iterator[float]) -> list[Pixel] | None:
        """Returns a path that keeps clear of `taken`. It steps back from dead ends; None: too often."""
        start = next(numbers) * self.size, next(numbers) * self.size, next(numbers) * 2 * math.pi
        walked: list[Dash] = []
        for _ in range(STEPS):
            *_, (y, x, angle) = walked[-1] if walked else (start,)
            for _ in range(TURNS):
                turned = angle + (2 * next(numbers) - 1) * self.turn
                dy, dx = math.sin(turned), math.cos(turned)
                pixels = [(math.floor(y + step * dy), math.floor(x + step * dx)) for step in (0, 1)]
                if pixels[0] != pixels[1] and self._are_free(pixels, taken, walked):
                    walked.append((pixels, around(pixels), (y + PITCH * dy, x + PITCH * dx, turned)))
                    break
            else:
                del walked[-BACK:]
            if len(walked) == length:
                return [pixel for pixels, _, _ in walked for pixel in pixels]
        return None

    def _are_free(self, pixels: list[Pixel], taken: set[Pixel], walked: list[Dash]) -> bool:
        return all(
            0 <= y < self.size
            and 0 <= x < self.size
            and (y, x) not in taken
            and not any((y, x) in reserved for _, reserved, _ in walked)
            for y, x in pixels
        )


def around(pixels: list[Pixel]) -> set[Pixel]:
    """Returns these pixels and the eight around each of them."""
    return {(y + a, x + b) for y, x in pixels for a in (-1, 0, 1) for b in (-1, 0, 1)}
