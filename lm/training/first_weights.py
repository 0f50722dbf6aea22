"""The weights that a run begins with: drawn, or taken from its teacher and from the run of `train.init_from`.

Under adapters (`lm.model.adapters`) they are the base, which is made again whenever the run is opened: its checkpoints
hold the adapters alone.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from lm.checkpoint.snapshot import flatten
from lm.errors import MismatchError
from lm.model.adapters import AdaptedFunctions
from lm.model.functions import ModelFunctions, Weights
from lm.model.layers import copy_layers, find_copied
from lm.pod.mesh import place
from lm.runs.initial import take_initial
from lm.runs.weights import SavedWeights
from lm.training.program import get_shardings
from lm.training.step import Teaching

BASE = 'base'
"""The fingerprint of the weights under adapters."""


@dataclasses.dataclass(frozen=True)
class FirstWeights:
    """The sources of the first weights of a run.

    Attributes:
        functions: of the model, without adapters.
        seed: draws what is not taken.
        data: where the data of the run lie, for messages.
        given: the run of `train.init_from`; None: there is none.
        source: the functions of the model of that run, if its layers lie in other stacks; None: names say enough.
        teaching: the comparison with the teacher; None: there is none.
        teacher: the weights of the teacher.
    """

    functions: ModelFunctions
    seed: int
    data: str = ''
    given: 'SavedWeights | AdaptedWeights | None' = None
    source: ModelFunctions | None = None
    teaching: Teaching | None = None
    teacher: 'SavedWeights | AdaptedWeights | None' = None

    @property
    def initial(self) -> SavedWeights | None:
        """The checkpoint of the run of `train.init_from`."""
        return self.given.saved if isinstance(self.given, AdaptedWeights) else self.given

    @property
    def origins(self) -> list[str]:
        """The directories of the runs whose weights are taken."""
        return [one.run_dir for one in (self.given, self.teacher) if one]

    def fingerprint(self) -> str:
        """Returns a fingerprint of the weights that are taken."""
        sums = [one.fingerprint() for one in (self.given, self.teacher) if one]
        return sums[0] if len(sums) == 1 else hashlib.sha256('\n'.join(sums).encode()).hexdigest()

    @property
    def needs_teacher(self) -> bool:
        """Some layers come from the teacher."""
        return self.teacher is not None and (self.initial is None or self.source is not None)

    def read_teacher(self, mesh: Mesh) -> Weights | None:
        """Reads the weights of the teacher, in float32; None without a teacher."""
        if self.teaching is None or self.teacher is None:
            return None
        functions = self.teaching.functions
        return self.teacher.read(place(functions.abstract, mesh, functions.declared))

    def take(self, drawn: Weights, abstract: Weights, teacher: Weights | None) -> tuple[Weights, str, list[str]] | None:
        """Puts what is taken in the place of drawn weights; None: nothing is.

        Args:
            drawn: the weights that the seed gives.
            abstract: the same as jax.ShapeDtypeStructs with the shardings of the result.
            teacher: the weights of the teacher (`read_teacher`).

        Returns:
            the weights, one line that names what was not taken, and the parameters among it.
        """
        if self.initial and self.source is None:
            return take_initial(self.initial, self.data, drawn, abstract)
        return self._take_layers(drawn, abstract, teacher) if self.initial or teacher is not None else None

    def make_base(self, mesh: Mesh, teacher: Weights | None) -> tuple[Weights, str]:
        """Makes the weights under adapters, and a line about them. Arguments as in `take`.

        Raises MismatchError if a parameter is taken from nowhere: it would never learn.
        """
        abstract = place(self.functions.abstract, mesh, self.functions.declared)
        found = self.take(self._draw(abstract), abstract, teacher)
        assert found is not None, 'the plan has refused adapters without a run to start from'
        weights, line, left = found
        if left:
            raise MismatchError(
                f'train.adapters: {", ".join(self.origins)} lacks {", ".join(left)}, which adapters do not train; '
                'start from a run that has all arrays, such as one of lm distill --stage align'
            )
        return weights, line

    def _draw(self, abstract: Weights) -> Weights:
        """Draws the weights that the seed gives. Where a run gives all parameters by their names, only buffers are
        drawn: the parameters would stand in memory a second time while that run is read."""
        kinds = ('buffers',) if self.initial and self.source is None else tuple(abstract)
        shardings = get_shardings({kind: abstract[kind] for kind in kinds})
        draw = jax.jit(lambda: {kind: self.functions.init(self.seed)[kind] for kind in kinds}, out_shardings=shardings)
        return abstract | draw()

    def _take_layers(
        self, drawn: Weights, abstract: Weights, teacher: Weights | None
    ) -> tuple[Weights, str, list[str]]:
        """Takes layers from the teacher, and from the run of `train.init_from`.

        The latter gives a student those layers whose mechanism is the same in both.
        """
        student, made = self.functions, dict(drawn)
        taken: dict[str, dict[str, bool]] = {kind: {} for kind in made}

        def take(source: ModelFunctions, weights: Weights, same_mechanism: bool) -> None:
            for kind in made:
                copy = jax.jit(
                    functools.partial(copy_layers, source, student, same_mechanism=same_mechanism, kind=kind),
                    out_shardings=get_shardings(abstract[kind]),
                )
                made[kind] = copy(weights[kind], made[kind])
                copied = flatten(find_copied(source, student, same_mechanism, kind))
                taken[kind].update({name: taken[kind].get(name, False) or copied[name] for name in copied})

        if self.teaching and teacher is not None:
            source = self.teaching.objective.find_source(self.teaching.functions)
            make_source = functools.partial(self.teaching.objective.make_source, self.teaching.functions)
            take(source, jax.jit(make_source)(teacher), False)
        if self.given and self.source:
            mesh = jax.tree.leaves(abstract)[0].sharding.mesh
            weights = self.given.read(place(self.source.abstract, mesh, self.source.declared))
            take(self.source, weights, teacher is not None)
        left = {kind: [name for name, is_taken in names.items() if not is_taken] for kind, names in taken.items()}
        count, lost = sum(map(len, taken.values())), [name for names in left.values() for name in names]
        line = f'{count - len(lost)} of {count} arrays taken from '
        sources = ['the teacher' if teacher else '', self.initial.run_dir if self.initial else '']
        line += ' and '.join(filter(None, sources))
        return made, f'{line}; these not: {", ".join(lost)}' if lost else line, left['params']


@dataclasses.dataclass(frozen=True)
class AdaptedWeights:
    """A checkpoint of a run that trains adapters, read as the weights of a model without them.

    Attributes:
        saved: the checkpoint, which has the adapters.
        functions: of the model with adapters.
        first: the base of the run.
    """

    saved: SavedWeights
    functions: AdaptedFunctions
    first: FirstWeights

    @property
    def run_dir(self) -> str:
        return self.saved.run_dir

    def fingerprint(self) -> str:
        """Returns a fingerprint of the merged weights."""
        return hashlib.sha256(f'{self.saved.fingerprint()}\n{self.first.fingerprint()}'.encode()).hexdigest()

    def read(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the adapters and adds them to the base; arguments and errors as in `SavedWeights.read`.

        Raises MismatchError also if the base has changed since the adapters were saved.
        """
        mesh = jax.tree.leaves(abstract)[0].sharding.mesh
        adapters = self.saved.read(place(self.functions.abstract, mesh, self.functions.declared))
        teacher = self.first.read_teacher(mesh) if self.first.needs_teacher else None
        base, _ = self.first.make_base(mesh, teacher)
        shardings = get_shardings(abstract['params'])
        merge = jax.jit(self.functions.merge_params, out_shardings=shardings, donate_argnums=1)  # there is one copy
        return {'params': merge(adapters['params'], base['params']), 'buffers': adapters['buffers']}
