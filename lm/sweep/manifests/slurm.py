"""A job array of Slurm, one task per point: https://slurm.schedmd.com/job_array.html.

The script itself looks at the exit code. It puts a task back into the queue by `scontrol requeue`, and submits it anew,
with `--exclude`, after a machine has computed wrongly. Before the time limit Slurm sends SIGTERM: the point saves, ends
with 42, and goes on in its next turn. A task that was cancelled is not put back.
"""

import shlex
from collections.abc import Sequence

from lm.signals import INTERRUPTED
from lm.sweep.manifests.base import (
    AGAIN,
    ELSEWHERE,
    NEVER,
    PORT,
    ClusterJob,
    ManifestFormat,
    make_command,
)
from lm.sweep.options import ClusterOptions

SCRIPT = 'sweep.sh'
SAVING_SECONDS = 300
"""How long before the time limit a point is told to save."""
KILLED = 137
"""The exit code of a process that was killed at once, for example because its machine was taken away."""

TEMPLATE = """\
# One task per point; `lm sweep --emit` wrote this. Submit it with: sbatch {script}
# The exit code decides: {again} again, {elsewhere} on other machines, {never} never, others {failures} times at most.
set -u
folder={folder}
export LM_WRONG_MACHINES=$folder/wrong_machines
failures=$folder/failures-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
# Points by name: their numbers may change when values are added to the sweep.
declare -A points=({points})

elsewhere() {{
  local wrong
  wrong=$(sort -u "$LM_WRONG_MACHINES" | paste -sd ,)
  echo "point ${{points[$SLURM_ARRAY_TASK_ID]}} goes to other machines than $wrong"
  sbatch --array="$SLURM_ARRAY_TASK_ID" --exclude="$wrong" "$folder/{script_name}"
}}

again() {{
  # A task that somebody has cancelled is no longer running.
  if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
}}

touch "$LM_WRONG_MACHINES"
if scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -qxFf "$LM_WRONG_MACHINES"; then
  elsewhere
  exit 0
fi
{setup}
# The processes get SIGTERM from Slurm themselves. This shell waits until they have saved.
trap : TERM
code=0
{srun} || code=$?

case $code in
  0 | {never_codes}) ;;
  {again_codes}) again ;;
  {elsewhere}) elsewhere ;;
  *)
    echo "$code" >>"$failures"
    if [ "$(wc -l <"$failures")" -le {failures} ]; then again; fi
    ;;
esac
exit "$code"
"""


class SlurmFormat(ManifestFormat):
    """One script for all points."""

    name = 'slurm'
    uses = ('image', 'gpus', 'nodes', 'queue', 'failures', 'jobs', 'setup', 'scheduler_options')
    submit = f'sbatch {{folder}}/{SCRIPT}'

    def check_machines(self, options: ClusterOptions, is_local: bool) -> None:
        """Machines of Slurm share disks, so any folder may do."""

    def make_files(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str) -> dict[str, str]:
        machines = sorted({machine for job in jobs for machine in job.excluded})
        indices = ','.join(str(job.index) for job in jobs) + (f'%{options.jobs}' if options.jobs else '')
        requests = {
            'job-name': 'lm',
            'array': indices,
            'output': f'{folder}/%a.log',
            'open-mode': 'append',
            'requeue': None,
            'signal': f'TERM@{SAVING_SECONDS}',
            'nodes': options.processes,
            'ntasks-per-node': 1,
        }
        if options.gpus:
            kind, separator, _ = options.gpus.rpartition(':')
            requests['gpus-per-node'] = f'{kind}{separator}{options.gpus_per_machine}'
        if options.queue:
            requests['partition'] = options.queue
        if machines:
            requests['exclude'] = ','.join(machines)
        lines = [f'--{name}' if value is None else f'--{name}={value}' for name, value in requests.items()]
        head = ['#!/usr/bin/env bash', *(f'#SBATCH {line}' for line in [*lines, *options.scheduler_options])]
        return {SCRIPT: '\n'.join(head) + '\n' + self.format_body(jobs, options, folder)}

    def format_body(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str) -> str:
        """Returns the script below Slurm's own lines."""
        srun = 'srun' + (f' --container-image={shlex.quote(options.image)}' if options.image else '')
        command = f'{shlex.join(make_command(jobs[0].root, ""))[:-2]}"${{points[$SLURM_ARRAY_TASK_ID]}}"'
        if options.processes > 1:  # srun gives each process its number
            host = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            address = f'--coordinator_address {host}:{PORT}" --process_count "$SLURM_NTASKS"'
            command = f'bash -c \'exec "$@" --process_id "$SLURM_PROCID"\' bash {command} {address}'
            srun = f'# shellcheck disable=SC2016\n{srun}'
        interrupted = sorted({code for code in INTERRUPTED if code > 0} - set(AGAIN))
        never, elsewhere = ' | '.join(map(str, NEVER)), ' | '.join(map(str, ELSEWHERE))
        return TEMPLATE.format(
            script=shlex.quote(f'{folder}/{SCRIPT}'),
            script_name=SCRIPT,
            folder=shlex.quote(folder),
            points=' '.join(f'[{job.index}]={shlex.quote(job.point)}' for job in jobs),
            setup='\n'.join(['set -e', *options.setup, 'set +e']) if options.setup else '',
            srun=f'{srun} {command}',
            again=', '.join(map(str, AGAIN)),
            again_codes=' | '.join(map(str, (*AGAIN, *interrupted, KILLED))),
            elsewhere=elsewhere,
            never=', '.join(map(str, NEVER)),
            never_codes=never,
            failures=options.most_failures,
        )
