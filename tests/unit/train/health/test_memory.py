"""A run that cannot fit is told of before it is built."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.parallel.data import local_of
from megatron_snip.runtime import Runtime
from megatron_snip.train import loop
from megatron_snip.train.health import memory
from megatron_snip.train.health.memory import free_memory, held
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from tests.unit.train.conftest import TINY

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       8000 kB\nMemFree:        10 kB\nMemAvailable:   4000 kB\n"


@pytest.mark.parametrize(("free", "told"), [(1000, 1), (10**15, 0), (None, 0)])
def test_a_run_that_cannot_fit_is_told_of_once(free, told, train_here, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    assert len(train_here(train_iters=1)) == 1, "a warning ends no run"
    lines = [line for line in caplog.messages if line.startswith("this machine cannot hold the run: ")]
    assert len(lines) == told
    assert all("0.0 GiB are free" in line and "--dry-run" in line for line in lines)


def test_it_is_told_before_anything_is_built(train_here, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    seen = []
    build = loop.build
    monkeypatch.setattr(loop, "build", lambda *a, **how: seen.append("cannot hold" in caplog.text) or build(*a, **how))
    train_here(train_iters=1)
    assert seen == [True]


def test_what_a_process_holds(train_here, monkeypatch):
    """Sixteen bytes a parameter, of the parts that a real run has."""
    made = []
    build = loop.build
    monkeypatch.setattr(loop, "build", lambda *a, **how: made.append(build(*a, **how)) or made[-1])
    train_here(train_iters=1)
    (parts,) = made
    count = sum(local_of(t).numel() for t in parts.optimizer.parameters.values())
    assert held(Config().replace(**TINY), 1) == [(16 * count, 0)]


def test_without_training_it_is_the_weights_alone(monkeypatch, caplog):
    config, here = Config().replace(**TINY), Runtime(0, 1, 0, CPU)
    ((whole, _),) = held(config, 1)
    for free, holds, told in (
        (5 * whole // 16, memory.WEIGHTS, []),
        (3 * whole // 16, memory.WEIGHTS, ["the weights need"]),
        (5 * whole // 16, memory.TRAINING, ["weights, gradients and the optimiser's state need"]),
    ):
        caplog.clear()
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        memory.warn_about_memory(config, here, holds)
        assert [said for said in told if said in caplog.text] == told and bool(caplog.messages) == bool(told)


def test_shards_hold_less():
    config = Config().replace(**{**TINY, "num_layers": 4, "global_batch_size": 8})
    ((whole, _),) = held(config, 1)
    assert held(config, 4) == [(whole // 4, 0)], "sharded over dp"
    assert held(config.replace(data_parallel_sharding_strategy="no_shard"), 4) == [(whole, 0)]
    assert held(config.replace(num_distributed_optimizer_instances=2), 4) == [(whole // 2, 0)]
    parts = held(config.replace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 4)
    # tp does not shard norms, and both ends of the pipeline hold a tied embedding
    norms, embedding = (2 * 4 + 1) * TINY["hidden_size"], TINY["vocab_size"] * TINY["hidden_size"]
    assert 2 * sum(device for device, _ in parts) == whole + 16 * (norms + embedding) and len(parts) == 2


@pytest.mark.parametrize(("precision", "state"), [("fp32", 8), ("collage-plus", 8), ("bf16", 4)])
def test_what_a_plan_moves_to_the_host_need_not_fit_the_gpu(precision, state, monkeypatch, caplog):
    config = Config().replace(**TINY, bf16=True, optimizer_precision=precision)
    plan = MemoryPlan.by_hand(["keep"], config, 1, on_host=["layers.0"])
    moved = state * (4 * 128**2 + 3 * 128**2 + 2 * 128)
    ((whole, none),), ((left, there),) = held(config, 1), held(config, 1, plan=plan)
    assert (whole - left, none) == (moved, 0) and there > moved
    assert held(config.replace(optimizer_cpu_offload=True, optimizer_offload_fraction=0.0), 1) == [(whole, 0)]
    here = Runtime(0, 1, 0, torch.device("cuda"))
    for free, given, told in ((whole - 1, None, True), (whole - 1, plan, False), (left - 1, plan, True)):
        caplog.clear()
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        memory.warn_about_memory(config, here, plan=given)
        assert [line.startswith("this GPU cannot hold the run") for line in caplog.messages] == [True] * told


def test_a_host_that_is_too_small_is_an_error_before_anything_is_built(train_here, monkeypatch):
    built = []
    monkeypatch.setattr(loop, "build", lambda *a, **how: built.append(a))
    ((_, there),) = held(Config().replace(**TINY, optimizer_cpu_offload=True), 1)
    monkeypatch.setattr(memory, "free_memory", lambda device: there // 2)
    for fraction, most in ((1.0, 0.49), (0.9, 0.4)):
        with pytest.raises(UserError) as info:
            train_here(train_iters=1, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
        said = str(info.value)
        assert said.startswith("--optimizer-cpu-offload takes 0.0") and "of the host for 1 rank on this machine" in said
        assert float(said.split("--optimizer-offload-fraction with at most ")[1].split(",")[0]) >= most
    assert not built


def test_processes_of_this_host_count(monkeypatch, caplog, train_here):
    config = Config().replace(**TINY)
    monkeypatch.setattr(memory, "free_memory", lambda device: 3 * held(config, 1)[0][0])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    train_here(train_iters=1)
    assert "for 4 processes" in caplog.text


def test_ranks_that_srun_starts_do_not_know_how_many_they_are(monkeypatch, caplog):
    """The last on a machine counts all."""
    config = Config().replace(**{**TINY, "num_layers": 2, "pipeline_model_parallel_size": 2})
    _, last = held(config, 2)
    monkeypatch.setattr(memory, "free_memory", lambda device: last[0] - 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    memory.warn_about_memory(config, Runtime(1, 2, 1, torch.device("cuda")))
    assert caplog.text.count("this GPU cannot hold the run") == 1
    assert memory.local_stages(config, Runtime(1, 2, 1, CPU)) == [0, 1]


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_free_is_what_the_machine_and_each_control_group_leave(tmp_path):
    assert free_memory(CPU, tmp_path) is None, "nothing tells"
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert free_memory(CPU, tmp_path) == 4000 * 1024
    group = "sys/fs/cgroup/user/job"
    write(tmp_path, {
        "proc/self/cgroup": "0::/user/job\n",
        f"{group}/memory.max": "max\n", f"{group}/memory.current": "5\n", f"{group}/memory.stat": "inactive_file 1\n",
    })  # fmt: skip
    assert free_memory(CPU, tmp_path) == 4000 * 1024
    around = "sys/fs/cgroup/user"
    write(tmp_path, {
        f"{around}/memory.max": "3000000\n", f"{around}/memory.current": "1000000\n",
        f"{around}/memory.stat": "anon 7\ninactive_file 200000\n",
    })  # fmt: skip
    assert free_memory(CPU, tmp_path) == 2200000


def test_free_in_a_control_group_of_version_1(tmp_path):
    group = "sys/fs/cgroup/memory"  # a container sees its own as the top
    write(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/docker/ab\n1:cpu:/docker/ab\n",
        f"{group}/memory.limit_in_bytes": "2000\n", f"{group}/memory.usage_in_bytes": "1500\n",
        f"{group}/memory.stat": "total_inactive_file 100\n",
    })  # fmt: skip
    assert free_memory(CPU, tmp_path) == 600


def test_this_machine_tells():
    free = free_memory(CPU)
    assert free is None or 0 < free < 2**50
