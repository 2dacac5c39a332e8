"""The first contact with a GPU, rehearsed on a CPU, so that its first minute does not go to a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_snip.arguments import parse
from tests.gpu import core

ROOT = Path(__file__).resolve().parents[1]


NAMES = ("ceilings", "bits", "products", "resume", "casts", "linears", "training", "profile", "tilings")


# test_a_resume_trains_three_times has the lines of that step, which trains three times more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("left_out", ["resume", pytest.param("", marks=pytest.mark.slow)], ids=["no resume", "all"])
def test_every_step_runs_and_finds_nothing_wrong(left_out, tmp_path):
    names = [name for name in NAMES if name != left_out]
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--output", str(tmp_path)]
    command += ["--steps", ",".join(names)] if left_out else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580)
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert {name: step["bad"] for name, step in steps.items()} == {name: [] for name in steps}, done.stderr[-2000:]
    assert done.returncode == 0 and list(steps) == names
    assert all(step["rows"] for step in steps.values())
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == len(names)


@pytest.mark.slow
def test_a_layout_of_several_runs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu_cluster.py"), "--rehearse", "--gpus", "2"]
    command += ["--layout", "tp 2", "--output", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    (step,) = json.loads((tmp_path / "gpu.json").read_text())["steps"].values()
    assert done.returncode == 0 and step["bad"] == [], done.stderr[-2000:]
    (row,) = step["rows"]
    assert row[:2] == ["tp 2", "fp8"] and float(row[2]) > 0 and row[4] == "-", "a CPU's trace has no kernels of NCCL"


def test_what_of_nccl_is_hidden(monkeypatch):
    """Two pieces of communication that touch are one; a copy beside them hides it, nothing else does."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_cluster

    def kernel(name: str, begin: float, end: float, cat: str = "kernel") -> dict:
        return {"cat": cat, "name": name, "ts": begin, "dur": end - begin}

    events = [
        kernel("ncclDevKernel_AllGather", 0, 10), kernel("ncclDevKernel_ReduceScatter", 5, 20),
        kernel("ncclDevKernel_AllGather", 30, 40), kernel("cast_kernel", 8, 12), kernel("sm90_gemm", 11, 15),
        kernel("sm90_gemm", 22, 31), kernel("aten::mm", 0, 100, "cpu_op"),
    ]  # fmt: skip
    assert gpu_cluster.nccl(events) == (30.0, 8.0)
    assert gpu_cluster.nccl([]) == (0.0, 0.0)


