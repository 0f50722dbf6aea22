"""The rotary positions in a config.json."""

from collections.abc import Callable

from lm.attention.rotary_scaling import LinearRotary, Llama3Rotary, RotaryScaling, YarnRotary
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import RotaryOptions


class RotaryEntry:
    """The rotary positions of the layers of one type. Versions 4 and 5 of `transformers` write them in two forms.

    Attributes:
        base: of the wavelengths.
        fraction: the share of the channels of a head that turn.
        kind: the name of the scaling; 'default': none.
        numbers: all entries, by their names.
    """

    def __init__(self, config: Hyperparameters, base: float, layer_type: str = 'full_attention'):
        """Reads a config.json; `base` stands for a base that it does not state."""
        new, old = config.section('rope_parameters'), config.section('rope_scaling')
        new = new.section(layer_type) if layer_type in new else new
        old = {'rope_type': old.get('type')} | old if old else {}
        single = ('rope_theta', 'partial_rotary_factor', 'original_max_position_embeddings')
        # As in `transformers`: the old form wins over the new one, and a length beside them over the lengths in them.
        length = {'original_max_position_embeddings': config.get('original_max_position_embeddings')}
        sources = [{name: config.get(name) for name in single}, new, old, length]
        self.numbers = Hyperparameters({'original_max_position_embeddings': config.get('max_position_embeddings')})
        for source in sources:
            self.numbers |= {name: value for name, value in source.items() if value is not None}
        self.base = self.numbers.number('rope_theta', base)
        self.fraction = self.numbers.number('partial_rotary_factor', 1.0)
        self.kind = self.numbers.text('rope_type', 'default')

    def differences(self, parts: bool = False) -> list[str]:
        """Returns in words what no model here computes; `parts`: the family turns a part of the channels of a head."""
        found = {
            f'rotary positions scaled by {self.kind!r}': self.kind not in SCALINGS,
            'rotary positions on a part of a head': self.fraction != 1 and not parts,
            'rotary positions with mscale': bool(self.numbers.get('mscale') or self.numbers.get('mscale_all_dim')),
        }
        return [what for what, differs in found.items() if differs]

    @property
    def scaling(self) -> RotaryScaling | None:
        return SCALINGS[self.kind](self.numbers)


def _make_llama3(numbers: Hyperparameters) -> RotaryScaling:
    return Llama3Rotary(
        factor=numbers.number('factor'),
        low_turns=numbers.number('low_freq_factor'),
        high_turns=numbers.number('high_freq_factor'),
        length=numbers.integer('original_max_position_embeddings'),
    )


def _make_yarn(numbers: Hyperparameters) -> RotaryScaling:
    return YarnRotary(
        factor=numbers.number('factor'),
        low_turns=numbers.find_number('beta_slow') or 1.0,
        high_turns=numbers.find_number('beta_fast') or 32.0,
        length=numbers.integer('original_max_position_embeddings'),
        whole=numbers.flag('truncate', True),
        attention_factor=numbers.find_number('attention_factor'),
    )


SCALINGS: dict[str, Callable[[Hyperparameters], RotaryScaling | None]] = {
    'default': lambda numbers: None,
    'linear': lambda numbers: LinearRotary(factor=numbers.number('factor')),
    'llama3': _make_llama3,
    'yarn': _make_yarn,
}
"""`rope_type` → a function of the entries."""


def describe_rotary(options: RotaryOptions | None) -> dict[str, object]:
    """Returns the entries of rotary positions for config.json, which `RotaryEntry` reads back."""
    if options is None:
        return {'rope_type': 'default', 'rope_theta': 10_000.0}
    return {'rope_theta': options.base, 'partial_rotary_factor': options.fraction, **_describe_scaling(options.scaling)}


def describe_types(model: ModelConfig) -> dict[str, object]:
    """Returns the entries of layers that see all tokens, and of layers with a window."""
    found: dict[str, object] = {'full_attention': describe_rotary(None), 'sliding_attention': describe_rotary(None)}
    for one in model.pattern:
        kind = 'full_attention' if getattr(one, 'window', None) is None else 'sliding_attention'
        found[kind] = describe_rotary(model.resolve(one).rotary)
    return found


def _describe_scaling(scaling: RotaryScaling | None) -> dict[str, object]:
    match scaling:
        case None:
            return {'rope_type': 'default'}
        case LinearRotary():
            return {'rope_type': 'linear', 'factor': scaling.factor}
        case Llama3Rotary():
            return {
                'rope_type': 'llama3',
                'factor': scaling.factor,
                'low_freq_factor': scaling.low_turns,
                'high_freq_factor': scaling.high_turns,
                'original_max_position_embeddings': scaling.length,
            }
        case YarnRotary():
            factor = {} if scaling.attention_factor is None else {'attention_factor': scaling.attention_factor}
            return {
                'rope_type': 'yarn',
                'factor': scaling.factor,
                'beta_slow': scaling.low_turns,
                'beta_fast': scaling.high_turns,
                'original_max_position_embeddings': scaling.length,
                'truncate': scaling.whole,
                **factor,
            }
    return {'rope_type': scaling.gin_name}
