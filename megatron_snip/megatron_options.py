"""Megatron-LM options that this trainer lacks: which have no effect here, and what replaces the others.

You can paste the options of a Megatron-LM launch script.  Options that have no effect here are dropped and logged.  All
others are refused at once, each with its way out.  Source of the names: Megatron-LM core 0.16.1, and 0.20 as of
2026-08-22, megatron/training/arguments.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from megatron_snip.config import option_groups
from megatron_snip.errors import UserError

LOGGER = logging.getLogger("megatron_snip")
_ANY = ""  # any value
_EXPERTS = "there are no experts here; leave it out"
#: Switches that are always on here, or that select kernels without changing results.
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
use-legacy-models apply-query-key-layer-scaling te-rng-tracker inference-rng-tracker no-initialization
init-model-with-meta-device no-async-tensor-model-parallel-allreduce disable-async-tensor-model-parallel-allreduce
no-tp-comm-bulk-wgrad disable-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad disable-tp-comm-bulk-dgrad no-tp-comm-overlap-ag
disable-tp-comm-overlap-ag no-tp-comm-overlap-rs disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
no-tp-comm-split-ag disable-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-split-rs delay-wgrad-compute
defer-embedding-wgrad-compute use-ring-exchange-p2p no-scatter-gather-tensors-in-pipeline
no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding fused-residual-rmsnorm
use-te-activation-func use-transformer-engine-op-fuser disable-jit-fuser enable-cuda-graph external-cuda-graph
optimizer-cuda-graph use-sharp disable-gloo-process-groups create-all-gather-group no-align-grad-reduce
disable-align-grad-reduce no-align-param-gather no-use-layer-wise-param-layout ddp-pad-buckets-for-high-nccl-busbw
ddp-reduce-scatter-with-fp32-accumulation reuse-grad-buf-for-mxfp8-param-ag fsdp-double-buffer fsdp-manual-registration
fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-max-pool-double-buffer
megatron-fsdp-enable-fine-grained-param-gather
no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args no-save-tokenizer-assets
disable-save-tokenizer-assets verify-integrity dist-ckpt-optim-fully-reshardable
distrib-optim-fully-reshardable-mem-efficient dist-ckpt-save-pre-mcore-014 no-ckpt-fully-parallel-save
disable-ckpt-fully-parallel-save ckpt-fully-parallel-load-per-rank-objects ckpt-drop-redundant-extra-state
ckpt-pg-tensors-cache-create no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity
no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load async-ckpt-use-cpu-shm no-manual-gc-eval
disable-manual-gc-eval check-for-spiky-loss exit-signal-handler-for-dataloader exit-signal-handler-for-training
use-pytorch-profiler pytorch-profiler-collect-shapes log-energy log-max-attention-logit
disable-log-loss-scale-to-tensorboard disable-straggler-on-startup one-logger-async test-mode disable-msc
legacy-tokenizer use-gigatoken tokenizer-hf-use-fast tokenizer-hf-no-use-fast tokenizer-hf-include-special-tokens
tokenizer-hf-no-include-special-tokens tokenizer-sentencepiece-legacy
no-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tokenizer-sentencepiece-ignore-extra-whitespaces
"""
#: Options with one or more values, none of which changes results.
_LISTS = "cp-comm-type cuda-graph-scope cuda-graph-modules high-priority-stream-groups"
#: Allowed values of options (or any), for which the run is the same here, and the way out for other values.
_VALUES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "position-embedding-type": (("rope",), "models here have rotary positions; give rope"),
    "rotary-percent": (("1",), "all channels are rotated here; give 1.0"),
    "normalization": (("RMSNorm",), "models here have RMSNorm; give RMSNorm"),
    "attention-dropout": (("0",), "there is no dropout here; give 0"),
    "hidden-dropout": (("0",), "there is no dropout here; give 0"),
    "optimizer": (("adam",), "the only optimizer is AdamW; give adam"),
    "dataloader-type": (("single",), "samples come in one order here; give single"),
    **dict.fromkeys(("expert-model-parallel-size", "expert-tensor-parallel-size"), (("1",), _EXPERTS)),
    "rope-type": (("rope",), "models here have rotary positions; give rope"),
    "softmax-type": (("vanilla",), "attention has the plain softmax here; give vanilla"),
    "outer-dp-sharding-strategy": (("no_shard",), "groups of processes hold the same parts here; give no_shard"),
    "mid-level-dataset-surplus": (("0.005",), "corpora of a blend have this surplus of samples; give 0.005"),
    "sample-rate": (("1",), "all samples are trained on here; give 1"),
    "vocab-extra-ids": (("0",), "give --vocab-size with these tokens counted"),
    "exit-signal": (("SIGTERM", "15"), "SIGTERM and Ctrl-C are listened to; leave it out"),
    **dict.fromkeys(
        ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype", "megatron-fsdp-main-grads-dtype",
         "megatron-fsdp-main-params-dtype", "megatron-fsdp-grad-comm-dtype"),
        (("fp32",), "gradients, master weights and Adam's state are float32 here; give fp32"),
    ),
    **dict.fromkeys(
        (
            "attention-backend", "flash-attention-version",
            "transformer-impl", "cross-entropy-fusion-impl", "ckpt-format",
            "dist-ckpt-format", "dist-ckpt-strictness", "empty-unused-memory-level", "num-dataset-builder-threads",
            "tiktoken-pattern", "tensorboard-queue-size", "tensorboard-log-interval",
            "timing-log-level", "timing-log-option", "logging-level", "ckpt-fully-parallel-load-process-group",
            "ddp-bucket-size", "ddp-num-buckets", "dist-ckpt-workers", "tp-comm-overlap-cfg", "one-logger-project",
            "one-logger-run-name", "app-tag-run-name", "app-tag-run-version", "straggler-ctrlr-port",
            "straggler-minmax-count", "cuda-graph-impl", "cuda-graph-warmup-steps", "wgrad-deferral-limit",
            "tp-comm-bootstrap-backend", "pipeline-model-parallel-comm-backend", "nccl-communicator-config-path",
            "sharp-enabled-group", "suggested-communication-unit-size", "symmetric-ar-type", "megatron-fsdp-version",
            "train-sync-interval", "mlp-chunks-for-prefill", "mlp-chunks-for-training", "async-strategy",
            "async-ckpt-cpu-priority", "async-ckpt-io-priority", "ckpt-fully-parallel-load-exchange-algo",
            "ckpt-fully-parallel-save-process-group", "ckpt-pg-tensors-cache-path", "per-dataset-sequences-path",
            "mask-prob", "short-seq-prob", "tokenizer-metadata", "null-tokenizer-pad-id",
            "tiktoken-num-special-tokens", "chat-template",
        ),
        ((_ANY,), ""),
    ),
}  # fmt: skip
_FP8 = "give --precision fp8, mxfp8 or snip in place of all --fp8-... options"
_FP4 = "give --precision nvfp4, fp4 or snip in place of all --fp4-... options"
_BF16_LAYERS = "give --snip-fix, such as layers.0.*=bf16"
_MODELS = "the models here are Llama and Qwen3's dense ones; leave it out"
_OPTIMIZER = "the only optimizer is AdamW; leave it out"
_PRETRAINS = "this program pretrains; leave it out"
_RESTARTS = "give torchrun --max-restarts"
_SHARDS = "give --data-parallel-sharding-strategy optim_grads_params"
_SERVES = "to serve a model, export it by tools/convert_checkpoint.py; leave it out"
_VALIDATION = "a validation reads the next --eval-iters batches of training's size; leave it out"
_RATES = "all weights have one learning rate here; leave it out"


