"""Arrays that are computed when they are asked for, so that a checkpoint is never in memory as a whole.

The families (`lm.interop.families`) transform tensors by few functions of NumPy. `Deferred` takes down these functions.
`np.asarray` reads the tensors that they need, and computes. Other functions of NumPy compute at once.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class Deferred(NDArrayOperatorsMixin):
    """An array of float32 of a known shape. `compute` gives it, and may be called again.

    Attributes:
        origin: where the first of its numbers are kept; those who read many arrays in this order read less.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, shape: Sequence[int], compute: Callable[[], np.ndarray], origin: tuple[int, ...] = ()):
        self.shape, self._compute, self.origin = tuple(int(n) for n in shape), compute, origin

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.asarray(self._compute(), dtype or np.float32)
        if found.shape != self.shape:
            raise ValueError(f'an array is {list(found.shape)}, not {list(self.shape)}')
        return found

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> object:
        if method != '__call__' or options or ufunc.nout != 1:
            return getattr(ufunc, method)(*map(_settle, inputs), **options)
        shape = np.broadcast_shapes(*map(_find_shape, inputs))
        return Deferred(shape, lambda: ufunc(*map(_settle, inputs)), _find_origin(inputs))

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        name = getattr(function, '__name__', '')
        if name in _TAKEN_DOWN:
            return _TAKEN_DOWN[name](*arguments, **options)
        settle = lambda x: [_settle(y) for y in x] if isinstance(x, list | tuple) else _settle(x)  # noqa: E731
        return function(*map(settle, arguments), **{key: settle(x) for key, x in options.items()})

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> 'Deferred':
        return self._then(self.shape[::-1], lambda x: x.T)

    def reshape(self, *shape: Any) -> 'Deferred':
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        known = math.prod(n for n in sizes if n != -1)
        whole = tuple(self.size // known if n == -1 else n for n in sizes)
        if math.prod(whole) != self.size:
            raise ValueError(f'cannot reshape array of shape {list(self.shape)} into {list(sizes)}')
        return self._then(whole, lambda x: x.reshape(whole))

    def swapaxes(self, first: int, second: int) -> 'Deferred':
        axes = list(range(self.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        return self._then([self.shape[axis] for axis in axes], lambda x: x.swapaxes(first, second))

    def __getitem__(self, key: Any) -> 'Deferred':
        # A slice of an array that nobody has written to takes no memory.
        return self._then(np.empty(self.shape, bool)[key].shape, lambda x: x[key])

    def _then(self, shape: Sequence[int], function: Callable[[np.ndarray], np.ndarray]) -> 'Deferred':
        return Deferred(shape, lambda: function(np.asarray(self)), self.origin)


def _find_shape(x: Any) -> tuple[int, ...]:
    return x.shape if isinstance(x, Deferred) else np.shape(x)


def _find_origin(inputs: Iterable[Any]) -> tuple[int, ...]:
    return next((x.origin for x in inputs if isinstance(x, Deferred)), ())


def _settle(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, Deferred) else x


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> Deferred:
    shapes = [_find_shape(x) for x in arrays]
    axis %= len(shapes[0])
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1:
        raise ValueError(f'arrays of shapes {", ".join(map(str, shapes))} cannot be joined')
    whole = [*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :]]

    def compute() -> np.ndarray:
        made, start = np.empty(whole, np.float32), 0
        for x in arrays:  # one after another: joining all at once would hold them twice
            end = start + _find_shape(x)[axis]
            made[(slice(None),) * axis + (slice(start, end),)] = x
            start = end
        return made

    return Deferred(whole, compute, _find_origin(arrays))


def _stack(arrays: Sequence[Any], axis: int = 0) -> Deferred:
    axis %= len(_find_shape(arrays[0])) + 1
    shapes = ((*shape[:axis], 1, *shape[axis:]) for shape in map(_find_shape, arrays))
    return _concatenate([x.reshape(*shape) for x, shape in zip(arrays, shapes, strict=True)], axis)


def _split(whole: Deferred, parts: Any, axis: int = 0) -> list[Deferred]:
    size = whole.shape[axis]
    if isinstance(parts, int | np.integer):
        if size % parts:
            raise ValueError(f'{size} is no multiple of {parts}')
        parts = [size // parts * i for i in range(1, int(parts))]
    ends = [0, *(int(n) for n in parts), size]
    before = (slice(None),) * (axis % whole.ndim)
    return [whole[(*before, slice(a, b))] for a, b in itertools.pairwise(ends)]


_TAKEN_DOWN = {'concatenate': _concatenate, 'stack': _stack, 'split': _split}
