# shellcheck shell=bash
# The scripts in this folder source this file: settings, quoting, DRY_RUN, and the few gcloud calls that they share.
# Written for bash 3.2 (macOS) and later.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
SCRIPT=$(basename "$0")
DRY_RUN=${DRY_RUN:-0}

SETTINGS='PROJECT ZONE TPU_NAME ACCELERATOR_TYPE RUNTIME_VERSION PROVISIONING RESERVATION AUTOCHECKPOINT
VALID_UNTIL_DURATION NETWORK SUBNETWORK SERVICE_ACCOUNT INTERNAL_IPS TUNNEL_THROUGH_IAP PROCESSES DEVICES RUN_DIR RUN_NAME
LOG_URL DATA_PATH MIN_FREE_GB PYTHON_VERSION ALLOW_DIRTY MAX_ATTEMPTS MAX_FAILURES POLL_SECONDS BACKOFF_SECONDS
MAX_BACKOFF_SECONDS RESET_SECONDS MAX_LOST_POLLS DELETE_WHEN_DONE PARALLEL SWEEP_LOG_DIR PREPARE_MACHINE_TYPE PREPARE_DISK_GB
PREPARE_MAX_DURATION CHECK SLICES MAX_RUN_DURATION EXTRAS ENV_FILE LEASE_SECONDS'

note() { echo "$SCRIPT: $*" >&2; }
fail() {
  note "$*"
  exit 2
}
is_dry() { [ "$DRY_RUN" = 1 ]; }

# The comment at the head of the calling script is its help.
print_help() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; }
help_if_asked() {
  case ${1:-} in
    -h | --help)
      print_help
      exit 0
      ;;
  esac
}

# Quotes one word for a POSIX shell. A word that needs no quotes stays bare.
quote() {
  if [[ $1 =~ ^--[A-Za-z0-9_-]+= ]]; then
    printf '%s' "${BASH_REMATCH[0]}"
    set -- "${1#*=}"
    if [ -z "$1" ]; then return 0; fi
  fi
  case $1 in
    '' | *[!A-Za-z0-9_@%+=:,./-]*)
      local rest=$1 out=''
      while [[ $rest == *"'"* ]]; do
        out="$out${rest%%\'*}'\\''"
        rest=${rest#*\'}
      done
      printf "'%s'" "$out$rest"
      ;;
    *) printf '%s' "$1" ;;
  esac
}
quote_all() {
  local separator='' word
  for word in "$@"; do
    printf '%s' "$separator"
    quote "$word"
    separator=' '
  done
}

# Runs a command, or prints it with DRY_RUN=1.
run() {
  if is_dry; then
    quote_all "$@"
    echo
  else
    "$@"
  fi
}

