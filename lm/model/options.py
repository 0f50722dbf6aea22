"""The options of one layer, as its mechanism and the model's section give them together (`ModelConfig.resolve`)."""

import dataclasses

from lm.attention import HeadDims


@dataclasses.dataclass(frozen=True)
class RotaryOptions:
    """The rotary positions of a layer: the base of the wavelengths, the size of a head, and the share that turns."""

    base: float
    head_dim: int
    fraction: float = 1.0


@dataclasses.dataclass(frozen=True)
class OutputGate:
    """The gate of a layer's output: its form (`lm.attention.base.GATES`), and the channels of the input it reads."""

    form: str
    inputs: int


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The options of one layer.

    Attributes:
        dims: the heads, as the mechanism sees them.
        rotary: None: queries and keys are not rotated.
        key_offset: the share of each key's channels that come from the token before.
        convolution: the tokens of the convolution of queries, keys and values; None: no such.
        qk_norm: queries and keys have RMSNorms.
        gate: None: nothing multiplies the output.
    """

    dims: HeadDims
    rotary: RotaryOptions | None
    key_offset: float
    convolution: int | None
    qk_norm: bool
    gate: OutputGate | None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The columns of queries, keys and values."""
        dims = self.dims
        return dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim

    @property
    def width(self) -> int:
        """The numbers per token that attention returns."""
        return self.dims.n_heads * self.dims.head_dim

    def count_products(self, d_model: int) -> int:
        """Returns the sizes of the layer's matrices around the mechanism, together."""
        return d_model * (sum(self.qkv_sizes) + self.width) + (self.gate.inputs * self.width if self.gate else 0)
