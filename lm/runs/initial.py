"""The weights that a new run takes from another one (`train.init_from`), by name: parameters, and the random
projections that they were learned with."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.finite import refuse_not_finite
from lm.checkpoint.snapshot import flatten
from lm.errors import AbsentError, MismatchError
from lm.runs.config_diff import parse_bindings
from lm.runs.run_dir import RunDir
from lm.runs.weights import find_weights


@dataclasses.dataclass(frozen=True)
class InitialParameters:
    """The newest checkpoint of `run_dir`, which may be another model's.

    Attributes:
        run_dir: as `train.init_from` names it.
        fingerprints: of the data of the run that starts; only the tokenizer counts here.
        data: where those data lie, for messages.
    """

    run_dir: str
    fingerprints: Mapping[str, str]
    data: str

    def check(self, params: dict) -> None:
        """Raises the errors of `take` that the record of the checkpoint alone shows."""
        with self._open() as other:
            self._check(other, params)

    def take(self, weights: dict, abstract: dict) -> tuple[dict, str, list[str]]:
        """Reads the weights, in place of the initial ones. Projections of another shape keep their initial values.

        Args:
            weights: `params` and `buffers`, nested dicts of arrays.
            abstract: the same as jax.ShapeDtypeStructs with the shardings of the result.

        Returns:
            the weights, one line that names the ones that were not taken, and the parameters among these.

        Raises:
            AbsentError: the other run has no checkpoint.
            MismatchError: its tokenizer is another one, an array of the same name has another shape, it has none of
                these arrays, or one of them is not finite.
        """
        with self._open() as other:
            saved = self._check(other, abstract['params'])
            part = find_weights(saved)
            target = {part: abstract['params'], 'buffers': _alike(abstract['buffers'], saved, 'buffers.')}
            restored = other.restore(target, partial=True)
        assert restored is not None, '`_check` has found a checkpoint'
        taken, step = (
            {'params': restored.state.get(part, {}), 'buffers': restored.state.get('buffers', {})},
            restored.step,
        )
        refuse_not_finite(taken, f'{self._setting}, step {restored.step}', 'name another run')
        names = flatten(taken)
        missing = [name for name in flatten(weights) if name not in names]
        left = [name.removeprefix('params.') for name in missing]
        mean = '' if part == 'params' else ', the mean of its last weights'
        line = f'{len(names)} of {len(names) + len(left)} arrays taken from {self.run_dir} at step {step}{mean}'
        lost = [name.removeprefix('params.') for name in missing if name.startswith('params.')]
        return merge_weights(weights, taken), f'{line}; these not: {", ".join(left)}' if left else line, lost

    def _open(self) -> Checkpointer:
        return Checkpointer(RunDir(self.run_dir, found=True).checkpoints)

    def _check(self, other: Checkpointer, params: dict) -> dict[str, dict]:
        """Returns name → shape and type of each array of the checkpoint, after all checks."""
        step = other.latest_step()
        if step is None:
            raise AbsentError(f'{self._setting}: holds no checkpoint; name a run directory')
        record = other.read_record(step)
        ours, theirs = self.fingerprints.get('tokenizer'), record['fingerprints'].get('tokenizer')
        if ours and theirs and ours != theirs:
            path = parse_bindings(record['metadata'].get('config') or '').get('data.path', 'unknown data')
            raise MismatchError(
                f'{self._setting}: the tokenizer of {path} is {theirs[:12]}…, the one of {self.data} is {ours[:12]}…, '
                'and the same number means another piece; take data with the tokenizer of that run '
                '(lm prepare with tokenizer.model_path), or start from a run with this one'
            )
        saved = {name.removeprefix('params.'): leaf for name, leaf in record['leaves'].items()}
        shared = {name: leaf for name, leaf in flatten(params).items() if name in saved}
        if not shared:
            raise MismatchError(f'{self._setting}: has none of the arrays of this model; start from a run like it')
        wrong = [
            describe_misfit(name, saved[name]['shape'], leaf.shape)
            for name, leaf in shared.items()
            if tuple(saved[name]['shape']) != tuple(leaf.shape)
        ]
        if wrong:
            self.refuse(wrong)
        return record['leaves']

    def refuse(self, wrong: Sequence[str]) -> NoReturn:
        """Raises MismatchError for arrays of other shapes (`describe_misfit`)."""
        raise MismatchError(
            f'{self._setting}: {"; ".join(wrong)}; give the model the sizes of that run, or start without it'
        )

    @property
    def _setting(self) -> str:
        return f'train.init_from = {self.run_dir!r}'


def _alike(tree: dict, saved: Mapping[str, dict], prefix: str) -> dict:
    """Returns the nested dict without arrays that `saved` lacks or has in another shape or type."""
    kept = {}
    for name, value in tree.items():
        path = f'{prefix}{name}'
        if isinstance(value, dict):
            kept[name] = _alike(value, saved, f'{path}.')
        elif path in saved and (saved[path]['shape'], saved[path]['dtype']) == (list(value.shape), value.dtype.name):
            kept[name] = value
    return kept


def merge_weights(old: dict, new: dict) -> dict:
    """Returns the nested dict `old` with the leaves of `new` in their places."""
    return {
        name: (merge_weights(value, new[name]) if isinstance(value, dict) else new[name]) if name in new else value
        for name, value in old.items()
    }


def describe_misfit(name: str, theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Describes an array that has one shape in the other run and another one here."""
    return f'{name} is {_shape(theirs)} there and {_shape(ours)} here'


def _shape(sizes: Sequence[int]) -> str:
    return '×'.join(map(str, sizes)) or 'a scalar'