# Reads the settings file. Variables of the environment override it. Unknown names are mistakes. Scripts that this one
# calls get the settings from it, so the file may be edited for another pod while a supervisor runs.
load_settings() {
  local file=${LM_TPU_SETTINGS:-$HERE/settings.env} name line kept=''
  if [ -n "${LM_TPU_SETTINGS_READ:-}" ]; then file=''; fi
  for name in $SETTINGS; do
    if [ -n "${!name+set}" ]; then kept="$kept$name=$(quote "${!name}");"; fi
  done
  if [ -f "$file" ]; then
    if grep -q $'\r' "$file"; then fail "$file: has the line ends of Windows; sed -i.bak 's/\\r\$//' $file changes them"; fi
    while IFS= read -r line || [ -n "$line" ]; do
      [[ $line =~ ^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z_0-9]*)= ]] || continue
      name=${BASH_REMATCH[2]}
      case " ${SETTINGS//$'\n'/ } " in
        *" $name "*) ;;
        *) fail "$file: $name is not a setting; see scripts/tpu/settings.env.example" ;;
      esac
    done <"$file"
    # shellcheck disable=SC1090
    . "$file"
  elif [ -n "$file" ] && [ -n "${LM_TPU_SETTINGS:-}" ]; then
    fail "LM_TPU_SETTINGS=$file: no such file"
  fi
  eval "$kept"
  for name in PROJECT ZONE TPU_NAME ACCELERATOR_TYPE; do
    [ -n "${!name:-}" ] || fail "$name is not set; copy scripts/tpu/settings.env.example to settings.env and fill it in"
  done
  [[ $TPU_NAME =~ ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ ]] ||
    fail "TPU_NAME=$TPU_NAME: use 1 to 63 lower-case letters, digits and dashes, a letter first, no dash last, as Google does"
  : "${RUNTIME_VERSION:=}" "${PROVISIONING:=spot}" "${RESERVATION:=}" "${AUTOCHECKPOINT:=1}" "${VALID_UNTIL_DURATION:=}"
  : "${NETWORK:=}" "${SUBNETWORK:=}" "${SERVICE_ACCOUNT:=}" "${INTERNAL_IPS:=0}" "${TUNNEL_THROUGH_IAP:=0}"
  : "${PROCESSES:=}" "${DEVICES:=}" "${RUN_DIR:=}" "${RUN_NAME:=}" "${LOG_URL:=}" "${DATA_PATH:=}" "${MIN_FREE_GB:=20}"
  : "${PYTHON_VERSION:=3.12}" "${ALLOW_DIRTY:=0}" "${MAX_ATTEMPTS:=100}" "${MAX_FAILURES:=3}" "${POLL_SECONDS:=60}"
  : "${BACKOFF_SECONDS:=30}" "${MAX_BACKOFF_SECONDS:=900}" "${RESET_SECONDS:=1800}" "${MAX_LOST_POLLS:=5}"
  : "${DELETE_WHEN_DONE:=always}"
  : "${PARALLEL:=4}" "${SWEEP_LOG_DIR:=runs/sweep-logs}" "${PREPARE_MACHINE_TYPE:=n2-standard-64}"
  : "${PREPARE_DISK_GB:=1000}" "${PREPARE_MAX_DURATION:=48h}" "${CHECK:=1}" "${SLICES:=1}" "${MAX_RUN_DURATION:=}"
  : "${EXTRAS:=}" "${ENV_FILE:=}" "${LEASE_SECONDS:=8}"
  for name in SLICES MAX_ATTEMPTS MAX_FAILURES MAX_LOST_POLLS PARALLEL PREPARE_DISK_GB; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name}: give a whole number of at least 1"
  done
  for name in BACKOFF_SECONDS MAX_BACKOFF_SECONDS RESET_SECONDS MIN_FREE_GB; do
    [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name=${!name}: give a whole number, without a unit"
  done
  for name in PROCESSES DEVICES; do
    [[ ${!name} =~ ^([1-9][0-9]*)?$ ]] || fail "$name=${!name}: give a whole number of at least 1, or nothing"
  done
  for name in POLL_SECONDS LEASE_SECONDS; do
    [[ ${!name} =~ ^[0-9]+([.][0-9]+)?$ ]] || fail "$name=${!name}: give a number, without a unit"
  done
  [[ $EXTRAS =~ ^([a-z0-9]+(,[a-z0-9]+)*)?$ ]] || fail "EXTRAS=$EXTRAS: give names of extras, such as tokenizers,wandb"
  if [ -n "$ENV_FILE" ]; then check_env_file; fi
  RUN_DIR=${RUN_DIR%/}
  if [ -z "$RUN_NAME" ]; then RUN_NAME=${RUN_DIR##*/}; fi
  if [ -z "$RUN_NAME" ]; then RUN_NAME=$TPU_NAME; fi
  [[ $RUN_NAME =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    fail "RUN_NAME=$RUN_NAME: use letters, digits, dots, dashes and underscores only"
  derive_accelerator
  SLICE=$ACCELERATOR_TYPE
  if [ "$SLICES" -gt 1 ]; then SLICE="$SLICES*$SLICE"; fi
  LOCATION=(--zone="$ZONE" --project="$PROJECT")
  # shellcheck disable=SC2086,SC2163
  export $SETTINGS LM_TPU_SETTINGS_READ=1
}

# Refuses a file of secrets that others can read, and one that holds more than variables.
check_env_file() {
  local line number=0
  [ -f "$ENV_FILE" ] || fail "ENV_FILE=$ENV_FILE: no such file"
  # shellcheck disable=SC2012
  [[ $(ls -lL "$ENV_FILE") == -???------* ]] || fail "ENV_FILE=$ENV_FILE: others can read it; chmod 600 $ENV_FILE"
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    # The line itself may be a secret.
    [[ $line =~ ^[[:space:]]*(#.*)?$ || $line =~ ^[A-Za-z_][A-Za-z_0-9]*=[^[:space:]\'\"\$\`\;\&\|\<\>\(\)\\]*$ ]] ||
      fail "ENV_FILE=$ENV_FILE: line $number: write NAME=VALUE, without blanks, quotes or signs of the shell"
  done <"$ENV_FILE"
}

# Sets RUNTIME_VERSION, PROCESSES (one per machine, two on TPU7x) and DEVICES of all slices, unless the settings give them.
derive_accelerator() {
  local kind=${ACCELERATOR_TYPE%%-*} size=${ACCELERATOR_TYPE##*-} runtime processes devices
  # TPU7x is also named by its shape in chips, such as tpu7x-4x4x4. Each chip counts two.
  if [ "$kind" = tpu7x ] && [[ $size =~ ^([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)$ ]]; then
    size=$((BASH_REMATCH[1] * BASH_REMATCH[2] * BASH_REMATCH[3] * 2))
  fi
  [[ $size =~ ^[1-9][0-9]*$ ]] || fail "ACCELERATOR_TYPE=$ACCELERATOR_TYPE: give a type with a size, such as v4-32"
  case $kind in
    v2 | v3) runtime=tpu-ubuntu2204-base processes=$((size / 8)) devices=$size ;;
    v4) runtime=tpu-ubuntu2204-base processes=$((size / 8)) devices=$((size / 2)) ;;
    v5p) runtime=v2-alpha-tpuv5 processes=$((size / 8)) devices=$((size / 2)) ;;
    v5litepod) runtime=v2-alpha-tpuv5-lite processes=$((size / 4)) devices=$size ;;
    v6e) runtime=v2-alpha-tpuv6e processes=$((size / 4)) devices=$size ;;
    # Only Kubernetes offers it, with two containers per machine of four chips. JAX sees two devices per chip.
    tpu7x) runtime='' processes=$((size / 4)) devices=$size ;;
    v5e) fail "ACCELERATOR_TYPE=$ACCELERATOR_TYPE: gcloud calls it v5litepod-$size" ;;
    *)
      [ -n "$RUNTIME_VERSION" ] && [ -n "$PROCESSES" ] && [ -n "$DEVICES" ] ||
        fail "ACCELERATOR_TYPE=$ACCELERATOR_TYPE: unknown kind; set RUNTIME_VERSION, PROCESSES and DEVICES too"
      return
      ;;
  esac
  # For the kinds that count chips, up to 8 chips are one machine.
  case $kind in v5litepod | v6e) if [ "$size" -le 8 ]; then processes=1; fi ;; esac
  if [ "$processes" -lt 1 ]; then processes=1; fi
  : "${RUNTIME_VERSION:=$runtime}" "${PROCESSES:=$((processes * SLICES))}" "${DEVICES:=$((devices * SLICES))}"
}

