#!/bin/sh
# Slurm: HealthCheckProgram=/etc/pacekeeper/slurm-healthcheck.sh, HealthCheckInterval=60.
# Drains this node while its agent reports it as unfit: `pacekeeper healthcheck` ends with code 12
# and prints "unfit: REASON". Anything else (a broken or missing installation, a time-out, an answer
# without a reason) leaves the node as it is; what is no answer goes to slurmd's log.
# It resumes nothing: do that after the repair (`scontrol update NodeName=... State=RESUME`).
# slurmd sets no PATH: if `pacekeeper` or `scontrol` are not in the system's folders, set it in
# /etc/default/pacekeeper (PATH=/usr/local/pacekeeper/bin:/usr/bin:/bin).
defaults=${PACEKEEPER_DEFAULTS:-/etc/default/pacekeeper}
if [ -r "$defaults" ]; then
    . "$defaults"
    export PATH
fi
answer=$(timeout -k 1 "${PACEKEEPER_HEALTHCHECK_S:-30}" pacekeeper healthcheck "$@")
code=$?
case "$code $answer" in
    "0 fit: "* | "2 unknown: "*) exit 0 ;;
    "12 unfit: "[!\ ]*) ;;
    *)
        echo "pacekeeper healthcheck ended with code $code and printed '$answer': this node is" \
            "left as it is; run it with PATH=$PATH" >&2
        exit 1
        ;;
esac
node=${SLURMD_NODENAME:-$(hostname -s)}
case $(scontrol show node "$node" --oneliner) in
    *"Reason=pacekeeper:"*) exit 0 ;; # already drained for this
esac
exec scontrol update "NodeName=$node" State=DRAIN "Reason=pacekeeper: $answer"
