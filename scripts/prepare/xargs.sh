#!/usr/bin/env bash
# Prepares a token store with N processes of this machine at a time, or with one on each machine of a list.
#
#   scripts/prepare/xargs.sh 4 --gin_file data/quickstart.gin --processes 1
#   HOSTS='one two three' scripts/prepare/xargs.sh 3 --gin_file data/quickstart.gin
#
# With HOSTS, share I runs over ssh on the I-th machine, in the same folder, which all machines see. A share that ends with
# 42 was stopped. The same command continues what is missing, and xargs ends with 123 if a share has failed.
set -euo pipefail
case ${1:-} in '' | *[!0-9]*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 2 ;; esac
count=$1
shift
FLAGS=$(printf '%q ' "$@")
export HOSTS=${HOSTS:-} FLAGS COUNT=$count

# Quotes a text for any POSIX shell.
quote() {
  # shellcheck disable=SC2001 # bash 3.2 and later disagree about quotes in a replacement
  printf "'%s'" "$(sed "s/'/'\\\\''/g" <<<"$1")"
}
# Prepares share $1 of COUNT.
prepare() {
  local command="lm prepare $FLAGS --shard $1/$COUNT" hosts
  read -ra hosts <<<"$HOSTS"
  if [ "${#hosts[@]}" = 0 ]; then
    eval "$command"
  else # the login shell of the machine may be another one
    # shellcheck disable=SC2029
    ssh "${hosts[$1 % ${#hosts[@]}]}" "bash -c $(quote "cd $(printf '%q' "$PWD") && $command")"
  fi
}
export -f prepare quote
seq 0 $((count - 1)) | xargs -P "$count" -I{} bash -c 'prepare {}'
