#!/bin/sh
# Slurm: one line about every job in its comment, as EpilogSlurmctld (slurm.conf).
# It runs on the controller as SlurmUser, without a search path, when a job has ended. The recording
# of a job is expected under $CLUSTERPROF_RUNS/<job id>, on a file system that the controller sees.
# `sacct -o comment` shows it. It needs slurmdbd: `scontrol update` refuses jobs that have ended.
# deploy/slurm has more: recordings without a change of the job, and a summary instead of a verdict.
PATH=${CLUSTERPROF_PATH:-/opt/clusterprof/bin:/usr/local/bin:/usr/bin:/bin}
runs=${CLUSTERPROF_RUNS:-/shared/clusterprof}
run=$runs/$SLURM_JOB_ID
[ -e "$run" ] || exit 0
line=$(timeout 300 clusterprof gate "$run" --profile ci --one-line 2> /dev/null)
[ -n "$line" ] && sacctmgr -i modify job where jobid="$SLURM_JOB_ID" set Comment="$line" > /dev/null
exit 0 # an epilog that fails would drain nodes: a verdict is no reason to
