#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb, llm.c's recipe on one GPU: 18865 steps of 524288 tokens, 7e18 FLOPs.
# Wants dev/data/fineweb10B/*.bin and, for -h 1, dev/data/hellaswag/hellaswag_val.bin. A smaller GPU: lower -b, the batch stays the same.
exec "$(dirname "$0")/run_until_done.sh" "${LOG_DIR:-log_gpt2_124M}" 18865 \
    -e d12 \
    -i "dev/data/fineweb10B/fineweb_train_*.bin" \
    -j "dev/data/fineweb10B/fineweb_val_*.bin" \
    -b 64 -t 1024 -d 524288 \
    -r 0 \
    -l 0.0006 -u 700 -q 0.0 -c 0.1 \
    -v 250 -s 20000 -g 144 -h 1 \
    -n 5000
