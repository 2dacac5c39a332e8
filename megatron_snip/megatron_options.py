"""Megatron-LM's options that this trainer does not have: which change nothing here, and what to give for the others.

So the options of a Megatron-LM launch script can be pasted: what is always so here is left out and told, the rest is
refused at once, each with its way out.  Source of the names: Megatron-LM core 0.16.1, megatron/training/arguments.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from megatron_snip.config import option_groups
from megatron_snip.errors import UserError

LOGGER = logging.getLogger("megatron_snip")
_ANY = ""  # any value
#: Switches that are always on here, or choose among kernels and say nothing of the numbers.
_SWITCHES = """
use-mcore-models swiglu disable-bias-linear use-rotary-position-embeddings no-position-embedding
group-query-attention no-masked-softmax-fusion attention-softmax-in-fp32 no-bias-swiglu-fusion no-bias-gelu-fusion
no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm use-flash-attn use-distributed-optimizer overlap-grad-reduce
overlap-param-gather overlap-param-gather-with-optimizer-step align-param-gather tp-comm-overlap
no-gradient-accumulation-fusion cross-entropy-loss-fusion
accumulate-allreduce-grads-in-fp32 decoupled-weight-decay use-cpu-initialization no-load-rng no-save-rng
no-create-attention-mask-in-dataloader no-mmap-bin-files auto-detect-ckpt-format use-dist-ckpt
use-persistent-ckpt-worker ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure
override-opt-param-scheduler
override-opt_param-scheduler no-check-for-nan-in-loss-and-grad log-params-norm log-num-zeros-in-grad log-progress
log-straggler log-timers-to-tensorboard log-memory-to-tensorboard log-batch-size-to-tensorboard
log-validation-ppl-to-tensorboard log-world-size-to-tensorboard no-log-loss-scale-to-tensorboard no-one-logger
enable-one-logger no-barrier-with-level-1-timing no-overlap-p2p-communication overlap-p2p-communication-warmup-flush
ddp-average-in-collective no-gradient-reduce-div-fusion use-nccl-ub disable-symmetric-registration enable-experimental
dataloader-fast-cache-load dataloader-defer-npy-index-mmap
"""
#: Options whose value must be one of these for the run to be the same here (or any), and what to give otherwise.
_VALUES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "position-embedding-type": (("rope",), "models here have rotary positions; give rope"),
    "rotary-percent": (("1",), "all channels are rotated here; give 1.0"),
    "normalization": (("RMSNorm",), "models here have RMSNorm; give RMSNorm"),
    "attention-dropout": (("0",), "there is no dropout here; give 0"),
    "hidden-dropout": (("0",), "there is no dropout here; give 0"),
    "optimizer": (("adam",), "there is AdamW alone; give adam"),
    "dataloader-type": (("single",), "samples come in one order here; give single"),
    "expert-model-parallel-size": (("1",), "there are no experts here; leave it out"),
    "exit-signal": (("SIGTERM", "15"), "SIGTERM and Ctrl-C are listened to; leave it out"),
    **dict.fromkeys(
        ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
        (("fp32",), "gradients, master weights and Adam's state are float32 here; give fp32"),
    ),
    **dict.fromkeys(
        (
            "attention-backend", "cp-comm-type",
            "transformer-impl", "cross-entropy-fusion-impl", "ckpt-format",
            "dist-ckpt-format", "dist-ckpt-strictness", "empty-unused-memory-level", "num-dataset-builder-threads",
            "tiktoken-pattern", "tensorboard-queue-size", "tensorboard-log-interval",
            "timing-log-level", "timing-log-option", "logging-level", "ckpt-fully-parallel-load-process-group",
            "ddp-bucket-size", "ddp-num-buckets", "dist-ckpt-workers", "tp-comm-overlap-cfg", "one-logger-project",
            "one-logger-run-name",
        ),
        ((_ANY,), ""),
    ),
}  # fmt: skip
_FP8 = "give --precision fp8, mxfp8 or snip in place of all --fp8-... options"
_FP4 = "give --precision nvfp4, fp4 or snip in place of all --fp4-... options"
_BF16_LAYERS = "give --snip-fix, such as layers.0.*=bf16"
_RATES = "all weights have one learning rate here; leave it out"
#: Options that a run cannot have here, and what to give in their place.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("fp8-format", "fp8-recipe", "fp8-amax-history-len", "fp8-amax-compute-algo", "fp8-param-gather", "fp8-margin",
         "no-fp8-wgrad", "fp8-interval", "keep-fp8-transpose-cache"), _FP8,
    ),
    **dict.fromkeys(("fp4-format", "fp4-recipe", "fp4-param-gather"), _FP4),
    **dict.fromkeys(
        ("first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"), _BF16_LAYERS
    ),
    "te-precision-config-file": "give --precision plan --precision-plan FILE",
    **dict.fromkeys(("decoupled-lr", "decoupled-min-lr"), _RATES),
    "fp16": "give --bf16",
    **dict.fromkeys(
        ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis",
         "fp16-lm-cross-entropy"),
        "BF16 needs no loss scale; leave it out",
    ),
    "use-precision-aware-optimizer": "Adam's state is float32 here; leave it out",
    "no-save-optim": "checkpoints have the optimiser's state; --no-load-optim leaves it when you load one",
    "recompute-activations": "give --recompute-granularity selective",
    "grad-reduce-in-bf16": "gradients are reduced in float32 here; leave it out",
    "apply-layernorm-1p": "norms have plain weights that start at 1; leave it out",
    "qk-layernorm": "give --model-name qwen3, whose heads have norms of q and k",
    "add-qkv-bias": "linears here have no biases; leave it out",
    "num-experts": "there are no experts here; leave it out",
    **dict.fromkeys(
        ("vocab-file", "merge-file"), "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"
    ),
    **dict.fromkeys(
        ("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp"),
        "give --data-parallel-sharding-strategy optim_grads_params, or another",
    ),
    "use-checkpoint-args": "give the model's options; --load refuses those that are not the checkpoint's",
    "pipeline-model-parallel-layout": "give --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers",
    **dict.fromkeys(("cpu-offloading", "optimizer-cpu-offload"), "everything stays on the device here; leave it out"),
    **dict.fromkeys(
        ("data-args-path", "per-split-data-args-path"), "give what the file has to --data-path, or to --train-data-path"
    ),
    "test-data-path": "there is no test set here; leave it out, and use tools/evaluate.py",
    "window-size": "attention sees all earlier tokens here; leave it out",
    "yaml-cfg": "give --config FILE, a TOML file of options",
    "save-retain-interval": "give --keep-last 1 --keep-every in its place",
    **dict.fromkeys(
        ("non-persistent-save-interval", "non-persistent-ckpt-type", "non-persistent-global-ckpt-dir",
         "non-persistent-local-ckpt-dir", "non-persistent-local-ckpt-algo"),
        "each save goes to --save; give --save-interval, and --keep-last to delete old ones",
    ),
    **dict.fromkeys(
        ("use-checkpoint-opt_param-scheduler", "use-checkpoint-opt-param-scheduler"),
        "the schedule follows the options; give those of before, which a resume that changes one names",
    ),
    "skip-train": "tools/evaluate.py measures a checkpoint",
    "iterations-to-skip": "no iteration is left out here; --snip-guard goes back when the loss breaks",
    "load-main-params-from-ckpt": "master weights are float32 and always loaded; leave it out",
    "distributed-timeout-seconds-after-init": "give --distributed-timeout-minutes, which holds from the start",
    "inprocess-restart": "give torchrun --max-restarts",
    **dict.fromkeys(("adlr-autoresume", "adlr-autoresume-interval"), "give --exit-duration-in-mins, or send SIGTERM"),
    **dict.fromkeys(("rank", "local-rank"), "torchrun tells each process by its environment; leave it out"),
    "wandb-entity": "set the environment variable WANDB_ENTITY",
}  # fmt: skip


def _is_value(word: str) -> bool:
    """Whether a word is an option's value: negative numbers are."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _same(value: str, allowed: Sequence[str]) -> bool:
    if _ANY in allowed or value in allowed:
        return True
    try:
        return any(float(value) == float(each) for each in allowed)
    except ValueError:
        return False


