#!/bin/sh
# TaskEpilog in slurm.conf: waits until the recorder has written its last records, 5 s at most.
# When the last task of a step has ended, Slurm kills what is left of the step, and the recorder with
# it (ProctrackType=proctrack/cgroup). Nothing waits while other tasks of the step still run.
trap 'exit 0' EXIT
PATH=/usr/bin:/bin:$PATH
exec > /dev/null 2>&1
. "$(dirname "$0")/common.sh"
step=$SLURM_JOB_ID
# The batch script has no step id, or one at the end of 32 bits.
if [ "${SLURM_STEP_ID:-4294967295}" -lt 4294967280 ]; then
    step=$step.$SLURM_STEP_ID
fi
tries=0
while [ "$tries" -lt 25 ]; do
    dirs=$(list_run_dirs "$(id -u)" "$step")
    [ -n "$dirs" ] || exit 0
    if [ "$tries" -ge 4 ]; then
        for dir in $dirs; do
            # The recorder has had time to see that this task ended: the others still run.
            [ -z "$(ls "$dir/register")" ] || exit 0
        done
    fi
    sleep 0.2
    tries=$((tries + 1))
done
