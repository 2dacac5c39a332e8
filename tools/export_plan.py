r"""Write a plan in the form that another trainer or quantiser reads.

    python tools/export_plan.py PLAN.json --to megatron --output DIR [--pipeline-model-parallel-size 4]
    python tools/export_plan.py PLAN.json --to torchtitan|transformer-engine|modelopt|torchao --output DIR

If the other program cannot express something, a note says so, and the more precise choice is made: a linear whose
GEMMs differ takes its most precise format, and so do linears that it fuses (q, k and v; gate and up).  A
format without a counterpart becomes the nearest one.  Plans with --snip-granularity fused and --snip-options
mxfp8,nvfp4 lose the least.
"""

from __future__ import annotations

import argparse
import dataclasses
import pprint
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_snip.config import ParallelConfig
from megatron_snip.errors import UserError
from megatron_snip.files import check_output, one_line, path_word
from megatron_snip.formats import get_format
from megatron_snip.jsonfile import write_atomic
from megatron_snip.model.spec import linear_place
from megatron_snip.model.stages import stage_blocks
from megatron_snip.quant import GEMMS
from megatron_snip.snip.plan import Plan

#: Format -> Transformer Engine's recipe, and what differs from ours; "" for nothing.
RECIPES: Mapping[str, tuple[str, str]] = {
    "bf16": ("", ""),
    "fp8": ("blockwise", "its scales are powers of two"),
    "fp8_pow2": ("blockwise", ""),
    "mxfp8": ("mxfp8", ""),
    "fp4": ("nvfp4", "its blocks are 1x16 with E4M3 scales"),
    "fp4_pow2": ("nvfp4", "its blocks are 1x16 with E4M3 scales"),
    "mxfp4": ("nvfp4", "its blocks are 1x16 with E4M3 scales"),
    "nvfp4": ("nvfp4", "it transforms wgrad's operands and has 16x16 blocks of weights"),
    "nvfp4_rht": ("nvfp4", ""),
}
_MX = "its blocks are 1x32 with power-of-two scales"
#: Format -> torchtitan's converter of linears.
CONVERTERS: Mapping[str, tuple[str, str]] = {
    "bf16": ("", ""),
    "fp8": ("float8", "its scales are of whole rows"),
    "fp8_pow2": ("float8", "its scales are of whole rows"),
    "mxfp8": ("mx", ""),
    **dict.fromkeys(("fp4", "fp4_pow2", "nvfp4", "nvfp4_rht"), ("mx", f"it trains linears in FP8 at least; {_MX}")),
    "mxfp4": ("mx", "it trains linears in FP8 at least"),
}
#: Format -> ModelOpt's settings of a linear's two quantisers.
QUANTIZERS: Mapping[str, tuple[str, str]] = {
    "bf16": ("", ""),
    "fp8": ("fp8", "its scales are of whole tensors"),
    "fp8_pow2": ("fp8", "its scales are of whole tensors"),
    "mxfp8": ("mxfp8", ""),
    "mxfp4": ("mxfp4", ""),
    **dict.fromkeys(("fp4", "fp4_pow2"), ("nvfp4", "its blocks are 1x16 with E4M3 scales")),
    "nvfp4": ("nvfp4", ""),
    "nvfp4_rht": ("nvfp4", "it transforms nothing"),
}
#: ModelOpt's num_bits and block_sizes.
MODELOPT = {
    "fp8": {"num_bits": (4, 3), "axis": None, "enable": True},
    "mxfp8": {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}, "enable": True},
    "mxfp4": {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}, "enable": True},
    "nvfp4": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}, "enable": True},
}
#: Kind -> torchtitan's module in a block, and Megatron's, where several of ours are one.
TITAN = {
    "q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "o": "attention.wo",
    "gate": "feed_forward.w1", "down": "feed_forward.w2", "up": "feed_forward.w3",
}  # fmt: skip
MEGATRON = {
    "q": "self_attention.linear_qkv", "k": "self_attention.linear_qkv", "v": "self_attention.linear_qkv",
    "o": "self_attention.linear_proj", "gate": "mlp.linear_fc1", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2",
}  # fmt: skip


