"""Compares a random model of the product with its formulas.

The product's functions are traced and computed by NumPy in float64 (`numpy_jaxpr`), so that what is left are faults.
"""

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from model_formulas import Formulas, Tree, Window, cut_documents
from numpy_jaxpr import evaluate

from lm.model.functions import ModelFunctions
from lm.ops.documents import Documents
from lm.pod.mesh import make_mesh
from lm.training.optimizer import OptimizerConfig
from lm.training.step import TrainStep

TOLERANCE = 1e-6
"""The largest difference of logits, relative to the largest logit. Constants of traced programs are float32."""
GRADIENT_TOLERANCE = 1e-5
"""The largest difference of a slope, relative to the length of the gradient and to the slope."""
NUDGE = 1e-5
"""The step of differences, relative to the size of an array's numbers."""
ROUNDING = 1e-9
"""Relative changes of all weights. The logits of a model that they move far have a larger tolerance."""


class Failure(NamedTuple):
    """A check that failed: its name, and what was found."""

    check: str
    found: str

    def is_like(self, other: 'Failure') -> bool:
        """Returns whether both failed in the same check, by the same kind of error or by wrong numbers."""
        kinds = [found.partition(':')[0] if 'Error:' in found else '' for found in (self.found, other.found)]
        return self.check == other.check and kinds[0] == kinds[1]


def compare(case: Case, checks: tuple[str, ...] | None = None) -> list[Failure]:
    """Returns the failures of a case; `checks` are the names of those to make, None: all.

    A model that cannot be built fails in the check 'build'.
    """
    with np.errstate(all='ignore'):
        try:
            comparison = Comparison(case)
        except Exception as error:  # whatever the product raises
            return [Failure('build', tell_error(error))]
        return [failure for name in CHECKS if checks is None or name in checks for failure in comparison.make(name)]


