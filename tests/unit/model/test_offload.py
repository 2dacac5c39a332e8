"""What leaves for the host, when it leaves and returns, and what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron_snip.config import ModelConfig
from megatron_snip.model import offload
from megatron_snip.model.build import Build
from megatron_snip.model.initial import draw_weights
from megatron_snip.model.llama import LlamaStage, build_stages
from megatron_snip.model.offload import MIN_BYTES, Offload, address_of
from megatron_snip.model.recompute import NOTHING, Recompute
from megatron_snip.parallel.tensor import Region
from megatron_snip.quant import LinearPrecision
from megatron_snip.train.dry_run.counts import HOST, Tracker

CPU = torch.device("cpu")
MODEL = ModelConfig(
    num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, seq_length=128,
    vocab_size=100,
)  # fmt: skip
TOKENS = torch.randint(100, (2, 128), generator=torch.Generator().manual_seed(0))
ALL = Recompute(plan=("offload",) * 4)


@pytest.fixture
def make(lone_mesh):
    """Call it for a stage of four blocks in a precision."""

    def stage(
        recompute: Recompute = ALL, precision: str = "fp8", *, first: bool = True, dtype=torch.bfloat16
    ) -> LlamaStage:
        region = Region(lone_mesh.tp, False)
        build = Build(MODEL, lone_mesh, region, 1, dtype, CPU, recompute, offload=Offload(CPU))
        blocks = [range(4)] if first else [range(0), range(4)]
        made = list(build_stages(build, blocks, tied=False, of=lambda s: True).values())[-1]
        made.allocate()
        draw_weights([made])
        for linear in made.linears().values():
            linear.precision = LinearPrecision.parse(precision)
        return made

    return stage


@pytest.fixture
def copies(monkeypatch):
    """Each copy to the host that is made: the storage that it is of, and the copy."""
    made: list[tuple[Tensor, Tensor]] = []
    plain = offload.to_host
    monkeypatch.setattr(offload, "to_host", lambda x, *where: (made.append((x, plain(x, *where))), made[-1][1])[1])
    return made


def saved(stage: LlamaStage, x: Tensor = TOKENS) -> dict[int, int]:
    """Storages that a forward's blocks save -> their bytes, except the weights and tables."""
    own = {address_of(t) for t in (*stage.parameters(), *stage.buffers())}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.detach()), t.detach())[1], lambda t: t):
        stage.hidden(x, [0, 1])
    return {address_of(t): t.untyped_storage().nbytes() for t in kept if address_of(t) not in own}


@pytest.mark.parametrize("precision", ["fp8", "bf16", "nvfp4_plain"])
def test_what_autograd_saves_is_copied_once_but_not_weights(precision, make, copies):
    """Several saved tensors are views of one storage; weights, their casts, tables and what is small stay."""
    sizes = sorted(size for size in saved(make(NOTHING, precision)).values() if size >= MIN_BYTES)
    stage = make(ALL, precision)
    out = stage.hidden(TOKENS, [0, 1])
    assert sorted(x.numel() for x, _ in copies) == sizes and len(sizes) > 20
    casts = [part for one in stage.linears().values() for part in one.weight_casts.tensors()]
    stays = {address_of(t) for t in (*stage.parameters(), *stage.buffers(), *casts)}
    assert not stays & {address_of(x) for x, _ in copies}
    out.sum().backward()
    assert len(copies) == len(sizes), "backward sends nothing"


def test_weights_casts_stay_where_a_kernel_saves_them(make, copies):
    """As Transformer Engine does; here an operation saves a view of a cast."""
    stage = make()
    stage.hidden(TOKENS, [0, 1])
    block = stage.blocks()[0]
    cast = max(block.mlp.up_proj.weight_casts.tensors(), key=Tensor.nbytes.__get__)
    assert cast.nbytes >= MIN_BYTES
    before = len(copies)
    w = torch.ones(cast.numel(), requires_grad=True)
    stage.build.offload.run(lambda: w * cast.view(torch.uint8).flatten()[: len(w)], stays=(), weights=block.weights)
    assert len(copies) == before


