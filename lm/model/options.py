"""The options of one layer, as its mechanism and the model's section give them together (`ModelConfig.resolve`)."""

import dataclasses

from lm.attention import HeadDims
from lm.attention.rotary_scaling import RotaryScaling


@dataclasses.dataclass(frozen=True)
class RotaryOptions:
    """The rotary positions of a layer: the arguments of `lm.model.positions.rotary` besides the positions.

    `head_dim` is the number of channels that are turned: all of a head, or those that all heads share.
    """

    head_dim: int
    base: float
    fraction: float = 1.0
    scaling: RotaryScaling | None = None


@dataclasses.dataclass(frozen=True)
class OutputGate:
    """The gate of a layer's output: its form (`lm.attention.base.GATES`), and the channels of the input it reads.

    `rank` is the rank of its matrix, which is then the product of two; None: there is one matrix.
    """

    form: str
    inputs: int
    rank: int | None = None

    def count_products(self, width: int) -> int:
        """Returns the sizes of its matrices, together, for an output of `width` numbers."""
        return self.inputs * width if self.rank is None else self.rank * (self.inputs + width)


@dataclasses.dataclass(frozen=True)
class ProjectedHeads:
    """The heads of queries, keys and values that a layer projects. Queries and keys are repeated to as many as values
    where there are fewer of them (`HeadDims` counts them after that)."""

    queries: int
    keys: int
    values: int


@dataclasses.dataclass(frozen=True)
class LatentOptions:
    """The numbers per token that keys and values are made of (`lm.model.parts.latent`).

    Attributes:
        rank: how many they are.
        shared: the channels of a key, the last ones, that all heads share.
        query_rank: the numbers per token that queries are made of; None: queries have a whole matrix.
        decoupled: rotary positions turn the shared channels alone, and the same channels of queries.
    """

    rank: int
    shared: int = 0
    query_rank: int | None = None
    decoupled: bool = False

    @property
    def down_sizes(self) -> tuple[int, ...]:
        """The columns of the matrix that makes the numbers of keys and values."""
        return (self.rank, self.shared) if self.shared else (self.rank,)


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The options of one layer.

    Attributes:
        dims: the heads, as the mechanism sees them.
        heads: the heads, as the layer projects them.
        latent: None: keys and values have matrices of their own.
        rotary: None: queries and keys are not rotated.
        key_offset: the share of each key's channels that come from the token before.
        convolution: the tokens of the convolution of queries, keys and values; None: no such.
        qk_norm: what the RMSNorms of queries and keys span, a head or the whole projection; None: there are none.
        output_norm: whether the output of each head is normalized, before the gate.
        gate: None: nothing multiplies the output.
        projections: the names and widths of further inputs of the mechanism (`Attention.projections`).
    """

    dims: HeadDims
    heads: ProjectedHeads
    latent: LatentOptions | None
    rotary: RotaryOptions | None
    key_offset: float
    convolution: int | None
    qk_norm: str | None
    output_norm: bool
    gate: OutputGate | None
    projections: tuple[tuple[str, int], ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of the further inputs of the mechanism."""
        return tuple(width for _, width in self.projections)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The columns of queries, keys and values."""
        heads, dims = self.heads, self.dims
        return heads.queries * dims.head_dim, heads.keys * dims.head_dim, heads.values * dims.value_size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """The columns of the matrix of queries, keys and values; of queries alone where the others are latent."""
        return self.qkv_sizes if self.latent is None else self.qkv_sizes[:1]

    @property
    def query_rank(self) -> int | None:
        """The numbers per token that queries are made of; None: queries have a whole matrix."""
        return None if self.latent is None else self.latent.query_rank

    @property
    def latent_sizes(self) -> tuple[int, int]:
        """The columns of the matrix that makes keys and values of the latent numbers."""
        _, keys, values = self.qkv_sizes
        return keys - self.heads.keys * (self.latent.shared if self.latent else 0), values

    @property
    def width(self) -> int:
        """The numbers per token that attention returns."""
        return self.dims.n_heads * self.dims.value_size

    @property
    def repeats(self) -> bool:
        """Tells whether queries or keys are repeated before the mechanism has them."""
        return (self.heads.queries, self.heads.keys) != (self.dims.n_heads, self.dims.n_kv_heads)

    def count_products(self, d_model: int) -> int:
        """Returns the sizes of the layer's matrices around the mechanism, together."""
        gate = self.gate.count_products(self.width) if self.gate else 0
        latent, rank = 0, self.query_rank
        if self.latent is not None:
            latent = d_model * sum(self.latent.down_sizes) + self.latent.rank * sum(self.latent_sizes)
        projected = sum(self.projected_sizes) * (rank or d_model) + d_model * (rank or 0)
        return projected + d_model * (self.width + sum(self.widths)) + gate + latent
