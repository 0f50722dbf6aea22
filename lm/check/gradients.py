"""`lm check --gradients`: whether the gradient that a configuration's model has is the gradient of its loss.

Each array p of a tiny model (`lm.check.tiny`) has a gradient g. Two slopes of the loss are compared with differences in
float64 (`lm.check.float64`), along the unit vectors d = g / |g| and a random one:

    claimed  g·d        measured  (loss(p + h d) - loss(p - h d)) / 2h

The first one shows errors of size and direction. The second one shows a part of an array whose gradient is missing.
The tokens are random, and each array is moved a little from its first value, so that nothing is zero by design.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from lm.check.float64 import widen_program
from lm.check.tiny import LENGTH, VOCABULARY, shrink
from lm.config.configurable import Configurable
from lm.experiment import Experiment
from lm.model.config import ModelConfig
from lm.model.functions import ModelFunctions
from lm.model.layers import BLOCKS
from lm.ops import platform
from lm.ops.documents import Documents
from lm.training.inputs import ROUTERS

OK, WRONG, ZERO = 'OK', 'WRONG', 'ZERO'
WINDOWS = 2
NUDGE = 0.1
"""How far an array is moved from its first value, as a share of its root mean square; of 1 where that is 0."""
STEPS = (1e-4, 1e-5, 1e-6)
"""h by the norm of the array. The loss has kinks, such as a change of experts: the step with the best agreement counts,
for a wrong gradient agrees at none."""
TOLERANCE = 1e-3
"""The largest relative error of a right gradient. Stabilizers of denominators cost up to a tenth of it."""
EXACT = 1e-6
"""Smaller steps are not tried below this relative error."""
VANISHED = 1e-12
"""The share of the largest |g| |p| of all arrays, below which a gradient is rounding of float64 alone."""
FLAT = 1e-8
"""The share of the same, above which differences see a slope."""


@dataclasses.dataclass(frozen=True)
class ArrayGradient:
    """The check of one array.

    Attributes:
        name: such as 'blocks/0/qkv/kernel'.
        layer: the kind of its layer, such as '@softmax(), @dense()'; empty outside of layers.
        claimed: the slope of the loss along the gradient, in nats per unit, as the gradient has it: its norm.
        measured: the same from differences; for a gradient of zero along a random direction.
        error: the larger relative error of the two directions, relative to the larger slope or the gradient's norm.
        rounding: the change of the logits by rounding this array to bfloat16, relative to their root mean square.
        verdict: OK; WRONG: differences do not confirm the gradient; ZERO: they confirm that the loss is flat.
        frozen: whether the array stays as it is in training.
    """

    name: str
    layer: str
    claimed: float
    measured: float
    error: float
    rounding: float
    verdict: str
    frozen: bool = False

    @property
    def stack(self) -> int:
        """The place of its layers among the stacks of the model; -1 outside of layers."""
        return _find_stack(self.name)


def _find_stack(name: str) -> int:
    top, _, rest = name.partition('/')
    return int(rest.partition('/')[0]) if top == BLOCKS else -1


@dataclasses.dataclass(frozen=True)
class GradientCheck:
    """The check of a model.

    Attributes:
        loss: the mean loss of random tokens, in nats per token.
        rounding: the change of the logits by rounding all arrays to bfloat16, relative to their root mean square.
        arrays: the parameters, by their names.
    """

    loss: float
    rounding: float
    arrays: tuple[ArrayGradient, ...]

    @property
    def faults(self) -> tuple[ArrayGradient, ...]:
        """The arrays whose gradient is wrong, or zero although they should learn."""
        return tuple(one for one in self.arrays if one.verdict == WRONG or (one.verdict == ZERO and not one.frozen))


def check_gradients(experiment: Experiment) -> GradientCheck:
    """Compares the gradient of each array with differences of the loss; takes seconds to a minute, and no device."""
    documents, z_loss = experiment.data.documents(None), experiment.optimizer.z_loss
    return check_loss(shrink(experiment.model), documents, z_loss, list_frozen(experiment))


def list_frozen(experiment: Experiment) -> tuple[str, ...]:
    """Returns the parts of the model that do not learn; of the objective's own, the one that has routers."""
    others = () if experiment.train.objective.trains_feed_forward else (ROUTERS,)
    return (*experiment.optimizer.frozen, *others)


