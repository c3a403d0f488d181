"""Quantised keys and values: their formats, and conversion from and to the model's type.

A head's key or value of one token is a row of blocks of 32 numbers. A block has a scale (int8), or
a scale and an offset (int4), in bfloat16, and a code for each number: number = code * scale +
offset. The compiled attention reads these rows (native/kv_rows.hpp); on a GPU, torch decodes them.
Blocks of this size are those of llama.cpp's q8_0 and q4_1.
"""

from __future__ import annotations

from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

BLOCK = 32  # numbers that share a scale
_SEVERAL = 1 << 15  # numbers that are worth a parallel region
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class KeyValueFormat:
    """Format of quantised keys and values.

    name:   a value of `--kv`
    number: the format's number in native/kv_rows.hpp
    bits:   of a code
    header: bytes before the codes of a block
    """

    name: str
    number: int
    bits: int
    header: int

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` numbers."""
        return -(-width // BLOCK) * (self.header + BLOCK * self.bits // 8)

    def pack(self, source: Tensor, target: Tensor) -> None:
        """Quantise keys or values [batch, heads, tokens, width] into rows of bytes.

        `target` is of type uint8, [batch, heads, tokens, `row_bytes(width)`].
        """
        if _is_native(source):
            for x, rows in zip(source, target, strict=True):
                self._convert("pack_keys_values", x, rows, x.dtype, x.shape[-1])
        else:
            target.copy_(self.pack_by_torch(source))

    def expand(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Decode rows of bytes to keys or values [batch, heads, tokens, width] of a type."""
        out = torch.empty((*rows.shape[:-1], width), dtype=dtype, device=rows.device)
        if not _is_native(out):
            return out.copy_(self.expand_by_torch(rows, width))
        for source, x in zip(rows, out, strict=True):
            self._convert("expand_keys_values", source, x, dtype, width)
        return out

    def _convert(
        self, kernel: str, source: Tensor, target: Tensor, dtype: torch.dtype, width: int
    ) -> None:
        heads, tokens, _ = source.shape
        call = library().structure("KeyValueCall")(
            source=source.data_ptr(),
            source_head=source.stride(0) * source.itemsize,
            source_token=source.stride(1) * source.itemsize,
            target=target.data_ptr(),
            target_head=target.stride(0) * target.itemsize,
            target_token=target.stride(1) * target.itemsize,
            heads=heads,
            tokens=tokens,
            width=width,
            format=self.number,
        )
        kernel_entry(kernel, dtype)(addressof(call), heads * tokens * width > _SEVERAL)

    def pack_by_torch(self, source: Tensor) -> Tensor:
        """Quantise keys or values as `pack` does, on any device; return the rows of bytes."""
        *shape, width = source.shape
        x = source.float()
        if more := -width % BLOCK:  # the first number of the last block stands for missing ones
            last = x[..., width + more - BLOCK, None]
            x = torch.cat([x, last.expand(*shape, more)], -1)
        blocks = x.view(*shape, -1, BLOCK)
        fault = (blocks * 0).sum(-1)  # 0, or NaN
        if self.bits == 8:
            low, least, most = torch.zeros_like(fault), -127, 127
            span = blocks.abs().amax(-1) / 127
        else:
            low, least, most = (blocks.amin(-1) + 0.0).bfloat16().float(), 0, 15  # never -0
            span = (blocks.amax(-1) - low) / 15
        scale = (span + fault).bfloat16()
        wide = scale.float()
        inverse = torch.where(wide > 0, 1 / wide, 0)
        near = ((blocks - low[..., None]) * inverse[..., None]).clamp(least, most).round()
        codes = near.nan_to_num().to(torch.int16)
        headers = [_bytes(scale)] if self.bits == 8 else [_bytes(scale), _bytes(low.bfloat16())]
        if self.bits == 4:
            codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        packed = torch.cat([*headers, (codes & 255).to(torch.uint8)], -1)
        return packed.flatten(-2)

    def expand_by_torch(self, rows: Tensor, width: int) -> Tensor:
        """Decode rows of bytes as `expand` does, on any device; return float32."""
        blocks = rows.unflatten(-1, (-1, self.row_bytes(BLOCK)))
        scale = blocks[..., :2].contiguous().view(torch.bfloat16).float()
        codes = blocks[..., self.header :]
        if self.bits == 8:
            x = codes.contiguous().view(torch.int8).float() * scale
        else:
            offset = blocks[..., 2:4].contiguous().view(torch.bfloat16).float()
            x = torch.cat([codes & 15, codes >> 4], -1).float() * scale + offset
        return x.flatten(-2)[..., :width]


FORMATS = {
    each.name: each for each in (KeyValueFormat("int8", 1, 8, 2), KeyValueFormat("int4", 2, 4, 4))
}


def _is_native(x: Tensor) -> bool:
    """Check that the compiled conversion can read, or write, keys or values."""
    return x.device.type == "cpu" and x.dtype in _TYPES and x.stride(-1) == 1


def _bytes(numbers: Tensor) -> Tensor:
    return numbers[..., None].contiguous().view(torch.uint8)
