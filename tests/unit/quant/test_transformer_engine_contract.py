"""Linears by Transformer Engine's own Python files: modules, recipes, roles, quantizers and shapes are the package's.

What does not run are its kernels: `engine_over_stand_in.py` stands in for them.  ``pytest --neighbours DIR`` runs this
with wheels of the package in a folder (tests/neighbours.sh): 2.20.2, and 2.8.0 for what has one recipe a linear.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_snip.cli.export_plan import main
from megatron_snip.config import ModelConfig
from megatron_snip.model.spec import linear_shapes
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.linears.transformer_engine import _RECIPES
from megatron_snip.snip.plan import Plan
from tests.unit.quant.engine_over_stand_in import SIDE

VERSIONS = ("2.20.2", "2.8.0")
LAYOUTS = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}
KINDS = {
    "bf16": None, "fp8": "Float8BlockQuantizer", "fp8_pow2": "Float8BlockQuantizer",
    "fp8_hybrid": "Float8BlockQuantizer",
    "mxfp8_dequantized": "MXFP8Quantizer", "bf16_dequantized": None, "mxfp8": "MXFP8Quantizer",
    "nvfp4_plain": "NVFP4Quantizer", "nvfp4": "NVFP4Quantizer",
}  # fmt: skip
MIXED = [
    "fp8/fp8/bf16",
    "mxfp8/nvfp4/nvfp4",
    "nvfp4/mxfp8/nvfp4",
    "bf16/mxfp8/fp8",
    "nvfp4_plain/nvfp4_plain/mxfp8",
    "fp8/fp8_hybrid/fp8_hybrid",
]
E4M3, E5M2 = 5, 6  # of its DType


@pytest.fixture(scope="module", params=VERSIONS)
def ask(request, tmp_path_factory):
    """Call it with requests to have them answered by a version of the package on a GPU of a capability."""
    given = request.config.getoption("--neighbours")
    wheels = [*Path(given).glob(f"transformer_engine-{request.param}-*.whl")] if given else []
    if not wheels:
        pytest.skip(f"needs --neighbours DIR with transformer-engine {request.param} (tests/neighbours.sh)")
    folder = tmp_path_factory.mktemp("transformer_engine")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)

    def answer(capability: str = "10.0", **requests):
        program = [sys.executable, "-m", "tests.unit.quant.engine_over_stand_in", str(folder), capability]
        done = subprocess.run(program, input=json.dumps(requests), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    answer.version = request.param
    return answer


def gemms_of(steps):
    """GEMM -> the quantizers of its operands; each GEMM is once among the steps."""
    found = {LAYOUTS[step["layout"]]: step["operands"] for step in steps if "layout" in step}
    assert len(found) == sum("layout" in step for step in steps) == 3
    return found


def check_gemms(steps, formats):
    """Both operands of each GEMM have its format; the first is the weight, or wgrad's input."""
    gemms = gemms_of(steps)
    for (gemm, operands), fmt in zip(gemms.items(), formats, strict=True):
        assert [operand.get("kind") for operand in operands] == [KINDS[fmt]] * 2, gemm
        weight, grad = gemm != "wgrad", gemm != "fprop"
        for operand, is_weight, is_grad in zip(operands, (weight, False), (False, grad), strict=True):
            if fmt.startswith("fp8"):
                wanted = {"force_pow_2_scales": fmt == "fp8_pow2", "block_scaling_dim": 2 if is_weight else 1}
                wanted["dtype"] = E5M2 if fmt == "fp8_hybrid" and is_grad else E4M3
            elif fmt.startswith("nvfp4"):
                rht = fmt == "nvfp4"
                wanted = {"with_2d_quantization": rht and is_weight, "stochastic_rounding": is_grad}
                if gemm == "wgrad":  # a quantizer of both directions transforms the columnwise data alone
                    wanted |= {"with_rht": rht, "with_post_rht_amax": rht}
            else:
                wanted = {}
            assert {name: operand[name] for name in wanted} == wanted, (gemm, operand)


def test_one_format_runs_by_its_recipe(ask):
    """Every format in one place: GEMMs, gradients, and the weight cast once for two microbatches."""
    formats = {"9.0": ["fp8", "fp8_hybrid", "fp8_pow2"], "10.0": ["mxfp8", "nvfp4_plain", "nvfp4"]}
    for capability, names in formats.items():
        answers = ask(capability, linears=names)
        assert answers["version"] == ask.version
        for name, answer in answers["linears"].items():
            assert answer["equal"] and not answer["recipe"].startswith("Custom"), name
            for steps in answer["passes"]:
                check_gemms(steps, [name] * 3)
            check_weight_casts(answer["passes"])


def check_weight_casts(passes):
    """The weight [2 SIDE, SIDE] is quantised in the first microbatch alone."""
    casts = [[step["quantised"] for step in steps if "quantised" in step] for steps in passes]
    assert [[2 * SIDE, SIDE] in each for each in casts] == [True, False]


def test_formats_by_gemm_run_by_a_custom_recipe(ask):
    if ask.version == "2.8.0":
        pytest.skip("formats by GEMM need 2.19")
    for precision, answer in ask(linears=MIXED)["linears"].items():
        parsed = LinearPrecision.parse(precision)
        assert answer["equal"] and answer["recipe"] == "CustomRecipe", precision
        for steps in answer["passes"]:
            check_gemms(steps, [parsed.fprop, parsed.dgrad, parsed.wgrad])
        if parsed.fprop != "bf16":
            check_weight_casts(answer["passes"])


def test_what_we_ask_for_is_supported(ask):
    """Where our table says that a format runs, the package does not refuse its recipe."""
    for capability in ("9.0", "10.0", "10.3"):
        here = tuple(map(int, capability.split(".")))
        ours = [name for name, recipe in _RECIPES.items() if recipe.capability[0] <= here < recipe.capability[1]]
        supported = ask(capability, formats=ours)["supported"]
        assert supported == dict.fromkeys(ours, True), capability


def test_a_written_plan_is_the_recipe_of_a_whole_model(ask, tmp_path):
    if ask.version == "2.8.0":
        pytest.skip("formats by GEMM need 2.19")
    shapes = linear_shapes(ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=128, num_attention_heads=2))
    by_kind = dict(zip("qkvo", MIXED, strict=False)) | {"gate": "bf16", "up": "mxfp8", "down": "nvfp4_plain"}
    by_kind |= {"v": "mxfp8_dequantized", "o": "mxfp8/bf16_dequantized/bf16_dequantized"}
    linears = {shape.name: LinearPrecision.parse(by_kind[shape.kind]) for shape in shapes}
    Plan.by_hand(linears, shapes).save(tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--to", "transformer-engine", "--output", str(tmp_path), "--for-version"]
    assert main([*words, ask.version]) == 0
    names = [*(f"model.{name}" for name in linears), "lm_head"]
    found = ask(module=str(tmp_path / "te_recipes.py"), names=names)["module"]
    check_gemms(found.pop("lm_head"), ["bf16"] * 3)
    for name, precision in linears.items():
        steps = found.pop(f"model.{name}")
        check_gemms(steps, [precision.fprop, precision.dgrad, precision.wgrad])
        assert sum("dequantised" in step for step in steps) == len(precision.sources), "columnwise from rowwise data"
    assert not found
