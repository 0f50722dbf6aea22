"""The time of a training step, part by part, on one device of an absent TPU.

The step is compiled for one described device. Each instruction costs the time in `lm.cost_model.step_time`: a model,
and not a measurement.
"""

import dataclasses
import math

from lm.compilation.compiler import CompiledProgram
from lm.cost_model.kernel_cycles import KernelCycles
from lm.cost_model.program import HloProgram
from lm.cost_model.step_time import StepTime, step_time
from lm.experiment import Experiment
from lm.hardware import Target, Topology, describe_devices
from lm.model import REMAT
from lm.plan import StepPlan, plan_step
from lm.pod.mesh import MeshConfig
from lm.training.program import StepTooLarge, compile_described


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Memory and time of a step on one device (a chip; on v7x one of its two cores).

    Attributes:
        remat: the level of `model.remat`: the configured level or, if that does not fit, the fastest other level.
        peak_gib: HBM; 0 if the step does not fit.
        time: None if the step does not fit.
        mfu: the utilization at this time.
    """

    remat: str
    peak_gib: float = 0.0
    time: StepTime | None = None
    mfu: float | None = None


def forecast_step(experiment: Experiment, topology: Topology) -> Forecast:
    """Compiles the step for one device of `topology` and models its time.

    If the step does not fit, the levels of `model.remat` that recompute more are tried.
    """
    configured, *others = list(REMAT)[list(REMAT).index(experiment.model.remat) :]
    if found := _forecast_level(experiment, configured, topology):
        return found
    # The fastest level depends on the context: recomputing attention costs time, and so does recomputing products.
    fitting = [found for level in others if (found := _forecast_level(experiment, level, topology))]
    none = Forecast([configured, *others][-1])
    return min(fitting, key=lambda found: found.time.seconds if found.time else math.inf, default=none)


def _forecast_level(experiment: Experiment, remat: str, topology: Topology) -> Forecast | None:
    """Returns memory and time of the step at a level of `model.remat`; None if it does not fit."""
    model, config = dataclasses.replace(experiment.model, remat=remat), experiment.train
    plan = plan_one(dataclasses.replace(experiment, model=model), topology)
    found = compile_step(plan, topology)
    if found is None:
        return None
    assert found.memory is not None, 'compilers for TPUs describe the memory'
    program = HloProgram(found.text)
    time, chip = step_time(program, topology, KernelCycles(program, topology)), topology.chip
    flops = plan.flops_per_token * config.tokens_per_step
    return Forecast(remat, found.memory.peak / 2**30, time, flops / time.seconds / (chip.flops / chip.devices))


def plan_one(experiment: Experiment, topology: Topology) -> StepPlan:
    """Plans the step of `lm train` for one device."""
    devices = describe_devices(topology)[:1]
    return plan_step(dataclasses.replace(experiment, mesh=MeshConfig()), Target.of_devices(devices))


def compile_step(plan: StepPlan, topology: Topology) -> CompiledProgram | None:
    """Compiles the step for one device; None: it needs more memory than the device has."""
    mesh = plan.mesh.arrange(describe_devices(topology)[:1])
    try:
        return compile_described(plan.program, mesh, topology)
    except StepTooLarge:
        return None
