#!/usr/bin/env bash
# GPT-3 124M (T=2048) on 300B tokens of FineWeb, llm.c's recipe on one GPU: 572204 steps of 524288 tokens, 2e20 FLOPs.
# Skips updates 7 deviations off, keeps 5 checkpoints and every 50000th. Wants dev/data/fineweb100B/*.bin and, for -h 1,
# dev/data/hellaswag/hellaswag_val.bin. A smaller GPU: lower -b, the batch stays the same.
exec "$(dirname "$0")/run_until_done.sh" "${LOG_DIR:-log_gpt3_124M}" 572204 \
    -e gpt3:c768 \
    -i "dev/data/fineweb100B/fineweb_train_*.bin" \
    -j "dev/data/fineweb100B/fineweb_val_*.bin" \
    -b 32 -t 2048 -d 524288 \
    -r 0 \
    -l 0.0006 -u 700 -q 0.1 -c 0.1 -sl 7.0 -sg 7.0 \
    -v 250 -s 20000 -g 144 -h 1 \
    -n 10000 -nk 5 -nm 50000
