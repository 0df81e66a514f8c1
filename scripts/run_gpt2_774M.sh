#!/usr/bin/env bash
# GPT-2 774M on 150B tokens of FineWeb, llm.c's recipe on one GPU: 286102 steps of 524288 tokens, 7e20 FLOPs.
# Wants dev/data/fineweb100B/*.bin and, for -h 1, dev/data/hellaswag/hellaswag_val.bin. A smaller GPU: lower -b, the batch stays the same.
exec "$(dirname "$0")/run_until_done.sh" "${LOG_DIR:-log_gpt2_774M}" 286102 \
    -e d36 \
    -i "dev/data/fineweb100B/fineweb_train_*.bin" \
    -j "dev/data/fineweb100B/fineweb_val_*.bin" \
    -b 32 -t 1024 -d 524288 \
    -r 1 \
    -l 0.00025 -u 700 -q 0.0 -c 0.1 \
    -v 250 -s 300000 -g 144 -h 1 \
    -n 4000
