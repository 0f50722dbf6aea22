"""One random model: its configuration, and the windows, pieces, microbatches and devices that it is compared on."""

import dataclasses

import numpy as np

from lm.model import ModelConfig
from lm.pod.mesh import MeshConfig


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh of `count` simulated devices, of which `fsdp` share parameters and `sequence` share a window."""

    count: int
    fsdp: int = 1
    sequence: int = 1

    @property
    def config(self) -> MeshConfig:
        return MeshConfig(fsdp=self.fsdp, sequence=self.sequence)

    @property
    def rows(self) -> int:
        """The devices that the rows of a batch are split over."""
        return self.count // self.sequence


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it is compared on.

    Attributes:
        model: the configuration.
        seed: of the weights and tokens.
        length: the tokens of a window.
        rows: the windows of a microbatch.
        microbatches: of a training step.
        eod: the token that opens a document; None: a window is one document.
        restart: the positions of each document begin at 0.
        pieces: the sizes of the pieces that are decoded one after another; they repeat.
        z_loss: the coefficient of the z-loss.
        devices: on which the step runs; None: one.
    """

    model: ModelConfig
    seed: int
    length: int
    rows: int = 1
    microbatches: int = 1
    eod: int | None = None
    restart: bool = False
    pieces: tuple[int, ...] = (1,)
    z_loss: float = 0.0
    devices: Devices | None = None

    def draw_tokens(self) -> np.ndarray:
        """Returns windows with one token more than `length`, [microbatches, rows, length + 1]."""
        rng = np.random.default_rng((self.seed, 1))
        shape = (self.microbatches, self.rows, self.length + 1)
        tokens = rng.integers(0, self.model.vocab_size, shape)
        if self.eod is None:
            return tokens
        tokens[tokens == self.eod] = (self.eod + 1) % self.model.vocab_size
        return np.where(rng.random(shape) < 0.15, self.eod, tokens)

    def list_pieces(self) -> list[slice]:
        """Returns the pieces of a window that are decoded, in order."""
        found, at = [], 0
        while at < self.length:
            size = min(self.pieces[len(found) % len(self.pieces)], self.length - at)
            if size not in self.pieces:  # a last piece that is cut would be one more program
                size = 1
            found.append(slice(at, at + size))
            at += size
        return found
