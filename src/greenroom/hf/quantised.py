"""Quantised safetensors: which stored tensors are one matrix, and in which encoding.

A quantised checkpoint holds a matrix as codes and scales under names of their own. Here they become
one encoded tensor with the name that an unquantised checkpoint would give it. So everything after
(transformers' renamings and conversions, the index of experts) need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from greenroom.core.layout import BLOCKS, ITEMSIZE
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.header import Stored

Tensors = dict[str, Stored]
SERVED = "fp8 with block scales, mxfp4, and compressed-tensors' pack-quantized int4 are"
FP8_SCALES = ("_scale_inv", "scale", "qscale_weight")  # after the name, or in the place of `weight`
UNUSED = ("activation_scale", "input_scale")  # of activations, which are not quantised here


def encoded(config: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """The tensors of a checkpoint by the names that it would have unquantised.

    CheckpointError where scales are missing or of the wrong shape; UnsupportedModel, naming the
    method, where it is not served.
    """
    settings = settings_of(config)
    if settings is None:
        return tensors
    method = str(settings.get("quant_method", "unknown"))
    if method not in METHODS:
        raise UnsupportedModel(
            f"{folder / 'config.json'}: the checkpoint is quantised ({method}), which is not served"
            f" ({SERVED})"
        )
    return METHODS[method](settings, tensors, folder)


def settings_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config or of one of its parts."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        settings = part.get("quantization_config")
        if isinstance(settings, dict):
            return settings
    return None


def _fp8(settings: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """DeepSeek's: `X.weight` in 8-bit floats and `X.weight_scale_inv`, one scale a block."""
    block = settings.get("weight_block_size")
    found = dict(tensors)
    for name, codes in tensors.items():
        if name.endswith(UNUSED):
            found.pop(name)
        if codes.dtype != "float8_e4m3fn":
            continue
        stem = name.removesuffix("weight")
        names = [name + FP8_SCALES[0], *(stem + last for last in FP8_SCALES[1:] if stem != name)]
        scale = next((other for other in names if other in tensors), None)
        if scale is None:
            raise CheckpointError(f"{folder}: {name} is quantised, but {names[0]} is missing")
        unit, across = block or codes.shape[-2:]
        rows = -(-codes.shape[-2] // unit)
        shape = (*codes.shape[:-2], rows, -(-codes.shape[-1] // across))
        stored = found.pop(scale)
        if block is None and stored.shape in ((), (1,)):  # one scale for all
            stored = replace(stored, shape=shape)
        _check_shape(scale, stored, shape, name, codes, folder)
        if stored.dtype == "uint8":
            stored = replace(stored, dtype="float8_e8m0fnu")
        if codes.shape[-1] % shape[-1]:
            raise UnsupportedModel(
                f"{folder}: {name} has {codes.shape[-1]} columns, which blocks of {across} do not"
                " divide"
            )
        found[name] = replace(
            codes,
            encoding="fp8",
            codes=codes.shape,
            unit=min(unit, codes.shape[-2]),
            companions=(stored,),
        )
    return found


def _mxfp4(settings: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """gpt-oss's: `X_blocks` [E, outputs, groups, 16] and `X_scales` [E, outputs, groups]."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith("_blocks") or blocks.dtype != "uint8":
            continue
        stem = name.removesuffix("_blocks")
        scale = f"{stem}_scales"
        if scale not in tensors:
            raise CheckpointError(f"{folder}: {name} is quantised, but {scale} is missing")
        *lead, rows, groups, _ = blocks.shape
        _check_shape(scale, tensors[scale], (*lead, rows, groups), name, blocks, folder)
        del found[name], found[scale]
        found[stem] = replace(
            blocks,
            encoding="mxfp4",
            shape=(*lead, 32 * groups, rows),
            codes=(*lead, rows, 16 * groups),
            transposed=True,
            companions=(tensors[scale],),
        )
    return found


def _compressed(settings: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """compressed-tensors' `pack-quantized`: `X.weight_packed` int32 and `X.weight_scale`."""
    groups = settings.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") or {}
        what = f"{group.get('format') or settings.get('format')}, {weights.get('num_bits')} bits"
        if weights.get("type") != "int" or weights.get("num_bits") != 4:
            raise _refused(folder, f"compressed-tensors: {what}")
        if not weights.get("symmetric", True):
            raise _refused(folder, f"compressed-tensors: {what}, asymmetric")
        if weights.get("actorder") in ("group", True):
            raise _refused(folder, f"compressed-tensors: {what}, reordered by activation")
    found = dict(tensors)
    for name, codes in tensors.items():
        if not name.endswith("weight_packed"):
            continue
        stem = name.removesuffix("_packed")
        scale = f"{stem}_scale"
        if codes.dtype != "int32" or scale not in tensors:
            raise CheckpointError(f"{folder}: {name} is quantised, but {scale} is missing")
        columns = codes.shape[-1] * BLOCKS["ct_int4"][0]
        size = next(iter(groups.values()))["weights"].get("group_size") or columns
        shape = (*codes.shape[:-1], -(-columns // (columns if size < 1 else size)))
        _check_shape(scale, tensors[scale], shape, name, codes, folder)
        for other in (name, scale, f"{stem}_shape"):
            found.pop(other, None)
        found[stem] = replace(
            codes,
            encoding="ct_int4",
            shape=(*codes.shape[:-1], columns),
            codes=codes.shape,
            companions=(tensors[scale],),
        )
    if odd := next((name for name in found if name.endswith("weight_scale")), None):
        raise _refused(folder, f"compressed-tensors: {odd} belongs to another format")
    return found


def _check_shape(
    name: str, stored: Stored, right: tuple[int, ...], of: str, codes: Stored, folder: Path
) -> None:
    if stored.shape != right:
        raise CheckpointError(
            f"{folder}: {name} has shape {list(stored.shape)}, but {list(right)} is right for"
            f" {of} {list(codes.shape)}"
        )
    if stored.dtype not in ITEMSIZE:
        raise UnsupportedModel(f"{folder}: {name} is stored as {stored.dtype}")


def _refused(folder: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{folder / 'config.json'}: {what}: is not served ({SERVED})")


METHODS: dict[str, Callable[[dict[str, Any], Tensors, Path], Tensors]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
