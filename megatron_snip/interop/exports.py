"""Plans in the form that other trainers and quantisers read: the text of their files, and notes on what is lost.

Each writer of `TARGETS` chooses a precision for every module of the other program (`Chosen`).  Where that program
cannot express something, the choice is the more precise one, and a note says so.  A file's first lines say how much of
the plan's FP4 is left.
"""

from __future__ import annotations

import pprint
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_snip.formats import get_format
from megatron_snip.interop.counterparts import (
    ENGINE,
    MODELOPT,
    OWN,
    RECIPES,
    TITAN,
    TORCHAO,
    Chosen,
    Known,
    Request,
    Version,
)
from megatron_snip.model.spec import linear_place
from megatron_snip.model.stages import stage_blocks
from megatron_snip.quant import GEMMS, LinearPrecision
from megatron_snip.quant.linears import te_quantizers

#: ModelOpt's attributes of a quantiser.
ATTRIBUTES: Mapping[str, dict[str, object]] = {
    "fp8": {"num_bits": (4, 3), "axis": None},
    "mxfp8": {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
    "mxfp4": {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
    "nvfp4_plain": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
}
#: Our format -> Megatron-LM's field and recipe.
MEGATRON_RECIPES = {
    "fp8_pow2": 'fp8_quantization_recipe: "blockwise"',
    "mxfp8": 'fp8_quantization_recipe: "mxfp8"',
    "nvfp4": 'fp4_quantization_recipe: "nvfp4"',
}
#: Kind -> module in a block.  In torchtitan the first is the name of all that q, k and v are: wqkv, or wq and wkv.
TITAN_MODULES = {
    **dict.fromkeys(("q", "k", "v"), "attention.qkv_linear."), "o": "attention.wo",
    "gate": "feed_forward.w1", "down": "feed_forward.w2", "up": "feed_forward.w3",
}  # fmt: skip
MEGATRON_MODULES = {
    **dict.fromkeys(("q", "k", "v"), "self_attention.linear_qkv"), "o": "self_attention.linear_proj",
    **dict.fromkeys(("gate", "up"), "mlp.linear_fc1"), "down": "mlp.linear_fc2",
}  # fmt: skip
#: Transformer Engine's first version with quantizers by GEMM.
BY_GEMM = (2, 19)

Written = tuple[dict[str, str], list[str]]


@dataclass(frozen=True)
class Target:
    """A program that reads plans: its writer, distribution and the versions, first to last, that it writes for."""

    write: Callable[[Request], Written]
    distribution: str
    first: Version
    last: Version


def _own(block: int, kind: str) -> str:
    """Hugging Face's name of a module."""
    part = "self_attn" if kind in ("q", "k", "v", "o") else "mlp"
    return f"model.layers.{block}.{part}.{kind}_proj"


def _factory_source() -> str:
    """te_quantizers.py without its docstring and what a file may have only once, at its top."""
    text = Path(te_quantizers.__file__).read_text(encoding="utf-8")
    return text.split("from __future__ import annotations\n")[1].strip()


def to_megatron(request: Request) -> Written:
    """A file for each pipeline stage, for --te-precision-config-file of core 0.16.

    Megatron-LM counts the blocks of each stage from 0.  The chunks of interleaved stages have the same names, so its
    file cannot tell them apart.  Precisions that are none of its recipes become functions of snip_recipes.py, for
    `custom_recipe_factory`.
    """
    blocks_of = stage_blocks(
        1 + max(place[0] for n in request.plan.linears if (place := linear_place(n))), request.parallel
    )
    by_gemm = request.version >= BY_GEMM
    known = _by_gemm(request) if by_gemm else RECIPES
    chosen = Chosen(request, lambda block, kind: f"{block}.{MEGATRON_MODULES[kind]}", known, by_gemm=by_gemm)
    configs, custom = "", {}
    for precision in sorted({*chosen.modules.values()}, key=str):
        recipe = "{}"
        if (key := str(precision)) != "bf16":
            field = MEGATRON_RECIPES.get(key)
            if field is None:
                custom[_identifier(key)] = precision
                field = f'fp8_quantization_recipe: "custom", custom_recipe_factory: "snip_recipes.{_identifier(key)}"'
            recipe = f"{{{field}, override_quantized_autocast: true, override_nonquantized_autocast: true}}"
        configs += f"  {_identifier(key)}:\n    transformer_engine_config_type: TEQuantizationParams\n"
        configs += f"    training_recipe: {recipe}\n"
    files = {}
    for stage, blocks in enumerate(blocks_of):
        matchers = ""
        for name, precision in chosen.modules.items():
            block, module = name.split(".", 1)
            if int(block) in blocks:
                pattern = f"decoder.layers.{int(block) - blocks.start}.{module}"
                config = _identifier(str(precision))
                matchers += f'  {pattern}: {{type: glob, pattern: "{pattern}", config: {config}, enabled: true}}\n'
        files[f"stage_{stage}.yaml"] = f"{chosen.header()}configs:\n{configs}matchers:\n{matchers}"
    if not custom:
        return files, chosen.notes
    files["snip_recipes.py"] = _megatron_module(chosen, custom)
    count = sum(precision in custom.values() for precision in chosen.modules.values())
    note = (
        f"{count} modules need Transformer Engine 2.19 or newer and the folder of snip_recipes.py on PYTHONPATH; "
        "--for-version 2.18 writes one recipe for a module"
    )
    return files, [*chosen.notes, *_emulated(chosen), note]


def _by_gemm(request: Request) -> Known:
    return OWN if request.own_casts else ENGINE


def _emulated(chosen: Chosen) -> list[str]:
    """A note on the modules that our quantizer runs on any GPU."""
    lacks = {name for name in OWN if name not in ENGINE or ENGINE[name][0] != name}
    count = sum(not lacks.isdisjoint(getattr(p, gemm) for gemm in GEMMS) for p in chosen.modules.values())
    note = f"{count} modules need megatron_snip where they train: it emulates the formats that Transformer Engine lacks"
    return [note] if count else []


def _identifier(precision: str) -> str:
    return precision.replace("/", "__")


def _megatron_module(chosen: Chosen, custom: Mapping[str, LinearPrecision]) -> str:
    text = f'"""Quantizers for the precision files beside it.\n\n{chosen.header("")}"""\n\n'
    text += f"from __future__ import annotations\n\n{_factory_source()}\n"
    for name, precision in custom.items():
        formats = tuple(getattr(precision, gemm) for gemm in GEMMS)
        text += f"\n\ndef {name}(role):\n    return quantizer_for(role, {formats!r})\n"
    return text


def to_transformer_engine(request: Request) -> Written:
    """A module with a recipe: of the whole model from 2.19 on, by linear before."""
    if request.version < BY_GEMM:
        return _recipes_by_linear(request)
    chosen = Chosen(request, _own, _by_gemm(request), by_gemm=True)
    formats = {name: tuple(getattr(p, gemm) for gemm in GEMMS) for name, p in chosen.modules.items()}
    text = f'''"""Transformer Engine's recipe for a whole model.

{chosen.header("")}
    layer = te.Linear(..., name="model.layers.0.mlp.up_proj")
    with te.autocast(recipe=RECIPE):
        loss = model(tokens)

Names are Hugging Face's; a module with another name, or none, stays in BF16.  Transformer Engine 2.19 or newer.  It
has NVFP4 and MXFP8 on Blackwell; elsewhere, and for formats that it lacks, megatron_snip emulates them if installed.
"""

from __future__ import annotations

from transformer_engine.common.recipe import CustomRecipe

{_factory_source()}


#: Name of a module -> the formats of its fprop, dgrad and wgrad.
FORMATS = {pprint.pformat(formats, width=116, sort_dicts=False)}


def qfactory(role):
    """The quantizer for a role."""
    return quantizer_for(role, None if role is None else FORMATS.get(role.name))


RECIPE = CustomRecipe(qfactory=qfactory)
'''
    return {"te_recipes.py": text}, [*chosen.notes, *_emulated(chosen)]


def _recipes_by_linear(request: Request) -> Written:
    chosen = Chosen(request, _own, RECIPES)
    text = f'''"""Transformer Engine's recipes by linear.

{chosen.header("")}
    recipe = recipe_of("model.layers.0.mlp.up_proj")
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = linear(x)

Names are Hugging Face's.  Transformer Engine 2.9 or newer; NVFP4 and MXFP8 need Blackwell.
"""

from transformer_engine.common import recipe as _recipe

_RECIPES = {{
    "bf16": None,
    "fp8_pow2": _recipe.Float8BlockScaling,
    "mxfp8": _recipe.MXFP8BlockScaling,
    "nvfp4": _recipe.NVFP4BlockScaling,
}}
FORMATS = {pprint.pformat(chosen.uniform(), sort_dicts=False)}


def recipe_of(name):
    """A new recipe for a module; None: it stays in BF16."""
    make = _RECIPES[FORMATS.get(name, "bf16")]
    return None if make is None else make()
'''
    return {"te_recipes.py": text}, chosen.notes


def to_torchtitan(request: Request) -> Written:
    """A module with torchtitan's converters, which match parts of the names in a model's configuration."""
    chosen = Chosen(request, lambda block, kind: f"layers.{block}.{TITAN_MODULES[kind]}", TITAN)
    names: dict[str, list[str]] = {}
    for name, fmt in chosen.uniform().items():
        names.setdefault(fmt, []).append(name)
    lists, made, imported = "", "", []
    for fmt, converter in (("fp8_rowwise", "Float8"), ("mxfp8", "MXFP8"), ("nvfp4", "NVFP4")):
        if fmt not in names:
            continue
        listed, field, constant = names[fmt], "fqns", converter.upper()
        if fmt == "fp8_rowwise":  # takes every linear but these
            listed = [*(name for name in chosen.modules if name not in {*names[fmt]}), "lm_head"]
            field, constant = "filter_fqns", "NOT_FLOAT8"
        lists += f"{constant} = [\n" + "".join(f'    "{name}",\n' for name in listed) + "]\n"
        arguments = f"{field}={constant}, model_compile_enabled=model_compile_enabled"
        made += f"        {converter}LinearConverter.Config({arguments}),\n"
        imported.append(f"{converter}LinearConverter")
    imports = f"from torchtitan.components.quantization import {', '.join(imported)}\n\n" if imported else ""
    text = f'''"""torchtitan's converters.

{chosen.header("")}
    from torchtitan_converters import converters

    model_registry("8B", converters=converters(model_compile_enabled=True))

A name matches if it is a part of a linear's name in the model's configuration.  "attention.qkv_linear." is wqkv,
or wq and wkv where fuse_qkv is False.  lm_head is no part of a plan and stays in BF16.
"""

{imports}{lists}

def converters(*, model_compile_enabled):
    """For `converters` of torchtitan's model_registry."""
    return [
{made}    ]
'''
    return {"torchtitan_converters.py": text}, chosen.notes


def to_modelopt(request: Request) -> Written:
    """A module with QUANT_CFG for modelopt.torch.quantization.quantize; forward alone, as it quantises."""
    chosen = Chosen(request, _own, MODELOPT, forward_only=True)
    entries: list[dict[str, object]] = [{"quantizer_name": "*", "enable": False}]
    for name, fmt in chosen.uniform().items():
        if fmt != "bf16":
            for which in ("weight", "input"):
                entries.append({"quantizer_name": f"{name}.{which}_quantizer", "cfg": ATTRIBUTES[fmt]})
    body = pprint.pformat({"quant_cfg": entries, "algorithm": "max"}, width=116, sort_dicts=False)
    count = len(entries) // 2
    note = f"{count} linears are quantised in forward only: ModelOpt has no setting for gradients"
    text = f"{chosen.header()}# Forward only: gradients are not quantised.\nQUANT_CFG = {body}\n"
    return {"modelopt_config.py": text}, [*chosen.notes, *([note] if count else [])]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def to_torchao(request: Request) -> Written:
    """A module with each linear's format and filters for torchao's converters."""
    chosen = Chosen(request, _own, TORCHAO)
    formats = chosen.uniform()
    found = [fmt for fmt in dict.fromkeys(formats.values()) if fmt != "bf16"]
    found.sort(key=lambda name: -get_format(name).element_bits)
    fp4 = [fmt for fmt in found if get_format(fmt).element_bits <= 4]
    lines = [
        f"    convert_to_float8_training(model, config=..., module_filter_fn=in_formats({_quoted(found)}))\n",
        f"    quantize_(model, NVFP4DynamicActivationNVFP4WeightConfig(), filter_fn=in_formats({_quoted(fp4)}))\n",
    ]
    uses = "".join(line for line, each in zip(lines, (found, fp4), strict=True) if each)
    text = f'''"""Filters of linears for torchao.

{chosen.header("")}
{uses}
Names are Hugging Face's.  You choose the configuration of torchao for each format.
"""

FORMATS = {pprint.pformat(formats, sort_dicts=False)}


def in_formats(*formats):
    """A filter of modules whose plan is one of these formats."""
    return lambda module, fqn: FORMATS.get(fqn) in formats
'''
    count = sum(fmt == "nvfp4" for fmt in formats.values())
    note = f"{count} in nvfp4: torchao's NVFP4 transforms nothing, and its weights' blocks are 1x16"
    return {"torchao_filters.py": text}, [*chosen.notes, *([note] if count else [])]


#: --to -> target.  Tests read what is written for the last version by that version's own code.
TARGETS: Mapping[str, Target] = {
    "megatron": Target(to_megatron, "transformer-engine", (2, 3), (2, 20)),
    "torchtitan": Target(to_torchtitan, "torchtitan", (0, 3), (0, 3)),
    "transformer-engine": Target(to_transformer_engine, "transformer-engine", (2, 9), (2, 20)),
    "modelopt": Target(to_modelopt, "nvidia-modelopt", (0, 44), (0, 47)),
    "torchao": Target(to_torchao, "torchao", (0, 18), (0, 18)),
}
