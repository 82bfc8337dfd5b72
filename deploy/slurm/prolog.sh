#!/bin/sh
# Prolog in slurm.conf: makes the folder of the job's recording, as root on every node of the job.
# It is needed only where users may not create folders in $runs themselves (mode 1777, as /tmp).
# A prolog that fails would drain the node: this one always succeeds.
trap 'exit 0' EXIT
PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec > /dev/null 2>&1
. "$(dirname "$0")/common.sh"
is_recorded || exit 0
# A shared file system that hangs must not hold up the job; one node after the other finds the
# folder there already.
timeout -s KILL 10 sh -c '
    mkdir -m 0700 "$1" && chown "$2" "$1" && chmod "$3" "$1"
' sh "$runs/$SLURM_JOB_ID" "$SLURM_JOB_UID:$(id -g "$SLURM_JOB_UID")" "${mode:-0700}"
