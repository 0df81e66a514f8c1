#!/usr/bin/env bash
# GPT-2 124M on 10B tokens on several machines with Open MPI, which only starts the ranks. Start it on the first machine of HOSTS:
#
#   HOSTS=node01:8,node02:8 scripts/run_mpirun.sh            # 8 ranks, and GPUs, on each
#
# One machine needs no HOSTS, only RANKS. mpirun ends all ranks when one fails and passes its exit code on: a lost rank (4) starts all
# of them again from the newest checkpoint, something to correct (2) or too little memory (3) ends the loop. Stopped itself, it kills them
# after a second or two, often before they have written a checkpoint: to stop with one, send SIGTERM to this script and to any one rank.
hosts=${HOSTS:-localhost:${RANKS:-8}}
export MASTER_ADDR=${MASTER_ADDR:-${hosts%%[:,]*}} # rank 0 runs on the first host
export LAUNCH="mpirun --host $hosts --map-by slot --bind-to none -x MASTER_ADDR -x MASTER_PORT=${MASTER_PORT:-12345}"
exec "$(dirname "$0")/run_gpt2_124M_multi.sh"