def _each(names: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


#: Options that are not supported here, and what to give instead.
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
    "num-experts": _EXPERTS,
    **dict.fromkeys(
        ("vocab-file", "merge-file"), "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"
    ),
    **dict.fromkeys(
        ("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp"),
        "give --data-parallel-sharding-strategy optim_grads_params, or another",
    ),
    "use-checkpoint-args": "give the model's options; --load refuses those that are not the checkpoint's",
    "pipeline-model-parallel-layout": "give --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers",
    **_each(
        """cpu-offloading optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params offload-modules min-offloaded-tensor-size
        delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks activation-offload-fraction""",
        "everything stays on the device here; leave it out",
    ),
    **dict.fromkeys(
        ("data-args-path", "per-split-data-args-path"), "give what the file has to --data-path, or to --train-data-path"
    ),
    "test-data-path": "there is no test set here; leave it out, and use tools/evaluate.py",
    **_each("window-size window-attn-skip-freq", "attention sees all earlier tokens here; leave it out"),
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
    **_each("inprocess-restart enable-ft-package calc-ft-timeouts ft-num-warmup-iters", _RESTARTS),
    **dict.fromkeys(("adlr-autoresume", "adlr-autoresume-interval"), "give --exit-duration-in-mins, or send SIGTERM"),
    **dict.fromkeys(("rank", "local-rank"), "torchrun tells each process by its environment; leave it out"),
    "wandb-entity": "set the environment variable WANDB_ENTITY",
    **_each("nproc-per-node nproc_per_node nnodes node-rank node_rank master-addr master_addr master-port master_port",
            "give it to torchrun, before the program"),
    "batch-size": "give --micro-batch-size",
    "model-parallel-size": "give --tensor-model-parallel-size",
    "warmup": "give --lr-warmup-fraction",
    "checkpoint-activations": "give --recompute-granularity full",
    "distribute-saved-activations": "give --sequence-parallel, which shares out what is saved",
    "step-batch-size-schedule": "give --rampup-batch-size START INCREMENT SAMPLES, with --train-samples",
    "phase-transition-iterations": "the batch grows only by --rampup-batch-size; leave it out",
    "decrease-batch-size-if-needed": "give a --global-batch-size that --micro-batch-size x data parallel size divides",
    "encoder-seq-length": "give --seq-length",
    **_each("encoder-num-layers decoder-num-layers", "give --num-layers"),
    "padded-vocab-size": "give --vocab-size and --make-vocab-size-divisible-by",
    **_each("no-pad-vocab-size disable-pad-vocab-size", "give --make-vocab-size-divisible-by 1"),
    **_each("tokenizer-special-tokens tiktoken-special-tokens", "give a --tokenizer-model that has them; leave it out"),
    "null-tokenizer-eod-id": "NullTokenizer ends documents with its last id; leave it out",
    "trust-remote-code": "no code of a tokenizer's folder is run here; leave it out",
    "allow-ambiguous-pad-tokens": "no token is taken for padding here; leave it out",
    "dataloader-inter-document-masking": "give --reset-attention-mask",
    **_each("object-storage-cache-path enable-msc", "data and checkpoints are files here; leave it out"),
    **_each("openai-gelu squared-relu quick-geglu activation-func-clamp-value glu-linear-offset "
            "use-fused-weighted-squared-relu", "MLPs are SwiGLU here; leave it out"),
    **_each("rotary-interleaved no-rope-freq",
            "each block rotates the two halves of a head against each other; leave it out"),
    "rotary-seq-len-interpolation-factor": "give --use-rope-scaling, which is Llama 3's, or leave it out",
    **_each("use-kitchen-attention kitchen-attention-backend", "attention is not quantised here; leave it out"),
    "fp32-residual-connection": "residuals have the type of the rest, BF16 under --bf16; leave it out",
    "apply-residual-connection-post-layernorm": "residuals go around the norms here; leave it out",
    "output-logit-dtype": "the loss is computed in float32 from logits of the model's type; leave it out",
    **_each("init-method-xavier-uniform embedding-init-method-std", "give --init-method-std, which holds for all"),
    "data-parallel-random-init": "all replicas begin with the same weights; leave it out",
    **_each("apply-wd-to-qk-layernorm no-weight-decay-cond-type", "norms have no weight decay here; leave it out"),
    **_each("sgd-momentum lion-beta1 lion-beta2", _OPTIMIZER),
    "freeze-all-layers": "all weights are trained here; leave it out",
    "disable-bf16-reduced-precision-matmul": "GEMMs have torch's defaults here; leave it out",
    **_each("batch-invariant-mode batch-invariant-backend", "give --deterministic-mode, which repeats a run's bits"),
    **_each("hierarchical-context-parallel-sizes hybrid-context-parallel max-seqlen-per-dp-cp-rank",
            "give --context-parallel-size alone"),
    "use-tp-pp-dp-mapping": "processes are numbered along tp, cp, dp and then pp here; leave it out",
    "microbatch-group-size-per-virtual-pipeline-stage": "it is the number of stages here; leave it out",
    **_each("tensor-parallel-num-weight-shards enable-full-sharding-in-hsdp", _SHARDS),
    "torch-fsdp2-no-reshard-after-forward": "give --data-parallel-sharding-strategy optim_grads",
    "ddp-param-name-patterns-for-fp32-local-accumulation": "gradients are summed in float32 here; leave it out",
    "persistent-save-interval": "give --save-interval",
    **_each("replication replication-jump replication-factor", "each save goes to --save; leave it out"),
    **_each("save-params-interval save-activations-interval save-wgrads-interval save-dgrads-interval",
            "only checkpoints write tensors; leave it out"),
    "use-mp-args-from-checkpoint-args": "give the layout's options; a checkpoint loads in any layout",
    "override-ckpt-iteration": "give --finetune to count from 0, or leave it out",
    **_each("ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
            "tools/convert_checkpoint.py converts checkpoints; leave it out"),
    **_each("log-memory-interval log-device-memory-used record-memory-history memory-snapshot-path",
            "give --log-memory"),
    **_each("pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra record-shapes nvtx-ranges "
            "run-workload-inspector-server", "give --profile, which writes torch.profiler's trace"),
    **_each("check-for-large-grads result-rejected-tracker-filename",
            "give --rerun-mode validate_results, which looks at the loss"),
    "check-weight-hash-across-dp-replicas-interval": "replicas' weights are not compared here; leave it out",
    "gpu-sniff-test-interval": "GPUs are not tested beside the run; leave it out",
    "config-logger-dir": "config.json in --run-dir has the options; leave it out",
    "dump-param-to-param-group-map": "matrices have weight decay and norms have none; leave it out",
    **_each("eval-global-batch-size eval-micro-batch-size start-eval-at-iter full-validation multiple-validation-sets "
            "validation-set-names", _VALIDATION),
    "fake-process-group": "give --dry-run --world-size N",
    **_each("lazy-mpu-init onnx-safe", "only this program uses the model; leave it out"),
    **_each("sft sft-tokenizer-prompt-format perform-rl-step refit-method", _PRETRAINS),
    **_each(
        """flash-decode max-tokens-to-oom use-legacy-static-engine decode-only-cuda-graphs enable-chunked-prefill
        disable-chunked-prefill nccl-all-reduce-for-prefill num-speculative-tokens
        use-same-sampling-seed-across-dp-ranks
        output-bert-embeddings bert-embedder-type""", _SERVES,
    ),
    **_each(
        """multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        rotary-scaling-factor mrope-section mscale
        mscale-all-dim cache-mla-latents attention-output-gate qk-l2-norm qk-clip qk-clip-alpha qk-clip-threshold
        experimental-attention-variant enable-mhc-connections use-mup is-hybrid-model spec disable-mamba-mem-eff-path
        bert-no-binary-head bert-load decoder-seq-length
        titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path block-data-path embedding-path
        indexer-batch-size indexer-log-interval num-classes img-h img-w num-channels patch-dim classes-fraction
        data-per-class-fraction no-data-sharding head-lr-mult swin-backbone-type mask-type mask-factor
        iter-per-epoch""", _MODELS,
    ),
}  # fmt: skip
#: Prefixes of unsupported options, for names in none of the tables.
_FAMILIES: Mapping[str, str] = {
    **_each("moe- expert- overlap-moe- overlap-dispatch- ep-overlap- use-grouped-gemm- high-priority-a2a- gtp-expert- "
            "save-tokens-per-expert-", _EXPERTS),
    **_each("mtp- mamba- gdp- hybrid- linear-attention- linear-conv- linear-key- linear-value- linear-num- dsa- "
            "no-dsa- disable-dsa- mla- mhc- mup- yarn- no-yarn- relative-attention- heterogeneous- biencoder- ict- "
            "retriever- vision- dino-", _MODELS),
    **_each("rl- no-rl- grpo- langrl- no-langrl- logits-save- logits-load-", _PRETRAINS),
    **_each("inference- no-inference-", _SERVES),
    "muon-": _OPTIMIZER,
    "fim-": "documents are trained on as they are here; leave it out",
    "gtp-": _SHARDS,
    **_each("fp8- disable-fp8-", _FP8),
    "fp4-": _FP4,
    **_each("cpu-offloading- fine-grained-", "everything stays on the device here; leave it out"),
    **_each("fault-injector- error-injection-", "no faults are made here; leave it out"),
    "inprocess-": _RESTARTS,
    "otel-": "give --wandb-project or --tensorboard-dir",
    **_each("flight-recorder- no-flight-recorder- disable-flight-recorder-",
            "set torch's own environment variables of the flight recorder"),
}  # fmt: skip


