#!/usr/bin/env bash
# GPT-2 124M on 10B tokens on several machines with torchrun. Start it on each of them, LOG_DIR and the data on a disk that all share:
#
#   MASTER_ADDR=node01 NODES=2 NODE_RANK=0 scripts/run_torchrun.sh          # on node01; NODE_RANK=1 on the next one
#
# One machine needs none of these. GPUS: how many each has. When a rank is lost its torchrun ends them all, on the other machines too,
# and every machine starts again from the newest checkpoint. torchrun turns every failure into exit code 1, so what trying again cannot
# help (see run_until_done.sh) ends after MAX_TRIES.
export LAUNCH="torchrun --no-python --nnodes ${NODES:-1} --node-rank ${NODE_RANK:-0} --nproc-per-node ${GPUS:-8} \
    --master-addr ${MASTER_ADDR:-127.0.0.1} --master-port ${MASTER_PORT:-29500}"
exec "$(dirname "$0")/run_gpt2_124M_multi.sh"
