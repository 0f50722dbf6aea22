"""The options of `lm sweep`. A field with a help text is a flag of the command line.

Importing this module imports nothing heavy.
"""

import dataclasses
from collections.abc import Sequence

from lm.errors import ConfigError
from lm.hardware import Topology
from lm.options import option
from lm.text import parse_whole


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep's run on this machine."""

    jobs: int = option('points at a time; default: 1', 'N', 1)
    gpus_per_job: int | None = option('share the GPUs out, K to a point; default: they are not divided', 'K')
    retry_failed: bool = option('run points again that diverged or were refused', default=False)
    allow_gin_imports: bool = False
    """Gin files of the points may import modules."""


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """The options of a search. A search that goes on must have the same, but for the number of trials."""

    sampler: str = 'tpe'
    """tpe (tree-structured Parzen estimator, Bergstra et al. 2011) or random."""
    trials: int = option('how many trials are drawn; default: 20', 'N', 20)
    seed: int = option('the seed of the draws; default: 0', 'N', 0, least=0)
    parallel: int = option('trials at a time on all machines together; default: --jobs', 'N', 1)
    prune: bool = option('end trials early that Hyperband does not promote', default=False)


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """The machines of each point, and how a cluster starts them. A format refuses options that it does not use."""

    image: str | None = option('the container image, such as scripts/tpu/Dockerfile makes', 'IMAGE')
    topology: Topology | None = option('TPUs: v5e:4x4, v4-32, or 2*v5e:4x4', 'SLICE')
    gpus: str | None = option('GPUs, on all machines together', '[KIND:]N')
    nodes: int | None = option('machines without TPUs; default: 1', 'N')
    queue: str | None = option('the local queue of Kueue, or the partition of Slurm', 'NAME')
    namespace: str | None = option('the namespace of Kubernetes', 'NAME')
    service_account: str | None = option('the service account of Kubernetes, whose identity opens the bucket', 'NAME')
    secret: str | None = option('the Secret of Kubernetes whose variables the pods get, such as WANDB_API_KEY', 'NAME')
    claim: str | None = option('the volume of Kubernetes that pods mount at ROOT', 'NAME')
    spot: bool = option('machines that may be taken away at any time', default=False)
    failures: int | None = option('tries again after exit codes without a rule; default: 3', 'N', least=0)
    setup: Sequence[str] = option('a line of shell before the command', 'LINE', (), action='append')
    scheduler_options: Sequence[str] = option(
        'one more option for Slurm: --scheduler_option=--account=mine',
        *('OPTION', ()),
        action='append',
        flag='scheduler_option',
    )
    jobs: int | None = None
    """Points at a time; None: as many as the cluster lets run."""

    @property
    def most_failures(self) -> int:
        return 3 if self.failures is None else self.failures

    @property
    def chips_per_machine(self) -> int:
        """The TPU chips of a machine: 4, or all of a smaller slice; eight chips of v5e or v6e share one machine."""
        assert self.topology is not None
        chips = self.topology.chips // self.topology.slices
        return chips if chips < 4 or (chips == 8 and self.topology.chip.axes == 2) else 4

    @property
    def machines_per_slice(self) -> int:
        if self.topology is None:
            return self.nodes or 1
        return self.topology.chips // self.topology.slices // self.chips_per_machine

    @property
    def processes(self) -> int:
        """The processes of a point, one per machine."""
        return self.machines_per_slice * (self.topology.slices if self.topology else 1)

    @property
    def gpus_per_machine(self) -> int:
        """The GPUs of each machine. Raises ConfigError where the number is not a multiple of the machines."""
        number = parse_whole((self.gpus or '0').rpartition(':')[2])
        if number is None or number % self.processes:
            raise ConfigError(f'--gpus {self.gpus}: give a number that {self.processes} machines can share, or KIND:N')
        return number // self.processes
