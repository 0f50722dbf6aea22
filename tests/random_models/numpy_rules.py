"""The operations of JAX in NumPy, entry by entry as a trace has them, with float64 in the place of all real types.

Random numbers are NumPy's, seeded by a key that depends on JAX's only by the order of splits.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Rule = Callable[..., Any]
NORMAL = statistics.NormalDist()
RULES: dict[str, Rule] = {}
"""Primitive → function of its equation and arrays; it returns an array, or a list where there are several results."""


def widen(x: Any, aval: Any = None) -> Any:
    """Returns an array whose real numbers are float64; keys become numbers that seed. `aval`: the type of a literal."""
    if jnp.issubdtype(getattr(x, 'dtype', np.float64), jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x)).astype(np.uint64).sum(-1)
    array = np.asarray(x) if aval is None else np.asarray(x, _type_of(aval.dtype))
    if array.dtype == jax.dtypes.float0:  # the gradient of integers
        return np.zeros(array.shape, bool)
    return array.astype(_type_of(array.dtype), copy=False)


def _type_of(dtype: Any) -> np.dtype:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype)


def _make_zeros(aval: Any) -> np.ndarray:
    return np.zeros(aval.shape, _type_of(aval.dtype))


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function (equation, *arrays) for primitives."""

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divides; integers towards zero."""
    return a / b if a.dtype.kind == 'f' else (np.sign(a) * np.sign(b) * (abs(a) // abs(b))).astype(a.dtype)


def _power(x: np.ndarray, exponent: int) -> np.ndarray:
    return x**exponent if exponent >= 0 else 1 / x**-exponent


def _logistic(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1.0, np.exp(-abs(x))) / (1 + np.exp(-abs(x)))


def _invert_erf(x: np.ndarray) -> np.ndarray:
    inner = np.clip(x, np.nextafter(-1, 0), np.nextafter(1, 0))
    return np.vectorize(lambda each: NORMAL.inv_cdf((each + 1) / 2) / math.sqrt(2), otypes=[float])(inner)


ALIKE = (
    'abs', 'add', 'ceil', 'cos', 'cosh', 'exp', 'exp2', 'expm1', 'floor', 'log', 'log1p', 'nextafter', 'sign', 'sin',
    'sinh', 'sqrt', 'square', 'tan', 'tanh',
)  # fmt: skip
"""Primitives that NumPy computes entry by entry, under the same name."""
RENAMED: dict[str, Callable[..., Any]] = {
    'add_any': np.add, 'and': np.bitwise_and, 'atan2': np.arctan2, 'eq': np.equal, 'ge': np.greater_equal,
    'gt': np.greater, 'is_finite': np.isfinite, 'le': np.less_equal, 'lt': np.less, 'max': np.maximum,
    'min': np.minimum, 'mul': np.multiply, 'ne': np.not_equal, 'neg': np.negative, 'not': np.bitwise_not,
    'or': np.bitwise_or, 'pow': np.power, 'rem': np.fmod, 'shift_left': np.left_shift,
    'shift_right_arithmetic': np.right_shift, 'sub': np.subtract, 'xor': np.bitwise_xor,
}  # fmt: skip
"""Primitive → the function of NumPy, where its name is another one."""
COMPOSED: dict[str, Callable[..., Any]] = {
    'clamp': lambda low, x, high: np.minimum(np.maximum(x, low), high),
    'div': _divide,
    'erf': np.vectorize(math.erf, otypes=[float]),
    'erf_inv': _invert_erf,
    'logistic': _logistic,
    'rsqrt': lambda x: 1 / np.sqrt(x),
    'shift_right_logical': lambda a, b: (a.view(f'u{a.itemsize}') >> b.view(f'u{b.itemsize}')).view(a.dtype),
}
for _name, _function in ({name: getattr(np, name) for name in ALIKE} | RENAMED | COMPOSED).items():
    RULES[_name] = lambda _, *arrays, function=_function: function(*arrays)


@rule('copy', 'copy_p', 'name', 'reduce_precision', 'sharding_constraint', 'reshard', 'pvary', 'stop_gradient')
def _keep(_, x):
    return x


@rule('bitcast_convert_type')
def _read_bits(equation, x):
    """Reads bits as numbers of the traced type: float64 is rounded to it first, and numbers become float64 again."""
    given, wanted = equation.invars[0].aval.dtype, equation.params['new_dtype']
    return widen(np.ascontiguousarray(x.astype(given)).view(wanted))


@rule('round')
def _round(equation, x):
    if equation.params['rounding_method'] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.rint(x)
    return np.copysign(np.floor(abs(x) + 0.5), x)


@rule('select_n')
def _select(_, which, *cases):
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.broadcast_to(which, cases[0].shape), cases)


# --------------------------------------------------------------------------------------------------------------- shapes


@rule('iota')
def _count(equation):
    aval, axis = equation.outvars[0].aval, equation.params['dimension']
    shape = [1] * aval.ndim
    shape[axis] = aval.shape[axis]
    return np.broadcast_to(np.arange(aval.shape[axis], dtype=_type_of(aval.dtype)).reshape(shape), aval.shape)


@rule('broadcast_in_dim')
def _broadcast(equation, x):
    shape, places = equation.params['shape'], equation.params['broadcast_dimensions']
    wide = [1] * len(shape)
    for place, size in zip(places, x.shape, strict=True):
        wide[place] = size
    return np.broadcast_to(x.reshape(wide), shape)


@rule('slice')
def _slice(equation, x):
    params = equation.params
    strides = params['strides'] or [1] * x.ndim
    return x[tuple(map(slice, params['start_indices'], params['limit_indices'], strides))]


@rule('pad')
def _pad(equation, x, value):
    """Pads with entries between, before and behind the given ones; a negative number before or behind cuts."""
    config = equation.params['padding_config']
    wide = [size + max(size - 1, 0) * inner for size, (_, _, inner) in zip(x.shape, config, strict=True)]
    shape = [size + max(low, 0) + max(high, 0) for size, (low, high, _) in zip(wide, config, strict=True)]
    padded = np.full(shape, value, x.dtype)
    starts = [max(low, 0) for low, _, _ in config]
    places = zip(starts, wide, config, strict=True)
    padded[tuple(slice(start, start + size, inner + 1) for start, size, (_, _, inner) in places)] = x
    cuts = zip(shape, config, strict=True)
    return padded[tuple(slice(max(-low, 0), size - max(-high, 0)) for size, (low, high, _) in cuts)]


def _place(starts: Iterable[Any], shape: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the part that begins at `starts`, moved into the array where it would leave it."""
    clamped = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(s, s + size) for s, size in zip(clamped, sizes, strict=True))


