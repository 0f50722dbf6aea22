"""Traced JAX programs in NumPy and float64, without a compiler.

    evaluate(jax.make_jaxpr(function)(*shapes), *arrays)

Each operation is computed by itself, and every floating-point type counts as float64. Programs of several devices run
too: `shard_map` cuts its arguments into lanes, one per device, and collectives exchange arrays between lanes. What the
partitioner would split stays whole.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from scipy import special

Arrays = list[np.ndarray]
"""One array per lane."""
AGREEMENT = 1e-6
"""The largest difference, relative to the largest number, between arrays that devices hold as copies of each other."""


class CopiesDiffer(AssertionError):
    """Devices have different numbers where a program says that they have the same."""


def evaluate(program: core.ClosedJaxpr, *arguments: Any) -> list[np.ndarray]:
    """Returns the results of a program; the arguments are trees, whose leaves are flattened."""
    leaves = [_widen(leaf) for leaf in jax.tree.leaves(arguments)]
    assert len(leaves) == len(program.jaxpr.invars), f'{len(leaves)} arrays for {len(program.jaxpr.invars)} arguments'
    lanes = Lanes([{}])
    return [each[0] for each in lanes.run(program.jaxpr, _of_constants(program, 1), [[leaf] for leaf in leaves])]


def _widen(x: Any) -> np.ndarray:
    """Returns an array, float64 where it has a floating-point type."""
    array = np.asarray(x)
    if array.dtype.kind == 'V':  # float0, the cotangents of integers
        return np.zeros(array.shape, bool)
    return array.astype(np.float64) if array.dtype.kind not in 'iub' else array


def _of_constants(program: core.ClosedJaxpr, lanes: int) -> list[Arrays]:
    return [[_widen(constant)] * lanes for constant in program.consts]


class Lanes:
    """Devices that run one program side by side; each is at a place of the mesh axes that are split so far."""

    def __init__(self, places: Sequence[dict[str, int]]):
        self.places = list(places)

    def __len__(self) -> int:
        return len(self.places)

    def run(self, jaxpr: core.Jaxpr, constants: Sequence[Arrays], arguments: Sequence[Arrays]) -> list[Arrays]:
        """Runs a program; each variable has one array per lane."""
        values: dict[Any, Arrays] = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom: Any) -> Arrays:
            if isinstance(atom, core.Literal):
                return [_widen(atom.val)] * len(self)
            return values[atom]

        last = _find_last_uses(jaxpr)
        for number, equation in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in equation.invars]
            name = equation.primitive.name
            if name in CONTROL:
                results = CONTROL[name](self, equation.params, inputs)
            elif name in OPERATIONS:
                results = self._compute(OPERATIONS[name], equation, inputs)
            else:
                raise NotImplementedError(f'{name}: numpy_jaxpr.py has no such operation')
            values |= zip(equation.outvars, results, strict=True)
            for variable in last[number]:
                values.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _compute(self, operation: Callable, equation: Any, inputs: Sequence[Arrays]) -> list[Arrays]:
        by_lane = []
        for arrays in zip(*inputs, strict=True) if inputs else [()] * len(self):
            found = operation(equation.params, *arrays)
            by_lane.append(found if equation.primitive.multiple_results else [found])
        return [list(each) for each in zip(*by_lane, strict=True)]

    def closed(self, program: core.ClosedJaxpr, arguments: Sequence[Arrays]) -> list[Arrays]:
        """Runs a program with constants of its own."""
        return self.run(program.jaxpr, _of_constants(program, len(self)), arguments)

    def alone(self, lane: int) -> 'Lanes':
        """Returns one of the lanes. It cannot exchange arrays with the others."""
        return Lanes([self.places[lane] | {'': lane}])

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Returns the lanes that differ in `axes` alone, in the order of the axes."""
        axes = [axes] if isinstance(axes, str) else list(axes)
        found: dict[Any, list[tuple[Any, int]]] = {}
        for lane, place in enumerate(self.places):
            assert '' not in place, 'a branch that only some devices take exchanges arrays'
            rest = tuple(sorted(item for item in place.items() if item[0] not in axes))
            found.setdefault(rest, []).append((tuple(place[axis] for axis in axes), lane))
        return [[lane for _, lane in sorted(group)] for group in found.values()]


