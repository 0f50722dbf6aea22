"""Draws random models: complete configurations, and what they are compared on.

Each mechanism has a function here that draws its fields. `LEFT_OUT` names what is not drawn, and why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cases import Case, Devices

from lm.attention import Attention, mechanisms
from lm.attention.options import SPANS
from lm.attention.rotary_scaling import LinearRotary, Llama3Rotary, YarnRotary
from lm.config.configurable import list_values
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer
from lm.model.feed_forward.experts import Experts
from lm.ops.errors import OperationError

LEFT_OUT = {
    'minimax': "hybrid.approximation = 'minimax': its coefficients come from an algorithm, not from a formula",
    'mean_far_factor': "polysketch.far_factor = 'mean': a moment of random vectors, which tests of sketches measure",
}
"""Name → reason of what is not drawn. An entry that is deleted is drawn."""
NOT_COMPARED = {
    'model.n_layers': 'drawn with the pattern',
    'model.base_width': 'changes first sizes and learning rates alone',
    'model.dtype': 'NumPy computes in float64',
    'model.unroll': 'drawn with the layers',
    'softmax.implementation': 'the portable one is compared with kernels elsewhere',
    'polysketch.implementation': 'the same',
    'hybrid.implementation': 'the same',
    'softmax.block': 'the same',
    'llops.init': 'first values alone',
    'llops.offset': 'first values alone',
    'polynomial.offset': 'first values alone',
    'polysketch.offset': 'first values alone',
    'performer.redraw_every': 'redraws are tested with training',
    'performer.projection': 'first values alone',
    'window_linear.mix': 'first values alone',
}
"""Field → why it is not drawn for itself."""


class Draw:
    """The random choices of one model. Each is made by a short call, so that the drawers read like lists."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def often(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def rarely(self, make: Callable[[], Any] | Any, otherwise: Any = None, share: float = 0.3) -> Any:
        """Returns `make` or what it returns in a share of the models."""
        if not self.often(share):
            return otherwise
        return make() if callable(make) else make

    def number(self, low: float, high: float) -> float:
        """Returns a number with three digits, evenly on a logarithmic scale."""
        return float(f'{np.exp(self.rng.uniform(np.log(low), np.log(high))):.3g}')


DRAWERS: dict[str, Callable[[Draw], dict[str, Any]]] = {}
"""The mechanism's name → a function that draws its fields."""


def drawer(name: str) -> Callable:
    def register(function: Callable) -> Callable:
        DRAWERS[name] = function
        return function

    return register


@drawer('softmax')
def _draw_softmax(draw: Draw) -> dict[str, Any]:
    return {
        'scale': draw.rarely(lambda: draw.number(0.1, 2)),
        'window': draw.rarely(lambda: draw.one(1, 2, 5, 8, 40), share=0.5),
        'sinks': draw.often(),
        'score_cap': draw.rarely(lambda: draw.number(0.5, 10)),
        'log_base': draw.rarely(lambda: draw.number(1.5, 30), share=0.2),
        'gate': draw.often(0.4),
    }


@drawer('polynomial')
def _draw_polynomial(draw: Draw) -> dict[str, Any]:
    return {
        'degree': draw.one(2, 4, 6, 8, 16),
        'denominator_bias': draw.one(1.0, 1.0, 0.0, draw.number(0.1, 5)),
        'gate': draw.often(0.4),
        'score_norm': draw.one('separate', 'separate', 'tied'),
    }


@drawer('polysketch')
def _draw_polysketch(draw: Draw, inside: bool = False) -> dict[str, Any]:
    sketch = draw.one('learned', 'gaussian', 'srht')
    factors = [1.0, draw.number(0.1, 3)]
    if sketch == 'gaussian':
        factors += ['published'] + ['mean'] * ('mean_far_factor' not in LEFT_OUT)
    return {
        'sketch': sketch,
        'sketch_size': draw.one(1, 3, 4),
        'sketches': draw.one(1, 1, 2, 3),
        'sketch_norm': draw.one(None, None, 'tied', 'separate'),
        'far_factor': draw.one(*factors),
        'learn_far_factor': draw.often(0.3),
        'degree': draw.one(2, 4, 8, 16),
        'local': not inside and draw.often(0.7),
        'block': draw.one(1, 3, 4, 8, 64),
        'network_width': draw.one(1, 2),
        'per_head': draw.often(0.4),
        'denominator_bias': draw.rarely(lambda: draw.number(0.1, 5), 1.0),
        'gate': not inside and draw.often(0.4),
    }


