#!/bin/sh
# Train on the hosts of `hostfile`, started from any of them (pdsh and ssh), or with NODE=0, 1, ... on each by hand:
#
#   examples/cluster/run.sh [SECTION.KEY=VALUE ...]
#   NODE=0 MASTER=10.0.0.1 examples/cluster/run.sh         # on the first host; NODE=1 on the second, and so on
#
# RUN_DIR must be on a file system that all hosts share, and so must this checkout, at the same path.
set -eu
cd "$(dirname "$0")/../.."
: "${RUN_DIR:=runs/two_sites}" "${HOSTFILE:=examples/cluster/hostfile}"
set -- train examples/cluster/two_sites.yaml "$@" --run-dir "$RUN_DIR" --resume auto --hostfile "$HOSTFILE"
if [ -n "${NODE:-}" ]; then
    set -- "$@" --no-ssh --node-rank "$NODE"
fi
if [ -n "${MASTER:-}" ]; then
    set -- "$@" --master-addr "$MASTER"
fi
exec "${PYTHON:-python}" -m megatron_grpo "$@"
