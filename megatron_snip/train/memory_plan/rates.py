"""Modelled seconds of a block: FLOPs by format and bytes over links, at given rates.

Nominal rates are those of data sheets, so seconds are a lower bound, good for comparing plans and not for predicting a
run.  A table of --gemm-times replaces the formats' ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_snip.config import Config
from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS
from megatron_snip.snip.plan.cost import GemmTimes
from megatron_snip.snip.plan.options import read_times
from megatron_snip.train.dry_run.counts import HOST, Counts
from megatron_snip.train.dry_run.device import device_of

#: Bytes per second and direction.  PCIe 5.0 x16 carries 63 GB/s (32 GT/s, 16 lanes, 128b/130b); packet headers leave
#: about 55.
HOST_LINK = 55e9
#: Bytes per second of the host's memory for each rank: two sockets with 12 channels of DDR5-4800 each have 922 GB/s, of
#: which 8 ranks get about half.
HOST_MEMORY = 60e9
#: Bits of an element by the dry run's names of GEMM operands.
_BITS = {"fp4": 4, "fp6": 6, "fp8": 8, "fp8 (E5M2)": 8, "bf16": 16, "fp32": 32}


@dataclass(frozen=True)
class Rates:
    """bf16: dense BF16 FLOP/s of a GPU.  link, host: bytes per second and direction between tp or cp ranks, and to the
    host.  times: ratios of formats.  name: where the numbers come from.
    """

    bf16: float
    link: float
    times: GemmTimes
    name: str = "nominal"
    host: float = HOST_LINK

    def update_seconds(self, copied: int, touched: int) -> float:
        """Seconds of AdamW on the host: gradients down and weights up, ``copied`` bytes each, and the update itself.

        An upper bound: the three overlap between units, and some of it with what the device does.
        """
        return 2 * copied / self.host + touched / HOST_MEMORY

    def block_seconds(self, forward: Counts, backward: Counts, *, exposed: bool = False) -> float:
        """Seconds of a block's forward and backward, with the copies to the host that its forward makes.

        A copy hides behind as much computation as that of the block itself: its own and the next block's overlap, and
        blocks are alike.  exposed: its copies back do not hide, because no backward comes first.
        """
        copies = sum(count for what, count in forward.items() if what[:2] == ("bytes", HOST)) / self.host
        run = self.seconds(backward)
        return max(self.seconds(forward), copies) + (run + copies if exposed else max(run, copies))

    def seconds(self, counts: Mapping[tuple[Any, ...], int]) -> float:
        """Seconds of what a dry run counted.  Collectives over dp and pp overlap with GEMMs and are left out."""
        flops, taken = float(counts.get(("flops",), 0)), 0.0
        for what, count in counts.items():
            if what[0] == "gemm":
                m, n, k = (int(size) for size in what[1:4])
                flops -= 2 * m * n * k * count
                taken += 2 * m * n * k * count * self._relative(str(what[4]), n, k) / self.bf16
            elif what[0] == "bytes" and what[1] in ("tp", "cp"):
                taken += count / self.link
        return taken + flops / self.bf16  # what is left are attention's products, in BF16

    def _relative(self, formats: str, n: int, k: int) -> float:
        """Time per FLOP of a GEMM relative to BF16; that of the wider operand."""
        bits = max(_BITS.get(name, 16) for name in formats.split(" x "))
        if self.times.times is None or bits >= 16:
            return bits / 16
        known = [name for name in self.times.times if get_format(name).element_bits == bits]
        return min(
            (sum(self.times.of(name, gemm, n, k) for gemm in GEMMS) / len(GEMMS) for name in known), default=bits / 16
        )


def rates_of(config: Config) -> Rates:
    """The rates of the device that a dry run assumes: H100, or B200 for formats that only Blackwell has."""
    times = read_times(config.snip)
    bf16, link = (2250e12, 900e9) if device_of(config) == "blackwell" else (989e12, 450e9)
    bandwidth = config.dry_run.host_bandwidth
    host = HOST_LINK if bandwidth is None else 1e9 * bandwidth
    return Rates(bf16, link, times, "nominal" if times.times is None else f"nominal, {times.hardware}", host)
