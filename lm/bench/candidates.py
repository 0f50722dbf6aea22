"""The mechanisms that a benchmark compares: names, with settings from gin files and parameters, or gin files.

polysketch                  @polysketch() as --gin_file and --gin_param set it
wide/polysketch             the same with the settings of the scope: --gin_param 'wide/polysketch.sketch_size = 64'
configs/attention/llops.gin what the file says of model.attention, and of everything else
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lm.attention import DEFAULT, mechanisms
from lm.bench.options import ComparedOptions
from lm.config.checks import Statement, check_used, did_you_mean, find_used_bindings
from lm.config.read import read
from lm.config.resolve import map_sections, resolve
from lm.config.text import Reference, join_names
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Target

CPU_MODEL, MODEL = 'configs/models/tiny.gin', 'configs/models/small.gin'
BASELINE = DEFAULT.gin_name
"""The mechanism with which speeds are compared."""
FEATURED = 'configs/attention/polysketch.gin'
"""The gin file of the mechanism that is compared with the baseline if the command line names none."""

Chosen = TypeVar('Chosen', bound=ComparedOptions)


@functools.cache
def featured() -> str:
    """Returns the gin name of the mechanism that the file `FEATURED` chooses."""
    chosen = {s.key: s.value for s in read([FEATURED])}
    return chosen['model.attention'].selector


def candidates(
    names: Sequence[str] | None,
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    *,
    allow_imports: bool = False,
) -> dict[str, Experiment]:
    """Returns the configurations of the names, each resolved and checked, by their names in tables.

    Args:
        names: as described above; None: the baseline, and the value of `model.attention`, or else the featured
            mechanism.
        gin_files, gin_params: shared by all candidates.

    Raises:
        ConfigError: an unknown name, a mistake in the configuration, or a binding that no candidate uses.
    """
    base = {s.key: s for s in read(gin_files, allow_imports=allow_imports)}
    params = {s.key: s for s in read((), gin_params, allow_imports=allow_imports)}
    is_default = names is None
    if names is None:
        names = [BASELINE, '' if 'model.attention' in base | params else featured()]
    if not names:
        raise ConfigError('--mechanisms: name at least one')
    resolved: list[tuple[str, Experiment, dict[str, Statement], Any]] = []
    for name in dict.fromkeys(names):
        own = {}
        if name.endswith('.gin'):
            own = {s.key: s for s in read([name], allow_imports=allow_imports)}
        elif name:
            scope, _, mechanism = name.rpartition('/')
            _check_known(mechanism)
            chosen = Statement('', 'model', 'attention', Reference(scope, mechanism), '--mechanisms', False)
            own = {chosen.key: chosen}
        bindings = base | params | own if not name.endswith('.gin') else base | own | params
        experiment, calls = resolve(bindings, Experiment)
        label = pathlib.Path(name).stem if name.endswith('.gin') else name or _label(experiment)
        resolved.append((label, experiment, bindings, calls))
    used_somewhere = set().union(*(find_used_bindings(bindings, calls) for *_, bindings, calls in resolved))
    for *_, bindings, calls in resolved:
        used = find_used_bindings(bindings, calls)
        kept = {key: s for key, s in bindings.items() if key in used or key not in used_somewhere}
        check_used(kept, calls, set(map_sections(Experiment).values()))
    if is_default:  # the baseline itself may be configured
        resolved = list({entry[0]: entry for entry in resolved}.values())
    labels = [label for label, *_ in resolved]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f'--mechanisms: two of them are called {min(twice)}; name one of them, or use a scope')
    return {label: experiment for label, experiment, *_ in resolved}


def with_model(options: Chosen, on_cpu: bool) -> Chosen:
    """Returns the options with a small model, smaller on a CPU, unless they describe a model themselves."""
    if options.gin_file or any(text.lstrip().startswith('model.d_model') for text in options.gin_param):
        return options
    return dataclasses.replace(options, gin_file=[CPU_MODEL if on_cpu else MODEL])


def read_candidates(options: ComparedOptions) -> dict[str, Experiment]:
    """Returns the configurations that the options name, as `candidates` does."""
    given = options.mechanisms, options.gin_file, options.gin_param
    return candidates(*given, allow_imports=options.allow_gin_imports)


def describe_settings(options: ComparedOptions, found: Mapping[str, Experiment]) -> dict[str, Any]:
    """Returns the files, parameters and mechanisms of a benchmark as its JSON file states them."""
    return {
        'gin_files': list(options.gin_file),
        'gin_params': list(options.gin_param),
        'mechanisms': {name: [str(attention) for attention in one.model.pattern] for name, one in found.items()},
    }


def change_context(experiment: Experiment, context: int, tokens: int, limit: int, target: Target) -> Experiment:
    """Returns the experiment with another context length, and microbatches of at most `limit` tokens per device of
    `target`.

    Raises ConfigError if the tokens per step are no multiple of the context, or the devices form no mesh.
    """
    shards = experiment.mesh.plan(target).shards or 1
    if tokens % context:
        raise ConfigError(f'--tokens_per_step {tokens}: must be a multiple of every context; {context} does not divide')
    rows = max(1, tokens // context // shards)
    fits = limit * experiment.mesh.sequence // context
    together = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n <= fits))
    train = dataclasses.replace(
        experiment.train, context_length=context, tokens_per_step=tokens, microbatches=rows // together
    )
    return dataclasses.replace(experiment, train=train)


def _check_known(mechanism: str) -> None:
    known = sorted(mechanisms())
    if mechanism not in known:
        hint = did_you_mean(mechanism, known) or f'; there are {join_names(known, 30)}, and files that end in .gin'
        raise ConfigError(f'--mechanisms {mechanism}: no such mechanism{hint}')


def _label(experiment: Experiment) -> str:
    return '+'.join(attention.gin_name for attention in experiment.model.pattern)
