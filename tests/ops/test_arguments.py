"""Arguments that do not fit an operation are refused with one line that names them."""

import jax
import jax.numpy as jnp
import pytest

from lm.ops import OPERATIONS, OperationError
from lm.ops.cross_entropy import cross_entropy, weighted_cross_entropy
from lm.ops.delta_rule import delta_rule
from lm.ops.exact_attention import polynomial_attention, softmax_attention
from lm.ops.experts import apply_experts
from lm.ops.gated_units import Norm, gated_units
from lm.ops.linear_attention import State, linear_attention
from lm.ops.rotary import HeadNorms, Rotation, rotate
from lm.ops.short_convolution import short_convolution
from lm.ops.sketch_networks import LevelWeights, NetworkWeights, Node, sketch_networks

B, L, H, K, D, V = 2, 5, 4, 2, 6, 11


def numbers(*shape: int) -> jax.Array:
    return jnp.full(shape, 0.1)


def ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def node(size: int, r: int = 3) -> Node:
    levels = [LevelWeights(*[numbers(1, 1, m)] * 2, numbers(1, m, 8), numbers(1, 8, r)) for m in (size, r)]
    network = NetworkWeights(*levels)
    return Node(network, network)


def rotation(*shape: int) -> Rotation:
    return Rotation(numbers(*shape), numbers(*shape))


