"""The mechanisms that weigh values: exact weights, feature maps, and both beside each other."""

import math

import numpy as np
from formulas import Layer, compare, formula, gelu, layer_norm, softmax
from numpy.polynomial import chebyshev
from scipy import special

FLOOR = 1e-12
"""Added to each feature of Hedgehog (`lm.attention.maps.two_sided`)."""


@formula('softmax')
def attend_softmax(layer: Layer) -> np.ndarray:
    """Weighs by exp(s_ij) / (exp(sink) + Σ_j' exp(s_ij')) (PolySketchFormer §2.1; OpenAI 2025, gpt-oss; Gemma 2 §2)."""
    config = layer.config
    scores = compare(layer.q, layer.k) * (config.scale or layer.q.shape[-1] ** -0.5)
    if config.log_base is not None:
        before = np.arange(layer.q.shape[1]) - layer.starts
        scores = scores * (np.log(before + config.log_base) / np.log(config.log_base))[:, None, :, None]
    if config.score_cap is not None:
        scores = config.score_cap * np.tanh(scores / config.score_cap)
    seen = layer.visible & layer.recent(config.window)
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest) * layer.forgotten()
    total = weights.sum(-1, keepdims=True)
    if config.sinks:
        total = total + np.exp(layer.weights['sinks'][None, :, None, None] - largest)
    return layer.mix(weights / total)


@formula('polynomial')
def attend_polynomial(layer: Layer) -> np.ndarray:
    """Weighs by ⟨q', k'⟩^p / (b + Σ), ' is layer normalization (PolySketchFormer §2.1)."""
    norm_of_keys = 'q_norm' if layer.config.score_norm == 'tied' else 'k_norm'
    q, k = layer_norm(layer.q, layer.weights['q_norm']), layer_norm(layer.k, layer.weights[norm_of_keys])
    weights = np.where(layer.visible, compare(q, k) ** layer.config.degree, 0.0) * layer.forgotten()
    return layer.mix(weights / (layer.config.denominator_bias + weights.sum(-1, keepdims=True)))


# Feature maps: functions of `Layer` that return the weights of all pairs before the mask, and b of the denominator.


def weigh_by_sketches(layer: Layer) -> tuple[np.ndarray, float]:
    """Returns f ⟨ψ(q'), ψ(k')⟩² with the factor f of far weights (PolySketchFormer, Theorem 2.4)."""
    config, weights = layer.config, layer.weights
    power = config.degree // 2
    if config.sketch_norm is None:
        q, k = layer_norm(layer.q, weights['q_norm']), layer_norm(layer.k, weights['k_norm'])
    else:
        q, k = layer_norm(layer.q), layer_norm(layer.k)
        if config.sketch != 'learned':
            norms = weights['sketch_norms']
            q, k = (x * norm['scale'] + norm['bias'] for x, norm in ((q, norms[0]), (k, norms[len(norms) - 1])))
    if config.sketches == 1:
        members = [weights.get('sketch')]
    else:
        members = list(weights.get('sketch', {}).get('members', {0: None}).values())
    inner = sum(compare(sketch(config, one, q, power), sketch(config, one, k, power)) for one in members) / len(members)
    if config.learn_far_factor:
        factor = np.exp(weights['log_far_factor'])[None, :, None, None]
    elif config.far_factor == 'published':
        factor = config.sketch_size ** (-2.0 * (power - 1))
    else:
        factor = config.far_factor
    return factor * inner**2, config.denominator_bias


def sketch(config: object, weights: dict | None, x: np.ndarray, power: int) -> np.ndarray:
    """Returns ψ(x): a tree whose nodes join two children (Algorithms 1 and 2; draft, Definitions 2.3 and 2.4)."""
    if power == 1:
        return x
    assert weights is not None
    r = config.sketch_size
    if config.sketch == 'srht':
        level = [by_head(x, weights['base'][i]) * r**-0.5 for i in range(power)]
    else:
        level = [x] * power
    node = 0
    while len(level) > 1:
        joined = []
        for left, right in zip(level[::2], level[1::2], strict=True):
            maps = weights['maps'][node]
            if config.sketch == 'learned':
                product = run_network(maps[0], left) * run_network(maps[1], right)
                joined.append(r**0.5 * np.tanh(r**-0.5 * product))
            else:
                joined.append(by_head(left, maps[0]) * by_head(right, maps[1]) * r**-0.5)
            node += 1
        level = joined
    return level[0]


