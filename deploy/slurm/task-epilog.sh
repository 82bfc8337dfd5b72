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

# Succeed if a process that is recorded into a run directory still runs; one that ended may be a zombie.
has_process() {
    for file in "$1"/register/*.json; do
        pid=${file##*/}
        stat=$(cat "/proc/${pid%.json}/stat") || continue
        case ${stat##*) } in
            Z* | X*) ;;
            *) return 0 ;;
        esac
    done
    return 1
}

tries=0
user=$(id -u)
while [ "$tries" -lt 50 ] && list_recorders "$user" "$step"; do
    for dir in $(list_run_dirs "$user" "$step"); do
        ! has_process "$dir" || exit 0
    done
    sleep 0.1
    tries=$((tries + 1))
done