class Comparison:
    """One case, with the weights, the formulas and the traced programs that its checks share."""

    def __init__(self, case: Case):
        self.case = case
        self.functions = ModelFunctions(case.model, jnp.float32)
        self.weights = draw_weights(self.functions, case.seed)
        self.formulas = Formulas(case.model, join(self.weights))
        self.tokens = case.draw_tokens()

    def make(self, check: str) -> Iterator[Failure]:
        """Makes a check; yields what failed. An error of the product is a failure, too."""
        try:
            found = CHECKS[check](self)
        except Exception as error:  # whatever the product raises
            found = tell_error(error)
        if found is not None:
            yield Failure(check, found)

    @functools.cached_property
    def window(self) -> Window:
        """The inputs of the first microbatch."""
        return cut_documents(self.tokens[0, :, :-1], self.case.eod, self.case.restart)

    @functools.cached_property
    def documents(self) -> Documents | None:
        return None if self.case.eod is None else Documents(self.case.eod, self.case.restart)

    @functools.cached_property
    def run_logits(self) -> Callable[..., np.ndarray]:
        """The product's logits of tokens [B, L], and `rounding` of the constants."""

        def logits(weights: Any, tokens: jax.Array) -> jax.Array:
            model = self.functions.merge(weights)
            return model.logits(model.hidden(tokens, *(self.documents.of(tokens) if self.documents else ())))

        shape = jax.ShapeDtypeStruct(self.tokens[0, :, :-1].shape, jnp.int32)
        program = jax.make_jaxpr(logits)(self.functions.abstract, shape)
        return lambda tokens, rounding=None: evaluate(
            program, self.weights, tokens.astype(np.int32), rounding=rounding
        )[0]

    @functools.cached_property
    def logits(self) -> np.ndarray:
        return self.run_logits(self.window.tokens)

    @functools.cached_property
    def expected(self) -> np.ndarray:
        return self.formulas.logits(self.window)

    @functools.cached_property
    def tolerance(self) -> float:
        """The largest difference of logits: more where rounding of the weights moves them."""
        rng = np.random.default_rng(0)
        moved = jax.tree.map(lambda x: x * (1 + ROUNDING * rng.normal(size=x.shape)), self.weights)
        change = np.abs(Formulas(self.case.model, join(moved)).logits(self.window) - self.expected).max()
        return max(TOLERANCE * np.abs(self.expected).max(), 100 * change)

    @functools.cached_property
    def wide_tolerance(self) -> float:
        """The same where float32 has rounded the constants of the program: more where that moves the logits."""
        rng = np.random.default_rng(1)
        changes = [np.abs(self.run_logits(self.window.tokens, rng) - self.logits).max() for _ in range(4)]
        return max(self.tolerance, 4 * max(changes))

    def tell_logits(self, found: np.ndarray) -> str | None:
        """Returns how far logits are from the formulas, where they are too far."""
        if tell_difference(found, self.expected, self.tolerance) is None:
            return None
        return tell_difference(found, self.expected, self.wide_tolerance)

    def check_logits(self) -> str | None:
        return self.tell_logits(self.logits)

    def check_causality(self) -> str | None:
        """Other tokens from some place on change no bit before it."""
        if self.case.model.looks_ahead or self.case.length < 2:
            return None
        at = int(np.random.default_rng(self.case.seed).integers(1, self.case.length))
        other = self.window.tokens.copy()
        other[:, at:] = (other[:, at:] + 1) % self.case.model.vocab_size
        return tell_difference(self.run_logits(other)[:, :at], self.logits[:, :at], 0.0)

    def check_documents(self) -> str | None:
        """Other tokens of one document change no bit of the others."""
        if self.case.eod is None:
            return None
        starts, other = self.window.starts, self.window.tokens.copy()
        rng, changed = np.random.default_rng(self.case.seed), np.zeros(starts.shape, bool)
        for row, line in enumerate(starts):
            changed[row] = line == rng.choice(np.unique(line))
        inside = changed & (other != self.case.eod)
        moved = (other + 1) % self.case.model.vocab_size
        other[inside] = np.where(moved == self.case.eod, other, moved)[inside]
        return tell_difference(self.run_logits(other)[~changed], self.logits[~changed], 0.0)

    def check_decoding(self) -> str | None:
        """Pieces one after another give the logits of the whole window."""
        if self.case.model.looks_ahead:
            return None
        batch, length = self.window.tokens.shape
        separate = self.documents is not None
        abstract = self.functions.abstract
        empty = lambda weights: self.functions.merge(weights).init_state(batch, length, separate)  # noqa: E731

        def extend(weights: Any, state: Any, tokens: Any, positions: Any, starts: Any) -> Any:
            model = self.functions.merge(weights)
            state, x = model.extend(state, tokens, positions, starts if separate else None)
            return state, model.logits(x)

        shape, leaves = jax.eval_shape(empty, abstract), None
        structure = jax.tree.structure(shape)
        leaves = evaluate(jax.make_jaxpr(empty)(abstract), self.weights)
        programs, found = {}, []
        for piece in self.case.list_pieces():
            size = piece.stop - piece.start
            numbers = jax.ShapeDtypeStruct((batch, size), jnp.int32)
            if size not in programs:
                programs[size] = jax.make_jaxpr(extend)(abstract, shape, numbers, numbers, numbers)
            arrays = self.window.tokens, self.window.positions, self.window.starts - piece.start
            arrays = [x[:, piece].astype(np.int32) for x in arrays]
            *leaves, logits = evaluate(programs[size], self.weights, jax.tree.unflatten(structure, leaves), *arrays)
            found.append(logits)
        return self.tell_logits(np.concatenate(found, axis=1))

    @functools.cached_property
    def step(self) -> tuple[float, Tree]:
        """The product's loss and gradients of a training step."""
        return self.run_step()

    @functools.cached_property
    def rounded_gradients(self) -> list[Tree]:
        """The same gradients where the constants of the program are rounded in other ways."""
        rng = np.random.default_rng(1)
        return [self.run_step(rng)[1] for _ in range(4)]

    def run_step(self, rounding: np.random.Generator | None = None) -> tuple[float, Tree]:
        """Returns the product's loss and gradients of a training step."""
        optimizer = OptimizerConfig(z_loss=self.case.z_loss, warmup_steps=1)
        step = TrainStep(self.functions, optimizer, 10, documents=self.documents)
        batch = self.tokens.astype(np.int32)
        with on_devices(self.case):
            program = jax.make_jaxpr(lambda weights, batch: step._gradients(weights, batch, jnp.int32(0)))(
                self.functions.abstract, jax.ShapeDtypeStruct(batch.shape, jnp.int32)
            )
        loss, *gradients = evaluate(program, self.weights, batch, rounding=rounding)
        structure = jax.tree.structure(self.functions.abstract['params'])
        return float(loss), jax.tree.unflatten(structure, gradients[: structure.num_leaves])

    def losses(self, weights: Any) -> tuple[float, float]:
        """Returns the formulas' loss, and what is minimized."""
        windows = [cut_documents(tokens[:, :-1], self.case.eod, self.case.restart) for tokens in self.tokens]
        model = Formulas(self.case.model, join(weights))
        return model.loss(windows, [tokens[:, 1:] for tokens in self.tokens], self.case.z_loss)

    def check_loss(self) -> str | None:
        expected = self.losses(self.weights)[0]
        found, size = np.asarray(self.step[0]), np.abs(self.expected).max()
        if abs(found - expected) <= max(TOLERANCE, self.tolerance / size) * expected:
            return None
        return tell_difference(found, np.asarray(expected), max(TOLERANCE, self.wide_tolerance / size) * expected)

    def check_gradient(self) -> str | None:
        """The slopes along directions that move all arrays agree with differences; else it names arrays that do not."""
        gradients, rng = self.step[1], np.random.default_rng((self.case.seed, 2))
        sizes = jax.tree.map(lambda g: np.linalg.norm(g), gradients)
        for _ in range(2):
            directions = jax.tree.map(lambda g, size: mix_direction(g, size, rng), gradients, sizes)
            if self._tell_slope(gradients, directions):
                break
        else:
            return None
        named, found = jax.tree_util.tree_leaves_with_path(gradients), []
        structure = jax.tree.structure(gradients)
        for number, (path, _) in enumerate(named):
            alone = [d * (i == number) for i, d in enumerate(jax.tree.leaves(directions))]
            if told := self._tell_slope(gradients, jax.tree.unflatten(structure, alone)):
                found.append(f'{jax.tree_util.keystr(path, simple=True, separator="/")}: {told}')
        return '; '.join(found) or self._tell_slope(gradients, directions)

    def _tell_slope(self, gradients: Tree, directions: Tree) -> str | None:
        """Compares the slope along a direction with differences of the formulas."""

        def ahead(by: float) -> float:
            moved = jax.tree.map(lambda x, d: x + by * d, self.weights['params'], directions)
            return self.losses(self.weights | {'params': moved})[1]

        def list_slopes(gradients: Tree) -> list[float]:
            return jax.tree.leaves(jax.tree.map(lambda g, d: float(np.sum(g * d)), gradients, directions))

        claimed, scale = sum(list_slopes(gradients)), sum(map(abs, list_slopes(gradients)))
        expected = math.nan
        for nudge in (NUDGE, NUDGE / 30):  # the loss may have a kink within the first one
            # Richardson: the error falls with the fourth power of the step.
            near, far = ((ahead(step) - ahead(-step)) / (2 * step) for step in (nudge, 2 * nudge))
            expected = (4 * near - far) / 3
            noise = 1e-10 / nudge + 10 * abs(near - far)
            if abs(claimed - expected) <= GRADIENT_TOLERANCE * max(scale, abs(expected)) + noise:
                return None
        if abs(claimed - expected) <= 4 * max(abs(sum(list_slopes(one)) - claimed) for one in self.rounded_gradients):
            return None
        return f'slope {claimed:.6g}, by differences {expected:.6g}'


