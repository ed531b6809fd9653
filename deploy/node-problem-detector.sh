#!/bin/sh
# The plug-in of node-problem-detector.json, installed as /etc/pacekeeper/node-problem-detector.sh.
# Ends with 0 (OK), 1 (NonOK: this node is unfit) or 2 (Unknown). NonOK needs code 12 of `pacekeeper
# healthcheck` and "unfit: REASON" on its stdout: a broken or missing installation, a time-out and
# an answer without a reason are Unknown. /etc/default/pacekeeper sets PATH, as for Slurm.
trap 'exit 2' EXIT # whatever ends this script early is Unknown
defaults=${PACEKEEPER_DEFAULTS:-/etc/default/pacekeeper}
if [ -r "$defaults" ]; then
    . "$defaults"
    export PATH
fi
answer=$(timeout -k 1 "${PACEKEEPER_HEALTHCHECK_S:-3}" pacekeeper healthcheck "$@")
code=$?
case "$code $answer" in
    "0 fit: "*) status=0 ;;
    "12 unfit: "[!\ ]*) status=1 ;;
    "2 unknown: "*) status=2 ;;
    *)
        echo "pacekeeper healthcheck printed '$answer'; run it with PATH=$PATH" >&2
        answer="unknown: pacekeeper healthcheck ended with code $code"
        status=2
        ;;
esac
echo "$answer"
trap - EXIT
exit "$status"
