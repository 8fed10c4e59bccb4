# srun's own status is the highest of all nodes, killed ones included; the first that ended badly counts.
first=$(awk '$1 != 0 { print $1; exit }' "$DIFFUSION_EXIT_FILE" 2>/dev/null)
status=${first:-$status}
echo "attempt $DIFFUSION_ATTEMPT ended with $status"
[ "$status" -ne 0 ] || exit 0
next=$(follows "$status")
if [ "$next" = stop ] || [ "$DIFFUSION_ATTEMPT" -ge "$max_restarts" ]; then
    exit "$status"
fi
# A controller that is being restarted answers some minutes later.
patiently() {
    for _ in {1..30}; do
        "$@" && return
        sleep 10
    done
    return 1
}
# A job that was cancelled is not to come back, and one that Slurm has requeued for a failed node does so already.
job=$(patiently scontrol --oneliner show job "$SLURM_JOB_ID") || {
    echo "not requeued: scontrol does not answer; scontrol requeue $SLURM_JOB_ID"
    exit "$status"
}
if [[ $job != *" JobState=RUNNING "* || $job != *" Restarts=$DIFFUSION_ATTEMPT "* ]]; then
    echo "not requeued: it was cancelled, or Slurm has done so"
    exit "$status"
fi
trap '' TERM # requeueing ends this script; what follows is still to be done
patiently scontrol requeue "$SLURM_JOB_ID" || echo "not requeued: Slurm refuses; scontrol requeue $SLURM_JOB_ID"
if [ "$next" = elsewhere ]; then
    # Slurm takes a list of nodes to avoid for a job that waits, as this one does now.
    bad=$(awk -v status="$status" '$1 == status { print $2 }' "$DIFFUSION_EXIT_FILE" | sort -u | paste -sd,)
    avoided=$(sed -n 's/.* ExcNodeList=\([^( ]*\).*/\1/p' <<<"$job")
    [ -z "$bad" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${avoided:+$avoided,}$bad"
fi
exit "$status"