CHECKS: dict[str, Callable[[Comparison], str | None]] = {
    'logits': Comparison.check_logits,
    'causality': Comparison.check_causality,
    'documents': Comparison.check_documents,
    'decoding': Comparison.check_decoding,
    'loss': Comparison.check_loss,
    'gradient': Comparison.check_gradient,
}


def tell_error(error: Exception) -> str:
    """Returns the text of an error, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f'{type(error).__name__}: {error} ({place.filename}:{place.lineno})'


def on_devices(case: Case) -> contextlib.AbstractContextManager:
    """Returns the context in which a step of the case is traced."""
    if case.devices is None:
        return contextlib.nullcontext()
    return jax.set_mesh(make_mesh(case.devices.config, jax.devices()[: case.devices.count]))


def draw_weights(functions: ModelFunctions, seed: int) -> Tree:
    """Draws all arrays of a model, float64: none is zero, so that each has an effect."""
    rng = np.random.default_rng((seed, 0))
    declared = {path: each.kind for path, each in jax.tree_util.tree_leaves_with_path(functions.declared)}

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        numbers = rng.normal(size=leaf.shape)
        kind = declared.get(path, 'buffer')
        if kind == 'matrix':
            return numbers * leaf.shape[-2] ** -0.5
        if kind == 'embedding':
            return numbers * leaf.shape[-1] ** -0.5
        if kind == 'gain':
            return 1 + 0.3 * numbers
        if kind == 'bias':  # of a gate: some forget soon, some late
            is_gate = "'gate'" in jax.tree_util.keystr(path)
            return 0.3 * numbers + (rng.uniform(-3, 3) if is_gate else 0.0)
        return numbers

    params = jax.tree_util.tree_map_with_path(draw, functions.abstract['params'])
    return {'params': params, 'buffers': jax.tree.map(lambda x: draw((), x), functions.abstract['buffers'])}


def join(weights: Tree) -> Tree:
    """Returns parameters and buffers in one nested dict."""

    def merge(first: Any, second: Any) -> Any:
        if not isinstance(first, dict):
            return first
        names = [*first, *(name for name in second if name not in first)]
        return {
            name: merge(first[name], second[name]) if name in first and name in second else (first | second)[name]
            for name in names
        }

    return merge(weights['params'], weights['buffers'])


def mix_direction(gradient: np.ndarray, size: float, rng: np.random.Generator) -> np.ndarray:
    """Returns a direction along the gradient and across it, on which each array's slope is about 1 in size."""
    across = rng.normal(size=gradient.shape)
    across /= np.linalg.norm(across)
    if size == 0:
        return across
    along = gradient / size
    step = min(1 / size, np.sqrt(gradient.size))
    return (rng.choice([-1.0, 1.0]) * along + across) * step


def tell_difference(found: np.ndarray, expected: np.ndarray, allowed: float) -> str | None:
    """Returns how far two arrays differ where it is too far, or where a number is not finite."""
    if found.shape != expected.shape:
        return f'shape {found.shape}, expected {expected.shape}'
    if not found.size:
        return None
    if not np.isfinite(found).all():
        return f'{np.sum(~np.isfinite(found))} of {found.size} numbers are not finite'
    difference = np.abs(found - expected)
    if difference.max() <= allowed:
        return None
    at = np.unravel_index(difference.argmax(), difference.shape)
    where = ', '.join(str(int(i)) for i in at)
    return f'differs by {difference.max():.3g} at [{where}], of {np.abs(expected).max():.3g}; {allowed:.1g} is allowed'
