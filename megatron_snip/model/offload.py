"""Activations on the host: what a block saves for its backward leaves the device in forward and returns in backward.

    forward    block b saves: its tensors are copied to the host while it and block b + 1 run, and then freed
    backward   block b + 1 begins: the copies of block b begin to return, and block b reads them

So at most one block's tensors are on their way out and one block's on their way back, beside those of the block that
runs.  A block whose backward follows its own forward (the last of the last stage) reads the tensors that have not left.
The last block of any other stage fetches its copies itself when its backward begins.

Copies are of whole storages, once each, because several saved tensors may be views of one.  On GPUs they go through
pinned memory on streams of their own.  Memory is freed in the order of the compute stream, which waits for a copy's
event first: with ``record_stream``, how much is held would depend on how far the host is ahead.  So would pinned memory
that is left to torch's allocator, which gives a block out again only when the host sees that its copies have ended.
Here it is used again at once, because only streams read and write it, and in order.  On CPUs a copy lies in the same
memory, made by an operator of its own, by which a dry run knows it (`dry_run.counts`).

What never leaves: weights and their casts, tensors that other blocks read too, and small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: A smaller storage stays: a copy takes longer to launch than to run.
MIN_BYTES = 16 * 1024


#: Pinned memory [bytes] that no copy needs any more, by size.
Unused = defaultdict[int, list[Tensor]]


def to_host(whole: Tensor, stream: torch.cuda.Stream | None, unused: Unused) -> Tensor:
    """A copy of ``whole`` [bytes] on the host, made by ``stream`` of a GPU, in unused memory if there is some."""
    if stream is None:
        return _cpu_to_host(whole)
    stream.wait_stream(torch.cuda.current_stream(whole.device))
    size = 1 << (whole.numel() - 1).bit_length()  # as torch rounds pinned memory up, so that similar tensors share it
    made = unused[size].pop() if unused[size] else torch.empty(size, dtype=whole.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        return made[: whole.numel()].copy_(whole, non_blocking=True)


def to_device(host: Tensor, device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    """A copy of ``host`` [bytes] on the device, made by ``stream`` of a GPU."""
    if stream is None:
        return _cpu_to_device(host)
    made = torch.empty(host.shape, dtype=host.dtype, device=device)  # of the compute stream's memory, which frees it
    stream.wait_stream(torch.cuda.current_stream(device))  # until then, queued kernels may use this memory
    with torch.cuda.stream(stream):
        return made.copy_(host, non_blocking=True)


@torch.library.custom_op("megatron_snip::to_host", mutates_args=())
def _cpu_to_host(whole: Tensor) -> Tensor:
    return whole.clone()


@torch.library.custom_op("megatron_snip::to_device", mutates_args=())
def _cpu_to_device(host: Tensor) -> Tensor:
    return host.clone()


for _copy in (_cpu_to_host, _cpu_to_device):
    _copy.register_fake(torch.empty_like)


class _Copy:
    """A storage that autograd saved: on the host, and on the device until it has left and from when it returns."""

    _event: torch.cuda.Event | None = None  # of the copy in flight
    host: Tensor | None = None

    def __init__(self, whole: Tensor, offload: Offload) -> None:
        self._offload, self._place = offload, whole.device
        self.host = to_host(whole, offload.out, offload.unused)
        self._is_here(whole, offload.out)

    def _is_here(self, whole: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._device: Tensor | None = whole
        self._version = whole._version
        self._event = None if stream is None else stream.record_event()

    def __del__(self) -> None:
        self._wait()  # memory that a copy still reads or writes must not be used for anything else
        if self.host is not None and self._offload.out is not None:
            size = self.host.untyped_storage().nbytes()
            self._offload.unused[size].append(self.host.as_strided((size,), (1,)))

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._place).wait_event(self._event)  # any thread may free the last reference
            self._event = None

    def fetch(self) -> None:
        """Begin to copy it to the device, unless it is there."""
        if self._device is None:
            assert self.host is not None
            self._is_here(to_device(self.host, self._place, self._offload.back), self._offload.back)

    def read(self) -> Tensor:
        """Its bytes on the device."""
        self.fetch()
        self._wait()
        assert self._device is not None
        return self._device

    def free(self) -> None:
        """Free it on the device, behind the copy in flight."""
        if self._device is not None:
            assert self._device._version == self._version, "a saved tensor was written to while it was copied"
            self._wait()
            self._device = None


class _Saved(NamedTuple):
    """A saved tensor: where it lies in the copy of its storage."""

    copy: _Copy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Sent:
    """What the forward of one block sends.

    stays: addresses of storages that other blocks read, too.  weights: those of the block while its forward runs.
    """

    def __init__(self, offload: Offload, stays: set[int], weights: Callable[[], Iterable[Tensor]]) -> None:
        self._offload, self._stays, self._weights = offload, stays, weights
        # only the graph keeps copies: backward frees them node by node
        self._copies: WeakValueDictionary[tuple[int, int], _Copy] = WeakValueDictionary()

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """What autograd keeps instead of a tensor [...]."""
        kept = tensor.detach()  # of an output, the tensor itself would be a circle
        if is_traceable_wrapper_subclass(tensor) or tensor.device.type != self._offload.device.type:
            return kept
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        copy = self._copies.get(key)
        if copy is None:
            if storage.nbytes() < MIN_BYTES or self._stays_here(storage._cdata):
                return kept
            items = storage.nbytes() // tensor.element_size()
            copy = _Copy(kept.as_strided((items,), (1,), 0).view(torch.uint8), self._offload)
            self._copies[key] = copy
        return _Saved(copy, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _stays_here(self, address: int) -> bool:
        # weights last, because FSDP gathers them and linears cast them while the block runs
        return address in self._stays or address in {address_of(weight) for weight in self._weights()}

    def fetch(self) -> None:
        """Begin to copy everything back, what backward reads first in front."""
        for copy in reversed([*self._copies.values()]):
            copy.fetch()

    def free(self) -> None:
        """Free the device's memory."""
        for copy in self._copies.values():
            copy.free()


@torch.no_grad()
def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.copy.read().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


def address_of(tensor: Tensor) -> int:
    """The identity of the storage of a tensor [...]."""
    return tensor.untyped_storage()._cdata


class Offload:
    """Sends what blocks save to the host, for all blocks of a rank.  device: of activations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # one for each direction of the link
        self.out, self.back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self.unused: Unused = defaultdict(list)
        self._leaving: Sent | None = None

    def run(
        self, block: Callable[..., Tensor], *args: Any, stays: Iterable[Tensor | None],
        weights: Callable[[], Iterable[Tensor]],
    ) -> tuple[Tensor, Sent]:  # fmt: skip
        """``block(*args)``, and what it sent.  stays, weights: as in `Sent`, tensors of any shape [...]."""
        sent = Sent(self, {address_of(one) for one in stays if one is not None}, weights)
        with saved_tensors_hooks(sent.pack, _unpack):
            return block(*args), sent

    def after(self, x: Tensor, before: Sent | None, sent: Sent | None) -> None:
        """Tell that a block's forward has ended, with its output x [...]; what the block before it and it sent."""
        self.free_what_left()
        self._leaving = sent
        if (before or sent) and x.requires_grad:

            def begins(_: Tensor) -> None:
                for one in (sent, before):
                    if one is not None:
                        one.fetch()

            x.register_hook(begins)

    def free_what_left(self) -> None:
        """Free what the block before the one whose forward ends has sent."""
        if self._leaving is not None:
            self._leaving.free()
        self._leaving = None
