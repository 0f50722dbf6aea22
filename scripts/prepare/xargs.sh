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
export HOSTS=${HOSTS:-} FLAGS
FLAGS=$(printf '%q ' "$@")
# shellcheck disable=SC2016 # the inner shells expand these
seq 0 $((count - 1)) | xargs -P "$count" -I{} bash -c '
  set -- $HOSTS
  command="lm prepare $FLAGS --shard {}/'"$count"'"
  if [ $# = 0 ]; then eval "$command"; else shift $(({} % $#)) && ssh "$1" "cd $PWD && $command"; fi'
