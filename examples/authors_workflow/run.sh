#!/usr/bin/env bash
# The steps of the SNIP authors' repository, one by one, with the commands here.  docs/from_snip.md explains them.
#
#   bash examples/authors_workflow/run.sh [prepare|train|collect|plans|schemes|evaluate|all] [options of megatron-snip train]
#
# prepare   text -> tokenizer -> tokens
# train     a checkpoint in BF16, to measure on and to start all schemes from
# collect   statistics of that checkpoint
# plans     SNIP's plan for one budget, random ones, and those of simpler rules
# schemes   training continues from the checkpoint under each plan, and in BF16, FP8 and FP4, with the same data
# evaluate  the table: what each scheme saves, what was predicted for it, its validation loss
#
# A step that was stopped continues where it was; finished steps are not repeated.  Options go to all training runs.
#
# Environment: WORKFLOW_DIR        where everything goes                         (runs/authors_workflow)
#              WORKFLOW_CONFIG     options of the model and its training          (examples/authors_workflow/workflow.toml)
#              WORKFLOW_BUDGET     share of the linears' FLOPs in FP4             (0.75)
#              WORKFLOW_ITERS      iterations in BF16                             (100)
#              WORKFLOW_MORE       iterations of each scheme after them           (40)
#              WORKFLOW_RANDOM     random plans                                   (3)
#              WORKFLOW_BYTES      bytes of text to gather, about                 (8000000)
#              WORKFLOW_VOCAB      tokens of the tokenizer                        (4096)
#              NPROC_PER_NODE      processes                                      (1)
# Relative paths are relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

step="${1:-all}"
options=("${@:2}")
dir="${WORKFLOW_DIR:-runs/authors_workflow}"
config="${WORKFLOW_CONFIG:-examples/authors_workflow/workflow.toml}"
iters="${WORKFLOW_ITERS:-100}"
more="${WORKFLOW_MORE:-40}"

# shellcheck source=tools/set_up.sh
. tools/set_up.sh base

distributed() {
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" torchrun --rdzv-backend one_node \
        --nproc_per_node "${NPROC_PER_NODE:-1}" "$@"
}

# pretrain RUN_DIR OPTIONS...: all runs read the same tokens, in the same order.
pretrain() {
    distributed pretrain_llama.py --config "$config" --tokenizer-model "$dir/tokenizer/tokenizer.model" \
        --train-data-path "$dir/tokens/train_text_document" --valid-data-path "$dir/tokens/valid_text_document" \
        --run-dir "$@" ${options[@]+"${options[@]}"}
}

prepare() {
    local part
    if [ ! -e "$dir/text/train.jsonl" ]; then
        python -m megatron_snip.cli gather --output "$dir/text" --max-bytes "${WORKFLOW_BYTES:-8000000}" --min-bytes 100000
    fi
    if [ ! -e "$dir/tokenizer/tokenizer.model" ]; then
        mkdir -p "$dir/tokenizer"
        python -m megatron_snip.cli tokenizer --input "$dir/text/train.jsonl" --vocab-size "${WORKFLOW_VOCAB:-4096}" \
            --max-bytes 8000000 --output-prefix "$dir/tokenizer/tokenizer"
    fi
    for part in train valid; do
        if [ ! -e "$dir/tokens/${part}_text_document.idx" ]; then
            python -m megatron_snip.cli preprocess --input "$dir/text/$part.jsonl" --output-prefix "$dir/tokens/$part" \
                --append-eod --workers 2 --tokenizer-type SentencePieceTokenizer \
                --tokenizer-model "$dir/tokenizer/tokenizer.model"
        fi
    done
}

train() {
    pretrain "$dir/bf16" --load "$dir/bf16/checkpoints" --precision bf16 --train-iters "$iters"
}

collect() {
    # statistics that are newer than the last checkpoint are of it
    if [ "$dir/stats.json" -nt "$dir/bf16/checkpoints/latest_checkpointed_iteration.txt" ]; then
        return
    fi
    distributed -m megatron_snip.cli probe --load "$dir/bf16/checkpoints" --snip-options fp8,fp4 --snip-weight 1 \
        --output "$dir/stats.json"
}

plans() {
    python -m megatron_snip.cli plan --stats "$dir/stats.json" --load "$dir/bf16/checkpoints" \
        --snip-granularity linear --snip-target "${WORKFLOW_BUDGET:-0.75}" --num-random "${WORKFLOW_RANDOM:-3}" \
        --output-dir "$dir/plans"
}

# scheme NAME OPTIONS...: from the checkpoint in BF16 on, unless the scheme has checkpoints of its own
scheme() {
    local run="$dir/schemes/$1" load="$dir/bf16/checkpoints"
    if [ -e "$run/checkpoints/latest_checkpointed_iteration.txt" ]; then
        load="$run/checkpoints"
    fi
    pretrain "$run" --load "$load" --save "$run/checkpoints" --train-iters "$((iters + more))" \
        --eval-interval "$more" "${@:2}"
}

schemes() {
    local plan name
    for name in bf16 fp8 fp4; do
        scheme "$name" --precision "$name"
    done
    for plan in "$dir"/plans/*.json; do
        name="$(basename "$plan" .json)"
        if [ "$name" != pareto ]; then
            scheme "$name" --precision plan --precision-plan "$plan"
        fi
    done
}

evaluate() {
    python examples/authors_workflow/compare.py "$dir"
}

case "$step" in
    prepare | train | collect | plans | schemes | evaluate) "$step" ;;
    all) for each in prepare train collect plans schemes evaluate; do "$each"; done ;;
    *) give_up "no such step: $step; give prepare, train, collect, plans, schemes, evaluate or all" ;;
esac
