"""The process: seeds, logging, the stop signal and how an error leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_snip
from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.errors import UserError


def test_ranks_come_from_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (runtime.environment_rank(), runtime.environment_world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (runtime.environment_rank(), runtime.environment_world_size()) == (3, 8)


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a GPU, and there is none; use gloo"):
        runtime.start("nccl", 1.0)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 has no GPU: this machine has 2; start one process per GPU"):
        runtime.start("auto", 1.0)


def test_a_process_that_sees_one_gpu_alone_takes_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="local rank 3 has no GPU: this machine has 1"):
        runtime._gpu_of(3, "nccl", "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as srun --gpus-per-task=1 sets it
    assert runtime._gpu_of(3, "nccl", "auto") == 0


def test_device_and_backend_are_two_options(monkeypatch):
    def resolved(gpus: bool) -> list[tuple[str, str]]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
        options = [
            ("auto", "auto"),
            ("gloo", "auto"),
            ("nccl", "auto"),
            ("auto", "cpu"),
            ("auto", "cuda"),
            ("gloo", "cuda"),
        ]
        return [runtime.resolve_backend(*pair) for pair in options]

    asked = [("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cuda")]
    assert resolved(gpus=True) == [("nccl", "cuda"), *asked]
    assert resolved(gpus=False) == [("gloo", "cpu"), *asked]


def test_several_processes_share_a_gpu_over_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert runtime.start("gloo", 1.0, device="cuda").device == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda needs a GPU, and there is none; use cpu"):
        runtime.start("gloo", 1.0, device="cuda")


@pytest.mark.parametrize(("backend", "bound"), [("nccl", torch.device("cuda", 1)), ("gloo", None)])
def test_nccl_is_bound_to_its_gpu(backend, bound, monkeypatch):
    """So that the mesh's groups are split from communicators that are made at the start."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **more: seen.append((name, more)))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    runtime.start(backend, 1.0, device="cuda")
    ((name, more),) = seen
    assert name == backend and more["device_id"] == bound


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS is 8, and RANK is not set: each process would train a"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, and RANK is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK is not set"),
        ({"RANK": "0"}, "RANK is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start one torchrun per node"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 2, WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT is x; start one"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_LOCALID": "1"},
            "RANK is set without LOCAL_RANK; set that to SLURM_LOCALID",
        ),
    ],
)
def test_processes_that_were_not_told_their_place_are_refused(variables, told, monkeypatch):
    """As `srun python pretrain_llama.py` starts them: each would be a run of one process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(runtime, "_join", lambda *_: pytest.fail("it went on"))
    with pytest.raises(UserError, match=told):
        runtime.start("gloo", 1.0)


@pytest.mark.parametrize("variables", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "8"}])
def test_a_lone_process_of_a_job_runs(variables, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(runtime, "_join", lambda *_: None)
    assert runtime.start("gloo", 1.0).world_size == 1


def report_file(monkeypatch, folder: Path, processes: int, here: int, mode: int = 0o700) -> Path:
    """torchrun's environment, with its folders; the one of this start."""
    start = folder / "torchelastic_x" / "none_y" / "attempt_0"
    (start / "0").mkdir(parents=True)
    start.parent.chmod(mode)
    for name, value in (("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", here),
                        ("TORCHELASTIC_ERROR_FILE", start / "0" / "error.json")):  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return start