QKV = {'q': numbers(B, L, H, D), 'k': numbers(B, L, K, D), 'v': numbers(B, L, K, D)}
EXACT = dict(zip(('q_BxLxHxD', 'k_BxMxKxD', 'v_BxMxKxD'), QKV.values(), strict=True))
LINEAR = dict(zip(('q_BxLxHxE', 'k_BxLxKxE', 'v_BxLxKxD'), QKV.values(), strict=True))
DELTA = LINEAR | {'beta_BxLxK': numbers(B, L, K)}
LOSS = {'x_BxLxD': numbers(B, L, D), 'embedding_VxD': numbers(V, D), 'bias_V': None, 'targets_BxL': ids(B, L)}
WEIGHTED = LOSS | {'weights_BxL': numbers(B, L)}
CONVOLUTION = {'x_BxLxN': numbers(B, L, D), 'kernel_SxN': numbers(3, D)}
UNITS = {'x_TxD': numbers(B, L, D), 'into_DxN': numbers(D, 2 * V), 'out_FxD': numbers(V, D)}
EXPERTS = {
    'x_TxD': numbers(L, D),
    'chosen_TxN': ids(L, 2),
    'weights_TxN': numbers(L, 2),
    'into_ExDxG': numbers(3, D, 4),
    'out_ExFxD': numbers(3, 4, D),
    'activate': jax.nn.gelu,
}
ROTARY = {'qk_BxLxNxC': numbers(B, L, H, D), 'rotation': rotation(L, 1, D // 2), 'n_heads': 3}
CALLS = {
    softmax_attention: EXACT,
    polynomial_attention: EXACT | {'degree': 2},
    linear_attention: LINEAR,
    delta_rule: DELTA,
    cross_entropy: LOSS,
    weighted_cross_entropy: WEIGHTED,
    short_convolution: CONVOLUTION,
    apply_experts: EXPERTS,
    gated_units: UNITS,
    rotate: ROTARY,
}
"""Operation → arguments that fit."""

EMPTY = {name: array[:, :0] for name, array in QKV.items()}
WRONG = [
    *((softmax_attention, {'window': n}, f'window = {n}: must be at least 1') for n in (0, -2)),
    *((softmax_attention, {'block': n}, f'block = {n}: must be at least 1') for n in (0, -3)),
    *(
        (function, {'v_BxMxKxD': numbers(B, n, K, D)}, r'v of shape .*: must be \(2, 5, 2, 6\), BxMxKxV like')
        for function in (softmax_attention, polynomial_attention)
        for n in (4, 9)
    ),
    (softmax_attention, {'v_BxMxKxD': numbers(B, L, 1, D)}, r'v of shape \(2, 5, 1, 6\)'),
    (softmax_attention, {'k_BxMxKxD': numbers(B, L, K, D - 1)}, r'k of shape \(2, 5, 2, 5\)'),
    (softmax_attention, {'k_BxMxKxD': numbers(1, L, K, D)}, r'k of shape \(1, 5, 2, 6\)'),
    (softmax_attention, {'q_BxLxHxD': numbers(L, H, D)}, r'q of shape .*: must have 4 axes, BxLxHxD'),
    (softmax_attention, {'q_BxLxHxD': EMPTY['q']}, r'q of shape \(2, 0, 4, 6\): must not be empty'),
    (softmax_attention, {'k_BxMxKxD': EMPTY['k'], 'v_BxMxKxD': EMPTY['v']}, 'k of shape .*: must not be empty'),
    (softmax_attention, {'starts_BxL': ids(1, L)}, 'starts of shape'),
    (softmax_attention, {'sinks_H': numbers(K)}, r'sinks of shape \(2,\): must be \(4,\)'),
    (softmax_attention, {'score_cap': 0.0}, r'score_cap = 0.0: must be above 0'),
    (softmax_attention, {'log_decay_BxMxK': numbers(B, L, H)}, r'log_decay of shape .*: must be \(2, 5, 2\)'),
    (polynomial_attention, {'block': -1}, 'block = -1'),
    *((linear_attention, {'v_BxLxKxD': numbers(B, n, K, D)}, 'v of shape') for n in (4, 6, 9)),
    (linear_attention, {'k_BxLxKxE': numbers(B, L + 1, K, D)}, 'k of shape'),
    (linear_attention, {'q_BxLxHxE': EMPTY['q']}, 'must not be empty'),
    (
        linear_attention,
        {'channel_log_decay_BxLxKxE': -numbers(B, L, K, 1), 'normalize': False},
        'channel_log_decay of shape',
    ),
    (linear_attention, {'initial_state': State(numbers(1, K, D, D), ())}, r'initial_state.kv of shape \(1, 2, 6, 6\)'),
    *((delta_rule, {'beta_BxLxK': numbers(*shape)}, 'beta of shape') for shape in ((B, L, 1), (B, 1, K), (1, L, K))),
    (delta_rule, {'v_BxLxKxD': numbers(B, L + 1, K, D)}, 'v of shape'),
    (delta_rule, {'log_decay_BxLxK': -numbers(B, L, 1)}, 'log_decay of shape'),
    (delta_rule, {'initial_state': numbers(B, K, D, D + 1)}, r'initial_state of shape .*: must be \(2, 2, 6, 6\)'),
    (delta_rule, {'q_BxLxHxE': EMPTY['q']}, 'must not be empty'),
    *((cross_entropy, {'targets_BxL': ids(B, n)}, 'targets of shape') for n in (4, 6)),
    (cross_entropy, {'chunk': 0}, 'chunk = 0: must be at least 1'),
    (cross_entropy, {'cap': 0.0}, 'cap = 0.0: must be above 0'),
    (cross_entropy, {'bias_V': numbers(1)}, 'bias of shape'),
    (cross_entropy, {'x_BxLxD': numbers(B, 0, D), 'targets_BxL': ids(B, 0)}, 'x of shape .*: must not be empty'),
    (weighted_cross_entropy, {'weights_BxL': numbers(1, L)}, 'weights of shape'),
    (weighted_cross_entropy, {'targets_BxL': ids(B, 4)}, 'targets of shape'),
    *((short_convolution, {'before_BxRxN': numbers(B, n, D)}, r'before of shape .*\(2, 2, 6\)') for n in (1, 4)),
    (short_convolution, {'kernel_SxN': numbers(3, 1)}, 'kernel of shape'),
    (short_convolution, {'reach_BxL': ids(B, 1)}, 'reach of shape'),
    (gated_units, {'activation': 'relu'}, "activation = 'relu': must be one of gelu, silu"),
    (gated_units, {'into_DxN': numbers(D, V)}, r'into of shape .*: must be \(6, 22\)'),
    (gated_units, {'norm': Norm(numbers(1), None, False, 1e-5)}, 'norm.gain of shape'),
    (apply_experts, {'weights_TxN': numbers(L, 1)}, 'weights of shape'),
    (rotate, {'rotation': rotation(L, 1, 1)}, r'rotation.cos of shape .*: must be \(5, 1, 3\), Lx1xP'),
    (rotate, {'rotation': rotation(1, L, 1, 3)}, r'rotation.cos of shape .*: must be \(2, 5, 1, 3\), BxLx1xP'),
    (rotate, {'qk_BxLxNxC': numbers(B, L, H, 7)}, 'rotated heads must have an even size'),
    (rotate, {'norms': HeadNorms(*(numbers(n) for n in (D, 1, D, D)))}, 'norms.q_bias of shape'),
    *((rotate, {'n_heads': n}, f'n_heads = {n}: must be 1 to 4') for n in (0, 9)),
]


@pytest.mark.parametrize('function', CALLS, ids=lambda function: function.__name__)
def test_arguments_that_fit_are_taken(function):
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(function(**CALLS[function])))


@pytest.mark.parametrize(('function', 'change', 'message'), WRONG)
def test_arguments_that_do_not_fit_are_refused(function, change, message):
    with pytest.raises(OperationError, match=message) as error:
        function(**(CALLS[function] | change))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('nodes', 'arrays', 'message'),
    [
        ((node(D), node(D)), [numbers(B, L, 1, 2, D)], 'nodes: 2 of them'),
        ((), [numbers(B, L, 1, 2, D)], 'nodes: 0 of them'),
        ((node(D),), [], 'xs: must hold'),
        ((node(D),), [numbers(B, L, 1, 2, D + 1)], 'xs of shape'),
        ((node(D),), [numbers(B, 0, 1, 2, D)], 'xs of shape .*: must not be empty'),
        ((node(D),), [numbers(B, L, 1, 2, D), numbers(B, L + 1, 1, 2, D)], 'xs of shape'),
    ],
)
def test_vectors_that_do_not_fit_the_networks_are_refused(nodes, arrays, message):
    with pytest.raises(OperationError, match=message):
        sketch_networks(nodes, *arrays)


def test_a_convolution_of_one_token_has_no_tokens_before():
    x = numbers(B, L, D)
    y = short_convolution(x, numbers(1, D), before_BxRxN=x[:, :0])
    assert (y == short_convolution(x, numbers(1, D))).all()


def test_every_operation_is_checked():
    tested = {function.__module__.rpartition('.')[2] for function, *_ in WRONG}
    assert set(OPERATIONS) <= tested | {'sketch_networks'}
