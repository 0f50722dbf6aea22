"""The contract of a format of manifests. Adding a format means adding one file with a class.

Each format has the same policy by exit codes, in the terms of its scheduler:

    0                  done
    42, signals        again, as long as one start in ten saves a step (`lm.sweep.run`): the state is saved
    45                 elsewhere: the machine computes wrongly
    2, 43, 44          never again: the same command would end in the same way
    anything else      again, `ClusterOptions.failures` times at most; Slurm: without a new checkpoint
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lm.errors import FINAL, ConfigError, Preempted, WrongResults
from lm.sweep.options import ClusterOptions

AGAIN = (Preempted.exit_code,)
ELSEWHERE = (WrongResults.exit_code,)
NEVER = FINAL
PORT = 8476
"""The port of process 0, at which the processes of a job meet."""

FORMATS: dict[str, 'ManifestFormat'] = {}
"""Name → format. Each subclass of `ManifestFormat` adds itself."""


@dataclasses.dataclass(frozen=True)
class ClusterJob:
    """One point, as a cluster runs it.

    Attributes:
        name: a label of at most 44 lower-case letters, digits and dashes; it differs between sweeps.
        excluded: machines that computed wrongly before.
    """

    name: str
    point: str
    index: int
    root: str
    excluded: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command of each process. It needs no file but the folder of the sweep.

        It names the point: numbers of points may change when values are added to the sweep.
        """
        return ['lm', 'sweep', '--run_dir', self.root, '--index', self.point]


class ManifestFormat(abc.ABC):
    """Manifests of one kind of cluster.

    Attributes:
        name: what --emit calls it.
        needs: options that must be given.
        uses: options that may be given besides.
        submit: the command that hands a folder of manifests to the cluster; {folder} stands for the folder.
    """

    name: ClassVar[str] = ''
    needs: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ()
    submit: ClassVar[str] = ''

    def __init_subclass__(cls) -> None:
        if cls.name:
            FORMATS[cls.name] = cls()

    def check(self, options: ClusterOptions, is_local: bool) -> None:
        """Raises ConfigError for options that are missing, or that this format does not use. `is_local`: the folder of
        the sweep is a path, not an address in a bucket."""
        default = ClusterOptions()
        for field in dataclasses.fields(options):
            flag, given = f'--{field.name}', getattr(options, field.name)
            is_given = given != getattr(default, field.name)
            if field.name in self.needs and not is_given:
                raise ConfigError(f'{flag}: --emit {self.name} needs it; name {field.metadata["help"]}')
            if is_given and field.name not in (*self.needs, *self.uses):
                raise ConfigError(f'{flag}: --emit {self.name} does not use it; leave it out')
        if options.topology and (options.gpus or options.nodes):
            raise ConfigError('--topology and --gpus or --nodes: give one of them, TPUs or other machines')
        self.check_machines(options, is_local)

    @abc.abstractmethod
    def check_machines(self, options: ClusterOptions, is_local: bool) -> None:
        """Raises ConfigError for machines or a folder that this kind of cluster does not offer."""

    @abc.abstractmethod
    def make_files(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str) -> dict[str, str]:
        """Returns file name → text of the manifests. `folder`: the absolute path that they will lie in."""