class Chosen:
    """One format for each module of the other program, and notes on what differs."""

    def __init__(self, plan: Plan, module: Callable[[int, str], str], known: Mapping[str, tuple[str, str]]) -> None:
        self.linears: dict[str, str] = {}  # by the other program's name, in the plan's order
        told: Counter[str] = Counter()
        members: dict[str, list[str]] = {}
        for name, precision in plan.linears.items():
            place = linear_place(name)
            assert place is not None, "plans are of linears of blocks"
            formats = {getattr(precision, gemm) for gemm in GEMMS}
            told["linears whose GEMMs differ take their most precise format"] += len(formats) > 1
            members.setdefault(module(place[0], place[1]), []).append(_most_precise(formats))
        for name, formats in members.items():
            told["modules of several linears in different formats take the most precise"] += len({*formats}) > 1
            fmt = _most_precise(formats)
            if fmt not in known:
                raise UserError(f"{fmt} has no counterpart there; make a plan of {', '.join(known)}")
            counterpart, differs = known[fmt]
            told[f"modules in {fmt} become {counterpart}: {differs}"] += bool(differs)
            self.linears[name] = counterpart
        self.notes = [f"{count} {note}" for note, count in told.items() if count]

    def by_format(self) -> dict[str, list[str]]:
        """Counterpart -> modules; "" for those that stay as they are."""
        found: dict[str, list[str]] = {}
        for name, fmt in self.linears.items():
            found.setdefault(fmt, []).append(name)
        return found


def _most_precise(formats: Sequence[str] | set[str]) -> str:
    return max(sorted(formats), key=lambda name: get_format(name).bits_per_element)


def _header(plan: Plan, mark: str = "#") -> str:
    return f"{mark} megatron_snip's plan {plan.hash} of iteration {plan.iteration}: {plan.achieved:.1%} in FP4.\n"


def to_megatron(plan: Plan, parallel: ParallelConfig) -> tuple[dict[str, str], list[str]]:
    """A file a pipeline stage, whose blocks Megatron-LM counts from 0: core 0.16's --te-precision-config-file.

    Interleaved stages, whose chunks have the same names, cannot be told apart there.
    """
    stages = stage_blocks(1 + max(place[0] for name in plan.linears if (place := linear_place(name))), parallel)
    chosen = Chosen(plan, lambda block, kind: f"{block}.{MEGATRON[kind]}", RECIPES)
    used = sorted({*chosen.linears.values()})
    configs = ""
    for fmt in used:
        recipe = "{}"
        if fmt:
            field = "fp4_quantization_recipe" if fmt == "nvfp4" else "fp8_quantization_recipe"
            more = "override_quantized_autocast: true, override_nonquantized_autocast: true"
            recipe = f'{{{field}: "{fmt}", {more}}}'
        configs += f"  {fmt or 'bf16'}:\n    transformer_engine_config_type: TEQuantizationParams\n"
        configs += f"    training_recipe: {recipe}\n"
    files = {}
    for stage, blocks in enumerate(stages):
        matchers = ""
        for name, fmt in chosen.linears.items():
            block, module = name.split(".", 1)
            if int(block) in blocks:
                pattern = f"decoder.layers.{int(block) - blocks.start}.{module}"
                matchers += (
                    f'  {pattern}: {{type: glob, pattern: "{pattern}", config: {fmt or "bf16"}, enabled: true}}\n'
                )
        files[f"stage_{stage}.yaml"] = f"{_header(plan)}configs:\n{configs}matchers:\n{matchers}"
    return files, chosen.notes


def to_torchtitan(plan: Plan, parallel: ParallelConfig) -> tuple[dict[str, str], list[str]]:
    """For each converter the modules that it must leave alone, as torchtitan's `filter_fqns` want them."""
    chosen = Chosen(plan, lambda block, kind: f"layers.{block}.{TITAN[kind]}", CONVERTERS)
    text = (
        _header(plan) + '# Names are matched as parts of names.  Add the head, "output", as it is no part of a plan.\n'
    )
    for converter in ("float8", "mx"):
        names = [name for name, fmt in chosen.linears.items() if fmt != converter]
        if len(names) < len(chosen.linears):
            listed = "".join(f'    "{name}",\n' for name in names)
            text += f'\n[quantize.linear.{converter}]\nfilter_fqns = [\n{listed}    "output",\n]\n'
    return {"torchtitan.toml": text}, chosen.notes


def _own(block: int, kind: str) -> str:
    """Hugging Face's name of a module."""
    part = "self_attn" if kind in ("q", "k", "v", "o") else "mlp"
    return f"model.layers.{block}.{part}.{kind}_proj"


def to_transformer_engine(plan: Plan, parallel: ParallelConfig) -> tuple[dict[str, str], list[str]]:
    """A module with a recipe by name, for `te.autocast` around each module's forward."""
    chosen = Chosen(plan, _own, RECIPES)
    text = f'''"""{_header(plan, "Generated from").strip()}

    recipe = recipe_of("model.layers.0.mlp.up_proj")
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = linear(x)

Hugging Face's module names.  Transformer Engine 2.9 or newer; NVFP4 and MXFP8 need Blackwell.
"""

from transformer_engine.common import recipe as _recipe

_RECIPES = {{
    "": None,
    "blockwise": _recipe.Float8BlockScaling,
    "mxfp8": _recipe.MXFP8BlockScaling,
    "nvfp4": _recipe.NVFP4BlockScaling,
}}
FORMATS = {pprint.pformat(chosen.linears, sort_dicts=False)}


def recipe_of(name):
    """A new recipe for a module; None: it stays in BF16."""
    make = _RECIPES[FORMATS.get(name, "")]
    return None if make is None else make()
'''
    return {"te_recipes.py": text}, chosen.notes