def check_loss(
    config: ModelConfig, documents: Documents | None, z_loss: float, frozen: Collection[str] = ()
) -> GradientCheck:
    """Checks a model of this size (`check_gradients`); `frozen`: the parts of it that do not learn."""
    tiny = TinyLoss(config, documents, z_loss)
    gradients, sizes = tiny.compute_gradients(), [np.linalg.norm(x) for x in tiny.params]
    largest = max(np.linalg.norm(g) * size for g, size in zip(gradients, sizes, strict=True))
    checked = (_check_array(tiny, i, gradients[i], float(largest)) for i in range(len(tiny.params)))
    found = [dataclasses.replace(one, frozen=part in frozen) for one, part in zip(checked, tiny.parts, strict=True)]
    return GradientCheck(tiny.compute_loss(tiny.params), tiny.round_all(), tuple(found))


def describe_faults(check: GradientCheck) -> str:
    """Returns one line about the faults of a check, with the array to look at first.

    A wrong gradient makes all gradients before it wrong. So the place of a fault is the last layer that has one.
    """
    wrong, zero = ([one for one in check.faults if one.verdict == verdict] for verdict in (WRONG, ZERO))
    if not wrong:
        names = ', '.join(one.name for one in zero)
        layers = ', '.join(dict.fromkeys(one.layer for one in zero if one.layer))
        return f'gradients: {names} cannot learn, for the loss does not depend on them; change the layer {layers}'
    last = [one for one in wrong if one.stack == max(each.stack for each in wrong)]
    worst = max(last, key=lambda one: one.error)
    where = f' in the layer {worst.layer}' if worst.layer else ''
    before = f'; {len(wrong) - len(last)} arrays before it, too' if len(wrong) > len(last) else ''
    return (
        f'gradients: wrong{where}: {", ".join(one.name for one in last)} (of {worst.name} the slope is '
        f'{worst.claimed:.4g}, measured {worst.measured:.4g}, error {worst.error:.1g}){before}; choose other options '
        'of this layer, and report it'
    )


class TinyLoss:
    """The loss of a tiny model, in float64.

    Attributes:
        names: of the parameters.
        parts: of the model, one for each parameter (`lm.parameters.PARTS`).
        params: their values, float64.
    """

    def __init__(self, config: ModelConfig, documents: Documents | None, z_loss: float):
        functions = ModelFunctions(config, jnp.float32)
        self.config, rng = config, np.random.default_rng(7)
        # Tokens from 1 on: 0 ends a document, and does so where it is set.
        tokens_BxL, targets_BxL = rng.integers(1, VOCABULARY, (2, WINDOWS, LENGTH)).astype(np.int32)
        tokens_BxL[0, LENGTH // 3] = 0
        share_BxL = jnp.full(tokens_BxL.shape, 1 / tokens_BxL.size, jnp.float32)

        def compute_loss(params: object, buffers: object) -> jax.Array:
            weights = {'params': params, 'buffers': buffers}
            return functions.weighted_loss(weights, tokens_BxL, targets_BxL, share_BxL, documents, z_loss)[0]

        def compute_logits(params: object, buffers: object) -> jax.Array:
            model = functions.merge({'params': params, 'buffers': buffers})
            return model.logits(model.hidden(jnp.asarray(tokens_BxL)))

        given = functions.abstract['params'], functions.abstract['buffers']
        with platform.choices(portable=True):
            self._loss, self._logits, self._gradient = (
                widen_program(jax.make_jaxpr(function)(*given))
                for function in (compute_loss, compute_logits, jax.grad(compute_loss))
            )
            start = widen_program(jax.make_jaxpr(functions.init, static_argnums=0)(0))
        tree = jax.tree.structure({'params': given[0], 'buffers': given[1]})
        weights = jax.tree.unflatten(tree, start())
        leaves = jax.tree_util.tree_leaves_with_path(weights['params'])
        self.names = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]
        self.parts = [declaration.part for declaration in jax.tree.leaves(functions.declared)]
        self.params = [_nudge(x, rng) for _, x in leaves]
        self._buffers = jax.tree.leaves(weights['buffers'])

    def compute_loss(self, params: list[np.ndarray]) -> float:
        """Returns the loss in nats per token."""
        return float(self._loss(*params, *self._buffers)[0])

    def compute_gradients(self) -> list[np.ndarray]:
        """Returns the gradient of each parameter."""
        return self._gradient(*self.params, *self._buffers)

    def _compute_logits(self, params: list[np.ndarray]) -> np.ndarray:
        return self._logits(*params, *self._buffers)[0]

    @functools.cached_property
    def _exact_logits(self) -> np.ndarray:
        return self._compute_logits(self.params)

    def round_all(self) -> float:
        """Returns how far rounding of all parameters to bfloat16 moves the logits, by their root mean square."""
        return self._compare([_round(x) for x in self.params])

    def round_one(self, which: int) -> float:
        """Returns the same for one parameter."""
        return self._compare(self.replace(which, _round(self.params[which])))

    def _compare(self, params: list[np.ndarray]) -> float:
        moved = self._compute_logits(params) - self._exact_logits
        return float(np.linalg.norm(moved) / np.linalg.norm(self._exact_logits))

    def replace(self, which: int, x: np.ndarray) -> list[np.ndarray]:
        """Returns the parameters with another value of one."""
        return [x if i == which else each for i, each in enumerate(self.params)]

    def measure_slopes(self, which: int, direction: np.ndarray) -> Iterator[float]:
        """Yields the slope of the loss along a unit vector of one parameter, from smaller and smaller differences."""
        x = self.params[which]
        for share in STEPS:
            step = share * np.linalg.norm(x)
            ahead, behind = (self.compute_loss(self.replace(which, x + sign * step * direction)) for sign in (1, -1))
            yield float((ahead - behind) / (2 * step))

    def name_layer(self, name: str) -> str:
        """Returns the kind of the layer of a parameter; empty outside of layers."""
        if (stack := _find_stack(name)) < 0:
            return ''
        kinds = self.config.stacks[stack], self.config.find_feed_forward(self.config.list_layers(stack)[0])
        return ', '.join(map(_name_kind, kinds))