# tpu_vm ssh|scp ARGUMENTS…: on the pod, with the track and flags of the settings. With several slices the queued
# resource reaches the workers of all slices, or of the first.
tpu_vm() {
  local verb=$1 command=(gcloud)
  shift
  if [ "$TUNNEL_THROUGH_IAP" = 1 ] || [ "$SLICES" -gt 1 ]; then command+=(alpha); fi
  if [ "$SLICES" = 1 ]; then
    command+=(compute tpus tpu-vm "$verb" "$@" "${LOCATION[@]}" --quiet)
  else
    local node=0
    case " $* " in *' --worker=all '*) node=all ;; esac
    command+=(compute tpus queued-resources "$verb" "$@" --node="$node" "${LOCATION[@]}" --quiet)
  fi
  if [ "$TUNNEL_THROUGH_IAP" = 1 ]; then
    command+=(--tunnel-through-iap)
  elif [ "$INTERNAL_IPS" = 1 ]; then
    command+=(--internal-ip)
  fi
  run "${command[@]}" </dev/null
}
# on_workers all|0|1… COMMAND: runs a shell command line in the home directory of these workers.
on_workers() { tpu_vm ssh "$TPU_NAME" --worker="$1" --command="$2"; }

# Prints the shell command line that calls vm/job.sh on a machine.
job() { printf 'bash lm/scripts/tpu/vm/job.sh %s' "$(quote_all "$@")"; }
# The same for its state. A machine without an installation answers too.
# shellcheck disable=SC2016
job_status() { printf '%s 2>/dev/null || echo "lm-job $(hostname) NONE -"' "$(job status "$@")"; }

