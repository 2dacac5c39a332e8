#!/usr/bin/env bash
# The first command: pretrain a small Llama under SNIP on this machine's CPU, from nothing to a report.
#
#   bash examples/quickstart.sh [--fresh] [options of pretrain_llama.py]
#
# Without --fresh, the run in runs/quickstart continues from its last checkpoint (from iteration 0 if it has none).
# With --fresh, an existing runs/quickstart is moved aside to runs/quickstart.<time>, and a new run starts.
# Other options override examples/quickstart.toml.  Text, tokenizer and tokens are made once.
#
# Environment: QUICKSTART_DATA   folder of text, tokenizer and tokens      (data/quickstart)
#              QUICKSTART_RUN    the run folder                            (runs/quickstart)
#              QUICKSTART_BYTES  bytes of text to gather, about            (16000000)
#              SAVE_GRACE_SECONDS  time that processes have to save after SIGTERM (120)
#              PYTHON, SKIP_SET_UP   see tools/set_up.sh
# Relative paths in them are relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

data="${QUICKSTART_DATA:-data/quickstart}"
run="${QUICKSTART_RUN:-runs/quickstart}"

fresh=0
options=()
for word in "$@"; do
    if [ "$word" = --fresh ]; then fresh=1; else options+=("$word"); fi
done

cat >&2 <<EOF
[quickstart] installs the packages if they are missing, gathers text of this machine, trains a tokenizer on it,
[quickstart] and trains a small Llama on four processes, in BF16 until its first plan and in FP4 and FP8 from then on.
[quickstart] It takes some four minutes on two cores, and ends with the report $run/report.html
EOF

# shellcheck source=tools/set_up.sh
. tools/set_up.sh base

# make_once FOLDER COMMAND...: the command fills FOLDER.partial, which becomes FOLDER when it has succeeded, so
# a folder that exists is complete.
make_once() {
    local folder="$1"
    shift
    if [ -d "$folder" ]; then
        return
    fi
    echo "[quickstart] making $folder" >&2
    rm -rf "$folder.partial"
    mkdir -p "$folder.partial"
    "$@"
    mv "$folder.partial" "$folder"
}

gather() {
    local bytes="$1"
    python tools/gather_text.py --output "$data/text.partial" --max-bytes "$bytes" \
        --min-bytes "$((bytes < 4000000 ? bytes : 4000000))"
}

train_tokenizer() {
    python tools/train_tokenizer.py --input "$data/text/train.jsonl" --vocab-size 4096 --max-bytes 8000000 \
        --output-prefix "$data/tokenizer.partial/tokenizer"
}

tokenize() {
    local part
    for part in train valid; do
        python tools/preprocess_data.py --input "$data/text/$part.jsonl" \
            --output-prefix "$data/tokens.partial/$part" --append-eod --workers 2 \
            --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer/tokenizer.model"
    done
}

bytes="${QUICKSTART_BYTES:-16000000}"
case "$bytes" in # bash would evaluate anything else in arithmetic, commands included
    *[!0-9]* | 0* | ???????????????*) give_up "QUICKSTART_BYTES is $bytes; give a number of bytes, such as 16000000" ;;
esac
make_once "$data/text" gather "$bytes"
make_once "$data/tokenizer" train_tokenizer
make_once "$data/tokens" tokenize

if [ "$fresh" = 1 ] && [ -e "$run" ]; then
    aside="$run.$(date +%Y%m%d-%H%M%S)"
    echo "[quickstart] moving the old run to $aside" >&2
    mv -n "$run" "$aside"
    [ ! -e "$run" ] || give_up "$aside is in the way; try again"
fi
if [ -e "$run/checkpoints/latest_checkpointed_iteration.txt" ]; then
    echo "[quickstart] resuming $run (--fresh starts a new run)" >&2
fi

# one_node: no port is open to other machines (SECURITY.md).
# Four processes share two cores, so one thread each.  exec: signals reach torchrun itself.  On SIGTERM it gives
# them two minutes for the iteration under way and a save, where torch would give 30 seconds (before 2.12, always).
export OMP_NUM_THREADS=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SAVE_GRACE_SECONDS:-120}"
exec torchrun --rdzv-backend one_node --nproc_per_node 4 \
    pretrain_llama.py --config examples/quickstart.toml \
    --train-data-path "$data/tokens/train_text_document" \
    --valid-data-path "$data/tokens/valid_text_document" \
    --tokenizer-model "$data/tokenizer/tokenizer.model" \
    --run-dir "$run" --load "$run/checkpoints" ${options[@]+"${options[@]}"}
