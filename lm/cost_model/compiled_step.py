"""The training step compiled for an absent TPU slice: memory, collectives, the least possible time, and a predicted
time.

It also computes figures that follow from the configuration alone. The step is the step of `lm train`: the same
function, shardings, donated state, batch and kernels. Only the devices are described. Compilation takes a minute or two
for a large model on a laptop.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from lm.compilation.memory import ProgramMemory
from lm.cost_model.kernel_cycles import KernelCycles
from lm.cost_model.program import HloProgram
from lm.cost_model.roofline import Roofline, roofline
from lm.cost_model.step_time import StepTime, step_time
from lm.experiment import Experiment
from lm.hardware import Target, Topology, describe_devices, parse
from lm.model.adapters import find_base
from lm.plan import StepPlan, plan_step
from lm.training.program import StepTooLarge, compile_described
from lm.training.replay import lower_replay

GIB = 2**30
MARGIN = 0.03
"""The fraction of the memory that advice leaves free: an evaluation, or another compiler, may need a little more."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Figures that follow from the configuration alone.

    Attributes:
        parameters: of the model, by its parts, without adapters.
        parameters_trained: those that learn: without frozen parts; under adapters, of these alone.
        flops_per_token: FLOPs of the MFU: forward and backward, no recomputation.
    """

    parameters: dict[str, int]
    parameters_total: int
    parameters_trained: int
    windows_per_step: int
    tokens_per_window: int
    tokens_per_step: int
    steps: int
    tokens_total: int
    flops_per_token: float
    flops_total: float


@dataclasses.dataclass(frozen=True)
class Memory:
    """The HBM of one JAX device (a chip; on v7x half of one), in GiB. If the compiler refuses a step, only `needed_gib`
    is known.

    Attributes:
        limit_gib: the memory that a program may use.
        needed_gib: at the peak.
        arguments_gib: parameters, optimizer state and batch.
        outputs_gib: the new state.
        aliased_gib: the outputs that replace the arguments in place.
        temporaries_gib: gradients, and the arrays that the forward pass keeps for the backward pass.
        replay_gib: at the peak of a replay, which runs beside the state; None without `train.replay_every`.
    """

    limit_gib: float
    needed_gib: float
    arguments_gib: float | None = None
    outputs_gib: float | None = None
    aliased_gib: float | None = None
    temporaries_gib: float | None = None
    replay_gib: float | None = None


@dataclasses.dataclass(frozen=True)
class Speed:
    """The run at a given time per step."""

    seconds_per_step: float
    steps_per_second: float
    tokens_per_second: float
    mfu: float
    run_hours: float
    run_chip_hours: float


@dataclasses.dataclass(frozen=True)
class Check:
    """The check of one configuration on one topology.

    Attributes:
        bindings: the changes of the configuration, as gin; empty: none.
        roofline, speed: a bound, and the run at the bound; None when the compiler refused the step.
        predicted_step, predicted: the model of `lm.cost_model.step_time`, and the run at its time; None also if the
            compiled program cannot be read.
        compile_seconds: on this machine.
        advice: changes to try if the step does not fit (see `lm.check.advice`).
    """

    topology: str
    chips: int
    devices: int
    bindings: tuple[str, ...]
    fits: bool
    memory: Memory
    roofline: Roofline | None
    speed: Speed | None
    compile_seconds: float
    predicted_step: StepTime | None = None
    predicted: Speed | None = None
    advice: Any = None

    @property
    def has_headroom(self) -> bool:
        """True if the step fits and leaves `MARGIN` of the memory free."""
        return self.memory.needed_gib <= (1 - MARGIN) * self.memory.limit_gib


def compute_budget(plan: StepPlan) -> Budget:
    """Computes the figures that need no compilation."""
    config, flops = plan.experiment.train, plan.flops_per_token
    total = config.steps * config.tokens_per_step
    return Budget(
        parameters=find_base(plan.functions).count_parameters(),
        parameters_total=plan.parameters,
        parameters_trained=plan.trained,
        windows_per_step=config.batch_size,
        tokens_per_window=config.context_length,
        tokens_per_step=config.tokens_per_step,
        steps=config.steps,
        tokens_total=total,
        flops_per_token=flops,
        flops_total=flops * total,
    )


def check(experiment: Experiment, topology: str | Topology, bindings: Mapping[str, Any] | None = None) -> Check:
    """Compiles the training step for `topology` and reads its costs; with `train.replay_every` also a replay, whose
    memory counts if it needs more.

    Args:
        topology: such as 'v5e:4x8'.
        bindings: changes to try, by gin name: {'model.remat': 'dots'}.

    Raises:
        ConfigError: an unknown topology, libtpu is missing, the batch or `mesh.fsdp` does not divide by the devices, or
            the compiler refuses the step for another reason than memory.
    """
    topology = parse(topology) if isinstance(topology, str) else topology
    bindings = dict(bindings or {})
    experiment = apply_bindings(experiment, bindings)
    devices, start = describe_devices(topology), time.perf_counter()
    plan = plan_step(experiment, Target.of_devices(devices))
    mesh = plan.mesh.arrange(devices)
    limit = topology.chip.limits.hbm_gib
    try:
        compiled = compile_described(plan.program, mesh, topology)
        assert compiled.memory is not None, 'compilers for TPUs describe the memory'
        memory, text = _make_memory(compiled.memory, limit), compiled.text
        if experiment.train.replay_every:
            memory = _add_replay(memory, plan, mesh, topology)
    except StepTooLarge as error:
        memory, text = Memory(limit, error.needed_gib), None
    refused = Check(
        topology=topology.name,
        chips=topology.chips,
        devices=len(devices),
        bindings=tuple(f'{name} = {value!r}' for name, value in bindings.items()),
        fits=False,
        memory=memory,
        roofline=None,
        speed=None,
        compile_seconds=time.perf_counter() - start,
    )
    if text is None:
        return refused
    layers = [(attention, experiment.model.resolve(attention).dims) for attention in experiment.model.pattern]
    undeclared = [(attention, dims) for attention, dims in layers if not attention.kernels_declare_cost(dims)]
    costs = [attention.flops_per_token(dims, experiment.train.context_length) for attention, dims in undeclared]
    forward = sum(costs) / max(1, len(costs))
    least = plan.flops_per_token * experiment.train.tokens_per_step / len(devices)
    bound, program = roofline(text, topology, forward, least), HloProgram(text)
    model = step_time(program, topology, KernelCycles(program, topology)) if text else None
    return dataclasses.replace(
        refused,
        fits=memory.needed_gib <= limit,
        roofline=bound,
        speed=_compute_speed(plan, bound.seconds, topology),
        predicted_step=model,
        # A prediction is never below the bound.
        predicted=model and _compute_speed(plan, max(model.seconds, bound.seconds), topology),
    )


def apply_bindings(experiment: Experiment, bindings: Mapping[str, Any]) -> Experiment:
    """Returns the experiment with other values of `section.field`."""
    for name, value in bindings.items():
        section, _, field = name.partition('.')
        new = dataclasses.replace(getattr(experiment, section), **{field: value})
        experiment = dataclasses.replace(experiment, **{section: new})
    return experiment


def _make_memory(found: ProgramMemory, limit: float) -> Memory:
    parts = (found.peak, found.arguments, found.outputs, found.aliased, found.temporaries)
    return Memory(limit, *(part / GIB for part in parts))


def _add_replay(memory: Memory, plan: StepPlan, mesh: Mesh, topology: Topology) -> Memory:
    """Adds the memory of a replay, which takes no arrays from the state: all of it stays beside the temporaries."""
    try:
        found = compile_described(plan.program, mesh, topology, lower_replay).memory
        assert found is not None, 'compilers for TPUs describe the memory'
        needed = (memory.arguments_gib or 0.0) + (found.outputs + found.temporaries) / GIB
    except StepTooLarge as error:
        needed = error.needed_gib
    return dataclasses.replace(memory, replay_gib=needed, needed_gib=max(memory.needed_gib, needed))


def _compute_speed(plan: StepPlan, seconds: float, topology: Topology) -> Speed:
    config = plan.experiment.train
    tokens = config.tokens_per_step / seconds
    hours = config.steps * seconds / 3600
    return Speed(
        seconds_per_step=seconds,
        steps_per_second=1 / seconds,
        tokens_per_second=tokens,
        mfu=plan.flops_per_token * tokens / (topology.chip.flops * topology.chips),
        run_hours=hours,
        run_chip_hours=hours * topology.chips,
    )