# ask DRY COMMAND…: prints the state that gcloud prints, ABSENT if the resource does not exist, or UNKNOWN if the query
# fails. DRY_RUN=1 prints the command on stderr, and answers DRY.
ask() {
  local dry=$1 answer errors
  shift
  if is_dry; then
    quote_all "$@" >&2
    echo >&2
    echo "$dry"
    return
  fi
  errors=$(mktemp)
  if answer=$("$@" 2>"$errors" </dev/null); then
    echo "${answer##*$'\n'}"
  else
    answer=$(cat "$errors")
    if [[ $answer == *NOT_FOUND* || $answer == *"was not found"* ]]; then
      echo ABSENT
    else
      note "${answer##*$'\n'}"
      echo UNKNOWN
    fi
  fi
  rm -f "$errors"
}
# Prints the state of the queued resource: the answer of the service (ACTIVE, SUSPENDED, …), or ABSENT or UNKNOWN.
queue_state() {
  ask ACTIVE gcloud compute tpus queued-resources describe "$TPU_NAME" "${LOCATION[@]}" '--format=value(state.state)'
}
# Prints the state of the machines: READY, PREEMPTED, REPAIRING, …, ABSENT or UNKNOWN. With several slices, the first
# that is not READY decides.
node_state() {
  local i state
  if [ "$SLICES" = 1 ]; then
    slice_state "$TPU_NAME"
    return
  fi
  for ((i = 0; i < SLICES; i++)); do
    state=$(slice_state "$TPU_NAME-$i")
    if [ "$state" != READY ]; then break; fi
  done
  echo "$state"
}
slice_state() { ask READY gcloud compute tpus tpu-vm describe "$1" "${LOCATION[@]}" '--format=value(state)'; }

# The folder of what this checkout knows of the pod: the commit that its run uses, and that the pod is its own.
pod_folder() { echo "${LM_TPU_STATE:-$ROOT/build/tpu}/$TPU_NAME"; }
# Notes that this checkout created the pod, or started its command there. Supervisors delete no other pod.
own_pod() {
  if is_dry; then return; fi
  mkdir -p "$(pod_folder)"
  echo "$PROJECT/$ZONE/$TPU_NAME" >"$(pod_folder)/owned"
}
owns_pod() { [ "$(cat "$(pod_folder)/owned" 2>/dev/null)" = "$PROJECT/$ZONE/$TPU_NAME" ]; }

# Prints the lease of the run, which its process 0 renews every 10 seconds. Prints nothing if there is none, or if this
# machine cannot read it.
read_lease() {
  case $RUN_DIR in
    gs://*) gcloud storage cat "$RUN_DIR/lock.json" 2>/dev/null </dev/null || true ;;
    s3://*) aws s3 cp "$RUN_DIR/lock.json" - 2>/dev/null </dev/null || true ;;
    *) cat "$RUN_DIR/lock.json" 2>/dev/null || true ;;
  esac
}
# True if the run renews its lease. The clocks of the machines do not matter.
renews_lease() {
  local before now try
  before=$(read_lease)
  for ((try = 0; try < 4; try++)); do
    sleep "$LEASE_SECONDS"
    now=$(read_lease)
    if [ -n "$now" ] && [ "$now" != "$before" ]; then return 0; fi
  done
  return 1
}