@drawer('performer')
def _draw_performer(draw: Draw, inside: bool = False) -> dict[str, Any]:
    signed = ['trigonometric', 'random_phases', 'gelu', 'cos', 'tanh', 'identity'] * (not inside)
    return {
        'features': draw.one(*['positive', 'hyperbolic'] * 2, *signed, 'relu', 'sigmoid', 'exp', 'abs'),
        'n_features': draw.one(2, 6, 10),
        'renormalize': inside or draw.often(0.8),
        'causal': inside or draw.often(0.9),
        'scale': draw.rarely(lambda: draw.number(0.1, 2)),
        'stabilizer': draw.one(1e-6, 1e-4),
        'kernel_epsilon': draw.one(1e-3, 0.1),
        'block': draw.one(None, 1, 3, 8, 64),
    }


@drawer('llops')
def _draw_llops(draw: Draw, inside: bool = False) -> dict[str, Any]:
    nonnegative, layer_norm = inside or draw.often(0.7), draw.often(0.7)
    degree = draw.one(2, 4, 6, 8) if nonnegative else draw.one(1, 2, 3, 4)
    return {
        'degree': degree if layer_norm else min(degree, 4),
        'n_features': draw.one(1, 3, 6),
        'rank': draw.one(1, 1, 2),
        'nonnegative': nonnegative,
        'affine': draw.often(0.4),
        'layer_norm': layer_norm,
        'renormalize': inside or draw.often(0.8),
        'denominator_bias': draw.rarely(lambda: draw.number(0.1, 5), 1.0) if nonnegative else draw.one(0.0, 1.0, 3.0),
        'stabilizer': draw.one(1e-6, 1e-3),
    }


@drawer('taylor')
def _draw_taylor(draw: Draw, inside: bool = False) -> dict[str, Any]:
    return {'feature_dim': draw.one(None, 1, 3, 4), 'per_head': draw.often()}


@drawer('hedgehog')
def _draw_hedgehog(draw: Draw, inside: bool = False) -> dict[str, Any]:
    return {'per_head': draw.often()}


@drawer('hybrid')
def _draw_hybrid(draw: Draw) -> dict[str, Any]:
    return {
        'window': draw.one(1, 2, 5, 8, 40),
        'degree': draw.one(1, 2, 2, 3),
        'parts': draw.one(1, 1, 2),
        'approximation': draw.one('taylor', 'chebyshev', *['minimax'] * ('minimax' not in LEFT_OUT)),
        'radius': draw.number(0.5, 4),
        'scale': draw.rarely(lambda: draw.number(0.05, 0.4)),
    }


INSIDE = {
    'polysketch': _draw_polysketch,
    'performer': _draw_performer,
    'llops': _draw_llops,
    'taylor': _draw_taylor,
    'hedgehog': _draw_hedgehog,
}
"""The mechanisms whose features can weigh keys beside a window."""


@drawer('window_linear')
def _draw_window_linear(draw: Draw) -> dict[str, Any]:
    name = draw.one(None, None, *INSIDE)
    return {
        'map': None if name is None else mechanisms()[name](**INSIDE[name](draw, inside=True)),
        'window': draw.one(1, 2, 5, 8, 40),
        'far_factor': draw.one(None, None, 'mean', draw.number(0.1, 3)),
        'scale': draw.rarely(lambda: draw.number(0.1, 2)),
    }


@drawer('retention')
def _draw_retention(draw: Draw) -> dict[str, Any]:
    return {'norm_epsilon': draw.rarely(1e-3, 1e-5)}


@drawer('gated_linear')
def _draw_gated_linear(draw: Draw) -> dict[str, Any]:
    gate = draw.one('sigmoid', 'ssd', 'channel')
    return {
        'gate': gate,
        'degree': 1 if gate == 'channel' else draw.one(1, 2),
        'norm_epsilon': draw.rarely(1e-3, 1e-5),
    }


@drawer('delta')
def _draw_delta(draw: Draw) -> dict[str, Any]:
    return {
        'gate': draw.one(False, True, 'channel'),
        'negative': draw.often(0.3),
        'norm_epsilon': draw.rarely(1e-3, 1e-5),
    }