def test_only_the_last_block_s_tensors_are_on_the_device_after_forward(make):
    """By the storages that are alive: those of a block leave while the next runs, and the host has all."""
    with Tracker() as tracker:
        stages, kept = [make(NOTHING), make(ALL)], []
        for stage in stages:
            stage.hidden(TOKENS, [0, 1])  # casts the weights
            before = tracker.memory.of_forward([])
            out = stage.hidden(TOKENS, [0, 1])
            kept.append((tracker.memory.of_forward([]) - before - out.nbytes, host(tracker)))
            del out
        (all_here, none_there), (here, there) = kept
        assert none_there == 0 and 0.98 * all_here < there < all_here
        assert all_here / 4 < here < 1.1 * all_here / 4
    assert host(tracker) == 0, "copies go with the graph"


def host(tracker: Tracker) -> int:
    return sum(entry.size for entry in tracker.memory.live.values() if entry.kind == HOST)


def test_copies_return_one_block_ahead_and_what_has_not_left_does_not(make, monkeypatch):
    order: list[str] = []
    plain = offload.to_device
    monkeypatch.setattr(offload, "to_device", lambda *args: (order.append("copy"), plain(*args))[1])
    stage = make()
    for index, block in stage.blocks().items():
        block.register_forward_hook(lambda *args, i=index: note(order, i, args[2]))
    stage.hidden(TOKENS, [0, 1]).sum().backward()
    copies = order.count("copy") // 3
    assert order == ["3", *["copy"] * copies, "2", *["copy"] * copies, "1", *["copy"] * copies, "0"]


def note(order: list[str], index: int, out: Tensor) -> None:
    out.register_hook(lambda _: order.append(str(index)))


def test_a_second_backward_reads_the_same(make):
    stage = make()
    plain, weights = make(NOTHING), list(stage.parameters())
    grads = [torch.autograd.grad(one.hidden(TOKENS, [0, 1]).sum(), list(one.layers.parameters())) for one in [plain]]
    out = stage.hidden(TOKENS, [0, 1]).sum()
    grads += [torch.autograd.grad(out, list(stage.layers.parameters()), retain_graph=i == 0) for i in range(2)]
    assert weights and all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*grads, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_what_others_hold_stays(make, copies):
    """All blocks read the tables, and the pipeline holds what it received until backward: a copy would free nothing."""
    plain, stage = (make(how, "bf16", first=False, dtype=torch.float32) for how in (NOTHING, ALL))
    x = torch.randn(2, 128, 128, requires_grad=True)
    sizes = saved(plain, x)
    assert stage.cos.nbytes >= MIN_BYTES and sizes.pop(address_of(x)) == x.nbytes
    stage.hidden(x, [0, 1])
    sent = {address_of(whole) for whole, _ in copies}
    assert not sent & {address_of(one) for one in (x, stage.cos, stage.sin)}
    assert sorted(whole.numel() for whole, _ in copies) == sorted(s for s in sizes.values() if s >= MIN_BYTES)


def test_without_gradients_nothing_leaves(make, copies):
    stage = make()
    with torch.no_grad():
        stage.hidden(TOKENS, [0, 1])
    assert not copies


def test_a_write_to_what_leaves_is_an_error():
    """Autograd itself only sees it without hooks."""
    sender, x = Offload(CPU), torch.randn(MIN_BYTES, requires_grad=True).exp()
    y, sent = sender.run(torch.square, x, stays=(), weights=list)
    sender.after(y, None, sent)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(AssertionError, match="written to while it was copied"):
        sender.free_what_left()


