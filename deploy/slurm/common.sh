# Read by the other scripts: settings, and whether a job is recorded.

folder=$(dirname "$0")
conf=$folder/clusterprof.conf
# A file that is not there would end some shells at once.
[ -r "$conf" ] || exit 0
. "$conf"

# Print how many GPUs the job has: those of this node times the nodes.
count_gpus() {
    on_node=${SLURM_GPUS_ON_NODE:-}
    if [ -z "$on_node" ]; then
        devices=${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-}}
        on_node=$(printf '%s' "$devices" | tr ',' '\n' | grep -c .)
    fi
    nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
    case "$on_node$nodes" in
        *[!0-9]*) echo 0 ;;
        *) echo $((on_node * nodes)) ;;
    esac
}

# Succeed if the job is large enough to be recorded.
is_recorded() {
    [ -n "${SLURM_JOB_ID:-}" ] && [ -n "$runs" ] && [ "$(count_gpus)" -ge "${min_gpus:-0}" ]
}

# Print the run directories of a job on this node: $1 = uid, $2 = job, job.step, or a pattern of them.
list_run_dirs() {
    for dir in /dev/shm/clusterprof-"$1"-????????-$2 /dev/shm/clusterprof-"$1"-????????-$2-restart*; do
        if [ -d "$dir" ] && [ ! -L "$dir" ]; then
            printf '%s\n' "$dir"
        fi
    done
}

# Print the pids of recorders on this node: $1 = uid, $2 = job, job.step, or a pattern of them. A recorder
# removes its run directory before it has written its last records: the process is what to wait for.
list_recorders() {
    pgrep -u "$1" -f -- "--run-dir=/dev/shm/clusterprof-$1-[0-9a-f]{8}-$2(-restart[0-9]+)?( |\$)"
}
