"""Low-rank adapters (LoRA, Hu et al. 2021, §4.1): a trained model learns by small matrices beside its own.

    x W  becomes  x W + (alpha / rank) (x A) B        A [D, rank], B [rank, N], B = 0 at first

Only A and B are parameters then. The model's own are the base: a step reads them, and checkpoints leave them out.
`AdaptedFunctions.merge_params` adds A B to W, for evaluation, generation and export.

Queries, keys and values, and the two halves of gated units, are separate matrices, though they are stored side by side.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.model.block import Block
from lm.model.dense import Dense, multiply_gathered
from lm.model.functions import ModelFunctions, Weights
from lm.model.transformer import Transformer, build, make_seed_key
from lm.parameters import Declaration, declarations, declare

TARGETS = {
    'q': ('qkv', 0),
    'k': ('qkv', 1),
    'v': ('qkv', 2),
    'o': ('attention_out', 0),
    'up': ('glu_in', 0),
    'gate': ('glu_in', 1),
    'down': ('glu_out', 0),
}
"""Name of a projection → the part of a layer that has it, and its place among the matrices of this part."""
DOWN, UP = 'down', 'up'
"""The names of A and B in checkpoints, below the name of the part."""


def _check_targets(names: tuple[str, ...]) -> str | None:
    if names and len(set(names)) == len(names) and set(names) <= set(TARGETS):
        return None
    return f'must be some of {", ".join(TARGETS)}, each once'


@configurable('lora')
class Lora(Configurable):
    """Low-rank adapters: they alone learn, and the model of `train.init_from` stays as it is."""

    rank: int = field(default=8, minimum=1, maximum=4096, help='columns of A and rows of B of each matrix')
    alpha: float = field(default=16.0, above=0, help='the products of the adapters are multiplied by alpha / rank')
    targets: tuple[str, ...] = field(
        default=('q', 'k', 'v', 'o'),
        check=_check_targets,
        help='projections with adapters: q, k, v, o of attention, and up, gate, down of dense feed-forward layers',
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def choose_places(self, part: str, count: int) -> tuple[int, ...]:
        """Returns the places of the matrices with adapters in a part of a layer with `count` matrices, ascending."""
        targets = (TARGETS[name] for name in self.targets)
        return tuple(sorted(place for where, place in targets if where == part and place < count))


class AdapterParam(nnx.Param):
    """A matrix of an adapter: the parameters of an adapted model are these alone."""


class AdaptedDense(Dense):
    """A linear map with adapters beside some of its matrices; the names of its own arrays stay."""

    def __init__(self, dense: Dense, lora: Lora, places: Sequence[int], rngs: nnx.Rngs):
        for name, value in vars(dense).items():
            if not name.startswith('_'):
                setattr(self, name, value)
        declared: Declaration = dense.kernel.get_metadata('declaration')
        *layers, rows, _ = dense.kernel.shape
        *stacked, row_axis, column_axis = declared.axes
        self.sizes, self.places, self.scale = declared.pieces, tuple(places), lora.scale
        chosen = tuple(self.sizes[place] for place in places)
        ranks = (lora.rank,) * len(chosen)
        # Uniform in ±1/√D, as `peft` draws it.
        init = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform', batch_axis=tuple(range(len(layers))))
        down = init(rngs.params(), (*layers, rows, sum(ranks)), jnp.float32)
        up = jnp.zeros((*layers, lora.rank, sum(chosen)), jnp.float32)
        self.down = AdapterParam(
            down, **declare('matrix', *stacked, row_axis, 'rank', pieces=ranks, part=declared.part)
        )
        self.up = AdapterParam(
            up, **declare('matrix', *stacked, 'rank', column_axis, pieces=chosen, part=declared.part)
        )

    def pieces(self, x_BxLxD: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
        products, added = super().pieces(x_BxLxD, sizes), self._multiply(x_BxLxD.astype(self.dtype))
        ends = list(itertools.accumulate(self.sizes))
        found = []
        for product_BxLxN, end in zip(products, itertools.accumulate(sizes), strict=True):
            inside = [place for place, last in enumerate(ends) if end - product_BxLxN.shape[-1] < last <= end]
            if any(place in added for place in inside):
                shape = product_BxLxN.shape[:-1]
                zeros = {place: jnp.zeros((*shape, self.sizes[place]), product_BxLxN.dtype) for place in inside}
                product_BxLxN += jnp.concatenate([(zeros | added)[place] for place in inside], axis=-1)
            found.append(product_BxLxN)
        return found

    def lone_matrix(self) -> None:
        """The adapters add to the product."""

    def _multiply(self, x_BxLxD: jax.Array) -> dict[int, jax.Array]:
        """Returns the products [B, L, N] of the adapters, by the places of their matrices."""
        (x_BxLxR,) = multiply_gathered(x_BxLxD, self.down[...].astype(self.dtype), [])
        parts = jnp.split(x_BxLxR * self.scale, len(self.places), axis=-1)
        ups = _split(self.up[...].astype(self.dtype), [self.sizes[place] for place in self.places])
        return {
            place: multiply_gathered(part_BxLxR, up_RxN, [])[0]
            for place, part_BxLxR, up_RxN in zip(self.places, parts, ups, strict=True)
        }


class AdaptedFunctions(ModelFunctions):
    """The functions of a model with adapters.

    `params` are the adapters alone. The base, the parameters of the model without them, stands in the weights under
    `base`, in the type that `cast` gives it.

    Attributes:
        base: the functions of the model without adapters.
        lora: the adapters.
    """

    def __init__(self, base: ModelFunctions, lora: Lora):
        """Raises ConfigError if a target is nowhere in the model."""
        self.config, self.dtype, self.widening = base.config, base.dtype, base.widening
        self.base, self.lora = base, lora
        model = nnx.eval_shape(lambda: self._build(0))
        self._check_targets(model)
        self.graph, adapters, _, buffers = nnx.split(model, AdapterParam, nnx.Param, ...)
        self.abstract = {'params': nnx.to_pure_dict(adapters), 'buffers': nnx.to_pure_dict(buffers)}
        self.declared = declarations(model, AdapterParam)

    def init(self, seed: int) -> Weights:
        """Draws the initial adapters, and the buffers of the base; the base is not drawn."""
        _, adapters, _, buffers = nnx.split(self._build(seed), AdapterParam, nnx.Param, ...)
        return {'params': nnx.to_pure_dict(adapters), 'buffers': nnx.to_pure_dict(buffers)}

    def list_arrays(self, weights: Mapping[str, Any]) -> tuple[Any, ...]:
        return weights['params'], weights['base'], weights['buffers']

    def cast(self, base: dict) -> dict:
        """Returns the base as a step takes it: matrices whose products have the type of the model are in this type.

        Each product rounds them to it anyway, so nothing changes but the memory that they take.
        """
        return jax.tree.map(lambda one, x: x.astype(self.dtype) if _is_rounded(one) else x, self.base.declared, base)

    def merge_params(self, adapters: dict, base: dict) -> dict:
        """Returns the parameters of the model without adapters that computes the same: W + (alpha / rank) A B."""
        found, own = _flatten(base), _flatten(adapters)
        declared = _flatten(self.base.declared)
        for *path, name in list(own):
            if name != DOWN:
                continue
            kernel = (*path, 'kernel')
            sizes = declared[kernel].pieces
            places = self.lora.choose_places(path[-1], len(sizes))
            downs = jnp.split(own[*path, DOWN], len(places), axis=-1)
            ups = _split(own[*path, UP], [sizes[place] for place in places])
            columns = _split(found[kernel], sizes)
            for place, down, up in zip(places, downs, ups, strict=True):
                added = jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST)
                columns[place] = columns[place] + self.lora.scale * added
            found[kernel] = jnp.concatenate(columns, axis=-1)
        return unflatten_dict(found)

    def count_adapters(self) -> int:
        """Returns the number of parameters that learn."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract['params']))

    def _build(self, seed: int) -> Transformer:
        """Returns the model with its adapters."""
        model = build(self.config, seed, self.dtype)
        rngs = nnx.Rngs(params=jax.random.fold_in(make_seed_key(seed), 2))
        for block, part, sizes in _list_parts(model):
            if places := self.lora.choose_places(part, len(sizes)):
                setattr(block, part, AdaptedDense(getattr(block, part), self.lora, places, rngs))
        return model

    def _check_targets(self, model: Transformer) -> None:
        met = {(part, place) for _, part, sizes in _list_parts(model) for place in range(len(sizes))}
        if absent := [name for name in self.lora.targets if TARGETS[name] not in met]:
            there = ', '.join(name for name, target in TARGETS.items() if target in met)
            raise ConfigError(
                f'{self.lora.gin_name}.targets: no layer of the model has {", ".join(absent)}; name some of {there}'
            )


