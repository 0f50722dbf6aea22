"""`lm bench precision`: checks whether the kernels of this machine agree with XLA alone.

It computes the loss of a model on random tokens and its gradients, three times on one device: as configured, without
our kernels, and without kernels in float32 with products of full precision. The model has one layer of each mechanism
of its pattern, and is otherwise as configured. So all parts of a step are compared: rotary positions, sketches,
attention, cross-entropy. The errors of the first two programs against the third should be alike.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.bench import results
from lm.bench.candidates import read_candidates, with_model
from lm.bench.options import ComparedOptions
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.hardware import Target
from lm.ops.platform import choices
from lm.plan import plan_step
from lm.pod.job import JobAddress, initialize_distributed
from lm.pod.mesh import MeshConfig

CPU_CONTEXTS, CONTEXTS = (512,), (4096,)
ALLOWED, ROUNDING = 3.0, 0.01
"""A gradient is wrong if its error exceeds this multiple of the error of XLA alone, plus one percent."""


@dataclasses.dataclass(frozen=True)
class PrecisionRow:
    """One configuration at one context length. Errors are relative to the norm, against float32.

    Attributes:
        kernels: the implementations other than XLA, by operation.
        loss, gradients: errors; the latter of all gradients as one vector.
        portable_loss, portable_gradients: the errors of XLA alone.
        worst: the parameter with the largest error in comparison with XLA alone.
        worst_error, portable_error: the errors of this parameter.
        repeats: whether a second run gave the same bits.
        portable_repeats: whether a second run of XLA alone gave the same bits. Some programs of XLA on GPUs do not.
        right: whether every gradient is finite and within the allowed error.
    """

    mechanism: str
    context: int
    kernels: str
    loss: float
    portable_loss: float
    gradients: float
    portable_gradients: float
    worst: str
    worst_error: float
    portable_error: float
    repeats: bool
    portable_repeats: bool
    right: bool

    @property
    def is_good(self) -> bool:
        """Tells whether no kernel is at fault: bits that differ in XLA alone as well are not the kernels' fault."""
        return self.right and self.repetition != 'NO'

    @property
    def repetition(self) -> str:
        return 'yes' if self.repeats else 'NO' if self.portable_repeats else 'no, as XLA'


COLUMNS = {
    'mechanism': ('mechanism', str),
    'context': ('context', '{:,}'.format),
    'loss': ('loss', '{:.2%}'.format),
    'portable_loss': ('XLA', '{:.2%}'.format),
    'gradients': ('gradients', '{:.2%}'.format),
    'portable_gradients': ('XLA', '{:.2%}'.format),
    'worst_error': ('worst', '{:.2%}'.format),
    'portable_error': ('XLA', '{:.2%}'.format),
    'worst': ('worst of', str),
    'repetition': ('repeats', str),
    'right': ('right', lambda right: 'yes' if right else 'NO'),
    'kernels': ('kernels', str),
}


def bench_precision(options: ComparedOptions, job: JobAddress) -> int:
    """Prints a table and writes it to a file, if there is one; returns 1 if a kernel is wrong."""
    output = results.Output(options.save)
    initialize_distributed(MeshConfig(), job)
    is_cpu = jax.default_backend() == 'cpu'
    options = with_model(options, is_cpu)
    printer, machine = results.Printer(), results.machine() | {'device_count': 1}
    printer.line(results.heading('lm bench precision', machine))
    printer.line('errors against float32 without kernels; beside each error, the error of XLA alone in the same type')
    rows = []
    for name, experiment in read_candidates(options).items():
        for context in options.contexts or (CPU_CONTEXTS if is_cpu else CONTEXTS):
            printer.progress(f'{name}, {context:,} tokens …')
            rows.append(compared(name, experiment, context))
    printer.progress()
    printer.table(rows, COLUMNS)
    settings = {'gin_files': list(options.gin_file), 'gin_params': list(options.gin_param)}
    output.write('precision', machine, settings, rows)
    for row in rows:
        if not row.is_good:
            print(failure(row), file=sys.stderr, flush=True)
    return 0 if all(row.is_good for row in rows) else 1