def instead_of(name: str) -> str:
    """What to give instead of an unsupported Megatron-LM option; "" for other names."""
    return _REFUSED.get(name) or next((text for start, text in _FAMILIES.items() if name.startswith(start)), "")


def _is_value(word: str) -> bool:
    """Whether a word is an option's value, such as a negative number."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _same(value: str, allowed: Sequence[str]) -> bool:
    if _ANY in allowed or value in allowed:
        return True
    try:
        return any(float(value) == float(each) for each in allowed)
    except ValueError:
        return False


def without_megatrons(words: Sequence[str]) -> list[str]:
    """Command-line words without Megatron-LM options that have no effect here.

    Raises UserError that lists all unsupported options, each with its way out.
    """
    kept: list[str] = []
    dropped: list[str] = []
    refused: list[str] = []
    ours, switches, lists, left = option_groups(), set(_SWITCHES.split()), set(_LISTS.split()), list(words)
    while left:
        word = left.pop(0)
        name, joined, value = word.removeprefix("--").partition("=")
        known = name in switches or name in lists or name in _VALUES
        instead = "" if known else instead_of(name)
        if not word.startswith("--") or name.replace("-", "_") in ours or not (known or instead):
            kept.append(word)
            continue
        values = [value] if joined else []
        while not joined and name not in switches and left and _is_value(left[0]):
            values.append(left.pop(0))
        shown = " ".join([f"--{name}", *values])
        allowed, instead = _VALUES.get(name, ((), instead))
        if name in switches or (name in lists and values) or (len(values) == 1 and _same(values[0], allowed)):
            dropped.append(shown)
        else:
            refused.append(f"{shown}: {instead or ('give it a value' if name in lists else 'give it one value')}")
    if refused:
        raise UserError(f"Megatron-LM options that are not supported here: {'; '.join(refused)}")
    if dropped:
        LOGGER.info(f"Megatron-LM options that are ignored here: {', '.join(dropped)}")
    return kept
