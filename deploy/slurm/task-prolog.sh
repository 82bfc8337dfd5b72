#!/bin/sh
# TaskProlog in slurm.conf: records every job with enough GPUs, and the job is not changed for it.
# Slurm runs it as the job's user before each task. Lines `export NAME=value` that it prints become
# the environment of the task; with them the task's Python programs load the probe.
# Whatever happens here, the task starts: nothing but complete lines is printed, and it exits with 0.
trap 'exit 0' EXIT
exec 2> /dev/null
[ "${CLUSTERPROF_DISABLE:-}" != 1 ] || exit 0
PATH=/usr/bin:/bin:$PATH
. "$(dirname "$0")/common.sh"
is_recorded || exit 0
# SLURM_TASK_PID is the process that will become the task. The recording ends with its last task.
# -I: neither PYTHONPATH nor the folder of the job decides what code runs here.
lines=$(
    timeout -s KILL 20 "$python" -I -m clusterprof record --export slurm \
        --pid "${SLURM_TASK_PID:-$PPID}" -o "$runs/$SLURM_JOB_ID" --mode "${mode:-0700}" $options
) || exit 0
printf '%s\n' "$lines"
if [ "${announce:-no}" = yes ] && [ "${SLURM_PROCID:-0}" = 0 ]; then
    echo "print clusterprof: this job is recorded to $runs/$SLURM_JOB_ID (CLUSTERPROF_DISABLE=1: not)"
fi