# Returns when the queued resource is ACTIVE, with 1 when it will not become ACTIVE.
wait_until_active() {
  local state last='' unknown=0
  while :; do
    state=$(queue_state)
    if [ "$state" != "$last" ]; then note "$TPU_NAME is $state"; fi
    last=$state
    case $state in
      ACTIVE) return 0 ;;
      WAITING_FOR_RESOURCES | ACCEPTED | CREATING | PROVISIONING | STATE_UNSPECIFIED | '') unknown=0 ;;
      UNKNOWN)
        unknown=$((unknown + 1))
        if [ "$unknown" -ge 10 ]; then return 1; fi
        ;;
      *) return 1 ;;
    esac
    sleep "$POLL_SECONDS"
  done
}

# Prints the commit to ship. Refuses uncommitted changes, which would run on this machine only.
shipped_commit() {
  local commit
  commit=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null) || fail "$ROOT: not a git checkout; setup.sh ships the last commit"
  if ! is_dry && [ "$(git -C "$ROOT" rev-parse --is-shallow-repository)" = true ]; then
    fail "$ROOT: a clone without its history cannot be shipped; git fetch --unshallow completes it"
  fi
  if ! is_dry && [ "$ALLOW_DIRTY" != 1 ] && [ -n "$(git -C "$ROOT" status --porcelain --untracked-files=no)" ]; then
    fail "uncommitted changes would stay behind; commit them, or set ALLOW_DIRTY=1 to ship $commit without them"
  fi
  echo "$commit"
}
# Writes the repository's last commit, with its history, into the file $1.
make_bundle() {
  local new=$1
  run mkdir -p "$(dirname "$1")"
  # Two scripts may write it while a third one sends it.
  if ! is_dry; then new=$1.$$; fi
  run git -C "$ROOT" bundle create --quiet "$new" HEAD
  if ! is_dry; then mv "$new" "$1"; fi
}
# Packs the last commit into BUNDLE and sets COMMIT, for every pod and attempt of the calling script. Later commits are
# not part of the run.
pack_commit() {
  if [ -n "${LM_TPU_COMMIT:-}" ]; then
    COMMIT=$LM_TPU_COMMIT BUNDLE=$LM_TPU_BUNDLE
    return
  fi
  BUNDLE=${1:-$(pod_folder)/lm.bundle}
  COMMIT=$(shipped_commit) || exit
  make_bundle "$BUNDLE"
  export LM_TPU_COMMIT=$COMMIT LM_TPU_BUNDLE=$BUNDLE
}