def _draw_scaling(draw: Draw) -> Any:
    factor, length = draw.number(1, 8), draw.one(8, 16, 64)
    limits = {'low_turns': draw.number(0.2, 1), 'high_turns': draw.number(1.5, 8), 'length': length}
    yarn = {'whole': draw.often(), 'attention_factor': draw.rarely(lambda: draw.number(0.7, 1.5))}
    return draw.one(
        LinearRotary(factor=factor),
        Llama3Rotary(factor=factor, **limits),
        YarnRotary(factor=factor, **limits, **yarn),
    )


def _draw_options(draw: Draw) -> dict[str, Any]:
    """Draws options that a layer may have of its own: of most, the model's stay."""
    heads = draw.one((1, None, None), (2, 1, None), (4, 2, None), (4, 2, 4), (2, 1, 4), (2, 2, 4), (4, 1, 2))
    options = {
        'value_dim': lambda: draw.one(None, 1, 3, 6),
        'rotary_base': lambda: draw.one(None, 10_000.0, 50.0),
        'rotary_fraction': lambda: draw.number(0.2, 1),
        'rotary_scaling': lambda: draw.rarely(lambda: _draw_scaling(draw), share=0.7),
        'key_offset': lambda: draw.one(0.0, 0.25, 0.5, 1.0),
        'convolution': lambda: draw.one(None, 2, 3, 4),
        'qk_norm': lambda: draw.often(),
        'output_norm': lambda: draw.often(),
        'output_gate_inputs': lambda: draw.number(0.2, 1),
        'output_gate_rank': lambda: draw.one(None, 1, 3),
        'head_dim': lambda: draw.one(2, 4, 6, 8),
    }
    found = {name: make() for name, make in options.items() if draw.often(0.3)}
    if draw.often(0.6):
        found |= dict(zip(('n_heads', 'n_kv_heads', 'n_value_heads'), heads, strict=True))
    if draw.often(0.2):
        found |= _draw_latent(draw, 'head_dim' in found)
    return found


def _draw_latent(draw: Draw, may_share: bool) -> dict[str, Any]:
    """Draws options of latent keys and queries; with `may_share`, of channels that heads share, too."""
    found: dict[str, Any] = {'latent_rank': draw.one(1, 4), 'latent_query_rank': draw.one(None, 1, 3)}
    found |= {'n_kv_heads': None, 'n_value_heads': None}
    if draw.often():  # the form of DeepSeek-V2
        base = draw.one(10_000.0, 50.0)
        shared = {'head_dim': draw.one(4, 6, 8), 'shared_key_dim': 2, 'rotary_decoupled': True}
        found |= shared | {'rotary_base': base, 'key_offset': 0.0}
    elif may_share:
        found['shared_key_dim'] = draw.one(0, 1)
    return found


def draw_mechanism(draw: Draw, name: str | None = None) -> Attention:
    """Draws a mechanism of any kind, or of one."""
    name = name or draw.one(*DRAWERS)
    options = _draw_options(draw) if draw.often(0.5) else {}
    if 'qk_norm' in options:
        options['qk_norm_span'] = SPANS[len(options) % 2]  # no draw of its own, so numbers keep their cases
    if draw.often(0.2):
        form = draw.one(None, 'silu', 'sigmoid')
        options |= {'output_gate': False} if form is None else {'output_gate': True, 'output_gate_form': form}
    return mechanisms()[name](**options, **DRAWERS[name](draw))


