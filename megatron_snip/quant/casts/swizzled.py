"""Specifies Blackwell's operands: packed codes, and one-byte scales in tiles of 128 x 4.

Source: cuBLAS 12.8, "1D Block Scaling Factors Layout".  Matrices here are [outer, reduction], as in a GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows and bytes in a tile of scales.
TILE_ROWS, TILE_BYTES = 128, 512


def swizzle(scales: Tensor) -> Tensor:
    """Arrange one-byte scales [outer, reduction blocks] in tiles of 128 x 4: [outer tiles, bytes], zero-padded.

    In a tile, scale (r, c) is byte 16 (r % 32) + 4 (r // 32) + c.  Tiles follow each other along the reduction dim.
    """
    rows, cols = scales.shape
    padded = F.pad(scales, (0, -cols % 4, 0, -rows % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(len(tiles), -1)


def pack(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes into bytes, low half first: uint8 [outer, reduction] -> [outer, half of it]."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] & 15 | codes[:, 1::2] << 4


def unswizzle(tiles: Tensor, rows: int, cols: int) -> Tensor:
    """Undo ``swizzle``: the scales [rows, cols] in ``tiles``."""
    parts = tiles.view(len(tiles), -1, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(len(tiles) * TILE_ROWS, -1)[:rows, :cols]


def unpack(packed: Tensor, cols: int) -> Tensor:
    """Undo ``pack``: the codes [outer, cols]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(start_dim=1)[:, :cols]


def scales_of_bytes(scales: Tensor, *, e4m3: bool) -> Tensor:
    """Decode bytes from ``scale_bytes`` to float32 scales: [...] -> [...].  An E8M0 0 becomes 2**-127."""
    return scales.view(torch.float8_e4m3fn if e4m3 else torch.float8_e8m0fnu).float()


def scale_bytes(scales: Tensor, block: tuple[int, int], size: tuple[int, int], *, each: int, e4m3: bool) -> Tensor:
    """Encode block scales, float32 [row blocks, column blocks], as one byte per ``each`` elements of the reduction dim.

    size: the codes' [outer, reduction].  e4m3: whether the bytes are E4M3; if not, they are E8M0.
    """
    repeated = scales.repeat_interleave(block[0], dim=0)[: size[0]]
    repeated = repeated.repeat_interleave(block[1] // each, dim=1)[:, : -(-size[1] // each)]
    if e4m3:
        return repeated.to(torch.float8_e4m3fn).view(torch.uint8)
    # the exponent field of a float32 power of two is its E8M0 code; 0 and 2**-127, which is subnormal, have code 0
    return (repeated.contiguous().view(torch.int32) >> 23).to(torch.uint8)
