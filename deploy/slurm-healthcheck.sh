#!/bin/sh
# Slurm: HealthCheckProgram=/etc/pacekeeper/slurm-healthcheck.sh, HealthCheckInterval=60.
# Drains this node while its agent says that it is unfit. It resumes nothing: who has mended the
# node does (`scontrol update NodeName=... State=RESUME`). Where nobody knows, nothing is done.
# slurmd gives its check no PATH: where `pacekeeper` or `scontrol` lie elsewhere than in the
# system's folders, /etc/default/pacekeeper sets one (PATH=/usr/local/pacekeeper/bin:/usr/bin:/bin).
if [ -r /etc/default/pacekeeper ]; then
    . /etc/default/pacekeeper
    export PATH
fi
said=$(pacekeeper healthcheck "$@")
code=$?
case $code in
    0 | 2) exit 0 ;;
    1) ;;
    *) echo "pacekeeper healthcheck ended with $code: is it in PATH=$PATH?" >&2; exit "$code" ;;
esac
node=${SLURMD_NODENAME:-$(hostname -s)}
case $(scontrol show node "$node" --oneliner) in
    *"Reason=pacekeeper:"*) exit 0 ;; # drained for this already
esac
exec scontrol update "NodeName=$node" State=DRAIN "Reason=pacekeeper: $said"
