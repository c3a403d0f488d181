"""Tiny models to pack, and a slow, obvious reader of packs, by docs/pack-format.md alone."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.hf.pack.packing import pack
from tests.models import cached_tiny

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
_KEEP: list[TemporaryDirectory[str]] = []


def source(name: str = "qwen3_moe", dtype: str = "bfloat16") -> Path:
    """A tiny model that tests do not change."""
    return cached_tiny(name, dtype=dtype, tokenizer=True, **SIZES)


@cache
def packed(kind: str, name: str = "qwen3_moe", dtype: str = "bfloat16") -> Path:
    """Its pack, which tests do not change either."""
    _KEEP.append(TemporaryDirectory(prefix="pack-"))
    folder = Path(_KEEP[-1].name) / kind
    pack(str(source(name, dtype)), folder, kind)
    return folder


def header(folder: Path) -> dict:
    return json.loads((folder / "greenroom.json").read_text())


def experts(folder: Path, dtype: str = "") -> dict[str, dict[str, Tensor]]:
    """Layer -> matrix -> [experts, rows, columns] in a dtype, by default the pack's."""
    head = header(folder)
    data = (folder / "experts.greenroom").read_bytes()
    found: dict[str, dict[str, Tensor]] = {}
    for layer in head["layers"]:
        found[layer["name"]] = {}
        for spec in [t for t in layer["tensors"] if "." not in t["name"]]:
            name = spec["name"]
            each = []
            for expert in range(layer["experts"]):
                start = layer["offset"] + expert * layer["stride"]
                tensors = {
                    t["name"]: _tensor(data, start, t)
                    for t in layer["tensors"]
                    if t["name"].split(".")[0] == name
                }
                kind = getattr(torch, dtype or head["dtype"])
                each.append(_decoded(layer["encodings"].get(name), name, tensors, kind))
            found[layer["name"]][name] = torch.stack(each)
    return found


def _tensor(data: bytes, start: int, spec: dict) -> Tensor:
    dtype = getattr(torch, spec["dtype"])
    count = int(np.prod(spec["shape"]))
    return torch.frombuffer(
        bytearray(data), dtype=dtype, count=count, offset=start + spec["offset"]
    ).view(spec["shape"])


def _decoded(encoding: str | None, name: str, parts: dict[str, Tensor], dtype: torch.dtype):
    codes = parts[name]
    if encoding is None:
        return codes.to(dtype)
    if encoding == "bf12":
        return _from_bf12(codes, *(parts[f"{name}.{x}"] for x in ("ends", "exponents", "escapes")))
    scale = parts[f"{name}.scale"].float()
    if encoding == "int4":
        low, high = (codes & 15).int() - 8, (codes >> 4).int() - 8
        codes = torch.stack((low, high), -1).flatten(1)
    codes = codes.float()
    rows, columns = codes.shape
    down, across = rows // scale.shape[0], columns // scale.shape[1]
    full = scale.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return (codes * full).to(dtype)


def _from_bf12(codes: Tensor, ends: Tensor, exponents: Tensor, escapes: Tensor) -> Tensor:
    """Weight by weight."""
    rows, columns = len(codes), codes.shape[1] // 3 * 2
    bits = np.zeros((rows, columns), np.uint16)
    table, listed = exponents[0].tolist(), escapes[0].numpy().view(np.uint32).tolist()
    begin = 0
    for row, data in enumerate(codes.tolist()):
        for place in range(columns):
            code = data[columns + place // 2] >> 4 * (place % 2) & 15
            first, j = place // 64 * 64, place % 64
            column = first + 8 * (j // 16) + j % 8 + (32 if j % 16 > 7 else 0)
            if first + 64 > columns:  # the last 32
                column = place
            sign, mantissa = data[place] >> 7, data[place] & 127
            bits[row, column] = sign << 15 | table[code] << 7 | mantissa
        for entry in listed[begin : int(ends[row, 0])]:
            bits[row, entry & 0xFFFF] = entry >> 16
        begin = int(ends[row, 0])
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def fill(model: PreTrainedModel, folder: Path, dtype: str = "") -> None:
    """Put a pack's experts into a whole model. Encoded matrices are [outputs, inputs] always."""
    tables = experts(folder, dtype)
    for layer in header(folder)["layers"]:
        module = model.get_submodule(layer["name"])
        for name, full in tables[layer["name"]].items():
            flip = module.is_transposed and name in layer["encodings"]
            module.get_parameter(name).data.copy_(full.transpose(1, 2) if flip else full)
