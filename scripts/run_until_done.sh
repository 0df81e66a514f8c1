#!/usr/bin/env bash
# Trains until the last step's checkpoint is complete, resuming after a crash or a stall that someone killed.
#
#   run_until_done.sh LOG_DIR LAST_STEP FLAG VALUE...       (LOG_DIR as seen from the repository)
#
# The flags must include -n, how often to write a checkpoint. Stops for good when LOG_DIR/DONE_<LAST_STEP> exists, on Ctrl-C or SIGTERM,
# which the run answers with a checkpoint, and when trying again cannot help: exit code 2 (something to correct), 3 (out of memory), a run
# that ends well and leaves no checkpoint at all, or MAX_TRIES tries in a row without a new one. Exit code 4, a lost rank, is tried again.
# PYTHON names the interpreter, LAUNCH a command that starts several of it, such as "mpirun -np 8".
set -u
cd "$(dirname "$0")/.." || exit

if [ $# -lt 2 ]; then
    echo "usage: run_until_done.sh LOG_DIR LAST_STEP FLAG VALUE..." >&2
    exit 2
fi
log_dir=$1 last_step=$2
shift 2
case " $* " in
    *" -n "* | *" --checkpoint-every"*) ;;
    *) echo "add -n STEPS, how often to write a checkpoint: without it the run would keep nothing to go on from" >&2; exit 2 ;;
esac
max_tries=${MAX_TRIES:-5}
done_file=$log_dir/DONE_$(printf %08d "$last_step")

newest_checkpoint() { find "$log_dir" -name 'DONE_*' 2>/dev/null | sort | tail -n 1; }

# A program in the background hears no Ctrl-C until it listens itself; one that has heard it takes this for the same request
stop() {
    kill -TERM $child 2>/dev/null && wait $child
    echo "stopped by hand; run the same script again to go on"
    exit 130
}
child=
trap stop INT TERM

tries=0
while [ ! -f "$done_file" ]; do
    before=$(newest_checkpoint)
    # in the background, as bash heeds a signal only between commands, or while it waits; LAUNCH is several words
    # shellcheck disable=SC2086
    ${LAUNCH:-} "${PYTHON:-python}" train_gpt2.py -o "$log_dir" -x "$last_step" -y 1 "$@" &
    child=$!
    wait $child
    code=$?
    case $code in
        2 | 3) echo "exit code $code: the same command would fail again; see the message above" >&2; exit $code ;;
        126 | 127) echo "exit code $code: ${PYTHON:-python} cannot be run; name an interpreter with PYTHON=" >&2; exit $code ;;
        130 | 143) exit $code ;;
    esac
    tries=$((tries + 1))
    if [ "$(newest_checkpoint)" != "$before" ]; then
        tries=0
    elif [ "$code" -eq 0 ] && [ -z "$before" ]; then
        echo "the run ended well and left no checkpoint in $log_dir: look at -n" >&2
        exit 2
    fi
    if [ "$tries" -ge "$max_tries" ]; then
        echo "ended $tries times with no new checkpoint in $log_dir (last exit code $code); see the messages above" >&2
        exit 1
    fi
    sleep "${RETRY_AFTER_S:-1}" # a GPU needs a moment to come back after a crash
done
echo "$done_file exists: training is complete"
