"""The configuration of mechanisms that are exact for the newest keys and linear for older ones."""

from typing import Self

from lm.attention.linear import LinearAttention


class WindowedAttention(LinearAttention):
    """Its `window` counts the newest keys, the query's own included, that are weighed exactly."""

    window: int

    def why_exact(self, length: int) -> str | None:
        if length > self.window:
            return None
        return f'{self.gin_name}.window = {self.window:,}: covers the context, so all weights are exact'

    def why_part(self, tokens: int) -> str | None:
        return None if self.window <= tokens else f'shorter than {self.gin_name}.window = {self.window:,}'

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        """Returns none: on TPUs the mechanism runs on XLA, because the kernels take no window."""
        return {}