def failure(row: PrecisionRow) -> str:
    """Returns one line with the fault and its remedy."""
    name = f'{row.mechanism}, {row.context:,} tokens'
    if row.right:
        return f'{name}: two runs differ; report it, with the table above'
    return (
        f'{name}: the gradient of {row.worst} is wrong by {row.worst_error:.2%}, by {row.portable_error:.2%} with XLA '
        f"alone; set the mechanism's implementation = 'xla', and report it with the table above"
    )


def compared(name: str, experiment: Experiment, context: int) -> PrecisionRow:
    """Compares the configured, the portable and the reference program of one configuration.

    Raises ConfigError if the mechanisms cannot compute a window of this length.
    """
    model = experiment.model
    if not model.causal:
        raise ConfigError(f'{name}: lm bench precision is for causal models')
    small = dataclasses.replace(model, n_layers=len(model.pattern))
    experiment = dataclasses.replace(experiment, model=small, mesh=MeshConfig())
    exact = dataclasses.replace(experiment, model=dataclasses.replace(small, dtype='float32'))
    (configured, again), used = values_of(experiment, context, runs=2)
    (portable, portable_again), _ = values_of(experiment, context, portable=True, runs=2)
    with jax.default_matmul_precision('highest'):
        (reference,), _ = values_of(exact, context, portable=True)
    repeats, portable_repeats = same_bits(configured, again), same_bits(portable, portable_again)
    loss, *of_loss = (found.pop('loss') for found in (reference, configured, portable))
    errors, others = (errors_of(found, reference) for found in (configured, portable))
    excess = {name: errors[name] / (ALLOWED * others[name] + ROUNDING) for name in errors}
    worst = max(excess, key=lambda name: np.nan_to_num(excess[name], nan=np.inf))
    return PrecisionRow(
        mechanism=name,
        context=context,
        kernels=', '.join(f'{operation}: {name}' for operation, name in used.items() if name != 'xla') or '–',
        loss=abs(float(of_loss[0] / loss - 1)),
        portable_loss=abs(float(of_loss[1] / loss - 1)),
        gradients=norm_of_difference(configured, reference),
        portable_gradients=norm_of_difference(portable, reference),
        worst=worst,
        worst_error=errors[worst],
        portable_error=others[worst],
        repeats=repeats,
        portable_repeats=portable_repeats,
        right=all(value <= 1 for value in excess.values()),
    )


def values_of(
    experiment: Experiment, context: int, portable: bool = False, runs: int = 1
) -> tuple[list[dict[str, np.ndarray]], dict[str, str]]:
    """Returns loss and gradients by name for each of some runs, and the implementations by operation."""
    devices = jax.local_devices()[:1]
    plan = plan_step(experiment, Target.of_devices(devices))
    step = plan.program.step
    with jax.set_mesh(plan.mesh.arrange(devices)), choices(portable) as used:
        tokens = jax.random.randint(jax.random.key(1), (1, context + 1), 0, experiment.model.vocab_size)

        def loss(params, buffers, tokens):
            share = jnp.full((1, context), 1 / context, jnp.float32)
            weights, rows = {'params': params, 'buffers': buffers}, (tokens[:, :-1], tokens[:, 1:], share)
            return step.weighted_loss(weights, *rows)[0]

        state = jax.jit(step.functions.init)(experiment.train.seed)
        program = jax.jit(jax.value_and_grad(loss))
        found = [jax.device_get(program(state['params'], state['buffers'], tokens)) for _ in range(runs)]
    return [{'loss': value, **named(gradients)} for value, gradients in found], used


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf, np.float64) for path, leaf in leaves
    }


def same_bits(found: dict[str, np.ndarray], again: dict[str, np.ndarray]) -> bool:
    """Tells whether two runs agree in every number."""
    return all(np.array_equal(found[name], again[name], equal_nan=True) for name in found)


def errors_of(found: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the error of each gradient relative to its norm, or absolute where the reference is zero."""
    norms = {name: float(np.linalg.norm(value)) for name, value in reference.items()}
    return {name: float(np.linalg.norm(found[name] - reference[name])) / (norms[name] or 1.0) for name in reference}


def norm_of_difference(found: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """Returns the error of all gradients as one vector, relative to its norm."""
    above, below = (
        sum(float(np.sum(np.square(x))) for x in values)
        for values in ([found[name] - reference[name] for name in reference], reference.values())
    )
    return (above / below) ** 0.5
