"""The calls of operations whose kernels are measured, and the work per grid step of each kernel."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lm.attention import HeadDims

Steps = Mapping[tuple[str, str], float]
"""(pass, name of the kernel) → tokens times heads per grid step."""


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of an operation whose kernels `scripts.kernels.cycles` compiles.

    Attributes:
        function: a function of arrays.
        inputs: its abstract arguments.
        steps: the work of its kernels.
        skips: grid steps skip work, so only the longest run of instructions counts.
        part_steps: the work of the kernels for a part of a window; None: the operation has no kernels for parts.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    steps: Steps
    skips: bool = False
    part_steps: Steps | None = None


Case = Callable[[HeadDims, int], KernelCall]
"""(heads, length of the sequence) → call."""
