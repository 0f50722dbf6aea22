"""The options of a layer around its mechanism, each declared once.

model.n_heads = 12             of all layers
softmax.rotary_base = None     of the layers of one mechanism
"""

import dataclasses
import typing
from typing import Any, Literal, TypeVar

import jax

from lm.attention.branches import BranchPart
from lm.attention.rotary_scaling import RotaryScaling
from lm.config.configurable import Configurable, configurable_base, field

MODEL: Literal['model'] = 'model'
"""The default of a mechanism's options: the layer has the model's value."""
GATES = {'silu': jax.nn.silu, 'sigmoid': jax.nn.sigmoid}
"""Forms of the output gate."""
SPANS = ('head', 'projection')
"""The parts of queries and keys that `qk_norm` normalizes."""


def _read_gate(value: object) -> dict[str, Any]:
    """Returns the options that `output_gate` of a mechanism meant, when it was the form of the gate, or None."""
    if value is None:
        return {'output_gate': False}
    is_form = isinstance(value, str) and value in GATES
    return {'output_gate': True, 'output_gate_form': value} if is_form else {}


@configurable_base
class LayerOptions(Configurable):
    """The options of all layers whose mechanism has none of its own."""

    gin_name = 'model'

    n_heads: int = field(default=12, minimum=1, help='query heads of each layer')
    n_kv_heads: int | None = field(default=None, minimum=1, help='grouped-query attention; None: as many as n_heads')
    n_value_heads: int | None = field(
        default=None,
        minimum=1,
        help='value heads, a multiple of the key heads, which are repeated (Qwen3-Next); None: as many as key heads',
    )
    head_dim: int = field(default=64, minimum=2, even=True, help='size of a query and of a key')
    value_dim: int | None = field(
        default=None, minimum=1, help='size of a value, where it differs from keys; None: head_dim'
    )
    latent_rank: int | None = field(
        default=None,
        minimum=1,
        omit_default=True,
        help='rank of keys and values, which are made of so many numbers per token, normalized (multi-head latent '
        'attention, Kimi Linear); None: they have matrices of their own',
    )
    shared_key_dim: int = field(
        default=0,
        minimum=0,
        omit_default=True,
        help='channels of a key, the last ones, that all heads share; needs latent_rank',
    )
    latent_query_rank: int | None = field(
        default=None,
        minimum=1,
        omit_default=True,
        help='rank of queries, which are made of so many numbers per token, normalized (q_lora_rank of DeepSeek-V2); '
        'needs latent_rank; None: queries have a matrix of their own',
    )
    rotary_decoupled: bool = field(
        default=False,
        omit_default=True,
        help='rotary positions turn the shared channels of keys alone, and the same channels of queries (DeepSeek-V2); '
        'needs shared_key_dim',
    )
    rotary_base: float | None = field(
        default=10_000.0, above=1, help='of the wavelengths of rotary positions; None: no such'
    )
    rotary_fraction: float = field(
        default=1.0, above=0, maximum=1, help='share of the channels of each head that rotary positions turn'
    )
    rotary_scaling: RotaryScaling | None = field(
        default=None, help='change of the frequencies of rotary positions for longer contexts; None: none'
    )
    key_offset: float = field(
        default=0.0,
        minimum=0,
        maximum=1,
        help='share of the channels of each key that come from the token before; those without positions first',
    )
    convolution: int | None = field(
        default=None,
        minimum=2,
        maximum=16,
        help='tokens of a causal convolution of queries, keys and values; usual is 4; None: no such',
    )
    qk_norm: bool = field(default=False, help='RMSNorm of the queries and keys of each head, before they are rotated')
    qk_norm_span: str = field(
        default='head',
        choices=SPANS,
        help='what qk_norm normalizes: each head, or the whole projection of queries or keys (OLMo 2)',
    )
    output_norm: bool = field(
        default=False, help='RMSNorm of what attention gives, of each head, before the output gate (Qwen3-Next)'
    )
    output_gate: bool = field(
        default=False,
        earlier=_read_gate,
        help='what attention gives is multiplied by silu(x W), as in RetNet and Mamba-2',
    )
    output_gate_form: str = field(
        default='silu', choices=tuple(GATES), help='of the output gate; sigmoid: as in Qwen3-Next and Kimi Linear'
    )
    output_gate_inputs: float = field(
        default=1.0, above=0, maximum=1, help='share of the channels of x, the first ones, that the output gate reads'
    )
    output_gate_rank: int | None = field(
        default=None,
        minimum=1,
        help='rank of the matrix of the output gate, which is then two (Kimi Linear: the head size); None: it is whole',
    )
    branch: BranchPart | None = field(
        default=None,
        omit_default=True,
        help='a part that attention and feed-forward layer pass before they are added, such as gains; None: no such',
    )


T = TypeVar('T', bound=LayerOptions)


def leave_to_model(cls: type[T]) -> type[T]:
    """Gives a subclass the same options with the default 'model'. It is a value that each of them may have."""
    hints = typing.get_type_hints(LayerOptions)
    for spec in dataclasses.fields(LayerOptions):
        cls.__annotations__[spec.name] = hints[spec.name] | Literal['model']
        metadata = {**spec.metadata, 'omit_default': True}
        setattr(cls, spec.name, dataclasses.field(default=MODEL, metadata=metadata))
    return cls