@rule('dynamic_slice')
def _cut(equation, x, *starts):
    return x[_place(starts, x.shape, equation.params['slice_sizes'])]


@rule('dynamic_update_slice')
def _put(_, x, update, *starts):
    changed = x.copy()
    changed[_place(starts, x.shape, update.shape)] = update
    return changed


def _locate(indices: np.ndarray, shape: Sequence[int], sizes: Sequence[int], dims: Any, batches: Sequence[int]) -> Any:
    """Locates the slices that a gather reads and a scatter writes.

    Args:
        indices: the first entry of each slice, [..., N].
        shape: of the array.
        sizes: of a slice, by axis of the array.
        dims: (the axes that the N numbers are of, axes of the array that indices have too, axes that slices lack).
        batches: the axes of `indices` for these.

    Returns:
        (the flat place of each entry, [..., *sizes of the axes that slices have]; whether a slice lies inside, [...]).
    """
    indexed, shared, dropped = dims
    outer = indices.shape[:-1]
    starts = [np.zeros(outer, np.int64) for _ in shape]
    for n, axis in enumerate(indexed):
        starts[axis] = indices[..., n].astype(np.int64)
    for axis, batch in zip(shared, batches, strict=True):
        starts[axis] = np.broadcast_to(np.arange(outer[batch]).reshape(-1, *[1] * (len(outer) - batch - 1)), outer)
    limits = [n - size for n, size in zip(shape, sizes, strict=True)]
    inside = np.all([(s >= 0) & (s <= limit) for s, limit in zip(starts, limits, strict=True)], axis=0)
    kept = [axis for axis in range(len(shape)) if axis not in (*shared, *dropped)]
    flat = np.zeros(outer + (1,) * len(kept), np.int64)
    for axis, start in enumerate(starts):
        place = np.clip(start, 0, limits[axis]).reshape(outer + (1,) * len(kept))
        if axis in kept:
            behind = len(kept) - kept.index(axis) - 1
            place = place + np.arange(sizes[axis]).reshape(-1, *[1] * behind)
        flat = flat + place * math.prod(shape[axis + 1 :])
    return flat, np.broadcast_to(inside, outer)


def _clips(mode: Any) -> bool:
    return mode is not None and 'CLIP' in str(mode).upper()


