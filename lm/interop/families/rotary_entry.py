"""The rotary positions in a config.json."""

from collections.abc import Callable, Mapping

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
        form, entries = SCALINGS[self.kind]
        return form(**{our: read(self.numbers, their) for our, (their, read) in entries.items()})


Entries = Mapping[str, tuple[str, Callable[[Hyperparameters, str], object]]]
"""Field of a scaling → its entry, and the function that reads it."""
FACTOR: Entries = {'factor': ('factor', Hyperparameters.number)}
LENGTH: Entries = {'length': ('original_max_position_embeddings', Hyperparameters.integer)}
LIMITS: Entries = {
    'low_turns': ('low_freq_factor', Hyperparameters.number),
    'high_turns': ('high_freq_factor', Hyperparameters.number),
}
YARN: Entries = {
    'low_turns': ('beta_slow', lambda numbers, name: numbers.find_number(name) or 1.0),
    'high_turns': ('beta_fast', lambda numbers, name: numbers.find_number(name) or 32.0),
    **LENGTH,
    'whole': ('truncate', lambda numbers, name: numbers.flag(name, True)),
    'attention_factor': ('attention_factor', Hyperparameters.find_number),
}
SCALINGS: dict[str, tuple[Callable[..., RotaryScaling | None], Entries]] = {
    'default': (lambda: None, {}),
    'linear': (LinearRotary, FACTOR),
    'llama3': (Llama3Rotary, {**FACTOR, **LIMITS, **LENGTH}),
    'yarn': (YarnRotary, {**FACTOR, **YARN}),
}
"""`rope_type` → the scaling and its entries."""


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
    if scaling is None:
        return {'rope_type': 'default'}
    for kind, (form, entries) in SCALINGS.items():
        if form is type(scaling):
            values = {their: getattr(scaling, our) for our, (their, _) in entries.items()}
            return {'rope_type': kind, **{name: value for name, value in values.items() if value is not None}}
    return {'rope_type': scaling.gin_name}
