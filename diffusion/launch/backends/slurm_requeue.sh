# The exit status of srun is the highest of all nodes, including those killed because of the first failure. The first
# nonzero status in the exit file gives the cause.
read -r first _ cause _ < <(awk '$1 != 0 { print; exit }' "$DIFFUSION_EXIT_FILE" 2>/dev/null)
status=${first:-$status}
echo "attempt $((DIFFUSION_ATTEMPT + 1)) exited with status $status"
[ "$status" -ne 0 ] || exit 0
next=$(action_after "$status")
if [ "$next" = stop ] || [ "$max_restarts" -eq 0 ]; then
    exit "$status"
fi
# Only failures in a row without progress use up restarts: not a preemption, and not the failures before the run resumed
# from a newer checkpoint, which its first node reports with a line '0 MACHINE progress'.
if awk '$1 == 0 && $3 == "progress" { found = 1 } END { exit !found }' "$DIFFUSION_EXIT_FILE" 2>/dev/null; then
    rm -f "$failures"
fi
if [ "$status" -ne 75 ] || [ "${cause:-preempted}" != preempted ]; then
    echo "attempt $((DIFFUSION_ATTEMPT + 1)): status $status" >>"$failures"
fi
if [ -f "$failures" ] && [ "$(wc -l <"$failures")" -gt "$max_restarts" ]; then
    echo "not requeued: all $max_restarts restarts are used without progress; see $failures"
    exit "$status"
fi
# A Slurm controller that is restarting responds again after some minutes.
retry() {
    for _ in {1..30}; do
        "$@" && return
        sleep 10
    done
    return 1
}
# Requeue only if this attempt is still the running one. A canceled job must not restart, and after a node failure Slurm
# has already requeued the job, so a second requeue would end the new attempt.
job=$(retry scontrol --oneliner show job "$SLURM_JOB_ID") || {
    echo "not requeued: scontrol does not respond; run scontrol requeue $SLURM_JOB_ID"
    exit "$status"
}
if [[ $job != *" JobState=RUNNING "* || $job != *" Restarts=$DIFFUSION_ATTEMPT "* ]]; then
    echo "not requeued: the job was canceled, or Slurm has already requeued it"
    exit "$status"
fi
trap '' TERM # requeueing sends SIGTERM to this script, which still has to exclude nodes
retry scontrol requeue "$SLURM_JOB_ID" || {
    echo "not requeued: Slurm refused; run scontrol requeue $SLURM_JOB_ID"
    exit "$status"
}
if [ "$next" = elsewhere ]; then
    # Slurm accepts a change of the excluded nodes only for a pending job, so this comes after the requeue.
    bad=$(awk -v status="$status" '$1 == status { print $2 }' "$DIFFUSION_EXIT_FILE" | sort -u | paste -sd,)
    excluded=$(sed -n 's/.* ExcNodeList=\([^( ]*\).*/\1/p' <<<"$job")
    [ -z "$bad" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${excluded:+$excluded,}$bad"
fi
exit "$status"
