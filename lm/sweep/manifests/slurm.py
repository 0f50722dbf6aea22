"""A job array of Slurm, one task per point: https://slurm.schedmd.com/job_array.html.

The script itself looks at the exit code. It puts a task back into the queue by `scontrol requeue`, and submits it anew,
with `--exclude`, after a machine has computed wrongly. Before the time limit Slurm sends SIGTERM: the point saves, ends
with 42, and goes on in its next turn. A task that was cancelled is not put back.

A failure counts until the point saves its next checkpoint, where the folder of the sweep is on a disk. A process that
is killed, as the kernel does where memory is short, is such a failure: Slurm itself puts back what it preempts.
"""

import shlex
from collections.abc import Sequence

from lm.signals import INTERRUPTED
from lm.sweep.manifests.base import AGAIN, ELSEWHERE, NEVER, PORT, ClusterJob, ManifestFormat
from lm.sweep.options import ClusterOptions

SCRIPT = 'sweep.sh'
SAVING_SECONDS = 300
"""How long before the time limit a point is told to save."""
MOST_TASKS = 1000
"""The tasks of one array. A cluster refuses indices from its MaxArraySize on, which is 1001 by default."""

TEMPLATE = """\
# One task per point; `lm sweep --emit` wrote this. Submit it with: sbatch {script}
# The exit code decides: {again} again, {elsewhere} on other machines, {never} never, others {failures} times at most
# without a new checkpoint.
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

saved() {{
  grep -o '"saved_step": *[0-9]*' {root}/"${{points[$SLURM_ARRAY_TASK_ID]}}"/run.json 2>/dev/null
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
code=0 before=$(saved)
{srun} || code=$?

case $code in
  0 | {never_codes}) ;;
  {again_codes}) again ;;
  {elsewhere}) elsewhere ;;
  *)
    if [ "$(saved)" != "$before" ]; then rm -f "$failures"; fi
    echo "$code" >>"$failures"
    if [ "$(wc -l <"$failures")" -le {failures} ]; then again; fi
    ;;
esac
exit "$code"
"""


class SlurmFormat(ManifestFormat):
    """One script for all points, or for each thousand of them."""

    name = 'slurm'
    uses = ('image', 'gpus', 'nodes', 'queue', 'failures', 'jobs', 'setup', 'scheduler_options')
    submit = 'for script in {folder}/*.sh; do sbatch "$script"; done'

    def check_machines(self, options: ClusterOptions, is_local: bool) -> None:
        """Machines of Slurm share disks, so any folder may do."""

    def make_files(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str) -> dict[str, str]:
        chunks: dict[int, list[ClusterJob]] = {}
        for job in jobs:
            chunks.setdefault(job.index // MOST_TASKS, []).append(job)
        files = {}
        for number, chunk in chunks.items():
            name, log = (f'sweep-{number}.sh', f'{number}-%a.log') if number else (SCRIPT, '%a.log')
            files[name] = self.format_head(chunk, options, f'{folder.replace("%", "%%")}/{log}')
            files[name] += self.format_body(chunk, options, folder, name)
        return files

    def format_head(self, jobs: Sequence[ClusterJob], options: ClusterOptions, log: str) -> str:
        """Returns Slurm's own lines. `log` is a pattern of file names, in which %a is the number of the task."""
        machines = sorted({machine for job in jobs for machine in job.excluded})
        tasks = ','.join(str(job.index % MOST_TASKS) for job in jobs) + (f'%{options.jobs}' if options.jobs else '')
        requests = {
            'job-name': 'lm',
            'array': tasks,
            'output': f'"{log}"' if ' ' in log else log,  # a line ends at a space without quotes
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
        lines = [f'--{key}' if value is None else f'--{key}={value}' for key, value in requests.items()]
        head = ['#!/usr/bin/env bash', *(f'#SBATCH {line}' for line in [*lines, *options.scheduler_options])]
        return '\n'.join(head) + '\n'

    def format_body(self, jobs: Sequence[ClusterJob], options: ClusterOptions, folder: str, name: str) -> str:
        """Returns the script `name` below Slurm's own lines."""
        srun = 'srun' + (f' --container-image={shlex.quote(options.image)}' if options.image else '')
        command = f'{shlex.join(jobs[0].command[:-1])} "${{points[$SLURM_ARRAY_TASK_ID]}}"'
        if options.processes > 1:  # srun gives each process its number
            host = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            address = f'--coordinator_address {host}:{PORT}" --process_count "$SLURM_NTASKS"'
            command = f'bash -c \'exec "$@" --process_id "$SLURM_PROCID"\' bash {command} {address}'
            srun = f'# shellcheck disable=SC2016\n{srun}'
        interrupted = sorted({code for code in INTERRUPTED if code > 0} - set(AGAIN))
        never, elsewhere = ' | '.join(map(str, NEVER)), ' | '.join(map(str, ELSEWHERE))
        return TEMPLATE.format(
            script=shlex.quote(f'{folder}/{name}'),
            script_name=name,
            folder=shlex.quote(folder),
            root=shlex.quote(jobs[0].root),
            points=' '.join(f'[{job.index % MOST_TASKS}]={shlex.quote(job.point)}' for job in jobs),
            setup='\n'.join(['set -e', *options.setup, 'set +e']) if options.setup else '',
            srun=f'{srun} {command}',
            again=', '.join(map(str, AGAIN)),
            again_codes=' | '.join(map(str, (*AGAIN, *interrupted))),
            elsewhere=elsewhere,
            never=', '.join(map(str, NEVER)),
            never_codes=never,
            failures=options.most_failures,
        )
