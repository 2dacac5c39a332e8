"""What a probe holds and sends on GPUs, counted for the examples' layouts, by how wgrad's error is gathered.

    python benchmarks/probe_bytes.py            # llama_7b on 8 and llama_70b on 64 GPUs

Counted, not measured: footprint.py, whose numbers tests compare with tensors and collectives over
gloo.  Bytes are those that a process hands to collectives.  "iteration" is what a plain iteration in bf16 sends
without recomputation: FSDP2's gather in bf16 and its float32 reduce-scatter, and for each block the four sums over tp,
to which a process hands [T, H], and the six gathers, to which it hands a tp-th of that (docs/performance.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from footprint import Layout, footprint
from harness import save

from megatron_snip.arguments import parse
from megatron_snip.snip.measure.linear_probe import ENOUGH_ROWS
from megatron_snip.train.setup import snip_shapes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
GIB = 2**30


def cases(name: str, gpus: int) -> tuple[str, list[tuple[str, float, float]], float]:
    """(layout, rows of (how, GiB held, GiB sent), GiB that an iteration sends)."""
    config = parse(["--config", str(EXAMPLES / name / f"{name}.toml")])
    m, p, t = config.model, config.parallel, config.training
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    dp = gpus // tp // pp
    microbatches, tokens = t.global_batch_size // dp // t.micro_batch_size, m.seq_length * t.micro_batch_size
    shapes = snip_shapes(config)
    layout = Layout(tp, dp, tokens, microbatches)
    now, loss = (footprint(shapes, 2, layout, updates=updates) for updates in (True, False))
    first = [shape for shape in shapes if shape.stage == 0]
    weights = sum(shape.out_features * shape.in_features for shape in first) / tp
    whole = 2 * 4 * weights  # float32 errors of two formats
    rest = now.outputs, now.sent_over_tp
    rows = [
        ("all rows, scattered in every microbatch", whole / dp + rest[0], whole * microbatches * (dp > 1) + rest[1]),
        ("all rows, scattered once", whole + rest[0], whole * (dp > 1) + rest[1]),
        ("all rows in bf16, scattered once", whole / 2 + rest[0], whole / 2 * (dp > 1) + rest[1]),
        (f"{ENOUGH_ROWS} rows or more, summed once", now.held, now.sent_over_dp + rest[1]),
        ("none: the default, without updates", loss.held, loss.sent_over_tp),
    ]
    blocks = len({shape.block for shape in first})
    activations = blocks * (4 + 6 / tp) * 2 * tokens * m.hidden_size * microbatches * (tp > 1)
    iteration = activations + (2 * weights / dp + 4 * weights) * (dp > 1)
    said = f"tp {tp} x pp {pp} x dp {dp}, {microbatches} microbatches of {tokens} tokens"
    return said, [(how, held / GIB, sent / GIB) for how, held, sent in rows], iteration / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {}
    for name, gpus in (("llama_7b", 8), ("llama_70b", 64)):
        layout, rows, iteration = cases(name, gpus)
        print(f"\n{name} on {gpus} GPUs, {layout}; an iteration sends {iteration:.0f} GiB a GPU\n")
        print("| wgrad's error | held, GiB a GPU | sent beside an iteration, GiB a GPU | in iterations |")
        print("|---|---|---|---|")
        for how, held, sent in rows:
            print(f"| {how} | {held:.2f} | {sent:.2f} | {sent / iteration:.4f} |")
        found[name] = {"layout": layout, "iteration_gib": iteration, "rows": rows}
    save(args.json, {"counted": "no measurement"}, found)


if __name__ == "__main__":
    main()