def _name_kind(kind: Configurable) -> str:
    """Returns such a text as '@window_linear(map = @performer())'."""
    values = ((field.name, getattr(kind, field.name)) for field in dataclasses.fields(kind))
    parts = [f'{name} = {_name_kind(value)}' for name, value in values if isinstance(value, Configurable)]
    return f'@{kind.gin_name}({", ".join(parts)})'


def _check_array(tiny: TinyLoss, which: int, gradient: np.ndarray, largest: float) -> ArrayGradient:
    """Checks one array; `largest` is the largest |g| |p| of all arrays."""
    size, claimed = float(np.linalg.norm(tiny.params[which])), float(np.linalg.norm(gradient))
    random = np.random.default_rng(which).normal(size=gradient.shape)
    random /= np.linalg.norm(random)
    name = tiny.names[which]
    make = functools.partial(ArrayGradient, name, tiny.name_layer(name), rounding=tiny.round_one(which))
    if claimed * size <= VANISHED * largest:
        measured = min(tiny.measure_slopes(which, random), key=abs)
        is_flat = abs(measured) * size <= FLAT * largest
        return make(claimed, measured, error=0.0 if is_flat else 1.0, verdict=ZERO if is_flat else WRONG)
    measured, error = _find_nearest(tiny, which, gradient / claimed, claimed, claimed)
    _, other = _find_nearest(tiny, which, random, float(np.sum(gradient * random)), claimed)
    worst = max(error, other)
    return make(claimed, measured, error=worst, verdict=OK if worst <= TOLERANCE else WRONG)


def _find_nearest(
    tiny: TinyLoss, which: int, direction: np.ndarray, claimed: float, norm: float
) -> tuple[float, float]:
    """Returns the measured slope that is nearest to the claimed one, and its error by the larger slope or the norm."""
    found: list[tuple[float, float]] = []
    for measured in tiny.measure_slopes(which, direction):
        found.append((abs(measured - claimed) / max(norm, abs(measured)), measured))
        if found[-1][0] <= EXACT:
            break
    error, measured = min(found)
    return measured, error


def _nudge(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    size = float(np.sqrt(np.mean(np.square(x)))) or 1.0
    return x + NUDGE * size * rng.normal(size=x.shape)


def _round(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)
