#!/bin/bash
# The learner of `penstock up` in a job of learner.sbatch: learner-step.sh FLAGS_AND_COMMAND_OF_SRUN
#
# srun answers SIGTERM by SIGKILL for its tasks. So the signal goes to the tasks by Slurm. When learner.sbatch itself
# has told them to stop, `penstock up` is told once they have ended. If it is told earlier, their time is over.
set -uo pipefail
code=0
if [ ! -f "$PENSTOCK_STOPPING" ]; then
  told=1
  trap '[ ! -f "$PENSTOCK_STOPPING" ] || exit 1; told=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' TERM
  srun "$@" &
  step=$!
  while [ -n "$told" ]; do # a signal ends `wait`, and not srun
    told=
    wait "$step" && code=0 || code=$?
  done
fi
if [ -f "$PENSTOCK_STOPPING" ]; then
  trap - TERM
  kill -TERM "$PPID"
  exec sleep 60 # until `penstock up` ends this process
fi
exit "$code"