_LAST_USES: weakref.WeakKeyDictionary[Any, list[list[Any]]] = weakref.WeakKeyDictionary()


def _find_last_uses(jaxpr: core.Jaxpr) -> list[list[Any]]:
    """Returns the variables that no equation after each one reads."""
    if (known := _LAST_USES.get(jaxpr)) is not None:
        return known
    kept = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    last: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last |= dict.fromkeys((atom for atom in equation.invars if not isinstance(atom, core.Literal)), number)
        last |= dict.fromkeys(equation.outvars, number)
    found: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for variable, number in last.items():
        if variable not in kept:
            found[number].append(variable)
    _LAST_USES[jaxpr] = found
    return found


# Control flow and devices: functions of (lanes, parameters, inputs) that return the results.


def _call(key: str) -> Callable:
    def call(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
        program = params[key]
        if isinstance(program, core.ClosedJaxpr):
            return lanes.closed(program, inputs)
        return lanes.run(program, [], inputs)

    return call


def _scan(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
    constants, carries = params['num_consts'], params['num_carry']
    fixed, carry = inputs[:constants], inputs[constants : constants + carries]
    scanned, length = inputs[constants + carries :], params['length']
    stacked: list[list[Arrays]] = [[] for _ in params['jaxpr'].out_avals[carries:]]
    turns = range(length - 1, -1, -1) if params['reverse'] else range(length)
    for turn in turns:
        now = [[x[turn] for x in arrays] for arrays in scanned]
        results = lanes.closed(params['jaxpr'], [*fixed, *carry, *now])
        carry = results[:carries]
        for place, result in zip(stacked, results[carries:], strict=True):
            place.append(result)
    outputs = []
    for place, aval in zip(stacked, params['jaxpr'].out_avals[carries:], strict=True):
        ordered = place[::-1] if params['reverse'] else place
        if not ordered:
            outputs.append([np.zeros((0, *aval.shape))] * len(lanes))
        else:
            outputs.append([np.stack([turn[lane] for turn in ordered]) for lane in range(len(lanes))])
    return [*carry, *outputs]


def _apart(lanes: Lanes, function: Callable, inputs: list[Arrays]) -> list[Arrays]:
    """Runs a function of (lanes, inputs) on each lane by itself."""
    by_lane = [function(lanes.alone(i), [[arrays[i]] for arrays in inputs]) for i in range(len(lanes))]
    return [[each[0] for each in results] for results in zip(*by_lane, strict=True)]


def _while(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
    asked = params['cond_nconsts']
    done = asked + params['body_nconsts']
    tests, fixed, carry = inputs[:asked], inputs[asked:done], inputs[done:]
    while True:
        going = [bool(x) for x in lanes.closed(params['cond_jaxpr'], [*tests, *carry])[0]]
        if any(going) and not all(going):
            rest = lambda lane, arrays: _while(lane, params, arrays)  # noqa: E731
            return _apart(lanes, rest, [*tests, *fixed, *carry])
        if not going[0]:
            return carry
        carry = lanes.closed(params['body_jaxpr'], [*fixed, *carry])


def _cond(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
    branches = params['branches']
    chosen = {min(max(int(x), 0), len(branches) - 1) for x in inputs[0]}
    if len(chosen) > 1:
        return _apart(lanes, lambda lane, arrays: _cond(lane, params, arrays), inputs)
    return lanes.closed(branches[chosen.pop()], inputs[1:])


def _shard_map(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
    sizes = dict(params['mesh'].shape)
    axes = [axis for axis in params['mesh'].axis_names if axis in params['newly_manual_axes']]
    inner = [dict(zip(axes, place, strict=True)) for place in itertools.product(*(range(sizes[axis]) for axis in axes))]
    split = Lanes([outer | place for outer in lanes.places for place in inner])

    def names_of(spec: Any) -> list[tuple[str, ...]]:
        return [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]

    def locate(x_shape: Sequence[int], spec: Any, place: dict[str, int]) -> tuple[slice, ...]:
        found = []
        for size, names in zip(x_shape, names_of(spec), strict=False):
            number = count = 0
            count = 1
            for name in names:
                number, count = number * sizes[name] + place[name], count * sizes[name]
            assert size % count == 0, (x_shape, spec)
            found.append(slice(number * (size // count), (number + 1) * (size // count)))
        return tuple(found)

    arguments = [
        [x[locate(x.shape, spec, place)] for x in arrays for place in inner]
        for arrays, spec in zip(inputs, params['in_specs'], strict=True)
    ]
    results = split.run(params['jaxpr'], [], arguments)

    def join(arrays: Arrays, spec: Any) -> np.ndarray:
        shape = list(arrays[0].shape)
        for axis, names in enumerate(names_of(spec)):
            shape[axis] *= int(np.prod([sizes[name] for name in names], dtype=int))
        whole, known = np.empty(shape, arrays[0].dtype), {}
        for array, place in zip(arrays, inner, strict=True):
            at = locate(shape, spec, place)
            key = tuple((part.start, part.stop) for part in at)
            if key in known:
                _check_copies(known[key], array)
            else:
                known[key] = whole[at] = array
        return whole

    count = len(inner)
    return [
        [join(arrays[i * count : (i + 1) * count], spec) for i in range(len(lanes))]
        for arrays, spec in zip(results, params['out_specs'], strict=True)
    ]


def _check_copies(first: np.ndarray, second: np.ndarray) -> None:
    if first.size and first.dtype.kind == 'f':
        finite = np.where(np.isfinite(first) & np.isfinite(second), first - second, 0.0)
        largest = np.abs(np.where(np.isfinite(first), first, 0.0)).max()
        if np.abs(finite).max() > AGREEMENT * max(largest, 1e-12):
            raise CopiesDiffer(
                f'copies of an array {first.shape} differ by {np.abs(finite).max():.2e} of {largest:.2e}'
            )


def _collective(combine: Callable[[dict, list[np.ndarray]], list[np.ndarray]], key: str = 'axis_name') -> Callable:
    """Returns the control function of an exchange inside each group of lanes."""

    def exchange(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
        assert params.get('axis_index_groups') is None
        outputs = []
        for arrays in inputs:
            found: list[Any] = [None] * len(lanes)
            for group in lanes.groups(params[key]):
                for lane, result in zip(group, combine(params, [arrays[i] for i in group]), strict=True):
                    found[lane] = result
            outputs.append(found)
        return outputs

    return exchange


def _gather_all(params: dict, arrays: Arrays) -> Arrays:
    join = np.concatenate if params['tiled'] else np.stack
    return [join(arrays, axis=params['all_gather_dimension'])] * len(arrays)


def _scatter_sum(params: dict, arrays: Arrays) -> Arrays:
    total, axis = sum(arrays), params['scatter_dimension']
    if params['tiled']:
        return np.split(total, len(arrays), axis=axis)
    return [np.take(total, i, axis=axis) for i in range(len(arrays))]


def _permute(params: dict, arrays: Arrays) -> Arrays:
    found = [np.zeros_like(arrays[0]) for _ in arrays]
    for source, target in params['perm']:
        found[target] = arrays[source]
    return found


def _exchange_all(params: dict, arrays: Arrays) -> Arrays:
    cut = [np.split(x, len(arrays), axis=params['split_axis']) for x in arrays]
    assert params['tiled']
    return [np.concatenate([row[i] for row in cut], axis=params['concat_axis']) for i in range(len(arrays))]


def _axis_index(lanes: Lanes, params: dict, inputs: list[Arrays]) -> list[Arrays]:
    return [[np.asarray(place[params['axis_name']], np.int32) for place in lanes.places]]


CONTROL: dict[str, Callable] = {
    'jit': _call('jaxpr'),
    'pjit': _call('jaxpr'),
    'closed_call': _call('call_jaxpr'),
    'core_call': _call('call_jaxpr'),
    'remat2': _call('jaxpr'),
    'checkpoint': _call('jaxpr'),
    'custom_vjp_call': _call('call_jaxpr'),
    'custom_jvp_call': _call('call_jaxpr'),
    'scan': _scan,
    'while': _while,
    'cond': _cond,
    'shard_map': _shard_map,
    'axis_index': _axis_index,
    'psum': _collective(lambda params, arrays: [sum(arrays)] * len(arrays), 'axes'),
    'psum_invariant': _collective(lambda params, arrays: [sum(arrays)] * len(arrays), 'axes'),
    'pmax': _collective(lambda params, arrays: [np.maximum.reduce(arrays)] * len(arrays), 'axes'),
    'pmin': _collective(lambda params, arrays: [np.minimum.reduce(arrays)] * len(arrays), 'axes'),
    'all_gather': _collective(_gather_all),
    'reduce_scatter': _collective(_scatter_sum),
    'ppermute': _collective(_permute),
    'all_to_all': _collective(_exchange_all),
}


# Operations: functions of (parameters, arrays) that return an array, or a list of them.


def _plain(function: Callable) -> Callable:
    return lambda params, *arrays: function(*arrays)


def _convert(params: dict, x: np.ndarray) -> np.ndarray:
    dtype = np.dtype(params['new_dtype'])
    return x.astype(dtype if dtype.kind in 'iub' else np.float64)


def _dtype(params: dict) -> np.dtype:
    dtype = np.dtype(params['dtype'])
    return dtype if dtype.kind in 'iub' else np.dtype(np.float64)


def _broadcast(params: dict, x: np.ndarray, *_: Any) -> np.ndarray:
    shape = [1] * len(params['shape'])
    for axis, size in zip(params['broadcast_dimensions'], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params['shape'])


def _iota(params: dict) -> np.ndarray:
    shape, axis = params['shape'], params['dimension']
    line = np.arange(shape[axis], dtype=_dtype(params))
    return np.broadcast_to(line.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)


def _slice(params: dict, x: np.ndarray) -> np.ndarray:
    strides = params['strides'] or [1] * x.ndim
    bounds = zip(params['start_indices'], params['limit_indices'], strides, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _starts(starts: Sequence[np.ndarray], shape: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    found = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(s, s + size) for s, size in zip(found, sizes, strict=True))


def _dynamic_slice(params: dict, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    return x[_starts(starts, x.shape, params['slice_sizes'])]


def _dynamic_update(params: dict, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    found = x.astype(np.result_type(x, update))
    found[_starts(starts, x.shape, update.shape)] = update
    return found


def _pad(params: dict, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    config = params['padding_config']
    shape = [low + high + n + max(n - 1, 0) * inner for n, (low, high, inner) in zip(x.shape, config, strict=True)]
    wide = [(max(low, 0), max(high, 0), inner) for low, high, inner in config]
    padded = np.full(
        [a + b + n + max(n - 1, 0) * i for n, (a, b, i) in zip(x.shape, wide, strict=True)], value, x.dtype
    )
    padded[tuple(slice(a, a + n + max(n - 1, 0) * i, i + 1) for n, (a, _, i) in zip(x.shape, wide, strict=True))] = x
    begins = [max(-low, 0) for low, _, _ in config]
    return padded[tuple(slice(b, b + n) for b, n in zip(begins, shape, strict=True))]


def _dot(params: dict, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    (x_summed, y_summed), (x_batch, y_batch) = params['dimension_numbers']
    x_kept = [i for i in range(x.ndim) if i not in (*x_summed, *x_batch)]
    y_kept = [i for i in range(y.ndim) if i not in (*y_summed, *y_batch)]
    batch = [x.shape[i] for i in x_batch]
    summed = int(np.prod([x.shape[i] for i in x_summed], dtype=int))
    rows, columns = [x.shape[i] for i in x_kept], [y.shape[i] for i in y_kept]
    left = x.transpose(*x_batch, *x_kept, *x_summed).reshape(*batch, int(np.prod(rows, dtype=int)), summed)
    right = y.transpose(*y_batch, *y_summed, *y_kept).reshape(*batch, summed, int(np.prod(columns, dtype=int)))
    return np.matmul(left, right).reshape(*batch, *rows, *columns)


def _ragged_dot(params: dict, x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    numbers = params['ragged_dot_dimension_numbers']
    (ragged,) = numbers.lhs_ragged_dimensions
    (x_summed, y_summed), batch = numbers.dot_dimension_numbers
    assert batch == ((), ())
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    parts = [slice(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
    if not numbers.rhs_group_dimensions:
        assert (x_summed, y_summed) == ((ragged,), (0,))
        assert ragged == 0
        return np.stack([np.matmul(x[part].T, y[part]) for part in parts])
    assert (ragged, numbers.rhs_group_dimensions) == (0, (0,))
    assert x_summed == (1,)
    result = np.zeros((x.shape[0], y.shape[3 - y_summed[0]]))
    for number, part in enumerate(parts):
        # Row by row: how BLAS rounds a row depends on how many there are, and that on the choices of other tokens.
        result[part] = np.matmul(x[part, None], y[number] if y_summed == (1,) else y[number].T)[:, 0]
    return result


def _gather(params: dict, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    numbers, sizes = params['dimension_numbers'], params['slice_sizes']
    places = indices.shape[:-1]
    window = [i for i in range(x.ndim) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    grid = np.indices(places)
    starts: list[Any] = [np.zeros(places, np.int64) for _ in range(x.ndim)]
    valid = np.ones(places, bool)
    for column, axis in enumerate(numbers.start_index_map):
        raw = indices[..., column].astype(np.int64)
        starts[axis] = np.clip(raw, 0, x.shape[axis] - sizes[axis])
        valid &= starts[axis] == raw
    for axis, source in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        starts[axis] = grid[source]
    count = len(window)
    index = []
    for axis in range(x.ndim):
        start = starts[axis].reshape(*places, *[1] * count)
        if axis in window:
            at = window.index(axis)
            offsets = np.arange(sizes[axis]).reshape([-1 if i == at else 1 for i in range(count)])
            start = start + offsets
        index.append(start)
    found = x[tuple(index)]
    found = np.broadcast_to(found, (*places, *(sizes[axis] for axis in window)))
    if 'FILL' in str(params['mode']):
        fill = params['fill_value']
        fill = (np.nan if x.dtype.kind == 'f' else np.iinfo(x.dtype).min) if fill is None else fill
        found = np.where(valid.reshape(*places, *[1] * count), found, np.asarray(fill, x.dtype))
    offset = set(numbers.offset_dims)
    order: list[int] = []
    batch_axes, window_axes = iter(range(len(places))), iter(range(len(places), found.ndim))
    for axis in range(found.ndim):
        order.append(next(window_axes) if axis in offset else next(batch_axes))
    return found.transpose(order)


def _scatter(combine: Callable[[np.ndarray, Any, np.ndarray], None]) -> Callable:
    def scatter(params: dict, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
        numbers = params['dimension_numbers']
        places = indices.shape[:-1]
        windows = numbers.update_window_dims
        scattered = [i for i in range(updates.ndim) if i not in windows]
        moved = updates.transpose(*scattered, *windows)
        hidden = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        window = [i for i in range(x.ndim) if i not in hidden]
        sizes = dict(zip(window, moved.shape[len(places) :], strict=True))
        grid = np.indices(places)
        starts: list[Any] = [np.zeros(places, np.int64) for _ in range(x.ndim)]
        for column, axis in enumerate(numbers.scatter_dims_to_operand_dims):
            starts[axis] = indices[..., column].astype(np.int64)
        for axis, source in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
            starts[axis] = grid[source]
        clip = 'CLIP' in str(params['mode'])
        valid = np.ones(places, bool)
        for axis in range(x.ndim):
            most = x.shape[axis] - sizes.get(axis, 1)
            if clip:
                starts[axis] = np.clip(starts[axis], 0, most)
            valid &= (starts[axis] >= 0) & (starts[axis] <= most)
        result = x.astype(np.result_type(x, updates))
        count, index = len(window), []
        for axis in range(x.ndim):
            start = starts[axis][valid].reshape(-1, *[1] * count)
            if axis in sizes:
                at = window.index(axis)
                start = start + np.arange(sizes[axis]).reshape([-1 if i == at else 1 for i in range(count)])
            index.append(start)
        combine(result, tuple(index), moved[valid])
        return result

    return scatter


def _set(target: np.ndarray, index: Any, values: np.ndarray) -> None:
    target[index] = values


def _sort(params: dict, *arrays: np.ndarray) -> list[np.ndarray]:
    axis = params['dimension']
    order = np.lexsort(arrays[: params['num_keys']][::-1], axis=axis)
    return [np.take_along_axis(x, order, axis=axis) for x in arrays]


def _top_k(params: dict, x: np.ndarray) -> list[np.ndarray]:
    axis = params.get('axis', x.ndim - 1)
    order = np.argsort(-x, axis=axis, kind='stable')
    chosen = np.take(order, np.arange(params['k']), axis=axis)
    return [np.take_along_axis(x, chosen, axis=axis), chosen.astype(np.int32)]


def _split(params: dict, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(params['sizes'])[:-1], axis=params['axis'])


def _select(params: dict, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _reduce(ufunc: Any, empty: Any = None) -> Callable:
    def reduce(params: dict, x: np.ndarray) -> np.ndarray:
        return np.asarray(ufunc.reduce(x, axis=tuple(params['axes']), **({} if empty is None else {'initial': empty})))

    return reduce


def _reduce_sum(params: dict, x: np.ndarray) -> np.ndarray:
    return np.asarray(x.sum(axis=tuple(params['axes']), dtype=x.dtype))


def _arg(function: Callable) -> Callable:
    return lambda params, x: function(x, axis=params['axes'][0]).astype(params['index_dtype'])


def _cumulate(ufunc: Any) -> Callable:
    def cumulate(params: dict, x: np.ndarray) -> np.ndarray:
        axis = params['axis']
        x = np.flip(x, axis) if params['reverse'] else x
        found = ufunc.accumulate(x, axis=axis)
        return np.flip(found, axis) if params['reverse'] else found

    return cumulate


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind == 'f':
        return x / y
    return np.where(y == 0, -1, np.trunc(np.divide(x, np.where(y == 0, 1, y)))).astype(x.dtype)


def _power(x: np.ndarray, y: int) -> np.ndarray:
    return x**y if y >= 0 else 1.0 / x**-y


def _round(params: dict, x: np.ndarray) -> np.ndarray:
    if 'EVEN' in str(params['rounding_method']):
        return np.rint(x)
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def _make_empty(params: dict) -> np.ndarray:
    """Returns an array of NaN: whoever reads it before it is written is found."""
    shape, dtype = params.get('shape', ()), params['dtype']
    kind = np.dtype(dtype).kind
    return np.zeros(shape, dtype) if kind in 'iub' else np.full(shape, np.nan)


def _same(params: dict, x: Any, *_: Any) -> Any:
    return x


OPERATIONS: dict[str, Callable] = {
    'abs': _plain(np.abs),
    'add': _plain(np.add),
    'add_any': _plain(np.add),
    'and': _plain(np.bitwise_and),
    'argmax': _arg(np.argmax),
    'argmin': _arg(np.argmin),
    # Residuals pass as integers through a name (`lm.ops.residuals`): their numbers stay.
    'bitcast_convert_type': _same,
    'broadcast_in_dim': _broadcast,
    'clamp': lambda params, low, x, high: np.clip(x, low, high),
    'concatenate': lambda params, *xs: np.concatenate(xs, axis=params['dimension']),
    'convert_element_type': _convert,
    'copy': _same,
    'copy_p': _same,
    'cos': _plain(np.cos),
    'cosh': _plain(np.cosh),
    'cummax': _cumulate(np.maximum),
    'cumprod': _cumulate(np.multiply),
    'cumsum': _cumulate(np.add),
    'div': _plain(_divide),
    'dot_general': _dot,
    'dynamic_slice': _dynamic_slice,
    'dynamic_update_slice': _dynamic_update,
    'empty': _make_empty,
    'empty2': _make_empty,  # a scalar
    'eq': _plain(np.equal),
    'erf': _plain(special.erf),
    'exp': _plain(np.exp),
    'exp2': _plain(np.exp2),
    'expand_dims': lambda params, x: np.expand_dims(x, params['dimensions']),
    'expm1': _plain(np.expm1),
    'floor': _plain(np.floor),
    'gather': _gather,
    'ge': _plain(np.greater_equal),
    'gt': _plain(np.greater),
    'integer_pow': lambda params, x: _power(x, params['y']),
    'iota': _iota,
    'is_finite': _plain(np.isfinite),
    'le': _plain(np.less_equal),
    'log': _plain(np.log),
    'log1p': _plain(np.log1p),
    'logistic': _plain(special.expit),
    'lt': _plain(np.less),
    'max': _plain(np.maximum),
    'min': _plain(np.minimum),
    'mul': _plain(np.multiply),
    'name': _same,
    'ne': _plain(np.not_equal),
    'neg': _plain(np.negative),
    'not': _plain(np.invert),
    'optimization_barrier': lambda params, *xs: list(xs),
    'or': _plain(np.bitwise_or),
    'pad': _pad,
    'pow': _plain(np.power),
    'ragged_dot_general': _ragged_dot,
    'reduce_and': _reduce(np.logical_and),
    'reduce_max': _reduce(np.maximum),
    'reduce_min': _reduce(np.minimum),
    'reduce_or': _reduce(np.logical_or),
    'reduce_precision': _same,
    'reduce_prod': _reduce(np.multiply),
    'reduce_sum': _reduce_sum,
    'rem': _plain(np.fmod),
    'reshape': lambda params, x: x.reshape(params['new_sizes']),
    'rev': lambda params, x: np.flip(x, params['dimensions']),
    'round': _round,
    'rsqrt': _plain(lambda x: 1.0 / np.sqrt(x)),
    'scatter': _scatter(_set),
    'scatter-add': _scatter(np.add.at),
    'scatter_add': _scatter(np.add.at),
    'select_n': _select,
    'sharding_constraint': _same,
    'shift_left': _plain(np.left_shift),
    'shift_right_logical': _plain(np.right_shift),
    'sign': _plain(np.sign),
    'sin': _plain(np.sin),
    'sinh': _plain(np.sinh),
    'slice': _slice,
    'sort': _sort,
    'split': _split,
    'sqrt': _plain(np.sqrt),
    'square': _plain(np.square),
    'squeeze': lambda params, x: np.squeeze(x, tuple(params['dimensions'])),
    'stack': lambda params, *xs: np.stack(xs, axis=params['axis']),
    'stop_gradient': _same,
    'sub': _plain(np.subtract),
    'tan': _plain(np.tan),
    'tanh': _plain(np.tanh),
    'top_k': _top_k,
    'transpose': lambda params, x: x.transpose(params['permutation']),
    'xor': _plain(np.bitwise_xor),
}
