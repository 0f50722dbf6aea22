"""`lm reproduce --on`: hands the runs of a table to the launchers of `lm sweep` and `scripts/tpu`.

Runs without tokens, and runs that do not fit, are refused before anything is written or paid for.
"""

import dataclasses
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
from etils import epath

from lm.check.check import find_slices
from lm.check.reach import refuse_absent_tokens
from lm.config.project import project_root
from lm.errors import ConfigError, LmError
from lm.files import is_remote
from lm.reproduce.descriptions import Description
from lm.reproduce.price import price_runs
from lm.reproduce.program import run_program
from lm.reproduce.runs import TableChoice, TableRun, list_runs, number_runs
from lm.sweep.emit import emit_sweep, find_format
from lm.sweep.options import ClusterOptions
from lm.sweep.sweep import Sweep
from lm.text import format_count

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
    is_checked: bool = True,
) -> None:
    """Writes the configurations of the runs into their folder, and starts pods or writes manifests.

    Args:
        root: the folder of the runs, which all machines reach.
        launcher: tpu, or a format of `lm.sweep.manifests`.
        manifests: the folder for manifests; None for tpu.
        retry_failed: hand over runs, too, whose failure would be repeated.
        is_checked: compile each run for the slice of TPUs first, as `--price` does.

    Raises ConfigError for options that the launcher does not use and for runs that do not fit, and LmError if the
    script fails.
    """
    params = (f'mesh.processes = {options.processes}',) if launcher != PODS and options.processes > 1 else ()
    choice = dataclasses.replace(choice, gin_params=(*params, *choice.gin_params))
    runs = list_runs(description, choice, root)
    if not runs:
        raise ConfigError(f'{description.name}: its {choice.scale} scale is commands for this machine; leave out --on')
    if launcher == PODS:
        topology = find_slice_of_pods(root, manifests, options, is_checked)
    else:
        topology = options.topology.name if options.topology else ''
        if manifests is None:
            raise ConfigError(f'--on {launcher}: name the folder for its manifests with --manifests')
        find_format(launcher).check(options, not is_remote(root))
    sweep = Sweep(root, [run.point for run in runs])
    sweep.check()
    if starts := [run for run in runs if run.is_start and not sweep.is_finished(run.point)]:
        print(f'{format_count(len(starts), "run")} first; the same command later hands over what starts from them')
    runs = starts or [run for run in runs if not run.is_start]
    if is_checked:
        runs = check_runs(runs, choice, root, topology)
    sweep = Sweep(root, [run.point for run in number_runs(runs)])
    for line in description.commands.get(choice.scale, ()):
        print(f'afterwards, on a machine that reaches {root}: {line.replace("{root}", root)}')
    if manifests is None:
        start_pods(sweep, root)
    else:
        emit_sweep(sweep, find_format(launcher), options, manifests, retry_failed=retry_failed)


def check_runs(runs: Sequence[TableRun], choice: TableChoice, root: str, topology: str) -> list[TableRun]:
    """Returns the runs that fit the slice of TPUs; '': the machines have no TPUs, and nothing is compiled for them.

    Those are left out that fit in the paper neither.

    Raises ConfigError for tokens that no machine would find, and for runs that should fit and do not.
    """
    for experiment in {run.point.experiment.data.path: run.point.experiment for run in runs}.values():
        if is_remote(root):
            refuse_absent_tokens(experiment)
    slices = list(find_slices([topology] if topology else [], if_possible=True))
    if not slices:
        return list(runs)
    jax.config.update('jax_platforms', 'cpu')
    prices = price_runs(runs, choice, epath.Path(root), slices[0])
    if failing := [price.run.point.name for price in prices if not price.is_expected]:
        raise ConfigError(
            f'{slices[0].name}: does not fit: {", ".join(failing)}; take a larger slice, or leave out rows'
        )
    for price in prices:
        if not price.fits:
            print(f'left out, as it does not fit {slices[0].name}, nor in the paper: {price.run.point.name}')
    fitting = [price.run for price in prices if price.fits]
    if not fitting:
        raise ConfigError(f'{slices[0].name}: no run fits, nor in the paper; choose other rows or columns')
    return fitting


def find_slice_of_pods(root: str, manifests: str | None, options: ClusterOptions, is_checked: bool) -> str:
    """Returns the slice that scripts/tpu/settings.env names; '' if it forbids checks (CHECK=0).

    Raises ConfigError for options that pods do not use, and for settings that the script refuses.
    """
    if manifests is not None:
        raise ConfigError(f'--manifests {manifests}: pods of scripts/tpu need none; leave it out')
    if options != ClusterOptions():
        raise ConfigError('--on tpu: the machines stand in scripts/tpu/settings.env; leave out --topology and the like')
    script = find_script()
    if not is_remote(root):
        raise ConfigError(f'--run_dir {root}: pods need a bucket, such as gs://my-bucket/table_2')
    if not is_checked:
        return ''
    found = subprocess.run([str(script), '--slice', root], check=False, capture_output=True, text=True)
    if found.returncode:
        raise ConfigError(
            found.stderr.strip().removeprefix(f'{script.name}: ') or f'{script}: ended with {found.returncode}'
        )
    return found.stdout.strip()


def find_script() -> Path:
    """Returns the path of the script that starts pods. Raises ConfigError outside a checkout."""
    script = project_root() / SCRIPT
    if not script.exists():
        raise ConfigError(f'{script}: no such file; --on tpu needs a checkout of this project')
    return script


def start_pods(sweep: Sweep, root: str) -> None:
    """Runs the script that gives each run a pod. Its settings stand in scripts/tpu/settings.env."""
    for point in sweep.points:
        sweep.write_config(point)
    sweep.write_results()
    command = [str(find_script()), 'lm', 'sweep', '--run_dir', root]
    if code := run_program(command, {'CHECK': '0'}):
        raise LmError(f'{shlex.join(command)}: ended with {code}; its table says which runs')
