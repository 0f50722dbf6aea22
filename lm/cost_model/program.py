"""The instructions and matrix products of a compiled program, read from its text, with loops counted.

The compiler's own `cost_analysis` counts the body of a loop once, and a training step is loops: over layers,
microbatches and blocks. Here every instruction counts as often as it runs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_INSTRUCTION = re.compile(r'^  (ROOT )?%([\w.\-]+) = ', re.M)
_COMPUTATION = re.compile(r'^(ENTRY )?%([\w.\-]+) \(.*\{$', re.M)
_ARRAY = re.compile(r'\b([a-z]+[a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?')


@dataclasses.dataclass(frozen=True)
class Array:
    """A buffer of an instruction: element type, shape, layout such as '1,0:T(8,128)S(1)'."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> float:
        """The bytes without padding."""
        return self.elements * _bits(self.dtype) / 8

    @property
    def hbm(self) -> float:
        """The bytes in HBM with the padding of tiles; 0 for a buffer in on-chip memory."""
        if re.search(r'S\([1-9]', self.layout):
            return 0.0
        order, _, tiles = self.layout.partition(':')
        minor = [int(n) for n in order.split(',') if n]
        found = re.match(r'T\(([\d,]*)\)', tiles)
        tile = [int(n) for n in found[1].split(',')] if found else []
        shape = list(self.shape)
        for axis, n in zip(minor, reversed(tile), strict=False):
            shape[axis] = -(-shape[axis] // n) * n
        return math.prod(shape) * _bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the program."""

    name: str
    opcode: str
    result: str
    arguments: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """The arrays that it returns."""
        found = _ARRAY.findall(self.result)
        return [Array(dtype, tuple(int(n) for n in shape.split(',') if n), layout) for dtype, shape, layout in found]

    @functools.cached_property
    def path(self) -> str:
        """The scopes and the primitive from which it comes, as JAX writes them; '' if the program does not say."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ''

    @functools.cached_property
    def operands(self) -> list[str]:
        return re.findall(r'%([\w.\-#]+)', self.arguments)

    @functools.cached_property
    def estimated_cycles(self) -> float:
        """The cycles that XLA expects of one run, as its scheduler uses them; 0 where it states none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return float(found[1]) if found else 0.0

    @property
    def is_kernel(self) -> bool:
        """True for a hand-written kernel."""
        return self.opcode == 'custom-call' and 'custom_call_target="tpu_custom_call"' in self.attributes

    def attribute(self, name: str) -> str:
        """Returns the computation, or the word, of the attribute `name`; '' if there is none."""
        found = re.search(rf'\b{name}=%?([^\s,]+)', self.attributes)
        return found[1] if found else ''


class HloProgram:
    """A compiled module. `text` is what `Compiled.as_text()` returns."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ''
        starts = list(_COMPUTATION.finditer(text))
        for i, start in enumerate(starts):
            end = starts[i + 1].start() if i + 1 < len(starts) else len(text)
            self.computations[start[2]] = _with_elements(list(_instructions(text[start.end() : end])))
            if start[1]:
                self.entry = start[2]
        self.by_name = {c: {i.name: i for i in body} for c, body in self.computations.items()}
        self.unknown_loops: list[str] = []
        """The loops with an unknown number of iterations; they count as one iteration."""
        self.times = self._count_runs()
        """Sequential computation (entry, loop bodies, branches) → how often it runs."""

    # ------------------------------------------------------------------------------------------------------- products

    def flops(self) -> float:
        """Counts the FLOPs of matrix products per run of the program on one device. Kernels count what they declare."""
        return sum(times * (_product_flops(i, found) + _declared(i)) for i, found, times in self._everything())

    def kernels(self) -> dict[str, tuple[int, Instruction]]:
        """Returns name → (runs, instruction) of the hand-written kernels that do not declare their cost."""
        return {
            i.name: (times, i)
            for i, _, times in self._everything()
            if i.is_kernel and 'cost_estimate' not in i.attributes
        }

    def flops_of(self, instruction: Instruction, computation: str) -> float:
        """Counts the FLOPs of one run of an instruction of `computation`, also inside fusions."""
        parts = ((i, self.by_name[owner or computation]) for i, owner in self.within(instruction))
        return sum(_product_flops(i, found) + _declared(i) for i, found in parts)

    def within(self, instruction: Instruction) -> Iterator[tuple[Instruction, str]]:
        """Yields the instruction with ''; for a fusion, also the instructions inside with the names of their
        computations."""
        yield instruction, ''
        if instruction.opcode in ('fusion', 'async-start') and (called := instruction.attribute('calls')):
            for i in self.computations.get(called, ()):
                for inner, owner in self.within(i):
                    yield inner, owner or called

    # ----------------------------------------------------------------------------------------------------------- runs

    def _count_runs(self) -> dict[str, int]:
        times: dict[str, int] = {}

        def visit(computation: str, n: int) -> None:
            times[computation] = times.get(computation, 0) + n
            for i in self.computations.get(computation, ()):
                if i.opcode == 'while':
                    trips = self._trips(i, computation)
                    if trips is None:
                        self.unknown_loops.append(i.name)
                    visit(i.attribute('body'), n * (1 if trips is None else trips))
                elif i.opcode == 'call':
                    visit(i.attribute('to_apply'), n)
                elif i.opcode == 'conditional':
                    branches = re.search(r'branch_computations=\{([^}]*)\}', i.attributes)
                    names = re.findall(r'%([\w.\-]+)', branches[1]) if branches else []
                    names += [i.attribute(b) for b in ('true_computation', 'false_computation') if i.attribute(b)]
                    names = [name for name in names if self._reads(name)] or names  # unused branches never run
                    if names:  # the cheapest branch: a step takes at least this
                        visit(min(names, key=self._written), n)

        visit(self.entry, 1)
        return {name: n for name, n in times.items() if name in self.computations}

    def _reads(self, computation: str) -> bool:
        """Returns whether a computation reads its arguments; unused branches do not (`blocks.call_in_branch`)."""
        instructions = self.computations.get(computation, ())
        given = {i.name for i in instructions if i.opcode == 'parameter'}
        return any(given.intersection(i.operands) for i in instructions)

    def _written(self, computation: str) -> int:
        """Returns the count of numbers that the instructions of a computation write."""
        made = (i for i in self.computations.get(computation, ()) if i.opcode not in ('parameter', 'get-tuple-element'))
        return sum(a.elements for i in made for a in i.arrays)

    def _trips(self, loop: Instruction, computation: str) -> int | None:
        """Returns the iterations of a loop that counts from a constant to a constant; None: not such a loop."""
        if known := re.search(r'known_trip_count\D*(\d+)', loop.attributes):
            return int(known[1])
        condition = self.by_name.get(loop.attribute('condition'), {})
        root = next((i for i in condition.values() if i.is_root), None)
        if root is None or root.opcode != 'compare' or root.attribute('direction') not in ('LT', 'LE'):
            return None
        counter, bound = (condition.get(name) for name in root.operands)
        if counter is None or counter.opcode != 'get-tuple-element':
            return None
        start = self._initial(loop, computation, int(counter.attribute('index')))
        if bound is not None and bound.opcode == 'get-tuple-element':
            end = self._initial(loop, computation, int(bound.attribute('index')))
        else:
            end = _constant(bound)
        step = self._increment(loop, int(counter.attribute('index')))
        if start is None or end is None or step is None:
            return None
        return max(0, -(-(end + (root.attribute('direction') == 'LE') - start) // step))

    def _initial(self, loop: Instruction, computation: str, index: int) -> int | None:
        names = self.by_name[computation]
        values = names.get(loop.operands[0])
        if values is None or values.opcode != 'tuple':
            return None
        return _constant(_find_source(names, values.operands[index]))

    def _increment(self, loop: Instruction, index: int) -> int | None:
        body = self.by_name.get(loop.attribute('body'), {})
        root = next((i for i in body.values() if i.is_root), None)
        if root is None or root.opcode != 'tuple':
            return None
        value = _find_source(body, root.operands[index])
        if value is None or value.opcode != 'add':
            return None
        steps = [_constant(body.get(name)) for name in value.operands]
        return next((step for step in steps if step), None)

    def _everything(self) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
        """Yields (instruction, its computation by name, runs), instructions inside fusions too."""
        for computation, times in self.times.items():
            for _, instruction, owner in self.sequence(computation):
                yield instruction, self.by_name[owner], times

    def sequence(self, computation: str) -> Iterator[tuple[Instruction, Instruction, str]]:
        """Yields (instruction of the computation, the same or an instruction inside it, the computation of
        the latter)."""
        for i in self.computations.get(computation, ()):
            for inner, owner in self.within(i):
                yield i, inner, owner or computation


# --------------------------------------------------------------------------------------------------------------- parts


def _instructions(text: str) -> Iterator[Instruction]:
    starts = list(_INSTRUCTION.finditer(text))
    for i, start in enumerate(starts):
        line = text[start.end() : starts[i + 1].start() if i + 1 < len(starts) else len(text)]
        end = _closing(line, 0) if line.startswith('(') else line.index(' ')
        result, rest = line[:end], line[end:].lstrip()
        opcode, _, _ = rest.partition('(')
        close = _closing(rest, len(opcode))
        yield Instruction(start[2], opcode, result, rest[len(opcode) + 1 : close - 1], rest[close:], bool(start[1]))


def _with_elements(instructions: list[Instruction]) -> list[Instruction]:
    """Adds the get-tuple-elements that JAX 0.12 leaves out: it writes `%x#2` for the third element."""
    elements: dict[str, set[str]] = {}
    for name in {name for i in instructions for name in i.operands}:
        while '#' in name:  # an element of an element, x#1#0, needs x#1
            whole = name.rpartition('#')[0]
            elements.setdefault(whole, set()).add(name)
            name = whole
    if not elements:
        return instructions
    result: list[Instruction] = []

    def add(instruction: Instruction) -> None:
        result.append(instruction)
        for name in sorted(elements.get(instruction.name, ())):
            index = name.rpartition('#')[2]
            kind, whole = _elements(instruction.result)[int(index)], f'{instruction.result} %{instruction.name}'
            add(Instruction(name, 'get-tuple-element', kind, whole, f', index={index}', is_root=False))

    for instruction in instructions:
        add(instruction)
    return result


def _elements(kind: str) -> list[str]:
    """Returns the types in the type of a tuple."""
    depth, found, begin = 0, [], 1
    for at, c in enumerate(kind):
        if c == ',' and depth == 1:
            found.append(kind[begin:at].strip())
            begin = at + 1
        depth += (c in '([{') - (c in ')]}')
    return [*found, kind[begin : len(kind) - 1].strip()]


def _closing(text: str, start: int) -> int:
    """Returns the position of the bracket that closes the one at `start`."""
    depth = 0
    for found in re.compile(r'[()]').finditer(text, start):
        depth += 1 if found[0] == '(' else -1
        if depth == 0:
            return found.end()
    return len(text)


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    found = re.match(r'(?:bf|f|s|u|c)(\d+)', dtype)
    return int(found[1]) if found else 0


def _find_source(names: dict[str, Instruction], name: str) -> Instruction | None:
    """Returns the instruction of a value, behind copies of it."""
    found = names.get(name)
    while found is not None and found.opcode in ('copy', 'bitcast'):
        found = names.get(found.operands[0])
    return found


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != 'constant' or not re.fullmatch(r'-?\d+', instruction.arguments):
        return None
    return int(instruction.arguments)


def _declared(instruction: Instruction) -> float:
    """Returns the FLOPs that a kernel declares."""
    found = re.search(r'"cost_estimate":\{[^{}]*"flops":"?(\d+)', instruction.attributes)
    return float(found[1]) if found and instruction.opcode == 'custom-call' else 0.0


def _product_flops(instruction: Instruction, found: dict[str, Instruction]) -> float:
    """Returns 2 FLOPs per multiply-add of a dot or a convolution; products with padding do not count."""
    if instruction.opcode not in ('dot', 'convolution') or any(name not in found for name in instruction.operands):
        return 0.0
    left, right = (found[name].arrays[0].shape for name in instruction.operands[:2])
    out = instruction.arrays[0]
    if instruction.opcode == 'dot':
        axes = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes)
        return 2.0 * out.elements * math.prod(left[int(a)] for a in axes[1].split(',') if a) if axes else 0.0
    labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
    if labels is None:
        return 0.0
    pads = {
        key: value.split('x')
        for key, value in re.findall(
            r'(\w+)=([\w\-]+)', (re.search(r'window=\{([^}]*)\}', instruction.attributes) or ['', ''])[1]
        )
    }
    groups = {name: int(instruction.attribute(f'{name}_group_count') or 1) for name in ('feature', 'batch')}
    products = right[labels[2].index('i')] * right[labels[2].index('o')] * left[labels[1].index('b')] / groups['batch']
    spatial = [c for c in labels[1] if c.isdigit()]
    for i, axis in enumerate(sorted(spatial)):
        pick = lambda key, default, i=i: pads[key][i] if key in pads else default  # noqa: E731
        low = int(pick('pad', '0_0').split('_')[0])
        stride, spread, dilate = (int(pick(k, '1')) for k in ('stride', 'lhs_dilate', 'rhs_dilate'))
        size_in, size_out = left[labels[1].index(axis)], out.shape[labels[3].index(axis)]
        kernel = right[labels[2].index(axis)]
        position = np.arange(size_out)[:, None] * stride - low + np.arange(kernel)[None] * dilate
        valid = (position % spread == 0) & (position >= 0) & (position // spread < size_in)
        products *= int(valid.sum())
    return 2.0 * products
