# shellcheck shell=bash
# Sourced by examples/llama_*/train_llama_*.sh, which set `name` (llama_1b, ...) and a default for NUM_NODES.
#
#   bash examples/<name>/train_<name>.sh [CHECKPOINT_PATH] [LOGS_PATH] [TOKENIZER_ARG] [DATA_ARG] [options ...]
#
# CHECKPOINT_PATH  folder that checkpoints are saved to and continued from   (checkpoints/<name>)
# LOGS_PATH        the run folder: metrics, plans, report                    (runs/<name>)
# TOKENIZER_ARG    MOCK, a sentencepiece *.model file, or a Hugging Face folder       (MOCK)
# DATA_ARG         MOCK, the prefix of a .bin/.idx pair, or "weight prefix weight prefix ..."   (MOCK)
# Further options go to pretrain_llama.py and override all others.
#
# Environment: GPUS_PER_NODE (8), NUM_NODES, NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (6000); on
# several nodes the same command runs once on each, with its own NODE_RANK.  Whoever can reach their ports controls
# the run: MASTER_ADDR is node 0's address in a private network, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (such as
# ib0) name each node's interface in it.
# SAVE_GRACE_SECONDS (840) is the time that processes have to save after SIGTERM reached torchrun.  They check for
# the signal once per iteration, so it must exceed one iteration plus a save.  torch before 2.12 does not know the
# variable that it sets, and always gives 30 seconds.
# Relative paths are relative to the folder the command is given in.
set -euo pipefail

for argument in "${@:1:4}"; do # an option here would be taken for a path, and its value for the next one
    case "$argument" in
        --*)
            echo "$argument is among the first four arguments, CHECKPOINT_PATH LOGS_PATH TOKENIZER_ARG DATA_ARG;" \
                "give all four before options, for example checkpoints/my runs/my MOCK MOCK $argument" >&2
            exit 2
            ;;
    esac
done
if [ "${NODE_RANK:-0}" != 0 ] && { [ -z "${MASTER_ADDR:-}" ] || [ "$NODE_RANK" -ge "$NUM_NODES" ]; }; then
    echo "NODE_RANK is $NODE_RANK, NUM_NODES $NUM_NODES and MASTER_ADDR ${MASTER_ADDR:-not set}; give ranks from 0 on," \
        "below NUM_NODES, and the host name of node 0 to MASTER_ADDR" >&2
    exit 2
fi

CHECKPOINT_PATH="${1:-checkpoints/$name}"
LOGS_PATH="${2:-runs/$name}"
TOKENIZER_ARG="${3:-MOCK}"
DATA_ARG="${4:-MOCK}"
shift "$(($# < 4 ? $# : 4))"

GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"

examples="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SAVE_GRACE_SECONDS:-840}"

DISTRIBUTED_ARGS=(--nproc_per_node "$GPUS_PER_NODE")
if [ "$NUM_NODES" = 1 ]; then
    DISTRIBUTED_ARGS+=(--rdzv-backend one_node) # no port is open to other machines
else
    DISTRIBUTED_ARGS+=(
        --nnodes "$NUM_NODES"
        --node_rank "$NODE_RANK"
        --master_addr "$MASTER_ADDR"
        --master_port "$MASTER_PORT"
    )
fi

# The file holds the published shape, the layout, the batch sizes, the schedule and SNIP's options.  What
# stands in the arrays below wins over it, for example TRAINING_ARGS+=(--lr 2e-4 --train-iters 10000).
MODEL_ARGS=(--config "$examples/$name/$name.toml")

TRAINING_ARGS=(--bf16 --exit-signal-handler)

MODEL_PARALLEL_ARGS=(--distributed-timeout-minutes 30)

DATA_ARGS=()
case "$TOKENIZER_ARG" in
    MOCK) ;; # the vocabulary's size stands in the file
    *.model) DATA_ARGS+=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER_ARG") ;;
    *) DATA_ARGS+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_ARG") ;;
esac
if [ "$DATA_ARG" = MOCK ]; then
    DATA_ARGS+=(--mock-data)
else
    read -r -a prefixes <<<"$DATA_ARG"
    DATA_ARGS+=(--data-path "${prefixes[@]}" --split "99,1,0" --data-cache-path "$LOGS_PATH/data_cache")
fi

EVAL_AND_LOGGING_ARGS=(
    --run-dir "$LOGS_PATH"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --log-throughput
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" "$examples/../pretrain_llama.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
