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

from greenroom.core.layout import BLOCKS, FLOATS
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import Stored

Tensors = dict[str, Stored]
SERVED = "fp8 with block scales, mxfp4, and compressed-tensors' pack-quantized int4 are"
FP8_SCALES = ("_scale_inv", "scale", "qscale_weight")  # after the name, or in the place of `weight`
E8M0 = ("uint8", "float8_e8m0fnu")  # powers of two; some files call them uint8
UNUSED = ("activation_scale", "input_scale")  # of activations, which are not quantised here


def encoded(config: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """The tensors of a checkpoint by the names that it would have unquantised.

    CheckpointError where the config's settings are wrong, or where codes and scales are missing, of
    a wrong type or of a wrong shape; UnsupportedModel, naming the method, where it is not served.
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
    block = _block(settings, folder)
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
        _check_axes(name, codes, 2, folder)
        unit, across = block or codes.shape[-2:]
        rows = -(-codes.shape[-2] // unit)
        shape = (*codes.shape[:-2], rows, -(-codes.shape[-1] // across))
        stored = found.pop(scale)
        if block is None and stored.shape in ((), (1,)):  # one scale for all
            stored = replace(stored, shape=shape)
        _check_scales(scale, stored, shape, (*FLOATS, *E8M0), name, codes, folder)
        if stored.dtype in E8M0:
            stored = replace(stored, dtype="float8_e8m0fnu")
        if codes.shape[-1] % min(across, codes.shape[-1]):
            raise _undivided(name, codes.shape[-1], across, folder)
        found[name] = replace(
            codes,
            encoding="fp8",
            codes=codes.shape,
            unit=min(unit, codes.shape[-2]),
            companions=(stored,),
        )
    return found


def _block(settings: dict[str, Any], folder: Path) -> tuple[int, int] | None:
    """The rows and columns that share a scale; None where one is for all of a matrix."""
    block = settings.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(_positive, block)):
        raise _wrong(folder, "weight_block_size", block, "two positive numbers, or null")
    return block[0], block[1]


def _mxfp4(settings: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """gpt-oss's: `X_blocks` [E, outputs, groups, 16] and `X_scales` [E, outputs, groups]."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        stem = name.removesuffix("_blocks")
        scale = f"{stem}_scales"
        if stem == name or (blocks.dtype != "uint8" and scale not in tensors):
            continue
        if scale not in tensors:
            raise CheckpointError(f"{folder}: {name} is quantised, but {scale} is missing")
        _check_codes(name, blocks, "uint8", folder)
        _check_axes(name, blocks, 3, folder)
        *lead, rows, groups, nbytes = blocks.shape
        if nbytes != BLOCKS["mxfp4"][1]:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(blocks.shape)}, but a block has"
                f" {BLOCKS['mxfp4'][1]} bytes"
            )
        shape = (*lead, rows, groups)
        _check_scales(scale, tensors[scale], shape, ("uint8",), name, blocks, folder)
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
    sizes = _group_sizes(settings, folder)
    found = dict(tensors)
    for name, codes in tensors.items():
        if not name.endswith("weight_packed"):
            continue
        stem = name.removesuffix("_packed")
        scale = f"{stem}_scale"
        if scale not in tensors:
            raise CheckpointError(f"{folder}: {name} is quantised, but {scale} is missing")
        _check_codes(name, codes, "int32", folder)
        _check_axes(name, codes, 2, folder)
        columns = codes.shape[-1] * BLOCKS["ct_int4"][0]
        given = tensors[scale].shape[-1:]
        shape = (*codes.shape[:-1], _scales_a_row(name, columns, sizes, given, folder))
        _check_scales(scale, tensors[scale], shape, FLOATS, name, codes, folder)
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


def _group_sizes(settings: dict[str, Any], folder: Path) -> list[int]:
    """The inputs that share a scale, of each group of matrices; 0: all of a row."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _wrong(folder, "config_groups", groups, "a table of groups of matrices")
    sizes = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _wrong(folder, f"config_groups.{name}", group, "a table with one of weights")
        form = group.get("format") or settings.get("format")
        what = f"{form}, {weights.get('num_bits')} bits"
        integers = weights.get("type") == "int" and weights.get("num_bits") == 4
        if form != "pack-quantized" or not integers:
            raise _refused(folder, f"compressed-tensors: {what}")
        if not weights.get("symmetric", True):
            raise _refused(folder, f"compressed-tensors: {what}, asymmetric")
        if weights.get("actorder") in ("group", True):
            raise _refused(folder, f"compressed-tensors: {what}, reordered by activation")
        size = weights.get("group_size")
        if size not in (None, -1) and not _positive(size):
            raise _wrong(folder, f"config_groups.{name}.weights.group_size", size, "a number")
        sizes.append(0 if size in (None, -1) else size)
    return sizes


def _scales_a_row(
    name: str, columns: int, sizes: list[int], given: tuple[int, ...], folder: Path
) -> int:
    """As many as are given, where the size of a group makes so many; else what would be right.

    That tells to which group a matrix belongs: sizes that divide a row give different numbers.
    """
    runs = [min(size or columns, columns) for size in sizes]
    counts = [columns // run for run in runs if columns % run == 0]
    if not counts:
        raise _undivided(name, columns, runs[0], folder)
    return given[0] if given and given[0] in counts else counts[0]


def _positive(number: Any) -> bool:
    return type(number) is int and number > 0


def _wrong(folder: Path, key: str, value: Any, right: str) -> CheckpointError:
    """The error for a setting of quantization_config."""
    said = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
    return CheckpointError(
        f"{folder / 'config.json'}: quantization_config.{key} is {said}, not {right}"
    )


def _check_codes(name: str, codes: Stored, dtype: str, folder: Path) -> None:
    if codes.dtype != dtype:
        raise CheckpointError(f"{folder}: {name} is stored as {codes.dtype}, but codes are {dtype}")


def _check_axes(name: str, codes: Stored, axes: int, folder: Path) -> None:
    if len(codes.shape) < axes or 0 in codes.shape:
        raise CheckpointError(
            f"{folder}: {name} has shape {list(codes.shape)}, which is no quantised matrix's"
        )


def _check_scales(
    name: str,
    stored: Stored,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    of: str,
    codes: Stored,
    folder: Path,
) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"{folder}: {name} has shape {list(stored.shape)}, but {list(shape)} is right for"
            f" {of} {list(codes.shape)}"
        )
    if stored.dtype not in dtypes:
        raise CheckpointError(
            f"{folder}: {name} is stored as {stored.dtype}, but scales are one of"
            f" {', '.join(dtypes)}"
        )


def _undivided(name: str, columns: int, size: int, folder: Path) -> UnsupportedModel:
    return UnsupportedModel(
        f"{folder}: {name} has {columns} columns, which blocks of {size} do not divide"
    )


def _refused(folder: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{folder / 'config.json'}: {what}: is not served ({SERVED})")


METHODS: dict[str, Callable[[dict[str, Any], Tensors, Path], Tensors]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
