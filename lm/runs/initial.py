"""The weights that a new run takes from another one (`train.init_from`), by name, with random projections."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flax.traverse_util import flatten_dict, unflatten_dict

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.finite import refuse_not_finite
from lm.checkpoint.snapshot import flatten, name_leaf
from lm.errors import AbsentError, MismatchError
from lm.runs.config_diff import parse_bindings
from lm.runs.weights import SavedWeights, find_weights


def check_initial(saved: SavedWeights, data: str, params: dict) -> None:
    """Raises the errors of `take_initial` that the record of the checkpoint alone shows."""
    with saved.open_run() as other:
        _check(saved, data, other, params)


def take_initial(saved: SavedWeights, data: str, weights: dict, abstract: dict) -> tuple[dict, str, list[str]]:
    """Reads the weights, in place of the initial ones. Projections of another shape keep their initial values.

    Args:
        saved: the newest checkpoint of a run, which may be another model's. Only the tokenizer counts of its
            fingerprints.
        data: where the data of the new run lie, for messages.
        weights: `params` and `buffers`, nested dicts of arrays.
        abstract: the same as jax.ShapeDtypeStructs with the shardings of the result.

    Returns:
        the weights, one line that names the ones that were not taken, and the parameters among these.

    Raises:
        AbsentError: the other run has no checkpoint.
        MismatchError: its tokenizer is another one, an array of the same name has another shape, it has none of
            these arrays, or one of them is not finite.
    """
    with saved.open_run() as other:
        leaves = _check(saved, data, other, abstract['params'])
        part = find_weights(leaves)
        target = {part: abstract['params'], 'buffers': _alike(abstract['buffers'], leaves)}
        restored = other.restore(target, partial=True)
    assert restored is not None, '`_check` has found a checkpoint'
    taken = {'params': restored.state.get(part, {}), 'buffers': restored.state.get('buffers', {})}
    refuse_not_finite(taken, f'{saved.name}, step {restored.step}', 'name another run')
    names = flatten(taken)
    missing = [name for name in flatten(weights) if name not in names]
    left = [name.removeprefix('params.') for name in missing]
    mean = '' if part == 'params' else ', the mean of its last weights'
    line = f'{len(names)} of {len(names) + len(left)} arrays taken from {saved.run_dir} at step {restored.step}{mean}'
    lost = [name.removeprefix('params.') for name in missing if name.startswith('params.')]
    merged = unflatten_dict(flatten_dict(weights, keep_empty_nodes=True) | flatten_dict(taken))
    return merged, f'{line}; these not: {", ".join(left)}' if left else line, lost


def _check(saved: SavedWeights, data: str, other: Checkpointer, params: dict) -> dict[str, dict]:
    """Returns name → shape and type of each array of the checkpoint, after all checks."""
    step = other.latest_step()
    if step is None:
        raise AbsentError(f'{saved.name}: holds no checkpoint; name a run directory')
    record = other.read_record(step)
    ours, theirs = saved.fingerprints.get('tokenizer'), record['fingerprints'].get('tokenizer')
    if ours and theirs and ours != theirs:
        path = parse_bindings(record['metadata'].get('config') or '').get('data.path', 'unknown data')
        raise MismatchError(
            f'{saved.name}: the tokenizer of {path} is {theirs[:12]}…, the one of {data} is {ours[:12]}…, '
            'and the same number means another piece; take data with the tokenizer of that run '
            '(lm prepare with tokenizer.model_path), or start from a run with this one'
        )
    leaves = {name.removeprefix('params.'): leaf for name, leaf in record['leaves'].items()}
    shared = {name: leaf for name, leaf in flatten(params).items() if name in leaves}
    if not shared:
        raise MismatchError(f'{saved.name}: has none of the arrays of this model; start from a run like it')
    wrong = [
        describe_misfit(name, leaves[name]['shape'], leaf.shape)
        for name, leaf in shared.items()
        if tuple(leaves[name]['shape']) != tuple(leaf.shape)
    ]
    if wrong:
        refuse_initial(saved, wrong)
    return record['leaves']


def refuse_initial(saved: SavedWeights, wrong: Sequence[str]) -> NoReturn:
    """Raises MismatchError for arrays of other shapes (`describe_misfit`)."""
    raise MismatchError(f'{saved.name}: {"; ".join(wrong)}; give the model the sizes of that run, or start without it')


def _alike(buffers: dict, saved: Mapping[str, dict]) -> dict:
    """Returns the nested dict without arrays that `saved` lacks or has in another shape or type."""

    def is_saved(path: tuple, array: Any) -> bool:
        found = saved.get(name_leaf(('buffers', *path)), {})
        return (found.get('shape'), found.get('dtype')) == (list(array.shape), array.dtype.name)

    return unflatten_dict({path: array for path, array in flatten_dict(buffers).items() if is_saved(path, array)})


def describe_misfit(name: str, theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Describes an array that has one shape in the other run and another one here."""
    return f'{name} is {_shape(theirs)} there and {_shape(ours)} here'


def _shape(sizes: Sequence[int]) -> str:
    return '×'.join(map(str, sizes)) or 'a scalar'
