"""The whole model from its formulas: tokens to logits, and the loss that a step minimizes (PolySketchFormer App. H).

B batch, L length, D width of the model, S tokens of a convolution, E experts, N choices per token.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import recurrent_formulas  # noqa: F401  registers its formulas
import weighted_formulas  # noqa: F401
from formulas import FORMULAS, Layer, gelu, layer_norm, repeat, rms_norm, silu, softmax
from scipy import special

ACTIVATIONS = {'gelu': gelu, 'silu': silu}
GATES = {'silu': silu, 'sigmoid': special.expit}
LATENT_EPSILON = 1e-6
"""Added to the variance of latent keys, as in the code of DeepSeek-V2."""
Tree = dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [B, L], and the first token of each token's document [B, L].

    `restart`: the positions of each document begin at 0.
    """

    tokens: np.ndarray
    starts: np.ndarray
    restart: bool = False

    @property
    def positions(self) -> np.ndarray:
        index = np.broadcast_to(np.arange(self.tokens.shape[1]), self.tokens.shape)
        return index - self.starts if self.restart else index


def cut_documents(tokens: np.ndarray, eod: int | None, restart: bool = False) -> Window:
    """Returns a window in which each `eod` opens a document; None: the window is one document."""
    starts = np.zeros_like(tokens)
    for row, line in enumerate(tokens):
        for i in range(1, len(line)):
            starts[row, i] = i if eod is not None and line[i] == eod else starts[row, i - 1]
    return Window(tokens, starts, restart)


