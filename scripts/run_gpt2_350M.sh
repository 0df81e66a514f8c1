#!/usr/bin/env bash
# GPT-2 350M on 31.5B tokens of FineWeb, llm.c's recipe on one GPU: 60000 steps of 524288 tokens, 7e19 FLOPs.
# Wants dev/data/fineweb100B/*.bin and, for -h 1, dev/data/hellaswag/hellaswag_val.bin. A smaller GPU: lower -b, the batch stays the same.
exec "$(dirname "$0")/run_until_done.sh" "${LOG_DIR:-log_gpt2_350M}" 60000 \
    -e d24 \
    -i "dev/data/fineweb100B/fineweb_train_*.bin" \
    -j "dev/data/fineweb100B/fineweb_val_*.bin" \
    -b 64 -t 1024 -d 524288 \
    -r 1 \
    -l 0.0003 -u 700 -q 0.0 -c 0.1 \
    -v 250 -s 100000 -g 144 -h 1 \
    -n 2000