def test_processes_of_one_node_meet_in_torchruns_private_folder(monkeypatch, tmp_path):
    assert runtime.private_folder() is None, "no torchrun"
    assert runtime.private_folder() != report_file(monkeypatch, tmp_path / "several", 4, 2), "they are not all here"
    start = report_file(monkeypatch, tmp_path / "one", 2, 2)
    assert runtime.private_folder() == start
    for mode in (0o755, 0o770, 0o701):
        report_file(monkeypatch, tmp_path / str(mode), 2, 2, mode)
        assert runtime.private_folder() is None, "others can see it"
    for path in ("", os.devnull, str(tmp_path / "gone/none_y/attempt_0/0/error.json")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        assert runtime.private_folder() is None


def test_a_run_on_one_node_uses_the_loopback_interface_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    try:
        runtime.stay_on_this_host()
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def test_a_store_that_nobody_serves_is_an_error_without_a_word(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(OSError, match="refused"):
        runtime._connect("start")
    assert capfd.readouterr().err == "", "a watch tries again every two seconds"


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert runtime.seed_of(1234, "layers.0.mlp.up_proj") == 6050616723310766188, "weights of old runs hang on it"
    seeds = {runtime.seed_of(*parts) for parts in [(1,), (2,), (1, "a"), (1, "b"), ("1a",), (1, "a", 0)]}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)


def test_an_iteration_reseeds_torch():
    def draw(seed: int, iteration: int) -> float:
        torch.rand(3)
        runtime.seed_iteration(seed, iteration)
        return torch.rand(()).item()

    assert draw(1, 5) == draw(1, 5)
    assert len({draw(1, 5), draw(1, 6), draw(2, 5)}) == 3


def test_sigterm_is_remembered_if_it_is_listened_to():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        deaf = runtime.StopSignal(listen=False)
        assert signal.getsignal(signal.SIGTERM) is before[0]
        heard = runtime.StopSignal(listen=True)
        assert not heard.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.received and not deaf.received
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_ctrl_c_is_remembered_and_a_second_one_ends_the_process():
    """In a process of its own, without torch's start: what a second one does is the end of it."""
    code = """if True:
        import os, signal, sys, time
        from megatron_snip import runtime
        heard = runtime.StopSignal(listen=True)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher passed on what the terminal had sent
        print(heard.received, flush=True)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
        print("still here", flush=True)
    """
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (got.returncode, got.stdout) == (-signal.SIGINT, "True\n")


def test_a_process_whose_agent_has_gone_ends(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(megatron_snip, "PARENT", -1)
    runtime.end_with_agent()
    assert left == [], "a shell's or srun's process stays"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    runtime.end_with_agent()
    assert left == [1]
    monkeypatch.setattr(megatron_snip, "PARENT", os.getppid())
    runtime.end_with_agent()
    assert left == [1]


def test_a_full_disk_under_stdout_does_not_end_the_run(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        runtime.say("x")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


@pytest.fixture
def logger():
    before = (runtime.LOGGER.handlers[:], runtime.LOGGER.level, runtime.LOGGER.propagate)
    yield runtime.LOGGER
    runtime.LOGGER.handlers[:], runtime.LOGGER.level, runtime.LOGGER.propagate = before


def test_rank_0_tells_everything_and_others_errors(logger, capsys):
    for rank in (0, 1):
        runtime.set_up_logging(rank)
        logging.getLogger("megatron_snip").info("news")
        logging.getLogger("megatron_snip").warning("careful")
        logging.getLogger("megatron_snip").error("wrong")
    lines = [line.split("[", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["rank 0] news", "rank 0] careful", "rank 0] wrong", "rank 1] wrong"]


def leave_with(monkeypatch, error: Exception) -> tuple[list[int], list[float]]:
    """What report_errors does about an error: exit codes and how long it waits before it tells."""
    left: list[int] = []
    waited: list[float] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(runtime.time, "sleep", waited.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with runtime.report_errors():
            raise error
    finally:
        signal.signal(signal.SIGTERM, before)
    return left, waited


def test_a_users_error_is_one_line_and_status_2(logger, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert leave_with(monkeypatch, UserError("--lr is odd; even it")) == ([2], [])
    assert capsys.readouterr().err == "error: --lr is odd; even it\n"


def test_other_ranks_wait_before_they_tell(logger, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "2")
    left, waited = leave_with(monkeypatch, UserError("odd"))
    assert left == [2] and sum(waited) >= 2.0
    assert capsys.readouterr().err == "error [rank 2]: odd\n"


def test_a_path_that_cannot_be_used_is_one_line_too(logger, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as info:
        (tmp_path / "file/folder").mkdir()
    assert leave_with(monkeypatch, info.value) == ([2], [])
    line = f"{tmp_path}/file/folder: Not a directory; one of the folders in it is a file; give another path"
    assert capsys.readouterr().err == f"error: {line}\n"


def test_an_os_error_without_a_path_keeps_its_traceback(logger, monkeypatch):
    with pytest.raises(BrokenPipeError):
        leave_with(monkeypatch, BrokenPipeError(32, "Broken pipe"))


@pytest.mark.parametrize(
    "error", [AssertionError("not the user's"), ValueError("not the user's"), OSError(5, "no path")]
)
def test_before_a_run_has_begun_other_errors_keep_their_traceback(logger, monkeypatch, error):
    """torch's ValueErrors among them."""
    with pytest.raises(type(error)) as info:
        leave_with(monkeypatch, error)
    assert info.value is error


NAMES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO",
)  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """The process's environment without what may be set for GPUs."""
    monkeypatch.setattr(os, "environ", {name: text for name, text in os.environ.items() if name not in NAMES})
    yield os.environ
    torch.use_deterministic_algorithms(False)


def test_what_gpus_read_at_their_start_is_set(environment, tmp_path):
    runtime.prepare_environment("cpu", deterministic=False, stacks=tmp_path)
    assert not set(NAMES) & environment.keys()
    runtime.prepare_environment("cuda", deterministic=False, stacks=tmp_path)
    assert {name: environment.get(name) for name in NAMES} == dict.fromkeys(NAMES) | {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert not torch.are_deterministic_algorithms_enabled()


def test_it_is_set_before_options_are_checked_which_starts_cuda(environment, monkeypatch, tmp_path):
    """A check asks for the GPU's capability, and CUDA's allocator reads its settings then."""
    from megatron_snip.train import loop

    def check(config, world_size):
        raise UserError(f"asked with {environment.get('PYTORCH_ALLOC_CONF')}")

    monkeypatch.setattr(loop, "check", check)
    with pytest.raises(UserError, match="asked with expandable_segments:True"):
        loop.train(Config().replace(device="cuda", run_dir=str(tmp_path)))


def test_what_the_user_has_set_stays(environment, tmp_path):
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": "x", "TORCH_NCCL_TRACE_BUFFER_SIZE": "5", "NCCL_ALGO": "Tree"}
    runtime.prepare_environment("cuda", deterministic=True, stacks=tmp_path)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "x" and "PYTORCH_ALLOC_CONF" not in environment
    assert environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "5" and "TORCH_FR_BUFFER_SIZE" not in environment
    assert environment["NCCL_ALGO"] == "Tree"


def test_deterministic_algorithms(environment, tmp_path):
    runtime.prepare_environment("cuda", deterministic=True, stacks=tmp_path)
    assert torch.are_deterministic_algorithms_enabled()
    assert (environment["CUBLAS_WORKSPACE_CONFIG"], environment["NCCL_ALGO"]) == (":4096:8", "Ring")
    environment["NCCL_ALGO"] = "NVLS"
    with pytest.raises(
        ValueError, match="NCCL_ALGO=NVLS may change bits from run to run under --deterministic-mode; un"
    ):
        runtime.prepare_environment("cuda", deterministic=True, stacks=tmp_path)