def test_kernels_are_sorted_by_kind(monkeypatch):
    """Two that overlap leave no gap; an operator of the CPU is no kernel."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_training

    names = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention", "cast_kernel": "casts",
        "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA": "GEMMs in FP8", "nvjet_sm90_tst_192x128_64x5": "GEMMs in BF16",
        "softmax_kernel": "cross entropy", "something else": "the rest",
    }  # fmt: skip
    events = [
        {"cat": "kernel", "name": name, "ts": 10e3 * i, "dur": 11e3 if i == 0 else 4e3} for i, name in enumerate(names)
    ]
    found = gpu_training.by_kind([*events, {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1e6}], "kernel")
    assert {kind for kind, milliseconds in found.items() if milliseconds} == {
        *names.values(), "all kernels", "waiting for the host",
    }  # fmt: skip
    assert found["attention"] == 11 and found["all kernels"] == 31 and found["waiting for the host"] == 4 * 6


def test_deep_gemms_operands_are_what_it_multiplies(monkeypatch):
    """A stand-in with its rules: [M, K] by [N, K], contiguous, scales by 128 along K, float32 sums added to c."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_linears

    def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        assert codes.is_contiguous() and codes.dtype == torch.float8_e4m3fn
        rows, columns = (size // blocks for size, blocks in zip(codes.shape, scales.shape, strict=True))
        assert columns == 128
        return codes.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    def fp8_gemm_nt(a, b, d, c=None, recipe=(1, 128, 128)):
        assert (len(a[1]), len(b[1])) == (len(a[0]) // recipe[0], len(b[0]) // recipe[1])
        d.copy_((decoded(*a) @ decoded(*b).T + (0 if c is None else c)).to(d.dtype))

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    x, w, g = (torch.randn(size).bfloat16() for size in ((128, 256), (384, 256), (128, 384)))
    (run,) = gpu_linears._deep_gemm(x, w, g).values()
    for made, exact in zip(run(), (x @ w.T, g @ w, g.T @ x), strict=True):
        assert float((made - exact).float().norm() / exact.float().norm()) < 0.06


STEPS = """
import os, sys, time
sys.path.insert(0, "{benchmarks}")
import gpu

def found(contact):
    return gpu.Table("found", ("process",), [(str(os.getpid()),)])

def raises(contact):
    contact.keep(gpu.Table("raises", ("row",), [("of before",)], bad=["a difference"]))
    raise RuntimeError("out of luck")

def crashes(contact):
    contact.keep(gpu.Table("crashes", ("row",), [("of before",)]))
    os._exit(9)

def hangs(contact):
    time.sleep(60)

if __name__ == "__main__":
    gpu.GRACE = 0.5
    names = ["raises", "found", "crashes", "hangs", "again"]
    gpu.STEPS = {{name: ("steps", 1.0) for name in names}}
    again = found
    gpu.in_one_process = lambda names, contact: gpu.run(
        {{name: (globals()[name], 1.0) for name in names}}, contact, gpu.Report.of(contact.folder)
    )
    sys.exit(gpu.main())
"""


def test_a_step_that_raises_crashes_or_hangs_leaves_the_others_and_what_it_found(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(STEPS.format(benchmarks=ROOT / "benchmarks"))
    done = subprocess.run([sys.executable, script, "--output", tmp_path], capture_output=True, text=True, timeout=60)
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert list(steps) == ["raises", "found", "crashes", "hangs", "again"], done.stderr
    assert steps["raises"]["bad"] == ["a difference", "failed: RuntimeError: out of luck"]
    assert steps["raises"]["rows"] == steps["crashes"]["rows"] == [["of before"]]
    for name in ("crashes", "hangs"):
        assert steps[name]["bad"] == ["the step did not end: it crashed or hung, or is running"]
    assert steps["found"]["bad"] == steps["again"]["bad"] == [] and steps["found"]["rows"] != steps["again"]["rows"]
    assert "in hangs" in (tmp_path / "hangs.traceback.txt").read_text() and done.returncode == 1
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == 5


def _case(number: int) -> list[str]:
    """In another process: a case that hangs, one whose process dies, and the others tell how many threads they have."""
    if number == 1:
        time.sleep(600)
    return [str(torch.get_num_threads())]


def _death(number: int) -> list[str]:
    os._exit(3)


@pytest.mark.slow  # most of it waits
def test_cases_in_parallel_have_a_thread_each_and_end_in_time(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    begin = time.monotonic()
    found = core.in_parallel(_case, [0, 1, 2], 2, 20.0)
    assert sorted(found) == ["1", "1", f"{core.cases()[1].name}: not done in 20 s"]
    assert time.monotonic() - begin < 60
    (dead,) = core.in_parallel(_death, [2], 1, 60.0)
    assert dead.startswith(f"{core.cases()[2].name}: ") and "terminated abruptly" in dead


@pytest.fixture
def training(monkeypatch, tmp_path):
    """gpu_training, a contact, and the commands it calls, each given a program's text in place of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import gpu_training

    commands, programs = [], []
    call = gpu.call

    def called(command, *rest):
        commands.append(list(command))
        return call([sys.executable, "-c", programs.pop(0)], *rest)

    monkeypatch.setattr(gpu_training, "call", called)
    contact = gpu.Contact(rehearse=False, folder=tmp_path, end=time.monotonic() + 60)
    return SimpleNamespace(module=gpu_training, contact=contact, commands=commands, programs=programs)


def test_a_training_ends_before_its_checkpoint(training, tmp_path):
    rows = "\n".join(json.dumps({"iteration": n}) for n in (1, 2)) + "\n"
    path = tmp_path / "runs/bf16/metrics.jsonl"
    training.programs.append(f"import time; open({str(path)!r}, 'w').write({rows!r}); time.sleep(600)")
    begin = time.monotonic()
    made = training.module.train(training.contact, "bf16", [], enough=2)
    assert [row["iteration"] for row in made] == [1, 2] and time.monotonic() - begin < 30
    training.programs.append("print('error: no luck'); raise SystemExit(2)")
    with pytest.raises(RuntimeError, match="bf16 ended with 2: error: no luck"):
        training.module.train(training.contact, "bf16", [])


def test_a_resume_trains_three_times(training, tmp_path):
    """The program knows all options; what differs after the resume is told."""

    def rows(folder: str, first: int, last: int, loss: float) -> str:
        written = "".join(json.dumps({"iteration": n, "lm loss": loss}) + "\n" for n in range(first, last + 1))
        return f"open({str(tmp_path / 'runs' / folder / 'metrics.jsonl')!r}, 'a').write({written!r})"

    training.programs += [rows("whole", 1, 6, 5.0), rows("cut", 1, 3, 5.0), rows("cut", 4, 6, 5.5)]
    table = training.module.resume(training.contact)
    assert table.rows == [("3",)] and table.bad[0] == "iteration 4: lm loss is 5.0 and 5.5"
    for words, iterations in zip(training.commands, (None, 3, None), strict=True):
        config = parse(words[words.index("pretrain_llama.py") + 1 :])
        assert config.training.exit_interval == iterations and config.training.train_iters == 6
        assert Path(config.logging.run_dir).name == ("cut" if words is not training.commands[0] else "whole")
    assert config.checkpoint.load == str(tmp_path / "runs/cut/checkpoints")


def test_one_process_trains_over_gloo_where_nccl_does_not_start(training, tmp_path):
    path = tmp_path / "runs/bf16/metrics.jsonl"
    training.programs += [
        "raise SystemExit('torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp')",
        f"open({str(path)!r}, 'w').write('{{}}\\n')",
    ]
    assert training.module.train(training.contact, "bf16", []) == [{}]
    first, second = training.commands
    assert second == [*first, "--device", "cuda", "--distributed-backend", "gloo"]
    assert "NCCL error" in (tmp_path / "nccl.txt").read_text()


def test_a_gemm_that_is_refused_leaves_the_others(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import gpu_linears

    def errors(contact, impl, name, k, kind):
        if k == 128:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return [0.0, 0.0, 0.0]

    monkeypatch.setattr(gpu_linears, "_errors", errors)
    table = gpu_linears.products(gpu.Contact(rehearse=True, folder=tmp_path, end=time.monotonic() + 60))
    assert len(table.rows) == 18 and len(table.bad) == 9
    assert table.bad[0] == "fp8, K = 1 x 128, normal: CUBLAS_STATUS_NOT_SUPPORTED"


def test_a_step_gives_memory_back_before_the_next(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))

    def step(contact):
        done.append("step")
        return gpu.Table("step", ())

    contact = gpu.Contact(rehearse=True, folder=tmp_path, end=time.monotonic() + 60)
    gpu.run({"one": (step, 1.0), "two": (step, 1.0)}, contact, gpu.Report.of(tmp_path))
    assert done == ["step", "free", "step", "free"]


def test_a_case_that_does_not_compile_is_told_and_a_dead_device_ends_the_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    def fails(error):
        raise error

    told = []
    assert gpu.runs("good", lambda: None, told) and not gpu.runs("cast", lambda: fails(ValueError("no layout")), told)
    assert told == ["cast is left out: ValueError: no layout"]
    with pytest.raises(torch.AcceleratorError):
        gpu.runs("cast", lambda: fails(torch.AcceleratorError("an illegal memory access was encountered")), told)


def test_a_casts_time_is_its_kernels_and_not_the_hosts(monkeypatch):
    """The GPU is kept busy while the host launches, so that it does not wait for the host after the first event."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import harness

    done: list[str] = []
    event = SimpleNamespace(record=lambda: done.append("event"), elapsed_time=lambda other: 2000.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("end"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("busy"))
    for ahead, first in ((True, ["busy"]), (False, [])):
        assert harness.interleaved({"a": lambda: done.append("case")}, "cuda", 1, 0, ahead=ahead) == {"a": 2.0}
        assert done == [*first, "event", "case", "event", "end"]
        done.clear()


def test_what_cannot_run_is_told(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--output", str(tmp_path), "--steps", "bits,typo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--steps typo unknown; known: ceilings, bits" in done.stderr
