"""`lm reproduce --on`: hands the runs of a table to the launchers of `lm sweep` and `scripts/tpu`."""

import dataclasses
import shlex
import subprocess

from lm.config.project import project_root
from lm.errors import ConfigError, LmError
from lm.files import is_remote
from lm.reproduce.descriptions import Description
from lm.reproduce.runs import TableChoice, list_runs
from lm.sweep.emit import emit_sweep, find_format
from lm.sweep.options import ClusterOptions
from lm.sweep.sweep import Sweep

PODS = 'tpu'
"""The launcher that is a script of this project; the others are formats of `lm sweep --emit`."""
SCRIPT = 'scripts/tpu/sweep.sh'


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Where the runs go.

    Attributes:
        launcher: tpu, or a format of `lm.sweep.manifests`.
        root: the folder of the runs, which all machines reach.
        manifests: the folder for manifests; None for tpu.
        retry_failed: hand over runs, too, whose failure would be repeated.
    """

    launcher: str
    root: str
    manifests: str | None
    retry_failed: bool = False


def hand_over(description: Description, choice: TableChoice, asked: HandOver, options: ClusterOptions) -> None:
    """Writes the configurations of the runs into their folder, and starts pods or writes manifests.

    Raises ConfigError for options that the launcher does not use, and LmError if the script fails.
    """
    params = (f'mesh.processes = {options.processes}',) if asked.launcher != PODS and options.processes > 1 else ()
    choice = dataclasses.replace(choice, gin_params=(*params, *choice.gin_params))
    sweep = Sweep(asked.root, [run.point for run in list_runs(description, choice)])
    if not sweep.points:
        raise ConfigError(f'{description.name}: its {choice.scale} scale is commands for this machine; leave out --on')
    for line in description.commands.get(choice.scale, ()):
        print(f'afterwards, on a machine that reaches {asked.root}: {line.replace("{root}", asked.root)}')
    if asked.launcher == PODS:
        start_pods(sweep, asked, options)
        return
    if asked.manifests is None:
        raise ConfigError(f'--on {asked.launcher}: name the folder for its manifests with --manifests')
    kind = find_format(asked.launcher)
    kind.check(options, not is_remote(asked.root))
    emit_sweep(sweep, kind, options, asked.manifests, retry_failed=asked.retry_failed)


def start_pods(sweep: Sweep, asked: HandOver, options: ClusterOptions) -> None:
    """Runs the script that gives each run a pod. Its settings stand in scripts/tpu/settings.env."""
    if asked.manifests is not None:
        raise ConfigError(f'--manifests {asked.manifests}: pods of scripts/tpu need none; leave it out')
    if options != ClusterOptions():
        raise ConfigError('--on tpu: the machines stand in scripts/tpu/settings.env; leave out --topology and the like')
    script = project_root() / SCRIPT
    if not script.exists():
        raise ConfigError(f'{script}: no such file; --on tpu needs a checkout of this project')
    if not is_remote(sweep.root):
        raise ConfigError(f'--run_dir {asked.root}: pods need a bucket, such as gs://my-bucket/table_2')
    sweep.check()
    for point in sweep.points:
        sweep.write_config(point)
    sweep.write_results()
    command = [str(script), 'lm', 'sweep', '--run_dir', asked.root]
    if code := subprocess.run(command, check=False).returncode:
        raise LmError(f'{shlex.join(command)}: ended with {code}; its table says which runs')