def without_megatrons(words: Sequence[str]) -> list[str]:
    """Command-line words without Megatron-LM's options that change nothing here.

    UserError that names all that it has and this trainer cannot do, each with what to give instead.
    """
    kept: list[str] = []
    dropped: list[str] = []
    refused: list[str] = []
    ours, switches, left = option_groups(), set(_SWITCHES.split()), list(words)
    while left:
        word = left.pop(0)
        name, joined, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name.replace("-", "_") in ours:
            kept.append(word)
            continue
        if name not in _VALUES and name not in _REFUSED and name not in switches:
            kept.append(word)
            continue
        values = [value] if joined else []
        while not joined and name not in switches and left and _is_value(left[0]):
            values.append(left.pop(0))
        shown = " ".join([f"--{name}", *values])
        allowed, instead = _VALUES.get(name, ((), _REFUSED.get(name, "")))
        if name in switches or (name in _VALUES and len(values) == 1 and _same(values[0], allowed)):
            dropped.append(shown)
        else:
            refused.append(f"{shown}: {instead or 'give it one value'}")
    if refused:
        raise UserError(f"options of Megatron-LM that are not here: {'; '.join(refused)}")
    if dropped:
        LOGGER.info(f"options of Megatron-LM that change nothing here: {', '.join(dropped)}")
    return kept
