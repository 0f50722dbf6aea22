"""Traced JAX programs in NumPy and float64, without a compiler.

    evaluate(jax.make_jaxpr(function)(*shapes), *arrays)

`numpy_rules` has the operations. Programs of several devices run here too: `shard_map` cuts its arguments
into lanes, one per device, and collectives exchange arrays between lanes. What the partitioner would split stays whole.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy_rules
from jax.extend import core

Arrays = list[np.ndarray]
"""One array per lane."""
AGREEMENT = 1e-6
"""The largest difference, relative to the largest number, between arrays that devices hold as copies of each other."""

EXACT = 2.0**12
"""Numbers whose multiple by this is whole are taken for those that float32 holds exactly."""
ROUNDING = 2.0**-24
"""The largest relative error of a number that is rounded to float32."""


class CopiesDiffer(AssertionError):
    """Devices have different numbers where a program says that they have the same."""


def evaluate(
    program: core.ClosedJaxpr, *arguments: Any, rounding: np.random.Generator | None = None
) -> list[np.ndarray]:
    """Returns the results of a program; the arguments are trees, whose leaves are flattened.

    With `rounding`, each constant changes by about as much as float32 has rounded it. Those that float32 holds exactly
    stay.
    """
    leaves = [numpy_rules.widen(leaf) for leaf in jax.tree.leaves(arguments)]
    assert len(leaves) == len(program.jaxpr.invars), f'{len(leaves)} arrays for {len(program.jaxpr.invars)} arguments'
    lanes = Lanes([{}], rounding)
    return [each[0] for each in lanes.closed(program, [[leaf] for leaf in leaves])]


class Lanes:
    """Devices that run one program side by side; each is at a place of the mesh axes that are split so far."""

    def __init__(self, places: Sequence[dict[str, int]], rounding: np.random.Generator | None = None):
        self.places, self.rounding = list(places), rounding

    def __len__(self) -> int:
        return len(self.places)

    def run(self, jaxpr: core.Jaxpr, constants: Sequence[Arrays], arguments: Sequence[Arrays]) -> list[Arrays]:
        """Runs a program; each variable has one array per lane."""
        values: dict[Any, Arrays] = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom: Any) -> Arrays:
            if isinstance(atom, core.Literal):
                return [self.round(numpy_rules.widen(atom.val, atom.aval))] * len(self)
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
                raise NotImplementedError(f'{name}: numpy_rules.py has no such operation')
            values |= zip(equation.outvars, results, strict=True)
            for variable in last[number]:
                values.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _compute(self, operation: Callable, equation: Any, inputs: Sequence[Arrays]) -> list[Arrays]:
        by_lane = []
        for arrays in zip(*inputs, strict=True) if inputs else [()] * len(self):
            found = operation(equation, *arrays)
            by_lane.append(found if isinstance(found, list) else [found])
        return [list(each) for each in zip(*by_lane, strict=True)]

    def closed(self, program: core.ClosedJaxpr, arguments: Sequence[Arrays]) -> list[Arrays]:
        """Runs a program with constants of its own."""
        constants = [[self.round(numpy_rules.widen(constant))] * len(self) for constant in program.consts]
        return self.run(program.jaxpr, constants, arguments)

    def round(self, constant: np.ndarray) -> np.ndarray:
        """Returns a constant, changed as `evaluate` says."""
        if self.rounding is None or constant.dtype.kind != 'f':
            return constant
        is_exact = (constant * EXACT == np.round(constant * EXACT)) | ~np.isfinite(constant)
        error = ROUNDING * self.rounding.uniform(-1, 1, constant.shape)
        return np.where(is_exact, constant, constant * (1 + error))

    def alone(self, lane: int) -> 'Lanes':
        """Returns one of the lanes. It cannot exchange arrays with the others."""
        return Lanes([self.places[lane] | {'': lane}], self.rounding)

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


def _make_unwritten(equation: Any) -> np.ndarray:
    """Returns an array of NaN: whoever reads it before it is written is found."""
    aval = equation.outvars[0].aval
    return np.zeros(aval.shape, aval.dtype) if aval.dtype.kind in 'iub' else np.full(aval.shape, np.nan)


OPERATIONS = numpy_rules.RULES | {
    # Residuals pass as integers through a name (`lm.ops.residuals`): their numbers stay.
    'bitcast_convert_type': lambda equation, x: x,
    'empty': _make_unwritten,
    'empty2': _make_unwritten,  # a scalar
}
"""Primitive → function of its equation and the arrays of a lane (`numpy_rules`)."""
