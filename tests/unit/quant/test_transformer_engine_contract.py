"""Linears by Transformer Engine's own Python files: modules, recipes, roles, quantizers and shapes are the package's.

What does not run are its kernels: `engine_over_stand_in.py` stands in for them.  ``pytest --neighbours DIR`` runs this
with wheels of the package in a folder (tests/neighbours.sh): 2.20.2, and 2.8.0 for what has one recipe a linear.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_snip.cli.export_plan import main
from megatron_snip.config import ModelConfig
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.linears.transformer_engine import _RECIPES
from megatron_snip.snip.plan.plan_file import Plan
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

OWN = {
    "10.0": ["fp4", "fp4_pow2", "mxfp4", "mxfp4_floor", "nvfp4_4over6", "mxfp8_floor", "fp8/fp4/fp4", "bf16/bf16/fp4"],
    "9.0": ["mxfp8", "nvfp4", "fp8/mxfp8/nvfp4", "fp4/fp8_pow2/nvfp4_plain"],
}


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


def test_our_quantizer_gives_our_bits(ask):
    """Formats that the package does not have, on any GPU, and those of Blackwell on Hopper; its own run the rest."""
    if ask.version == "2.8.0":
        pytest.skip("quantizers of Python need 2.19")
    for capability, precisions in OWN.items():
        for precision, answer in ask(capability, own=precisions)["own"].items():
            assert answer["equal"] == dict.fromkeys((*LAYOUTS.values(), "bias"), True), (capability, precision)
            parsed = LinearPrecision.parse(precision)
            for fmt, found in zip((parsed.fprop, parsed.dgrad, parsed.wgrad), answer["kinds"], strict=True):
                theirs = fmt in KINDS and (capability == "10.0" or fmt.startswith("fp8"))
                assert found == [KINDS[fmt] if theirs else None] * 2, (capability, precision)


def test_our_quantizer_adds_to_the_main_gradient(ask):
    if ask.version == "2.8.0":
        pytest.skip("quantizers of Python need 2.19")
    assert 0 < ask(accumulated=True)["accumulated"] < 4e-3  # ours rounds each microbatch's gradient to bf16


@pytest.mark.parametrize("precision", ["fp4", "fp8/fp4/fp4", "fp4/bf16/fp8"])
def test_our_quantizer_under_tensor_parallelism(ask, precision, tmp_path):
    """Two ranks, column and row parallel, with and without sequence parallelism."""
    if ask.version == "2.8.0":
        pytest.skip("quantizers of Python need 2.19")
    requests = [{"rank": rank, "store": str(tmp_path / "store"), "precision": precision} for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda request: ask("9.0", tensor_parallel=request)["tensor_parallel"], requests)
    for equal in answers:
        assert len(equal) == 12 and all(equal.values()), equal


def test_what_we_ask_for_is_supported(ask):
    """Where our table says that a format runs, the package does not refuse its recipe."""
    for capability in ("9.0", "10.0", "10.3"):
        here = tuple(map(int, capability.split(".")))
        ours = [name for name, recipe in _RECIPES.items() if recipe.capability[0] <= here < recipe.capability[1]]
        supported = ask(capability, formats=ours)["supported"]
        assert supported == dict.fromkeys(ours, True), capability


def written(ask, folder, precisions, capability="10.0", *words):
    """Kind of a linear -> casts and GEMMs of its te.Linear under the recipe that a plan of one block is written as."""
    shapes = LLAMA.linear_shapes(ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=128, num_attention_heads=2))
    linears = {shape.name: LinearPrecision.parse(precisions[shape.kind]) for shape in shapes}
    Plan.by_hand(linears, shapes).save(folder / "plan.json")
    told = [str(folder / "plan.json"), "--to", "transformer-engine", "--output", str(folder), "--for-version"]
    assert main([*told, ask.version, *words]) == 0
    names = {shape.kind: f"model.{shape.name}" for shape in shapes} | {"lm_head": "lm_head"}
    found = ask(capability, module=str(folder / "te_recipes.py"), names=[*names.values()])["module"]
    return {kind: found[name] for kind, name in names.items()}


def test_a_written_plan_is_the_recipe_of_a_whole_model(ask, tmp_path):
    if ask.version == "2.8.0":
        pytest.skip("formats by GEMM need 2.19")
    precisions = dict(zip("qkvo", MIXED, strict=False)) | {"gate": "bf16", "up": "mxfp8", "down": "nvfp4_plain"}
    precisions |= {"v": "mxfp8_dequantized", "o": "mxfp8/bf16_dequantized/bf16_dequantized"}
    found = written(ask, tmp_path, precisions)
    check_gemms(found.pop("lm_head"), ["bf16"] * 3)
    for kind, precision in precisions.items():
        parsed, steps = LinearPrecision.parse(precision), found.pop(kind)
        check_gemms(steps, [parsed.fprop, parsed.dgrad, parsed.wgrad])
        assert sum("dequantised" in step for step in steps) == len(parsed.sources), "columnwise from rowwise data"
    assert not found


def test_a_plan_written_with_our_casts_keeps_its_formats(ask, tmp_path):
    """On Hopper: its own FP8, and ours for the rest."""
    if ask.version == "2.8.0":
        pytest.skip("quantizers of Python need 2.19")
    precisions = dict.fromkeys("qkvo", "fp8") | {"gate": "fp4", "up": "fp8/fp4/fp4", "down": "nvfp4"}
    found = written(ask, tmp_path, precisions, "9.0", "--own-casts")
    run = {"fp8": ["fp8"] * 3, "fp8/fp4/fp4": ["fp8", "bf16", "bf16"]}  # a dequantised operand has no quantizer
    for kind, precision in precisions.items():
        check_gemms(found[kind], run.get(precision, ["bf16"] * 3))
    text = (tmp_path / "te_recipes.py").read_text()
    assert "mlp.gate_proj': ('fp4', 'fp4', 'fp4')" in text and "'fp8', 'fp4', 'fp4'" in text
