"""The specification of what Blackwell's tensor cores read: packed codes, and one-byte scales in tiles of 128 x 4.

Source: cuBLAS 12.8, "1D Block Scaling Factors Layout".  Matrices here are [outer, reduction] of a GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows of a tile of scales, and bytes of a tile.
TILE_ROWS, TILE_BYTES = 128, 512


def swizzle(scales: Tensor) -> Tensor:
    """One-byte scales [outer, reduction blocks] in tiles of 128 x 4, with zeros beyond the edges: [outer tiles, bytes].

    In a tile, scale (r, c) is byte 16 (r % 32) + 4 (r // 32) + c; tiles run along the reduction dim first.
    """
    rows, cols = scales.shape
    padded = F.pad(scales, (0, -cols % 4, 0, -rows % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(len(tiles), -1)


def pack(codes: Tensor) -> Tensor:
    """Two codes of four bits a byte, the first one low: uint8 [outer, reduction] -> [outer, half of it]."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] & 15 | codes[:, 1::2] << 4


def scale_bytes(scales: Tensor, block: tuple[int, int], size: tuple[int, int], *, each: int, e4m3: bool) -> Tensor:
    """Scales of blocks, float32 [., .], as a byte for every ``each`` elements of codes [outer, reduction] of a size.

    e4m3: whether they become E4M3 and not E8M0.
    """
    repeated = scales.repeat_interleave(block[0], dim=0)[: size[0]]
    repeated = repeated.repeat_interleave(block[1] // each, dim=1)[:, : -(-size[1] // each)]
    if e4m3:
        return repeated.to(torch.float8_e4m3fn).view(torch.uint8)
    # a float32 power of two's exponent field is its E8M0 code; 2**-127, which is subnormal, and 0 have 0
    return (repeated.contiguous().view(torch.int32) >> 23).to(torch.uint8)
