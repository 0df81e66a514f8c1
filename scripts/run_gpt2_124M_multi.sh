#!/usr/bin/env bash
# GPT-2 124M on 10B tokens by several ranks, which the command in LAUNCH starts: run_torchrun.sh, run_slurm.sh and run_mpirun.sh have one.
exec "$(dirname "$0")/run_until_done.sh" "${LOG_DIR:-log_gpt2_124M_multi}" 18865 \
    -e d12 \
    -i "dev/data/fineweb10B/fineweb_train_*.bin" \
    -j "dev/data/fineweb10B/fineweb_val_*.bin" \
    -b 32 -t 1024 -d 524288 \
    -r 0 -z 1 \
    -l 0.0006 -u 700 -q 0.0 -c 0.1 \
    -v 250 -s 20000 -g 144 -h 1 \
    -n 1000
