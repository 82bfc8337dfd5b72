#!/bin/sh
# Tells the owner of each job in two lines where its time went, and removes old recordings.
#
#     report.sh           all jobs that have ended since the last call: from cron or a systemd timer,
#                         on a machine for analysis that sees $runs (as root, or as a user who may
#                         read the recordings)
#     report.sh JOB...    these jobs
#
# As EpilogSlurmctld in slurm.conf it reports the job that has ended, in the background on the
# controller: for small clusters only, because analyzing a large job takes CPU and memory.
PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin
. "$(dirname "$0")/common.sh"
age_s=120 # a recorder writes every second: without a write for so long, it has ended
limit=30m # for one analysis

# Run a command as the owner of a recording, who may read it, and not with more rights than that.
run_as_owner() {
    owner=$1
    shift
    if [ "$(id -u)" = 0 ] && [ "$owner" != root ]; then
        runuser -u "$owner" -- "$@"
    else
        "$@"
    fi
}

# Succeed if nothing was written to a recording for some time.
has_ended() {
    [ -z "$(find "$1" -newermt "-$age_s seconds" -print -quit)" ]
}

# Put a text into the comment of a job, or beside it where its user has written one. A job that has
# ended can be changed in Slurm's database only: `scontrol update` refuses it.
set_comment() {
    key=Comment
    case $(sacct -X -n -P -j "$1" -o comment 2> /dev/null) in
        "" | clusterprof:*) ;;
        *) key=AdminComment ;;
    esac
    sacctmgr -i modify job where "jobid=$1" set "$key=$2" > /dev/null 2>&1
}

# Analyze one job, and tell its owner: $1 = job.
report_job() {
    run=$runs/$1
    owner=$(stat -c %U "$run") || return
    cd / || return
    code=0
    text=$(run_as_owner "$owner" nice -n 19 timeout "$limit" \
        "$python" -I -m clusterprof analyze "$run" --format brief 2> "$state/error") || code=$?
    if [ -z "$text" ]; then
        text="clusterprof: the recording cannot be analyzed (exit $code)
$(head -n 1 "$state/error")"
    fi
    printf '%s\n' "$text" > "$state/$1"
    # The copy beside the recording is the owner's, and is written with the owner's rights.
    printf '%s\n' "$text" | run_as_owner "$owner" sh -c 'umask 022; cat > "$1"' sh "$run/summary.txt" || true
    if [ "${comment:-yes}" = yes ]; then
        set_comment "$1" "$(printf '%s' "$text" | tr '\n' ' ')" || true
    fi
    if [ "${mail:-no}" = yes ]; then
        printf '%s\n\nclusterprof analyze %s\n' "$text" "$run" |
            mail -s "Job $1: where the GPU time went" "$owner" || true
    fi
}

# Remove recordings whose last record is older than keep_days; a file `keep` in one protects it.
remove_old() {
    [ "${keep_days:-0}" -gt 0 ] || return 0
    find "$runs" -mindepth 1 -maxdepth 1 -type d -name '[0-9]*' | while IFS= read -r run; do
        [ ! -e "$run/keep" ] || continue
        [ -z "$(find "$run" -newermt "-$keep_days days" -print -quit)" ] || continue
        rm -rf -- "$run" && rm -f -- "$state/${run##*/}"
    done
}

umask 077
mkdir -p "$state" || exit 1
if [ -n "${SLURM_SCRIPT_CONTEXT:-}" ] || [ $# -gt 0 ]; then
    jobs=${*:-$SLURM_JOB_ID}
    for job in $jobs; do
        [ -d "$runs/$job" ] || continue
        if [ $# -gt 0 ]; then
            report_job "$job"
        else
            # Slurm does not wait for what is in the background of this script.
            (sleep 15 && report_job "$job") < /dev/null > /dev/null 2>&1 &
        fi
    done
    exit 0
fi
# Only one at a time: a large job may take longer than the time between two calls.
exec 9> "$state/lock"
flock -n 9 || exit 0
for run in "$runs"/[0-9]*; do
    job=${run##*/}
    if [ -d "$run" ] && [ ! -L "$run" ] && [ ! -e "$state/$job" ] && has_ended "$run"; then
        report_job "$job"
    fi
done
remove_old