def by_head(x: np.ndarray, matrix_NxMxR: np.ndarray) -> np.ndarray:
    """Multiplies each head with its matrix; several heads share one where there are fewer."""
    return np.einsum('blhm,hmr->blhr', x, np.repeat(matrix_NxMxR, x.shape[2] // len(matrix_NxMxR), axis=0))


def run_network(weights: dict, x: np.ndarray) -> np.ndarray:
    """Returns f(x): LayerNorm, dense, gelu, dense, and all of it once more (App. D)."""
    kernels, scales, biases = (weights[name] for name in ('kernels', 'scales', 'biases'))
    heads = x.shape[2]
    for half in range(2):
        gain, bias = (np.repeat(each[half][:, 0], heads // len(each[half]), axis=0) for each in (scales, biases))
        x = layer_norm(x, {'scale': gain, 'bias': bias})
        x = by_head(gelu(by_head(x, kernels[2 * half])), kernels[2 * half + 1])
    return x


def weigh_by_random_features(layer: Layer) -> tuple[np.ndarray, float]:
    """Returns ⟨φ(q), φ(k)⟩ of random features (Choromanski et al. 2020, §2.2 and §2.3; 2021, Lemma 1)."""
    config = layer.config
    scale = config.scale or layer.q.shape[-1] ** -0.5
    q, k = (
        random_features(layer, x * math.sqrt(scale), of_query) for x, of_query in ((layer.q, True), (layer.k, False))
    )
    return compare(q, k), 0.0


LIMIT = 35.0
"""The largest exponent of features: their products, summed over millions of keys, stay finite in float32."""


def random_features(layer: Layer, x: np.ndarray, of_query: bool) -> np.ndarray:
    """Returns φ of scaled vectors.

    Where weights are normalized, signed ones of a query are divided by a factor of the query, and nothing is added to
    positive ones.
    """
    config, (omega, phases) = layer.config, (layer.weights['projection'], layer.weights.get('phases'))
    products, half = x @ omega.T, (x**2).sum(-1, keepdims=True) / 2
    kind, count = config.features, config.n_features
    free = of_query and config.renormalize
    if kind in ('positive', 'hyperbolic'):
        if kind == 'hyperbolic':
            products = np.concatenate([products, -products], -1)
        return (np.exp(np.minimum(products - half, LIMIT)) + (0.0 if free else config.stabilizer)) / math.sqrt(count)
    if kind in ('trigonometric', 'random_phases'):
        outer = 1.0 if free else np.exp(np.minimum(half, LIMIT))
        if kind == 'trigonometric':
            return outer * np.concatenate([np.sin(products), np.cos(products)], -1) * math.sqrt(2 / count)
        return outer * np.cos(products + phases) * math.sqrt(2 / count)
    functions = {
        'relu': lambda y: np.maximum(y, 0.0),
        'sigmoid': special.expit,
        'exp': np.exp,
        'abs': np.abs,
        'gelu': gelu,
        'cos': np.cos,
        'tanh': np.tanh,
        'identity': lambda y: y,
    }
    return (functions[kind](products) + config.kernel_epsilon) / math.sqrt(count)


def weigh_by_products(layer: Layer) -> tuple[np.ndarray, float]:
    """Returns ⟨φ_Q(q), φ_K(k)⟩, φ(x) = Σ_r Π_j x Θ_{j,r}, squared where no weight is negative (LLoPS, Def. 3.3)."""
    config, weights = layer.config, layer.weights
    q, k = layer.q, layer.k
    if config.layer_norm:
        q, k = layer_norm(q, weights['q_norm']), layer_norm(k, weights['k_norm'])

    def features(x: np.ndarray, theta: np.ndarray) -> np.ndarray:
        if config.affine:
            x = np.concatenate([x, np.ones((*x.shape[:-1], 1))], -1)
        factors = np.einsum('blhd,jrdm->jrblhm', x, theta)
        found = factors.prod(0).sum(0)
        return found**2 if config.nonnegative else found

    return compare(features(q, weights['q_factors']), features(k, weights['k_factors'])), config.denominator_bias


def weigh_by_series(layer: Layer) -> tuple[np.ndarray, float]:
    """Returns 1 + s + s²/2, s = ⟨W_q q, W_k k⟩ / √r (Arora et al. 2024; LLoPS §2.2)."""
    q, k = layer.q, layer.k
    if layer.config.feature_dim is not None:
        q, k = by_head(q, layer.weights['q_weight']), by_head(k, layer.weights['k_weight'])
    s = compare(q, k) / math.sqrt(q.shape[-1])
    return 1 + s + s**2 / 2, 0.0


def weigh_by_two_softmaxes(layer: Layer) -> tuple[np.ndarray, float]:
    """Returns ⟨φ(q), φ(k)⟩, φ(x) = [softmax(W x), softmax(-W x)] (Zhang et al. 2024, Hedgehog)."""

    def features(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        w = w if w.ndim == 3 else w[None]
        products = by_head(x, w.swapaxes(1, 2))
        return np.concatenate([softmax(products), softmax(-products)], -1) + FLOOR

    return compare(features(layer.q, layer.weights['q_weight']), features(layer.k, layer.weights['k_weight'])), 0.0


MAPS = {
    'polysketch': weigh_by_sketches,
    'performer': weigh_by_random_features,
    'llops': weigh_by_products,
    'taylor': weigh_by_series,
    'hedgehog': weigh_by_two_softmaxes,
}
SIGNED = ('trigonometric', 'random_phases', 'gelu', 'cos', 'tanh', 'identity')
"""Random features whose weights can be negative."""
ESTIMATORS = ('positive', 'hyperbolic')
"""Random features without a sign whose weights estimate exp(s)."""


def average(layer: Layer, weights: np.ndarray, bias: float, epsilon: float | None = None) -> np.ndarray:
    """Returns Σ w v / (b + Σ w); a sum within `epsilon` of 0 is replaced by it plus 2 `epsilon`."""
    total = bias + weights.sum(-1, keepdims=True)
    if epsilon is not None:
        total = np.where(np.abs(total) <= epsilon, total + 2 * epsilon, total)
    return layer.mix(weights / total)


@formula('polysketch')
def attend_polysketch(layer: Layer) -> np.ndarray:
    """Weighs near keys by ⟨q', k'⟩^p and far ones by sketches (PolySketchFormer §3.2)."""
    config = layer.config
    weights, bias = weigh_by_sketches(layer)
    if config.local:
        q, k = layer_norm(layer.q, layer.weights['q_norm']), layer_norm(layer.k, layer.weights['k_norm'])
        i, j = layer.places
        weights = np.where(i // config.block == j // config.block, compare(q, k) ** config.degree, weights)
    return average(layer, np.where(layer.visible, weights, 0.0) * layer.forgotten(), bias)


@formula('performer')
def attend_performer(layer: Layer) -> np.ndarray:
    weights = np.where(layer.visible, weigh_by_random_features(layer)[0], 0.0)
    if not layer.config.renormalize:
        return layer.mix(weights)
    return average(layer, weights, 0.0, layer.config.stabilizer if layer.config.features in SIGNED else None)


@formula('llops')
def attend_llops(layer: Layer) -> np.ndarray:
    config = layer.config
    weights, bias = weigh_by_products(layer)
    weights = np.where(layer.visible, weights, 0.0)
    if not config.renormalize:
        return layer.mix(weights)
    return average(layer, weights, bias, None if config.nonnegative else config.stabilizer)


@formula('taylor')
def attend_taylor(layer: Layer) -> np.ndarray:
    return average(layer, np.where(layer.visible, weigh_by_series(layer)[0], 0.0), 0.0)


@formula('hedgehog')
def attend_hedgehog(layer: Layer) -> np.ndarray:
    return average(layer, np.where(layer.visible, weigh_by_two_softmaxes(layer)[0], 0.0), 0.0)


@formula('hybrid')
def attend_hybrid(layer: Layer) -> np.ndarray:
    """Weighs recent keys by exp(s) and older ones by a polynomial P(s), or by Π P of parts (Graef et al. 2024)."""
    config = layer.config
    scale = config.scale or layer.q.shape[-1] ** -0.5
    coefficients = approximate(config.approximation, config.degree, config.radius / config.parts)
    far = np.ones(1)
    for q, k in zip(*(np.split(x, config.parts, axis=-1) for x in (layer.q, layer.k)), strict=True):
        far = far * np.polynomial.polynomial.polyval(scale * compare(q, k), coefficients)
    weights = np.where(layer.recent(config.window), np.exp(scale * compare(layer.q, layer.k)), far)
    return average(layer, np.where(layer.visible, weights, 0.0), 0.0)


def approximate(name: str, degree: int, radius: float) -> np.ndarray:
    """Returns the coefficients of a polynomial that stands for exp on [-radius, radius] (§3)."""
    if name == 'taylor':
        return np.array([1 / math.factorial(n) for n in range(degree + 1)])
    assert name == 'chebyshev', name
    # exp(r x) = I_0(r) + 2 Σ_n I_n(r) T_n(x), with modified Bessel functions I
    series = special.iv(np.arange(degree + 1), radius) * np.where(np.arange(degree + 1) == 0, 1, 2)
    return chebyshev.cheb2poly(series) / radius ** np.arange(degree + 1)


@formula('window_linear')
def attend_window_linear(layer: Layer) -> np.ndarray:
    """Weighs recent keys by γ exp(s - c), c the largest recent s, and older ones by f ⟨φ(q), φ(k)⟩ (LoLCATs, eq. 7).

    Where ⟨φ(q), φ(k)⟩ estimates exp(s), c is 0.
    """
    config = layer.config
    name = 'hedgehog' if config.map is None else config.map.gin_name
    if config.map is None:
        far, _ = weigh_by_two_softmaxes(layer)
    else:
        weights = layer.weights.get('map', {})
        inner = Layer(config.map, weights, layer.q, layer.k, layer.v, {}, layer.starts, layer.causal)
        far, _ = MAPS[name](inner)
    if config.far_factor == 'mean' or (config.far_factor is None and name != 'hedgehog'):
        far = far * np.exp(layer.weights['log_far_factor'])[None, :, None, None]
    elif config.far_factor is not None:
        far = far * config.far_factor
    scores = compare(layer.q, layer.k) * (config.scale or layer.q.shape[-1] ** -0.5)
    recent = layer.recent(config.window) & layer.visible
    if name == 'performer' and config.map.features in ESTIMATORS:
        largest = 0.0
    else:
        largest = np.where(recent, scores, -np.inf).max(-1, keepdims=True)
    near = special.expit(layer.weights['mix_logit'])[None, :, None, None] * np.exp(
        np.where(recent, scores - largest, 0.0)
    )
    weights = np.where(recent, near, far)
    return average(layer, np.where(layer.visible, weights, 0.0), 0.0)
