#!/usr/bin/env bash
# GPT-2 1558M on 34B tokens of FineWeb-EDU, llm.c's recipe on one GPU: 32000 steps of 1048576 tokens, 3e20 FLOPs.
# Wants dev/data/edu_fineweb100B/*.bin and, for -h 1, dev/data/hellaswag/hellaswag_val.bin. A smaller GPU: lower -b, the batch stays the same.
exec "$(dirname "$0")/run_until_done.sh" "${LOG_DIR:-log_gpt2_1558M}" 32000 \
    -e d48 \
    -i "dev/data/edu_fineweb100B/edu_fineweb_train_*.bin" \
    -j "dev/data/edu_fineweb100B/edu_fineweb_val_*.bin" \
    -b 16 -t 1024 -d 1048576 \
    -r 1 \
    -k cosine -l 0.0006 -u 700 -q 0.1 -c 0.1 \
    -v 250 -s 300000 -g 384 -h 1 \
    -n 2000
