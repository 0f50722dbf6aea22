#!/usr/bin/env bash
# Train on a pod whose workers stop answering while the run is healthy, look at its stacks, and lose the pod for good.
# The cloud is `tests/fake_cloud.py`: its machines are folders here, and the `lm` on them is the real one.
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts tokens
expect lm prepare --gin_file tiny.gin --processes 1

step 'a pod'
python - "$PWD/cloud" <<'PYTHON'
import os, pathlib, shlex, sys

sys.path.insert(0, os.environ['PYTHONPATH'] + '/tests')
from fake_cloud import FakeCloud

path = pathlib.Path(sys.argv[1])
cloud = FakeCloud(path, workers=1)
real = f'#!/usr/bin/env bash\nif [ "$*" = --help ]; then exit 0; fi\nexec {os.environ["PYTHON"]} -m lm.cli "$@"\n'
(path / 'lm').write_text(real)
settings = cloud.settings | {'RUN_DIR': f'{path.parent}/run', 'MAX_LOST_POLLS': '3', 'LEASE_SECONDS': '4', 'POLL_SECONDS': '0.3'}
(path / 'settings.env').write_text(''.join(f'{name}={shlex.quote(value)}\n' for name, value in settings.items()))
names = cloud.environment.items()
pathlib.Path('environment').write_text(''.join(f'export {name}={shlex.quote(value)}\n' for name, value in names))
PYTHON
# shellcheck disable=SC1091
source ./environment
export LM_TPU_SETTINGS=$PWD/cloud/settings.env
expect lm doctor "$PWD"
train=(lm train --gin_file "$PWD/tiny.gin" --set data.path="$PWD/tokens" --set train.steps=1500
  --set checkpoint.save_every_steps=100)
begin "$root/scripts/tpu/supervise.sh" "${train[@]}"
until_step run 5

step 'the stacks of a run that goes on'
expect "$root/scripts/tpu/stacks.sh"
shows 'most recent call first' 'run_steps'

step 'workers that do not answer, and a lease that is renewed'
touch cloud/pods/pod/unreachable
until grep -qs 'renews its lease, so it is healthy' "$JOURNEY/begun.stdout"; do
  kill -0 "$background" || { take_output && fail 'the supervisor ended'; }
  sleep 0.1
done
is_there cloud/pods/pod
rm cloud/pods/pod/unreachable

step 'a preemption: the lease falls silent, and another pod goes on'
pkill -KILL -f "lm.cli train --gin_file $PWD/tiny.gin" || fail 'nothing trains'
echo SUSPENDED >cloud/pods/pod/state
code=0
wait "$background" || code=$?
take_output
equal "$code" 0
shows 'deleting pod: it is SUSPENDED' 'done after 2 attempt(s)'
is_gone cloud/pods/pod
expect lm inspect run --verify
expect lm inspect run --json
equal "$(figure status)" finished
equal "$(records run | awk '$1 == "train"' | wc -l)" 1500
