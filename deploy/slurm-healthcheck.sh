#!/bin/sh
# Slurm: HealthCheckProgram=/etc/pacekeeper/slurm-healthcheck.sh, HealthCheckInterval=60.
# Drains this node while its agent says that it is unfit. It resumes nothing: who has mended the
# node does (`scontrol update NodeName=... State=RESUME`). Where nobody knows, nothing is done.
said=$(pacekeeper healthcheck "$@")
[ $? -eq 1 ] || exit 0
node=${SLURMD_NODENAME:-$(hostname -s)}
case $(scontrol show node "$node" --oneliner) in
    *"Reason=pacekeeper:"*) exit 0 ;; # drained for this already
esac
exec scontrol update "NodeName=$node" State=DRAIN "Reason=pacekeeper: $said"