def _draw_feed_forward(draw: Draw) -> DenseLayer | Experts:
    if draw.often(0.4):
        return DenseLayer()
    experts, groups = draw.one((2, 1), (3, 1), (4, 2), (6, 3), (8, 2))
    top_groups = int(draw.rng.integers(1, groups + 1))
    top_k = int(draw.rng.integers(1, min(3, experts // groups * top_groups) + 1))
    shared_dim = draw.one(None, 5)
    return Experts(
        n_experts=experts,
        top_k=top_k,
        hidden_dim=draw.one(None, 3, 8),
        shared_dim=shared_dim,
        shared_gate=shared_dim is not None and draw.often(),
        sigmoid=draw.often(),
        normalize=draw.often(),
        scale=draw.one(1.0, 2.5),
        groups=groups,
        top_groups=top_groups,
        correction=draw.often(0.4),
        balance=draw.one(0.0, 0.1),
    )


def draw_model(draw: Draw, small: bool) -> ModelConfig:
    """Draws the configuration of a model. Raises ConfigError if the product refuses it."""
    options = {'n_heads': 2, 'head_dim': 4, 'rotary_base': 100.0} | _draw_options(draw)
    count = draw.one(1, 1, 2) if small else draw.one(1, 1, 2, 2, 3)
    attention = tuple(draw_mechanism(draw) for _ in range(count))
    kinds = tuple(_draw_feed_forward(draw) for _ in range(draw.one(1, 1, 2)))
    layers = max(count + draw.one(0, 0, 1, *[2] * (not small)), len(kinds))
    gated = draw.often(0.7)
    return ModelConfig(
        vocab_size=draw.one(7, 13),
        n_layers=layers,
        d_model=draw.one(6, 8, 12),
        hidden_dim=draw.one(None, 7, 10),
        feed_forward=draw.rarely(lambda: kinds if len(kinds) > 1 else kinds[0], share=0.6),
        attention=attention if count > 1 else attention[0],
        causal=draw.often(0.93),
        norm=draw.one('layer', 'rms'),
        norm_epsilon=draw.rarely(1e-3, 1e-5),
        norm_placement=draw.one('before', 'before', 'after', 'both'),
        activation=draw.one('gelu', 'silu'),
        gated=gated,
        biases=draw.often(0.2),
        qkv_biases=draw.often(0.2),
        embedding_scale=draw.rarely(lambda: draw.number(0.5, 5)),
        sinusoids=draw.often(),
        learned_positions=draw.rarely(64),
        qk_norm_span=draw.one('head', 'projection'),
        output_gate=draw.often(0.3),
        output_gate_form=draw.one('silu', 'sigmoid'),
        tied=draw.often(),
        logit_cap=draw.rarely(lambda: draw.number(1, 20)),
        remat=draw.one('none', 'none', 'dots', 'dense', 'attention', 'full'),
        unroll=draw.one(1, 1, 2, 4),
        **options,
    )


MESHES = (Devices(8, 2, 2), Devices(8, 1, 4), Devices(8, 2), Devices(4, 2, 2), Devices(2, 1, 2))


def draw_case(number: int, small: bool = False, tries: int = 200) -> Case:
    """Draws the case with this number: the same one each time.

    Configurations that the product refuses are drawn anew. With `small` there are few layers, and few devices.
    """
    for attempt in range(tries):
        draw = Draw(np.random.default_rng((number, attempt)))
        try:
            case = _draw_case(draw, number, small)
            check_case(case)
        except (ConfigError, OperationError):
            continue
        return case
    raise AssertionError(f'model {number}: {tries} draws were refused')


def _draw_case(draw: Draw, number: int, small: bool) -> Case:
    model = draw_model(draw, small)
    devices = draw.rarely(lambda: draw.one(*MESHES)) if small else draw.one(None, None, *MESHES)
    eod = draw.one(None, 3) if not model.looks_ahead else None
    restart = eod is not None and draw.often()
    length = int(draw.rng.integers(1, 30))
    if devices is not None and draw.often(0.8):
        length = max(2, length // devices.sequence) * devices.sequence
    return Case(
        model=model,
        seed=number,
        length=length,
        rows=draw.one(1, 2) if devices is None else devices.rows,
        microbatches=draw.one(1, 2, 3) if devices is None or devices.rows < 4 else draw.one(1, 2),
        eod=eod,
        restart=restart,
        pieces=draw.one((1,), (5, 1), (3,), (7, 1, 1), (64,)),
        z_loss=draw.one(0.0, 0.1),
        devices=devices,
    )


def check_case(case: Case) -> None:
    """Raises ConfigError for a case that the product refuses, or that is left out."""
    model = case.model
    parts = 1 if case.devices is None else case.devices.sequence
    model.check_parts(parts, case.length)
    for attention in model.pattern:
        options = model.resolve(attention)
        if case.length % parts == 0 and case.length // parts < (options.convolution or 1):
            raise ConfigError('a part is shorter than what its convolution sees')
        if attention.gin_name == 'hybrid' and options.dims.head_dim % attention.parts:
            raise ConfigError('parts')


def list_fields(configs: Sequence[Any]) -> dict[str, set]:
    """Returns 'name.field' → the values that these configurations have, as texts."""
    found: dict[str, set] = {}
    for config in configs:
        for name, value in list_values(config).items():
            found.setdefault(f'{config.gin_name}.{name}', set()).add(repr(value))
    return found
