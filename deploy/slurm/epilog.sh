#!/bin/sh
# Epilog in slurm.conf: nothing outlives the job. It ends recorders that still run, and removes what a
# killed recorder left in /dev/shm. Slurm runs it as root on every node when the job has ended there.
# An epilog that fails would drain the node: this one always succeeds.
trap 'exit 0' EXIT
PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec > /dev/null 2>&1
. "$(dirname "$0")/common.sh"
[ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_JOB_UID:-}" ] || exit 0

# Wait until the recorders of the job have ended: $1 = tenths of a second at most.
wait_for_recorders() {
    left=$1
    while [ "$left" -gt 0 ] && list_recorders "$SLURM_JOB_UID" "$SLURM_JOB_ID(\\.[0-9]+)?"; do
        sleep 0.1
        left=$((left - 1))
    done
    [ "$left" -gt 0 ]
}

# Send a signal to the recorders of the job.
signal_recorders() {
    for pid in $(list_recorders "$SLURM_JOB_UID" "$SLURM_JOB_ID(\\.[0-9]+)?"); do
        kill -s "$1" "$pid"
    done
}

wait_for_recorders 50 ||
    { signal_recorders TERM && wait_for_recorders 50; } ||
    { signal_recorders KILL && wait_for_recorders 10; }
for dir in $(list_run_dirs "$SLURM_JOB_UID" "$SLURM_JOB_ID") \
    $(list_run_dirs "$SLURM_JOB_UID" "$SLURM_JOB_ID.*"); do
    rm -rf -- "$dir"
done