def _list_parts(model: Transformer) -> list[tuple[Block, str, tuple[int, ...]]]:
    """Returns the blocks with each part that can have adapters, and the columns of the matrices of this part."""
    parts = itertools.product(model.blocks, dict.fromkeys(part for part, _ in TARGETS.values()))
    found = ((block, part, getattr(block, part)) for block, part in parts)
    return [
        (block, part, dense.kernel.get_metadata('declaration').pieces)
        for block, part, dense in found
        if isinstance(dense, Dense)
    ]


def find_base(functions: ModelFunctions) -> ModelFunctions:
    """Returns the functions of the model without adapters."""
    return functions.base if isinstance(functions, AdaptedFunctions) else functions


def adapt(functions: ModelFunctions, lora: Lora | None) -> ModelFunctions:
    """Returns the functions of the model with adapters, if there are any."""
    return functions if lora is None else AdaptedFunctions(functions, lora)


def _is_rounded(declaration: Declaration) -> bool:
    """Returns whether all products with a parameter are in the type of the model: routers and mechanisms have other
    ones."""
    is_router = {'experts', 'gate'} & set(declaration.axes[-1:])
    return declaration.kind in ('matrix', 'embedding') and declaration.part != 'mechanism' and not is_router


def _split(matrix: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Returns the matrices of these numbers of columns that stand side by side."""
    return jnp.split(matrix, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def _flatten(tree: dict) -> dict[tuple, Any]:
    return dict(flatten_dict(tree))  # pyright: ignore