@pytest.mark.parametrize(("granule", "size"), [(1, 3 * MIN_BYTES), (512, 4 * MIN_BYTES)])
def test_a_dry_run_counts_the_host_apart(granule, size):
    """On a GPU in powers of two, as torch allocates pinned memory."""
    with Tracker(granule) as tracker:
        x = torch.ones(3 * MIN_BYTES, dtype=torch.uint8)
        kept = offload.to_host(x, None, Offload(CPU).unused)
        back = offload.to_device(kept, CPU, None)
        assert tracker.memory.host_peak() == size and sum(tracker.memory.peak().values()) == 6 * MIN_BYTES
        assert [tracker.counts["bytes", HOST, way] for way in ("to host", "from host")] == [3 * MIN_BYTES] * 2
    assert torch.equal(back, x)


class Square(torch.autograd.Function):
    """Notes when its backward reads x."""

    log: list[str]

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Square.log.append(f"compute reads {x[0].item():g}")
        return 2 * x * grad


class FakeStream:
    """Notes what a stream of a GPU is told, and what runs on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"{self.log[-1]}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for: {event}")


#: What three blocks do on a GPU: values, and what is logged of each.
SEND, FREE = ["out waits for compute", "out copies {}"], "compute waits for: out copies {}"
FETCH, READ = ["back waits for compute", "back copies {}"], "compute reads {}"
BACK = "compute waits for: back copies {}"
ORDER = [
    (2, ["block 0", *SEND]), (4, ["block 1", *SEND]), (2, [FREE]), (16, ["block 2", *SEND]), (4, [FREE]),
    (4, FETCH), (16, ["backward of block 2", FREE, READ]),
    (2, FETCH), (4, ["backward of block 1", BACK, READ]), (2, ["backward of block 0", BACK, READ]),
]  # fmt: skip


def test_the_order_of_streams_on_a_gpu(monkeypatch):
    """By stand-ins for its streams.  Memory is freed, read and written behind the events of its copies.

    A second microbatch has the same order, in the pinned memory of the first.
    """
    log: list[str] = []
    monkeypatch.setattr(Square, "log", log, raising=False)
    compute, out, back = (FakeStream(name, log) for name in ("compute", "out", "back"))
    running = [compute]

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        running.append(stream)
        yield
        running.pop()

    def named(tensor: Tensor) -> str:
        return f"{tensor.view(torch.float32)[0].item():g}"

    def copy(made: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        made.numpy()[:] = source.numpy()
        log.append(f"{running[-1].name} copies {named(source)}")
        return made

    plain_empty, pinned = torch.empty, []

    def empty(*size: object, pin_memory: bool = False, **how: object) -> Tensor:
        made = plain_empty(*size, **how)
        if pin_memory:
            pinned.append(made.nbytes)
        return made

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: running[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "copy_", copy)
    sender = Offload(CPU)
    sender.out, sender.back = out, back
    logs = []
    for _ in range(2):
        x, before = torch.full((MIN_BYTES - 8,), 2.0, requires_grad=True), None
        for block in range(3):
            x, sent = sender.run(
                lambda x, i=block: (log.append(f"block {i}"), Square.apply(x))[1], x, stays=(), weights=list
            )
            sender.after(x, before, sent)
            x.register_hook(lambda _, i=block: log.append(f"backward of block {i}"))
            before = sent
        x.sum().backward()
        del x, before, sent
        logs.append(log.copy())
        log.clear()
        assert pinned == [4 * MIN_BYTES] * 3
    assert logs == [[text.format(value) for value, texts in ORDER for text in texts]] * 2


def test_no_tensor_is_in_a_circle(make):
    """An operation's own output is among what it saves."""
    gc.collect()
    gc.disable()
    try:
        with Tracker() as tracker:
            stage = make()
            out = stage.hidden(TOKENS, [0, 1])
            before = len(tracker.memory.live)
            del out
            assert host(tracker) == 0 and len(tracker.memory.live) < before
    finally:
        gc.enable()