@rule('gather')
def _gather(equation, x, indices):
    params = equation.params
    dims, sizes = params['dimension_numbers'], params['slice_sizes']
    axes = dims.start_index_map, dims.operand_batching_dims, dims.collapsed_slice_dims
    flat, inside = _locate(indices, x.shape, sizes, axes, dims.start_indices_batching_dims)
    found = x.reshape(-1)[flat] if x.size else np.zeros(flat.shape, x.dtype)
    outer = inside.ndim
    if not _clips(params['mode']) and not inside.all():
        fill = params['fill_value']
        fill = fill if fill is not None else np.nan if x.dtype.kind == 'f' else 0
        found = np.where(inside.reshape(inside.shape + (1,) * (found.ndim - outer)), found, fill)
    return np.moveaxis(found, range(outer, found.ndim), dims.offset_dims)


def _scatter(put: Callable[[np.ndarray, np.ndarray, np.ndarray], None]) -> Rule:
    def scatter(equation, x, indices, updates):
        params = equation.params
        dims = params['dimension_numbers']
        window = dims.update_window_dims
        outer = updates.ndim - len(window)
        updates = np.moveaxis(updates, window, range(outer, updates.ndim))
        lacking = (*dims.inserted_window_dims, *dims.operand_batching_dims)
        given = iter(updates.shape[outer:])
        sizes = [1 if axis in lacking else next(given) for axis in range(x.ndim)]
        axes = dims.scatter_dims_to_operand_dims, dims.operand_batching_dims, dims.inserted_window_dims
        flat, inside = _locate(indices, x.shape, sizes, axes, dims.scatter_indices_batching_dims)
        flat = np.broadcast_to(flat, updates.shape)
        if not _clips(params['mode']):
            flat, updates = flat[inside], updates[inside]
        changed = x.flatten()
        put(changed, flat.reshape(-1), updates.reshape(-1))
        return changed.reshape(x.shape)

    return scatter


# ---------------------------------------------------------------------------------------------------- sums and products


def _cumulate(function: np.ufunc) -> Rule:
    def cumulate(equation, x):
        axis = equation.params['axis']
        turned = np.flip(x, axis) if equation.params['reverse'] else x
        found = function.accumulate(turned, axis=axis, dtype=x.dtype)
        return np.flip(found, axis) if equation.params['reverse'] else found

    return cumulate


@rule('sort')
def _sort(equation, *arrays):
    axis, keys = equation.params['dimension'], equation.params['num_keys']
    order = np.lexsort(arrays[:keys][::-1], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in arrays]


@rule('top_k')
def _top(equation, x):
    axis = equation.params.get('axis', -1) % x.ndim
    order = np.argsort(-x, axis=axis, kind='stable')
    order = np.take(order, range(equation.params['k']), axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int32)]


@rule('dot_general')
def _multiply(equation, a, b):
    (summed_a, summed_b), (batch_a, batch_b) = equation.params['dimension_numbers']
    free_a = [i for i in range(a.ndim) if i not in (*summed_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*summed_b, *batch_b)]
    outer = [a.shape[i] for i in batch_a]
    inner = math.prod(a.shape[i] for i in summed_a)
    rows, columns = [a.shape[i] for i in free_a], [b.shape[i] for i in free_b]
    a = a.transpose([*batch_a, *free_a, *summed_a]).reshape(*outer, math.prod(rows), inner)
    b = b.transpose([*batch_b, *summed_b, *free_b]).reshape(*outer, inner, math.prod(columns))
    return (a @ b).reshape(*outer, *rows, *columns).astype(_type_of(equation.outvars[0].aval.dtype), copy=False)


@rule('ragged_dot_general')
def _multiply_groups(equation, a, b, sizes):
    """Multiplies groups of rows of a, [R, K], with matrices of their own; or groups of summed rows: [R, M], [R, N]."""
    params = equation.params
    ((summed_a,), (summed_b,)), _ = params['ragged_dot_dimension_numbers'].dot_dimension_numbers
    (ragged,) = params['ragged_dot_dimension_numbers'].lhs_ragged_dimensions
    groups = params['ragged_dot_dimension_numbers'].rhs_group_dimensions
    ends = np.cumsum(sizes)
    pieces = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if ragged == summed_a:
        a, b = np.moveaxis(a, summed_a, 0), np.moveaxis(b, summed_b, 0)
        return np.stack([a[piece].T @ b[piece] for piece in pieces])
    a, b = np.moveaxis(a, ragged, 0), np.moveaxis(b, (*groups, summed_b), (0, 1))
    found = np.zeros((a.shape[0], b.shape[2]))
    for matrix, piece in zip(b, pieces, strict=True):
        # Row by row: how BLAS rounds a row depends on how many there are, and that on the choices of other tokens.
        found[piece] = (a[piece, None] @ matrix)[:, 0]
    return found