# Sets COMMAND to the arguments, with the number of processes that must join. `lm train` and `lm distill` also get the run
# directory.
complete_command() {
  COMMAND=("$@")
  check_shipped "$@"
  local i verb=''
  for ((i = 0; i + 1 < $#; i++)); do
    if [ "${COMMAND[$i]}" = lm ] || [ "${COMMAND[$i]}" = lm.cli ]; then
      verb=${COMMAND[$((i + 1))]}
      break
    fi
  done
  case $verb in
    train | distill)
      if ! has_flag --run_dir "$@"; then
        [ -n "$RUN_DIR" ] || fail "RUN_DIR is not set; name the run directory, for example gs://bucket/runs/small"
        COMMAND+=(--run_dir "$RUN_DIR")
      fi
      ;;
    evaluate | generate | sweep | bench) ;;
    *) return 0 ;;
  esac
  case " $* " in
    *mesh.processes*) ;;
    *) COMMAND+=(--gin_param "mesh.processes = $PROCESSES") ;;
  esac
}
# Prints the path of lm on this machine; fails where there is none.
find_lm() {
  local program
  program=$(command -v lm || echo "$ROOT/.venv/bin/lm")
  [ -x "$program" ] && echo "$program"
}
# Refuses the names of settings.env.example and of the documentation among settings and arguments.
check_placeholders() {
  local word
  for word in "PROJECT=$PROJECT" "RUN_DIR=$RUN_DIR" "LOG_URL=$LOG_URL" "$@"; do
    case $word in
      *my-project*) fail "$word: my-project is the name in the example; write the name of your project" ;;
      *//my-bucket*) fail "$word: my-bucket is the name in the example; write the name of your bucket" ;;
    esac
  done
}
# Refuses on this machine what would fail on a paid pod. Calls `lm check` with the configuration of an `lm train` (also of
# the run that it resumes or branches) or an `lm sweep`, compiled for all SLICES of ACCELERATOR_TYPE. Other commands, and
# CHECK=0, pass.
check_command() {
  local words=() runs=() verb='' code=0 program
  while [ $# -gt 0 ]; do
    case $1 in
      train | sweep) verb=${verb:-$1} ;;
      --gin_file | --gin_param | --set | --sweep_file | --index)
        words+=("$1" "${2:-}")
        if [ $# -gt 1 ]; then shift; fi
        ;;
      --run_dir | --branch_from)
        runs+=("$1" "${2:-}")
        if [ $# -gt 1 ]; then shift; fi
        ;;
      --run_dir=* | --branch_from=*) runs+=("$1") ;;
      --gin_file=* | --gin_param=* | --set=* | --sweep_file=* | --index=* | --allow_gin_imports) words+=("$1") ;;
    esac
    shift
  done
  if [ "$CHECK" != 1 ] || [ -z "$verb" ]; then return 0; fi
  if [ "$verb" = sweep ] && ! has_flag --sweep_file ${words[@]+"${words[@]}"}; then
    words+=(${runs[@]+"${runs[@]}"}) # its points lie in its folder
  fi
  if [ "$verb" = train ]; then
    words+=(${runs[@]+"${runs[@]}"})
    if ! has_flag --run_dir ${runs[@]+"${runs[@]}"}; then words+=(--run_dir "$RUN_DIR"); fi
  fi
  words=(check ${words[@]+"${words[@]}"} --topology "$SLICE" --if_possible)
  if is_dry; then
    quote_all lm "${words[@]}"
    echo
    return 0
  fi
  check_placeholders ${words[@]+"${words[@]}"}
  if ! program=$(find_lm); then
    note "lm is not installed on this machine (scripts/quickstart.sh does it): the step is not checked"
    return 0
  fi
  "$program" "${words[@]}" >&2 || code=$?
  if [ "$code" != 0 ]; then
    note "nothing was asked for; CHECK=0 before this command goes on without the check"
    exit "$code"
  fi
}
# Refuses a gin file of this checkout that its last commit does not have: the pod gets that commit.
check_shipped() {
  local word next='' path
  git -C "$ROOT" rev-parse HEAD >/dev/null 2>&1 || return 0
  for word in "$@"; do
    path=''
    if [ -n "$next" ]; then path=$word; fi
    next=''
    case $word in
      --gin_file | --sweep_file) next=1 ;;
      --gin_file=* | --sweep_file=*) path=${word#*=} ;;
    esac
    path=${path#"$ROOT"/}
    case $path in '' | gs://* | s3://* | /*) continue ;; esac
    if [ -f "$ROOT/$path" ] || [ -f "$path" ]; then
      git -C "$ROOT" cat-file -e "HEAD:${path#./}" 2>/dev/null ||
        fail "$path: is not in the last commit, which is what the pod gets; commit it"
    fi
  done
}
# Refuses a --run_dir among the arguments that would be lost when the machines are preempted or deleted.
check_run_dir() {
  local word next='' dir=''
  for word in "$@"; do
    if [ -n "$next" ]; then dir=$word; fi
    next=''
    case $word in
      --run_dir) next=1 ;;
      --run_dir=*) dir=${word#*=} ;;
    esac
  done
  case $dir in
    '' | gs://* | s3://* | /*) ;;
    *) fail "--run_dir $dir: would be lost with the machines; name a folder in a bucket, such as gs://my-bucket/runs/small" ;;
  esac
}
has_flag() {
  local flag=$1 word
  shift
  for word in "$@"; do
    case $word in "$flag" | "$flag="*) return 0 ;; esac
  done
  return 1
}
