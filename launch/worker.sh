#!/usr/bin/env bash
# Train in a container or job that may be taken away: SIGTERM reaches the trainer, which finishes its step and saves.
#
#   launch/worker.sh CONFIG [training options]
#
# A container's first process gets the signals and must pass them on. After a SIGTERM the exit code is 143 where the trainer ended in good
# order, so that whoever restarts jobs that failed starts this one again; the same command then continues the run. Else it is the trainer's.
set -uo pipefail

asked=0
child=""
# shellcheck disable=SC2317,SC2329  # the trap calls it
forward() {
  asked=1
  if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null; fi
}
trap forward TERM INT

"${DENSEGRPO:-densegrpo}" train "$@" &
child=$!
((asked)) && kill -TERM "$child"
while kill -0 "$child" 2>/dev/null; do
  wait "$child" # a signal ends wait, not the trainer
done
wait "$child" # again, as the last one may have told of a signal; bash keeps the status
status=$?
((asked && status == 0)) && exit 143
exit "$status"