@rule('triangular_solve')
def _solve(equation, a, b):
    params = equation.params
    a = np.tril(a) if params['lower'] else np.triu(a)
    if params['unit_diagonal']:
        a = a * (1 - np.eye(a.shape[-1])) + np.eye(a.shape[-1])
    a = a.swapaxes(-1, -2) if params['transpose_a'] else a
    if params['left_side']:
        return np.linalg.solve(a, b)
    return np.linalg.solve(a.swapaxes(-1, -2), b.swapaxes(-1, -2)).swapaxes(-1, -2)


# ------------------------------------------------------------------------------------------------------- random numbers


@rule('random_seed', 'random_wrap', 'random_unwrap')
def _seed(equation, x):
    shape = equation.outvars[0].aval.shape
    return np.broadcast_to(x.astype(np.uint64).reshape(-1)[0], shape)


@rule('random_split')
def _split_key(equation, keys):
    shape = equation.params['shape']
    drawn = [_generator(key).integers(2**63, size=shape, dtype=np.uint64) for key in keys.reshape(-1)]
    return np.stack(drawn).reshape(*keys.shape, *shape)


@rule('random_fold_in')
def _fold(_, keys, number):
    return keys * np.uint64(1_000_003) + number.astype(np.uint64) + np.uint64(1)


@rule('random_bits')
def _draw_bits(equation, keys):
    shape, width = equation.params['shape'], equation.params['bit_width']
    drawn = [_generator(key).integers(2**width, size=shape, dtype=f'u{width // 8}') for key in keys.reshape(-1)]
    return np.stack(drawn).reshape(*keys.shape, *shape)


def _generator(key: Any) -> np.random.Generator:
    return np.random.default_rng(int(key))


def _reduce(function: Callable[..., np.ndarray]) -> Rule:
    return lambda equation, x: function(x, axis=tuple(equation.params['axes'])).astype(x.dtype, copy=False)


def _find(function: Callable[..., np.ndarray]) -> Rule:
    return lambda equation, x: function(x, axis=equation.params['axes'][0]).astype(equation.params['index_dtype'])


RULES |= {
    'argmax': _find(np.argmax),
    'argmin': _find(np.argmin),
    'concatenate': lambda equation, *arrays: np.concatenate(arrays, equation.params['dimension']),
    'convert_element_type': lambda equation, x: x.astype(_type_of(equation.params['new_dtype']), copy=False),
    'cumlogsumexp': _cumulate(np.logaddexp),
    'cummax': _cumulate(np.maximum),
    'cummin': _cumulate(np.minimum),
    'cumprod': _cumulate(np.multiply),
    'cumsum': _cumulate(np.add),
    'integer_pow': lambda equation, x: _power(x, equation.params['y']),
    'qr': lambda equation, x: list(np.linalg.qr(x, 'complete' if equation.params['full_matrices'] else 'reduced')),
    'reduce_and': _reduce(np.all),
    'reduce_max': _reduce(np.max),
    'reduce_min': _reduce(np.min),
    'reduce_or': _reduce(np.any),
    'reduce_prod': _reduce(np.prod),
    'reduce_sum': _reduce(np.sum),
    'reshape': lambda equation, x: x.reshape(equation.params['new_sizes']),
    'rev': lambda equation, x: np.flip(x, equation.params['dimensions']),
    'scatter': _scatter(lambda x, at, updates: x.__setitem__(at, updates)),
    'split': lambda equation, x: np.split(x, np.cumsum(equation.params['sizes'])[:-1], equation.params['axis']),
    'stack': lambda equation, *arrays: np.stack(arrays, equation.params.get('axis', 0)),
    'tile': lambda equation, x: np.tile(x, equation.params['reps']),
    'transpose': lambda equation, x: x.transpose(equation.params['permutation']),
    **dict.fromkeys(('device_put', 'optimization_barrier'), lambda _, *arrays: list(arrays)),
    **dict.fromkeys(('empty', 'empty2'), lambda equation: _make_zeros(equation.outvars[0].aval)),
    **dict.fromkeys(('expand_dims', 'squeeze'), lambda equation, x: x.reshape(equation.outvars[0].aval.shape)),
    **dict.fromkeys(('scatter-add', 'scatter_add'), _scatter(np.add.at)),
    **dict.fromkeys(('scatter-max', 'scatter_max'), _scatter(np.maximum.at)),
    **dict.fromkeys(('scatter-min', 'scatter_min'), _scatter(np.minimum.at)),
    **dict.fromkeys(('scatter-mul', 'scatter_mul'), _scatter(np.multiply.at)),
}
