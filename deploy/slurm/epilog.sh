#!/bin/sh
# Epilog in slurm.conf: nothing outlives the job. It ends recorders that still run, and removes what a
# killed recorder left in /dev/shm. Slurm runs it as root on every node when the job has ended there.
# An epilog that fails would drain the node: this one always succeeds.
trap 'exit 0' EXIT
PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec > /dev/null 2>&1
. "$(dirname "$0")/common.sh"
[ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_JOB_UID:-}" ] || exit 0

# Print the processes that record into a run directory. The name of a job holds no character but
# the dot that a pattern would interpret.
list_recorders() {
    pgrep -u "$SLURM_JOB_UID" -f -- "--run-dir=$1( |\$)"
}

# Send a signal to these processes, and wait until they have ended: $1 = folder, $2 = signal, $3 = tenths of a second.
end_recorders() {
    pids=$(list_recorders "$1") || return 0
    [ "$2" = 0 ] || kill -s "$2" $pids
    left=$3
    while [ "$left" -gt 0 ] && list_recorders "$1" > /dev/null; do
        sleep 0.1
        left=$((left - 1))
    done
}

for dir in $(list_run_dirs "$SLURM_JOB_UID" "$SLURM_JOB_ID") \
    $(list_run_dirs "$SLURM_JOB_UID" "$SLURM_JOB_ID.*"); do
    end_recorders "$dir" 0 50
    end_recorders "$dir" TERM 50
    end_recorders "$dir" KILL 10
    rm -rf -- "$dir"
done
