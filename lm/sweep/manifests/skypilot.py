"""Tasks of SkyPilot, one per point, for `sky jobs launch`.

See https://docs.skypilot.co/en/latest/reference/yaml-spec.html. A managed job recovers from a preemption by itself.
`recover_on_exit_codes` adds the codes that are run again, on machines that SkyPilot asks for anew, which also suits 45.
`max_restarts_on_errors` counts every other code alike. It is 0, because 2, 43 and 44 must not be repeated.
"""

import shlex
from collections.abc import Sequence

import yaml

from lm.errors import ConfigError
from lm.sweep.manifests.base import AGAIN, ELSEWHERE, PORT, ClusterJob, ManifestFormat
from lm.sweep.options import ClusterOptions

TPUS = {
    'v4': ('tpu-v4', 'tpu-ubuntu2204-base'),
    'v5e': ('tpu-v5litepod', 'v2-alpha-tpuv5-lite'),
    'v5p': ('tpu-v5p', 'v2-alpha-tpuv5'),
    'v6e': ('tpu-v6e', 'v2-alpha-tpuv6e'),
}
"""Generation → SkyPilot's name of the accelerator, and the runtime of its machines."""
INSTALL = (
    'python3 -m pip install --quiet --user uv',
    '~/.local/bin/uv venv --quiet --allow-existing --python 3.12 .venv',
    '~/.local/bin/uv pip install --quiet --python .venv/bin/python -c scripts/constraints.txt -e ".[{extra}]"',
)
"""Lines that install this checkout on a machine."""


class SkyPilotFormat(ManifestFormat):
    """A task per point: the machines of a TPU slice, or `nodes` machines with GPUs."""

    name = 'skypilot'
    uses = ('image', 'topology', 'gpus', 'nodes', 'spot', 'setup')
    submit = 'for task in {folder}/*.yaml; do sky jobs launch --yes --detach-run "$task"; done'

    def check_machines(self, options: ClusterOptions, is_local: bool) -> None:
        if is_local:
            raise ConfigError('--run_dir: machines of a cloud see no disk of this one; name a folder in a bucket')
        if (options.topology is None) == (options.gpus is None):
            raise ConfigError('--topology or --gpus: name the machines of a point, such as v5e:4x4, or H100:8')
        if options.gpus and ':' not in options.gpus:
            raise ConfigError(f'--gpus {options.gpus}: name their kind as well, such as H100:{options.gpus}')
        if options.topology and (options.topology.slices > 1 or options.topology.chip.name not in TPUS):
            raise ConfigError(
                f'--topology {options.topology.name}: --emit {self.name} knows single slices of {", ".join(TPUS)}'
            )

    def make_files(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str) -> dict[str, str]:
        tasks = {f'{job.name}.yaml': make_task(job, options) for job in jobs}
        return {name: yaml.dump(task, Dumper=Dumper, sort_keys=False, width=120) for name, task in tasks.items()}


class Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar('tag:yaml.org,2002:str', data, style='|' if '\n' in data else None)


Dumper.add_representer(str, Dumper.represent_str)


def make_task(job: ClusterJob, options: ClusterOptions) -> dict[str, object]:
    """Returns the task of a point. Without an image, the checkout is copied to the machines and installed there."""
    recovery = {'max_restarts_on_errors': 0, 'recover_on_exit_codes': [*AGAIN, *ELSEWHERE]}
    resources: dict[str, object] = {}
    if options.topology:
        chip = options.topology.chip
        kind, runtime = TPUS[chip.name]
        resources['infra'] = 'gcp'
        resources['accelerators'] = f'{kind}-{options.topology.chips * chip.cores}'
        resources['accelerator_args'] = {'runtime_version': runtime}
    else:
        kind = (options.gpus or '').rpartition(':')[0]
        resources['accelerators'] = f'{kind}:{options.gpus_per_machine}'
    resources |= {'use_spot': options.spot, 'job_recovery': recovery}
    command, setup = job.command, list(options.setup)
    task: dict[str, object] = {'name': job.name}
    if options.image:
        resources['image_id'] = f'docker:{options.image}'
    else:
        task['workdir'] = '.'
        install = [line.format(extra='tpu' if options.topology else 'gpu,gs,s3') for line in INSTALL]
        task['setup'] = '\n'.join(['set -e', *install]) + '\n'
        command = [f'.venv/bin/{command[0]}', *command[1:]]
    task |= {'resources': resources, 'envs': {'POINT': job.point}}
    run = '\n'.join(['set -e', *setup, f'exec {shlex.join(command)}']) + '\n'
    if options.topology is None and options.processes > 1:
        task['num_nodes'] = options.processes
        address = f'"$(head -n 1 <<<"$SKYPILOT_NODE_IPS"):{PORT}"'
        meeting = f'--coordinator_address {address} --process_count "$SKYPILOT_NUM_NODES"'
        run = f'{run.rstrip()} {meeting} --process_id "$SKYPILOT_NODE_RANK"\n'
    return task | {'run': run}
