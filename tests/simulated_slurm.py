"""Slurm's commands without a cluster. `install` makes them; `sbatch` runs the tasks of an array one after the other.

`lm` is one of the commands: outcomes.json has task → its exit codes, one after the other; [code, step] also saves that
step. log.json gets an entry per start: [task, machine, code, the arguments of lm].
"""

import json
import os
import pathlib
import re
import subprocess
import sys

MACHINES = ('machine-0', 'machine-1', 'machine-2')
COMMANDS = ('sbatch', 'scontrol', 'squeue', 'srun', 'lm')
FOLDER = pathlib.Path(os.environ.get('SIMULATED_CLUSTER', '.'))


def install(folder: pathlib.Path, outcomes: dict) -> dict[str, str]:
    """Writes the commands into `folder`; returns the environment that finds them."""
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        path.chmod(0o755)
    (folder / 'outcomes.json').write_text(json.dumps(outcomes))
    (folder / 'log.json').write_text('[]')
    return os.environ | {'SIMULATED_CLUSTER': str(folder), 'PATH': f'{folder}:{os.environ["PATH"]}'}


def sbatch(arguments: list[str]) -> None:
    """Runs each task of the array until nobody puts it back into the queue."""
    script = arguments[-1]
    lines = re.findall(r'^#SBATCH (--.*)', pathlib.Path(script).read_text(), re.M)
    options = dict(line.lstrip('-').partition('=')[::2] for line in [*lines, *arguments[:-1]])
    tasks = options['array'].partition('%')[0].split(',')
    machine = next(m for m in MACHINES if m not in options.get('exclude', '').split(','))
    for task in tasks:
        again = FOLDER / f'again-{task}'
        while True:
            names = {'SLURM_ARRAY_JOB_ID': '7', 'SLURM_ARRAY_TASK_ID': task, 'SLURM_JOB_ID': f'7{task}'}
            names |= {'SLURM_JOB_NODELIST': machine, 'SLURMD_NODENAME': machine, 'TASK': task}
            subprocess.run(['bash', script], env=os.environ | names, check=False)
            if not again.exists():
                break
            again.unlink()


def lm(arguments: list[str]) -> int:
    """Ends with the next code of the task. With 45 it names its machine, as `lm.sweep.sweep` does."""
    outcomes, log = (json.loads((FOLDER / name).read_text()) for name in ('outcomes.json', 'log.json'))
    task, machine = os.environ['TASK'], os.environ['SLURMD_NODENAME']
    code = outcomes[task].pop(0)
    if isinstance(code, list):
        code, step = code
        run = pathlib.Path(arguments[arguments.index('--run_dir') + 1], arguments[arguments.index('--index') + 1])
        run.mkdir(exist_ok=True)
        (run / 'run.json').write_text(json.dumps({'saved_step': step}, indent=2))
    log.append([int(task), machine, code, arguments])
    (FOLDER / 'outcomes.json').write_text(json.dumps(outcomes))
    (FOLDER / 'log.json').write_text(json.dumps(log))
    if code == 45:
        with open(os.environ['LM_WRONG_MACHINES'], 'a') as file:
            file.write(f'{machine}\n')
    return code


def main(name: str, arguments: list[str]) -> int:
    if name == 'sbatch':
        sbatch(arguments)
    elif name == 'scontrol' and arguments[0] == 'requeue':
        (FOLDER / f'again-{os.environ["TASK"]}').touch()
    elif name == 'scontrol':
        print(arguments[-1])
    elif name == 'squeue':
        cancelled = json.loads((FOLDER / 'outcomes.json').read_text()).get('cancelled', [])
        print('COMPLETING' if os.environ['TASK'] in cancelled else 'RUNNING')
    elif name == 'srun':
        return subprocess.run([a for a in arguments if not a.startswith('--container')], check=False).returncode
    else:
        return lm(arguments)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], sys.argv[2:]))