def to_modelopt(plan: Plan, parallel: ParallelConfig) -> tuple[dict[str, str], list[str]]:
    """A module with QUANT_CFG for modelopt.torch.quantization.quantize; forward alone, as it quantises."""
    chosen = Chosen(plan, _own, QUANTIZERS)
    config: dict[str, object] = {"default": {"enable": False}}
    for name, fmt in chosen.linears.items():
        if fmt:
            config |= {f"{name}.{which}_quantizer": MODELOPT[fmt] for which in ("weight", "input")}
    body = pprint.pformat({"quant_cfg": config, "algorithm": "max"}, width=116, sort_dicts=False)
    header = f"{_header(plan)}# Forward only: gradients are not quantised.\n"
    count = sum(fmt != "" for fmt in chosen.linears.values())
    note = f"{count} linears are quantised in forward only: ModelOpt has no setting for gradients"
    return {"modelopt_config.py": f"{header}QUANT_CFG = {body}\n"}, [*chosen.notes, *([note] if count else [])]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def to_torchao(plan: Plan, parallel: ParallelConfig) -> tuple[dict[str, str], list[str]]:
    """A module with each linear's format and filters for torchao's converters."""
    chosen = Chosen(plan, _own, {fmt: (fmt, "") for fmt in RECIPES})
    found = [fmt for fmt in chosen.by_format() if fmt != "bf16"]
    found.sort(key=lambda name: -get_format(name).element_bits)
    fp4 = [fmt for fmt in found if get_format(fmt).element_bits <= 4]
    lines = [
        f"    convert_to_float8_training(model, config=..., module_filter_fn=in_formats({_quoted(found)}))\n",
        f"    quantize_(model, NVFP4DynamicActivationNVFP4WeightConfig(), filter_fn=in_formats({_quoted(fp4)}))\n",
    ]
    uses = "".join(line for line, formats in zip(lines, (found, fp4)) if formats)
    text = f'''"""{_header(plan, "Generated from").strip()}

{uses}
Hugging Face's module names.  Which of torchao's configurations stands for which format is yours to say.
"""

FORMATS = {pprint.pformat(chosen.linears, sort_dicts=False)}


def in_formats(*formats):
    """A filter of modules whose plan is one of these formats."""
    return lambda module, fqn: FORMATS.get(fqn) in formats
'''
    count = sum(fmt == "nvfp4_rht" for fmt in chosen.linears.values())
    note = f"{count} in nvfp4_rht: torchao's NVFP4 transforms nothing, and its weights' blocks are 1x16"
    return {"torchao_filters.py": text}, [*chosen.notes, *([note] if count else [])]


TARGETS: Mapping[str, Callable[[Plan, int], tuple[dict[str, str], list[str]]]] = {
    "megatron": to_megatron,
    "torchtitan": to_torchtitan,
    "transformer-engine": to_transformer_engine,
    "modelopt": to_modelopt,
    "torchao": to_torchao,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("plan", type=path_word, help="plan file, such as RUN_DIR/plans/iter_0000100.json")
    parser.add_argument("--to", choices=TARGETS, required=True, help="the program that will read it")
    parser.add_argument("--output", type=path_word, required=True, help="output folder")
    parser.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, help="of the Megatron-LM run (default: 1)"
    )
    for option in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
        parser.add_argument(option, type=int, help="of the Megatron-LM run")
    for option in ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"):
        parser.add_argument(option, action="store_true", help="of the Megatron-LM run")
    options = parser.parse_args(arguments)
    try:
        split = {field.name for field in dataclasses.fields(ParallelConfig)} & vars(options).keys()
        parallel = ParallelConfig(**{name: getattr(options, name) for name in split})
        plan = Plan.load(options.plan)
        if others := [name for name in plan.linears if linear_place(name) is None]:
            raise UserError(
                f"{options.plan}: {others[0]!r} is no linear of a Llama's or Qwen3's blocks; give a plan of one"
            )
        files, notes = TARGETS[options.to](plan, parallel)
        for name, text in files.items():
            path = Path(options.output) / name
            check_output("--output", path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
    except (UserError, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print("\n".join(str(Path(options.output) / name) for name in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
