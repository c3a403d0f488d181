"""Encoded experts of any bytes, of every encoding that has a compiled product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.layout import BLOCKS, PLAIN, SlotLayout
from greenroom.hf.pack.exponents import bf12
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.encodings.bf12 import escape_room
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.matrix import has_format
from greenroom.runtime.slots.block_fields import layout_in_fields
from tests.ggml_blocks import GGML, sane_scales
from tests.runtime.kernels.toys import EXPERTS, ToySlots

ITEM = {"fp8": "float8_e4m3fn", "int8": "int8", "symmetric8": "int8"}
ITEM |= dict.fromkeys(("symmetric4", "affine4", "affine8", "indexed4", "indexed8"), "int32")


@dataclass(frozen=True)
class Style:
    """An encoding, the type of its scales and the weights that share one."""

    name: str
    scales: str = ""
    share: tuple[int, int] = (1, 32)
    codes: str = ""  # their type, if not the usual one; zeros of int8 codes are int8 too

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.scales, self.codes)))


STYLES = (
    *(Style(name) for name in GGML if has_format(name)),
    Style("gguf_nvfp4_scaled"),
    Style("mxfp4", "uint8"),
    Style("nvfp4", "float8_e4m3fn", (1, 16)),
    Style("ct_nvfp4", "float8_e4m3fn", (1, 16)),
    Style("int8", "float16", (1, 64)),
    Style("int4", "float16"),
    Style("fp8", "float32", (128, 128)),
    Style("bf12", share=(1, 1 << 20)),
    Style("symmetric4", "float32", (1, 64)),
    Style("symmetric4", "bfloat16", (1, 32)),
    Style("symmetric4", "float16", (1, 128)),
    Style("symmetric8", "bfloat16", (1, 1 << 20)),
    Style("affine4", "float16"),
    Style("affine8", "bfloat16", (1, 64)),
    Style("indexed4", "float16"),
    Style("indexed8", "float32"),
)
# Encodings that multiply inputs of float32.
FLOATS = ("iq1", "iq2", "iq3", "tq", "symmetric", "affine", "indexed", "fp8", "bf12", PLAIN)
# Every affine encoding with every type of scales and codes.
AFFINE_STYLES = tuple(
    Style(f"{kind}{bits}", scales, (1, group), codes)
    for kind in ("symmetric", "affine", "indexed")
    for bits, codes in ((4, "int32"), (8, "int32"), (8, "int8"))
    for scales, group in (("float32", 32), ("bfloat16", 64), ("float16", 32))
)


def planes_of(style: Style, kernels: str = "native") -> int:
    """Planes of bytes of packed inputs; 0: they are float32."""
    wide = style.name == "int4" and style.share[1] > 32
    if kernels == "rounded" or style.name.startswith(FLOATS) or wide:
        return 0
    return 1 if kernels == "native" and style.name in (*GGML, "gguf_nvfp4_scaled") else 2


def tensors_of(
    style: Style, name: str, shape: tuple[int, int], random: np.random.Generator
) -> dict[str, Tensor]:
    """The parts of one matrix [outputs, inputs], with weights of about a trained model's size."""
    (rows, columns), (inputs, nbytes) = shape, BLOCKS[style.name]
    if style.name == "bf12":
        return bf12_tensors(name, shape, random)
    assert columns % inputs == 0
    raw = random.integers(0, 256, (rows, columns // inputs * nbytes), np.uint8)
    if style.name in GGML:
        sane_scales(style.name, raw.reshape(-1, nbytes), random)
        return {name: torch.from_numpy(raw)}
    if style.name == "gguf_nvfp4_scaled":
        sane_scales("gguf_nvfp4", raw.reshape(-1, nbytes), random)
        factor = torch.from_numpy(random.uniform(0.05, 0.1, (2, 1)).astype(np.float32))
        return {name: torch.from_numpy(raw), f"{name}.matrix_scale": factor}
    codes = torch.from_numpy(raw).view(getattr(torch, style.codes or ITEM.get(style.name, "uint8")))
    down, across = style.share
    size = (-(-rows // down), columns // across) if columns % across == 0 else (-(-rows // down), 1)
    if style.name == "mxfp4":
        scale = torch.from_numpy(random.integers(118, 128, size, np.uint8))
    elif style.name.endswith("nvfp4"):
        scale = torch.from_numpy(random.integers(1, 60, size, np.uint8)).view(torch.float8_e4m3fn)
        matrix_scale = torch.from_numpy(random.uniform(0.05, 0.1, (2, 1)).astype(np.float32))
        if style.name == "ct_nvfp4":
            matrix_scale = 1 / matrix_scale
        return {name: codes, f"{name}.scale": scale, f"{name}.matrix_scale": matrix_scale}
    else:
        steps = 2000 if style.name == "fp8" else 1000 if style.name.endswith("8") else 60
        scale = torch.from_numpy(random.normal(size=size) / steps)
        scale = scale.to(getattr(torch, style.scales))
    if style.name == "fp8":  # the two codes that are no numbers
        raw[raw & 0x7F == 0x7F] = 0x55
    parts = {name: codes, f"{name}.scale": scale}
    if style.name.startswith(("affine", "indexed")):
        top = 1 << int(style.name[-1])
        zero = torch.from_numpy(random.integers(0, top, size, np.uint8))
        parts[f"{name}.zero"] = zero.view(torch.int8 if codes.dtype is torch.int8 else torch.uint8)
    if style.name.startswith("indexed"):
        runs = [random.permutation(columns) // across for _ in range(2 - rows % 2)]
        parts[f"{name}.index"] = torch.from_numpy(np.stack(runs).astype(np.int32))
    return parts


def bf12_tensors(name: str, shape: tuple[int, ...], random: Any) -> dict[str, Tensor]:
    """A matrix in bf12, some of whose weights have exponents without a code."""
    weights = random.normal(size=shape)
    rare = random.integers(0, weights.size, 12)
    weights.flat[rare] *= np.exp2(random.integers(-40, -12, 12))
    bits = torch.from_numpy(weights).bfloat16().view(torch.int16).numpy().view(np.uint16)
    rows, columns = shape
    parts = {
        name: np.zeros((rows, columns // 2 * 3), np.uint8),
        f"{name}.ends": np.zeros((rows, 1), np.int32),
        f"{name}.exponents": np.zeros((1, 16), np.uint8),
        f"{name}.escapes": np.zeros((1, escape_room(rows, columns)), np.int32),
    }
    assert bf12(bits, *parts.values())
    return {key: torch.from_numpy(part) for key, part in parts.items()}


class Coded:
    """Experts of a module, encoded and expanded, in slots with the same numbers."""

    def __init__(
        self,
        module: nn.Module,
        up: Style | None,
        down: Style | None,
        seed: int = 0,
        scale_bits: int = 0,
        flip: bool = True,
        slots: Callable[[SlotLayout, int], Any] = ToySlots,
        fields: bool = False,
    ) -> None:
        """`scale_bits`: significant bits of float16 scales; `flip`: plain matrices beside encoded
        ones lie row by output too; `slots` makes the memory of experts; `fields`: blocks lie in the
        order of fields, where they can."""
        self._slots, self._fields = slots, fields
        random = np.random.default_rng(seed)
        first = "gate_up_proj" if module.has_gate else "up_proj"
        shapes = {n: tuple(getattr(module, n).shape[1:]) for n in (first, "down_proj")}
        self.dtype = next(p.dtype for p in module.parameters() if p.dim() == 3)
        name = str(self.dtype).removeprefix("torch.")
        styles = {first: up, "down_proj": down}
        experts: list[dict[str, Tensor]] = []
        plains: list[dict[str, Tensor]] = []
        for expert in range(EXPERTS):
            experts.append({})
            plains.append({})
            for key, style in styles.items():
                shape = shapes[key][::-1] if module.is_transposed else shapes[key]
                if style is None:
                    w = getattr(module, key)[expert].data
                    plain = w.T.contiguous() if module.is_transposed else w
                    parts = {key: plain if flip else w}
                else:
                    parts = tensors_of(style, key, shape, random)
                    if scale_bits:
                        _shorten(parts[f"{key}.scale"], scale_bits)
                    values = list(parts.values())
                    plain = ENCODINGS[style.name].decode(values, shape, self.dtype)
                experts[-1] |= parts
                plains[-1][key] = plain
        encodings = {key: style.name for key, style in styles.items() if style}
        self.places = random.permutation(EXPERTS + 3)[:EXPERTS].tolist()
        self.layer = self._layer(module, experts, encodings, name)
        # The same matrices, row by output, whatever the flag says.
        flag, module.is_transposed = module.is_transposed, False
        self.plain = self._layer(module, plains, {}, name)
        module.is_transposed = flag

    def _layer(
        self,
        module: nn.Module,
        experts: list[dict[str, Tensor]],
        encodings: dict[str, str],
        dtype: str,
    ) -> LayerExperts:
        sizes = [(k, tuple(t.shape), str(t.dtype)[6:]) for k, t in experts[0].items()]
        layout = SlotLayout.pack(sizes, encodings, dtype)
        if self._fields:
            layout = layout_in_fields(layout)
        slots = self._slots(layout, EXPERTS + 3)
        for expert, slot in enumerate(self.places):
            for key, tensor in experts[expert].items():
                slots.put(slot, layout[key], tensor)
        return LayerExperts(module, layout, slots)


def _shorten(scale: Tensor, bits: int) -> None:
    """Keep the first significant bits of float16 numbers, the last of them set somewhere."""
    bit_patterns = scale.view(torch.int16)
    bit_patterns &= -1 << 11 - bits
    bit_patterns[0, 0] |= 1 << 11 - bits
