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


def hand_over(
    description: Description,
    choice: TableChoice,
    root: str,
    options: ClusterOptions,
    launcher: str,
    manifests: str | None,
    retry_failed: bool = False,
) -> None:
    """Writes the configurations of the runs into their folder, and starts pods or writes manifests.

    Args:
        root: the folder of the runs, which all machines reach.
        launcher: tpu, or a format of `lm.sweep.manifests`.
        manifests: the folder for manifests; None for tpu.
        retry_failed: hand over runs, too, whose failure would be repeated.

    Raises ConfigError for options that the launcher does not use, and LmError if the script fails.
    """
    params = (f'mesh.processes = {options.processes}',) if launcher != PODS and options.processes > 1 else ()
    choice = dataclasses.replace(choice, gin_params=(*params, *choice.gin_params))
    sweep = Sweep(root, [run.point for run in list_runs(description, choice)])
    if not sweep.points:
        raise ConfigError(f'{description.name}: its {choice.scale} scale is commands for this machine; leave out --on')
    for line in description.commands.get(choice.scale, ()):
        print(f'afterwards, on a machine that reaches {root}: {line.replace("{root}", root)}')
    if launcher == PODS:
        start_pods(sweep, root, manifests, options)
        return
    if manifests is None:
        raise ConfigError(f'--on {launcher}: name the folder for its manifests with --manifests')
    kind = find_format(launcher)
    kind.check(options, not is_remote(root))
    emit_sweep(sweep, kind, options, manifests, retry_failed=retry_failed)


def start_pods(sweep: Sweep, root: str, manifests: str | None, options: ClusterOptions) -> None:
    """Runs the script that gives each run a pod. Its settings stand in scripts/tpu/settings.env."""
    if manifests is not None:
        raise ConfigError(f'--manifests {manifests}: pods of scripts/tpu need none; leave it out')
    if options != ClusterOptions():
        raise ConfigError('--on tpu: the machines stand in scripts/tpu/settings.env; leave out --topology and the like')
    script = project_root() / SCRIPT
    if not script.exists():
        raise ConfigError(f'{script}: no such file; --on tpu needs a checkout of this project')
    if not is_remote(sweep.root):
        raise ConfigError(f'--run_dir {root}: pods need a bucket, such as gs://my-bucket/table_2')
    sweep.check()
    for point in sweep.points:
        sweep.write_config(point)
    sweep.write_results()
    command = [str(script), 'lm', 'sweep', '--run_dir', root]
    if code := subprocess.run(command, check=False).returncode:
        raise LmError(f'{shlex.join(command)}: ended with {code}; its table says which runs')
