"""What an iteration sends and keeps, by our dry run, beside what Megatron-LM's code does on the same layout.

    python benchmarks/megatron_counts.py                  # quickstart, llama_7b and llama_70b on 64 GPUs
    python benchmarks/megatron_counts.py --json FILE --case llama_70b --precision fp8

Nothing is recomputed.  Bytes are those that a process hands over, "on a ring" those that leave it: (n - 1) of an
all-gather's, (n - 1) / n of a reduce-scatter's, twice that of an all-reduce's.  Scalars are left out, but for one that
torch's pipeline sends in a run's first iteration, which is the one counted.

Megatron-LM's counts are formulas, of its main branch (d98e8a64, 2026-08-22, core 0.20) in bf16, with
--sequence-parallel where we have it, --use-distributed-optimizer and --overlap-grad-reduce.  A process has L blocks,
N parameters and M microbatches of T tokens (a cp-th of their sequences); U = 2 T H / tp bytes.  How often, of how many
bytes each, and why:

    tp   all-gather      4 L M, U     inputs, in forward and for wgrad: tensor_parallel/layers.py,
                                      LinearWithGradAccumulationAndAsyncCommunication
                         2 L M, U     gradients of outputs: mappings.py, _ReduceScatterToSequenceParallelRegion
                         M, U         the embedding's gradient, on the first stage
                         2 M, U       the output layer's input, on the last stage
         reduce-scatter  4 L M, tp U  outputs, and gradients of inputs: the same two
                         M, tp U      the embedding's output; on the last stage the gradient of the output layer's input
         all-reduce      3 M, 4 T     the loss, on the last stage: cross_entropy.py
                         1, 8 L H     gradients of norms, 4 H more on the last stage: finalize_model_grads.py
         without sequence parallelism nothing is gathered, and the reduce-scatters are all-reduces of as many bytes
    dp   all-gather      2 N / dp in all, one a bucket: param_and_grad_buffer.py; dp includes cp
         reduce-scatter  4 N in all, one a bucket.  Buckets are of 40 million parameters or a million for each of dp on
                         the first stage, one on each other: distrib_optimizer.py, _compute_per_buffer_param_layout
    pp   send            M, U         of each chunk of blocks, forward but for the last and backward but for the first;
                                      tp U without sequence parallelism: schedules.py, get_tensor_shapes
         all-reduce      1, 4 V H / tp  a tied embedding, on the first and the last stage: finalize_model_grads.py
    cp   send            (2 cp - 1) L M, of 3 (cp - 1) L M K in all, K = 4 T G D / tp: a ring of keys and values, and of
                         their gradients: Transformer Engine d0067d0d, context_parallel.py, AttnFuncWithCPAndKVP2P

A block keeps for each of T / tp tokens of a microbatch, in bytes: inputs of both norms and what they give 8 H, q, k and
v 2 A D + 4 G D, attention's output 2 A D and logarithms 4 A, fc1's output 4 F (fused_bias_swiglu.py keeps no more),
what SwiGLU gives 2 F, and a number for each norm's row 8.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_snip.arguments import parse
from megatron_snip.config import Config
from megatron_snip.model.stages import stage_blocks
from megatron_snip.train.dry_run.counts import Stretch
from megatron_snip.train.dry_run.measure import end_ranks, measure_all

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: (options, processes)
CASES = {
    "quickstart": ("quickstart.toml", 4),
    "llama_7b": ("llama_7b/llama_7b.toml", 64),
    "llama_70b": ("llama_70b/llama_70b.toml", 64),
}
PRECISIONS = ("bf16", "fp8", "fp4")
MIB = 2**20
#: (axis, collective) -> (how often, bytes)
Sent = dict[tuple[str, str], tuple[int, int]]


class Megatron:
    """A process of Megatron-LM on the layout of a run: stage counts processes along pp."""

    def __init__(self, config: Config, world_size: int, stage: int) -> None:
        m, p, t = config.model, config.parallel, config.training
        self.model, self.parallel = m, p
        self.tp, self.pp, self.cp = (
            p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
        )  # fmt: skip
        self.dp = config.data_parallel_size(world_size) * self.cp
        self.microbatches = config.num_microbatches(self.dp // self.cp)
        self.tokens = t.micro_batch_size * m.seq_length // self.cp
        self.chunks = len(stage_blocks(m.num_layers, p)) // self.pp
        self.blocks = sum(map(len, stage_blocks(m.num_layers, p)[stage :: self.pp]))
        self.first, self.last = stage == 0, stage == self.pp - 1
        self.tied = not m.untie_embeddings_and_output_weights
        self.shard = 2 * self.tokens * m.hidden_size // self.tp

    def sent(self) -> Sent:
        """All that an iteration sends, scalars left out."""
        return {key: sent for key, sent in {**self.over_tp(), **self.others()}.items() if all(sent)}

    def over_tp(self) -> Sent:
        """Activations, the loss and the gradients of norms."""
        if self.tp == 1:
            return {}
        microbatches, h = self.microbatches, self.model.hidden_size
        gathers = (6 * self.blocks + self.first + 2 * self.last) * microbatches
        sums = (4 * self.blocks + self.first + self.last) * microbatches
        losses, norms = 3 * microbatches * self.last, (2 * self.blocks + self.last) * h
        whole = self.tp * self.shard
        if not self.parallel.sequence_parallel:
            return {("tp", "all-reduce"): (sums + losses, sums * whole + losses * 4 * self.tokens)}
        return {
            ("tp", "all-gather"): (gathers, gathers * self.shard),
            ("tp", "reduce-scatter"): (sums, sums * whole),
            ("tp", "all-reduce"): (losses + 1, losses * 4 * self.tokens + 4 * norms),
        }

    def others(self) -> Sent:
        """Weights and gradients over dp, activations over pp, keys and values over cp."""
        m, sizes = self.model, self.parameters()
        each = self.shard * (1 if self.parallel.sequence_parallel else self.tp)
        sends = self.microbatches * (2 * self.chunks - self.first - self.last) * (self.pp > 1)
        rounds, keys = self.blocks * self.microbatches, 4 * self.tokens * m.query_groups * m.head_dim // self.tp
        tied = self.tied and self.pp > 1 and (self.first or self.last)
        buckets = self.buckets(sizes) * (self.dp > 1)
        return {
            ("dp", "all-gather"): (buckets, 2 * sum(sizes) // self.dp),
            ("dp", "reduce-scatter"): (buckets, 4 * sum(sizes)),
            ("pp", "send"): (sends, sends * each),
            ("pp", "all-reduce"): (int(tied), 4 * m.padded_vocab_size * m.hidden_size // self.tp),
            ("cp", "send"): ((2 * self.cp - 1) * rounds * (self.cp > 1), 3 * (self.cp - 1) * rounds * keys),
        }

    def parameters(self) -> list[int]:
        """Sizes of this process's parameters, from the embedding on."""
        m, h = self.model, self.model.hidden_size
        queries, keys = m.num_attention_heads * m.head_dim, 2 * m.query_groups * m.head_dim
        matrices = (queries * h, (queries + keys) * h, 2 * m.ffn_hidden_size * h, m.ffn_hidden_size * h)
        block = [h, h, *(size // self.tp for size in matrices)]
        vocabulary = m.padded_vocab_size * h // self.tp
        head = [h] + [vocabulary] * (self.pp > 1 or not self.tied)
        return [vocabulary] * self.first + block * self.blocks + head * self.last

    def buckets(self, sizes: list[int]) -> int:
        """How many buckets parameters of these sizes come to; a tied embedding of several stages is one by itself."""
        own = int(self.tied and self.pp > 1 and (self.first or self.last))
        if not self.first:
            return 1 + own
        limit, count, held = max(40_000_000, 1_000_000 * self.dp), own, 0
        for size in reversed(sizes[own:]):
            held += size
            if held >= limit:
                count, held = count + 1, 0
        return count + (held > 0)

    def kept(self) -> int:
        """Bytes that a block keeps for backward, of a microbatch, where tp goes with sequence parallelism."""
        m = self.model
        queries, keys = m.num_attention_heads * m.head_dim, m.query_groups * m.head_dim
        of_token = 8 * m.hidden_size + 4 * queries + 4 * keys + 4 * m.num_attention_heads + 6 * m.ffn_hidden_size + 8
        return of_token * self.tokens // self.tp


def sent_by(stretch: Stretch) -> Sent:
    """What a dry run counted, without what a pipeline receives and what goes over all processes."""
    keys = [(what[1], what[2]) for what in stretch.counts if what[0] == "count"]
    kept = [(str(axis), str(kind)) for axis, kind in keys if axis != "world" and kind != "recv"]
    return {key: (stretch.counts["count", *key], stretch.counts["bytes", *key]) for key in sorted(kept)}


def on_a_ring(kind: str, size: int, processes: int) -> float:
    """Bytes that leave a process, of those that it hands to a collective."""
    share = {"all-gather": processes - 1, "reduce-scatter": 1 - 1 / processes, "all-reduce": 2 - 2 / processes}
    return size * share.get(kind, 1)


def over(axis: str, sent: Sent, processes: int) -> float:
    """Bytes that leave a process over an axis."""
    return sum(on_a_ring(kind, size, processes) for (of, kind), (_, size) in sent.items() if of == axis)


def config_of(case: str, precision: str) -> Config:
    """The options of a layout."""
    words = ["--config", str(EXAMPLES / CASES[case][0]), "--precision", precision, "--recompute-granularity", "none"]
    return parse([*words, "--mock-data"])


def count(case: str, precisions: Sequence[str]) -> dict[int, dict[str, dict[str, Any]]]:
    """What a process of the first and of the last stage sends and keeps: Megatron-LM's, and ours in each precision."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for precision in precisions:
        config, world_size = config_of(case, precision), CASES[case][1]
        ends = end_ranks(config, world_size)
        for one in measure_all(config, world_size, sorted({ends[0], ends[-1]})):
            theirs = Megatron(config, world_size, one.stage)
            of = found.setdefault(one.rank, {"Megatron-LM": _described(theirs.sent(), theirs.kept(), theirs.tp)})
            of[precision] = _described(sent_by(one.stretches[0]), one.stretches[0].kept, theirs.tp)
    return found


def _described(sent: Sent, kept: int, tp: int) -> dict[str, Any]:
    named = {f"{axis} {kind}": {"count": n, "bytes": size} for (axis, kind), (n, size) in sent.items()}
    return {"sent": named, "tp_on_a_ring": over("tp", sent, tp), "kept_by_a_block": kept}


def rows(of: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table of one process: a row a collective, a column for Megatron-LM and for each precision of ours."""
    kinds = dict.fromkeys(kind for one in of.values() for kind in one["sent"])
    table = [[kind, *(_times(one["sent"].get(kind)) for one in of.values())] for kind in sorted(kinds)]
    table.append(["tp on a ring", *(f"{one['tp_on_a_ring'] / MIB:.1f}" for one in of.values())])
    table.append(["a block keeps", *(f"{one['kept_by_a_block'] / MIB:.2f}" for one in of.values())])
    return table


def _times(sent: dict[str, int] | None) -> str:
    return f"{sent['count']}: {sent['bytes'] / MIB:.1f}" if sent else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {}
    for case in args.case:
        found[case] = count(case, args.precision)
        for rank, of in found[case].items():
            print(f"\n{case}, rank {rank}; times: MiB\n\n| | {' | '.join(of)} |\n|{'---|' * (len(of) + 1)}")
            print("\n".join(f"| {' | '.join(row)} |" for row in rows(of)), flush=True)
    if args.json:
        text = json.dumps({"about": {"counted": "no measurement"}, "results": found}, indent=1)
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