class Formulas:
    """A model of a configuration with given arrays, nested as the model names them."""

    def __init__(self, config: Any, weights: Tree):
        self.config, self.weights = config, weights

    def logits(self, window: Window) -> np.ndarray:
        """Returns [B, L, vocabulary]."""
        return self._run(window)[0]

    def loss(self, windows: list[Window], targets: list[np.ndarray], z_loss: float = 0.0) -> tuple[float, float]:
        """Returns (the mean nats of the targets of all microbatches, what a step minimizes).

        The latter adds z_loss · (log Σ exp logits)² and the balance loss of each layer's experts, means over the
        microbatches.
        """
        nats, objective = [], []
        for window, target in zip(windows, targets, strict=True):
            logits, balance = self._run(window)
            largest = logits.max(-1, keepdims=True)
            normalizer = (largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True)))[..., 0]
            each = normalizer - np.take_along_axis(logits, target[..., None], -1)[..., 0]
            nats.append(each.mean())
            objective.append((each + z_loss * normalizer**2).mean() + balance)
        return float(np.mean(nats)), float(np.mean(objective))

    def _norm(self, weights: Tree | None, x: np.ndarray) -> np.ndarray:
        if weights is None:
            return x
        return {'layer': layer_norm, 'rms': rms_norm}[self.config.norm](x, weights, self.config.norm_epsilon)

    def _run(self, window: Window) -> tuple[np.ndarray, float]:
        config, table = self.config, self.weights['embedding']['embedding']
        x = table[window.tokens]
        if config.learned_positions:
            x = x + self.weights['positions']['embedding'][window.positions]
        x = x * (math.sqrt(config.d_model) if config.embedding_scale is None else config.embedding_scale)
        if config.sinusoids:
            x = x + embed_positions(window.positions, config.d_model)
        balance = 0.0
        for number in range(config.n_layers):
            x, one = self._run_layer(number, x, window)
            balance += one
        x = self._norm(self.weights['final_norm'], x)
        logits = x @ (table if config.tied else self.weights['head']).T
        return logits if config.logit_cap is None else config.logit_cap * np.tanh(logits / config.logit_cap), balance

    def _layer_weights(self, number: int) -> Tree:
        """Returns the arrays of a layer.

        The layers of the pattern's whole repeats lie one after another in the array of their place in the pattern; each
        layer of a cut repeat has an array of its own.
        """
        mechanisms, kinds = list_all(self.config.attention), list_all(self.config.feed_forward)
        period = min(math.lcm(len(mechanisms), len(kinds)), max(self.config.n_layers, len(mechanisms)))
        repeat_number, place = divmod(number, period)
        whole = self.config.n_layers // period
        stack, row = (place, repeat_number) if repeat_number < whole else (period + place, 0)
        return take_row(self.weights['blocks'][stack], row)

    def _run_layer(self, number: int, x: np.ndarray, window: Window) -> tuple[np.ndarray, float]:
        weights = self._layer_weights(number)
        mechanisms, kinds = list_all(self.config.attention), list_all(self.config.feed_forward)
        mechanism, kind = mechanisms[number % len(mechanisms)], kinds[number % len(kinds)]
        mixed = self._attend(mechanism, weights, self._norm(weights.get('attention_norm'), x), window)
        x = x + self._norm(weights.get('attention_out_norm'), mixed)
        made, balance = self._feed(kind, weights, self._norm(weights.get('glu_norm'), x))
        return x + self._norm(weights.get('glu_out_norm'), made), balance

    def _option(self, mechanism: Any, name: str) -> Any:
        """Returns the mechanism's option, which is the model's unless it is set."""
        own = getattr(mechanism, name)
        return getattr(self.config.layer, name) if own == 'model' else own

    def _attend(self, mechanism: Any, weights: Tree, x: np.ndarray, window: Window) -> np.ndarray:
        option = lambda name: self._option(mechanism, name)  # noqa: E731
        size, batch, length = option('head_dim'), *x.shape[:2]
        queries = option('n_heads')
        keys = option('n_kv_heads') or queries
        values, value_size = option('n_value_heads') or keys, option('value_dim') or size
        sizes = queries * size, keys * size, values * value_size
        read = x if option('latent_query_rank') is None else make_latent_queries(weights['latent_queries'], x)
        flat = multiply(read, weights['qkv'])
        if (rank := option('latent_rank')) is not None:
            flat = np.concatenate([flat, *make_latent(weights['latent'], x, rank, keys, sizes[1:])], -1)
        if option('convolution'):
            flat = convolve(flat, weights['convolution']['kernel'], window.starts)
        q, k, v = np.split(flat, np.cumsum(sizes)[:-1], axis=-1)
        q, k = q.reshape(batch, length, queries, size), k.reshape(batch, length, keys, size)
        v = v.reshape(batch, length, values, value_size)
        k = offset_keys(k, option('key_offset'), window.starts)
        if option('qk_norm'):
            span = option('qk_norm_span')
            q, k = (self._norm_vectors(weights[name], y, span) for name, y in (('q_norm', q), ('k_norm', k)))
        heads = max(queries, values)
        q, k = repeat(q, heads // queries), repeat(k, values // keys)
        if option('rotary_base') is not None:
            turning = option('shared_key_dim') if option('rotary_decoupled') else size
            turn = Rotation.of(turning, *(option(f'rotary_{name}') for name in ('base', 'fraction', 'scaling')))
            q, k = (
                np.concatenate([y[..., : size - turning], turn(y[..., size - turning :], window.positions)], -1)
                for y in (q, k)
            )
        causal = self.config.causal and mechanism.causal
        inputs = self._further_inputs(mechanism, weights, x, values, size)
        layer = Layer(mechanism, weights.get('attention', {}), q, k, v, inputs, window.starts, causal)
        o = FORMULAS[mechanism.gin_name](layer)
        if option('output_norm'):
            o = rms_norm(o, weights['output_norm'], self.config.norm_epsilon)
        o = o.reshape(batch, length, -1)
        if option('output_gate'):
            seen = max(1, round(option('output_gate_inputs') * self.config.d_model))
            matrices = weights['output_gate']
            if option('output_gate_rank') is None:
                logits = multiply(x[..., :seen], matrices)
            else:
                logits = multiply(multiply(x[..., :seen], matrices['down']), matrices['up'])
            o = o * GATES[option('output_gate_form')](logits)
        return multiply(o, weights['attention_out'])

    def _norm_vectors(self, weights: Tree, y: np.ndarray, span: str) -> np.ndarray:
        """Normalizes each head, or the whole projection."""
        if span == 'head':
            return rms_norm(y, weights, self.config.norm_epsilon)
        return rms_norm(y.reshape(*y.shape[:2], -1), weights, self.config.norm_epsilon).reshape(y.shape)

    def _further_inputs(self, mechanism: Any, weights: Tree, x: np.ndarray, heads: int, size: int) -> Tree:
        """Returns the products that gates read, by name."""
        widths = {
            'softmax': {'gate_BxLxK': heads},
            'polynomial': {'gate_BxLxK': heads},
            'polysketch': {'gate_BxLxK': heads},
            'gated_linear': {'gate_BxLxN': 16 if getattr(mechanism, 'gate', None) == 'channel' else heads},
            'delta': {
                'beta_BxLxK': heads,
                'gate_BxLxN': size if getattr(mechanism, 'gate', None) == 'channel' else heads,
            },
        }.get(mechanism.gin_name, {})
        if not getattr(mechanism, 'gate', None):
            widths = {name: width for name, width in widths.items() if not name.startswith('gate')}
        if not widths:
            return {}
        pieces = np.split(multiply(x, weights['mechanism_in']), np.cumsum(list(widths.values()))[:-1], axis=-1)
        return dict(zip(widths, pieces, strict=True))

    def _feed(self, kind: Any, weights: Tree, x: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the output of the feed-forward layer and its balance loss."""
        if kind is None or kind.gin_name == 'dense':
            return self._run_units(x, *(weights[name] for name in ('glu_in', 'glu_out'))), 0.0
        found, balance = self._route(kind, weights['experts'], x)
        if kind.shared_dim is not None:
            shared = self._run_units(x, weights['glu_in'], weights['glu_out'])
            if kind.shared_gate:
                shared = shared * special.expit(multiply(x, weights['experts']['shared_gate']))
            found = found + shared
        return found, balance

    def _run_units(self, x: np.ndarray, into: Tree, out: Tree) -> np.ndarray:
        activate, products = ACTIVATIONS[self.config.activation], multiply(x, into)
        if not self.config.gated:
            return multiply(activate(products), out)
        values, gates = np.split(products, 2, axis=-1)
        return multiply(values * activate(gates), out)

    def _route(self, kind: Any, weights: Tree, x: np.ndarray) -> tuple[np.ndarray, float]:
        """Computes c Σ_{e chosen} s_e E_e(x) (Shazeer et al. 2017 §2.1; DeepSeekMoE §3; DeepSeek-V3 §2.1.2)."""
        scores = (special.expit if kind.sigmoid else softmax)(multiply(x, weights['router']))
        compared = scores + weights['correction'] if kind.correction else scores
        chosen = np.zeros(scores.shape, bool)
        members = kind.n_experts // kind.groups
        for at in np.ndindex(scores.shape[:-1]):
            grouped = compared[at].reshape(kind.groups, members)
            best = np.sort(grouped, axis=1)[:, -2:].sum(1)
            is_open = np.isin(np.arange(kind.groups), np.argsort(-best, kind='stable')[: kind.top_groups])
            open_scores = np.where(is_open[:, None], grouped, -np.inf).reshape(-1)
            chosen[at][np.argsort(-open_scores, kind='stable')[: kind.top_k]] = True
        gains = np.where(chosen, scores, 0.0)
        if kind.normalize:
            gains = gains / gains.sum(-1, keepdims=True)
        found = np.zeros_like(x)
        for expert in range(kind.n_experts):
            into, out = ({'kernel': weights[name][expert]} for name in ('glu_in', 'glu_out'))
            found = found + kind.scale * gains[..., expert : expert + 1] * self._run_units(x, into, out)
        share = chosen.mean((0, 1)) * kind.n_experts / kind.top_k
        mean = (scores / scores.sum(-1, keepdims=True)).mean((0, 1))
        return found, kind.balance * float(share @ mean)


def list_all(choice: Any) -> tuple:
    return choice if isinstance(choice, tuple) else (choice,)


def take_row(tree: Any, row: int) -> Any:
    return {name: take_row(leaf, row) for name, leaf in tree.items()} if isinstance(tree, dict) else tree[row]


def multiply(x: np.ndarray, weights: Tree) -> np.ndarray:
    """Returns x W + b."""
    return x @ weights['kernel'] + weights.get('bias', 0.0)


def embed_positions(positions: np.ndarray, width: int) -> np.ndarray:
    """Returns sines, then cosines (Vaswani et al. 2017, §3.5)."""
    angles = positions[..., None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def convolve(x: np.ndarray, kernel_SxN: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns silu(Σ_{0 ≤ s < S} w_s x_{t-s}), x = 0 before the document."""
    total = np.zeros_like(x)
    for s, gains in enumerate(kernel_SxN):
        for t in range(s, x.shape[1]):
            total[:, t] += np.where((t - s >= starts[:, t])[:, None], x[:, t - s], 0.0) * gains
    return silu(total)


def offset_keys(k: np.ndarray, fraction: float, starts: np.ndarray) -> np.ndarray:
    """Takes the last channels of each half of a key from the token before; 0 at the first token of a document."""
    half = k.shape[-1] // 2
    taken = np.arange(k.shape[-1]) % half >= half - round(half * fraction)
    before = np.concatenate([np.zeros_like(k[:, :1]), k[:, :-1]], axis=1)
    before = np.where((starts == np.arange(k.shape[1]))[..., None, None], 0.0, before)
    return np.where(taken, before, k)


def make_latent(
    weights: Tree, x: np.ndarray, rank: int, heads: int, sizes: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys [c W_h, x W'] and values c W'_h for c = RMSNorm(x W) (DeepSeek-V2, §2.1.2)."""
    down = multiply(x, weights['down'])
    latent, shared = down[..., :rank], down[..., rank:]
    up = multiply(rms_norm(latent, weights['norm'], LATENT_EPSILON), weights['up'])
    own = up[..., : up.shape[-1] - sizes[1]].reshape(*x.shape[:2], heads, -1)
    shared = np.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
    return np.concatenate([own, shared], -1).reshape(*x.shape[:2], -1), up[..., up.shape[-1] - sizes[1] :]


def make_latent_queries(weights: Tree, x: np.ndarray) -> np.ndarray:
    """Returns RMSNorm(x U), of which queries are made (DeepSeek-V2, eq. 12 and 13)."""
    return rms_norm(multiply(x, weights['down']), weights['norm'], LATENT_EPSILON)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Rotary positions (Su et al. 2021, eq. 15): the pairs (c, c + C/2), of which the first ones turn."""

    frequencies: np.ndarray
    amplitude: float = 1.0

    @classmethod
    def of(cls, size: int, base: float, fraction: float, scaling: Any) -> 'Rotation':
        turning = max(1, round(fraction * (size // 2)))
        frequencies = base ** (-np.arange(turning) / turning)
        if scaling is None:
            return cls(frequencies)
        return SCALINGS[scaling.gin_name](scaling, frequencies, base)

    def __call__(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angles = positions[..., None, None] * self.frequencies
        half, turning = x.shape[-1] // 2, len(self.frequencies)
        pairs = x[..., :half] + 1j * x[..., half:]
        pairs[..., :turning] *= self.amplitude * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _scale_linear(scaling: Any, frequencies: np.ndarray, base: float) -> Rotation:
    """Position interpolation (Chen et al. 2023, eq. 4)."""
    return Rotation(frequencies / scaling.factor)


def _scale_llama3(scaling: Any, frequencies: np.ndarray, base: float) -> Rotation:
    """Llama 3.1 (Grattafiori et al. 2024, §3.4.2; limits of the authors' code)."""
    turns = scaling.length * frequencies / (2 * np.pi)
    smooth = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    slow, fast = turns < scaling.low_turns, turns > scaling.high_turns
    return Rotation(np.where(slow, frequencies / scaling.factor, np.where(fast, frequencies, between)))


def _scale_yarn(scaling: Any, frequencies: np.ndarray, base: float) -> Rotation:
    """YaRN (Peng et al. 2023, §3): a ramp over the pairs between two limits of turns in the first context."""
    width = 2 * len(frequencies)
    first, last = (
        width * math.log(scaling.length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.high_turns, scaling.low_turns)
    )
    if scaling.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    ramp = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
    factor = 0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor
    return Rotation(ramp * frequencies / scaling.factor + (1 - ramp) * frequencies, factor)


SCALINGS = {'linear_rotary': _scale_linear, 'llama3_rotary': _scale_llama3, 'yarn_rotary': _scale_yarn}
