"""Quantised safetensors: which stored tensors are one matrix, and in which encoding.

A quantised checkpoint holds a matrix as codes and scales under names of their own. Here they become
one encoded tensor with the name that an unquantised checkpoint would give it. So everything after
(transformers' renamings and conversions, the index of experts) need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from greenroom.core.layout import BLOCKS, FLOATS
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor

Tensors = dict[str, StoredTensor]
SERVED = "fp8 with block scales, mxfp4, and compressed-tensors' pack-quantized int4 are"
FP8_SCALES = ("_scale_inv", "scale", "qscale_weight")  # after the name, or in the place of `weight`
E8M0 = ("uint8", "float8_e8m0fnu")  # powers of two; some files call them uint8
UNUSED = ("activation_scale", "input_scale")  # of activations, which are not quantised here


def combine_codes_and_scales(config: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """The tensors of a checkpoint by the names that it would have unquantised.

    CheckpointError where the config's settings are wrong, or where codes and scales are missing, of
    a wrong type or of a wrong shape; UnsupportedModel, naming the method, where it is not served.
    """
    settings = settings_of(config)
    if settings is None:
        return tensors
    method = str(settings.get("quant_method", "unknown"))
    found = _Quantised(settings, tensors, folder)
    if method not in METHODS:
        raise UnsupportedModel(
            f"{found.config}: the checkpoint is quantised ({method}), which is not served"
            f" ({SERVED})"
        )
    METHODS[method](found)
    return found.made


def settings_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config or of one of its parts."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        settings = part.get("quantization_config")
        if isinstance(settings, dict):
            return settings
    return None


class _Quantised:
    """A quantised checkpoint; its codes and scales become encoded tensors in `made`."""

    def __init__(self, settings: dict[str, Any], tensors: Tensors, folder: Path) -> None:
        self.settings, self.tensors, self.made = settings, tensors, dict(tensors)
        self.folder, self.config = folder, folder / "config.json"

    def scale_of(self, name: str, dtype: str, axes: int, scales: Sequence[str]) -> str:
        """The name of the scales of codes, which must be of this type and have so many axes."""
        codes = self.tensors[name]
        scale = next((each for each in scales if each in self.tensors), None)
        if scale is None:
            raise self.error(f"{name} is quantised, but {scales[0]} is missing")
        if codes.dtype != dtype:
            raise self.error(f"{name} is stored as {codes.dtype}, but codes are {dtype}")
        if len(codes.shape) < axes or 0 in codes.shape:
            raise self.error(
                f"{name} has shape {list(codes.shape)}, which is no quantised matrix's"
            )
        return scale

    def join(
        self,
        names: tuple[str, str, str],
        matrix: StoredTensor,
        scales: StoredTensor,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
    ) -> None:
        """Make of `names` (codes, scales, and what they become) the tensor `matrix`. Scales must be
        of this shape and of one of these types."""
        codes, scale, target = names
        if scales.shape != shape:
            raise self.error(
                f"{scale} has shape {list(scales.shape)}, but {list(shape)} is right for"
                f" {codes} {list(self.tensors[codes].shape)}"
            )
        if scales.dtype not in dtypes:
            raise self.error(
                f"{scale} is stored as {scales.dtype}, but scales are one of {', '.join(dtypes)}"
            )
        for name in {codes, scale} - {target}:
            del self.made[name]
        self.made[target] = replace(matrix, companions=(scales,))

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {what}")

    def undivided(self, name: str, columns: int, size: int) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.folder}: {name} has {columns} columns, which blocks of {size} do not divide"
        )

    def refused(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.config}: compressed-tensors: {what}: is not served ({SERVED})"
        )

    def wrong(self, key: str, value: Any, right: str) -> CheckpointError:
        """The error for a setting of quantization_config."""
        said = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
        return CheckpointError(f"{self.config}: quantization_config.{key} is {said}, not {right}")


def _fp8(found: _Quantised) -> None:
    """DeepSeek's: `X.weight` in 8-bit floats and `X.weight_scale_inv`, one scale a block."""
    block = _block(found)
    for name, codes in found.tensors.items():
        if name.endswith(UNUSED):
            del found.made[name]
        if codes.dtype != "float8_e4m3fn":
            continue
        stem = name.removesuffix("weight")
        names = [name + FP8_SCALES[0], *(stem + last for last in FP8_SCALES[1:] if stem != name)]
        scale = found.scale_of(name, codes.dtype, 2, names)
        *lead, rows, columns = codes.shape
        down, across = block or (rows, columns)
        shape = (*lead, -(-rows // down), -(-columns // across))
        stored = found.tensors[scale]
        if block is None and stored.shape in ((), (1,)):  # one scale for all
            stored = replace(stored, shape=shape)
        if stored.dtype in E8M0:
            stored = replace(stored, dtype="float8_e8m0fnu")
        matrix = replace(codes, encoding="fp8", codes=codes.shape, unit=min(down, rows))
        found.join((name, scale, name), matrix, stored, shape, (*FLOATS, *E8M0))
        if columns % min(across, columns):
            raise found.undivided(name, columns, across)


def _block(found: _Quantised) -> tuple[int, int] | None:
    """The rows and columns that share a scale; None where one is for all of a matrix."""
    block = found.settings.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(_positive, block)):
        raise found.wrong("weight_block_size", block, "two positive numbers, or null")
    return block[0], block[1]


def _mxfp4(found: _Quantised) -> None:
    """gpt-oss's: `X_blocks` [E, outputs, groups, 16] and `X_scales` [E, outputs, groups]."""
    inputs, nbytes = BLOCKS["mxfp4"]
    for name, blocks in found.tensors.items():
        stem = name.removesuffix("_blocks")
        scale = f"{stem}_scales"
        if stem == name or (blocks.dtype != "uint8" and scale not in found.tensors):
            continue
        found.scale_of(name, "uint8", 3, [scale])
        *lead, rows, groups, width = blocks.shape
        if width != nbytes:
            raise found.error(
                f"{name} has shape {list(blocks.shape)}, but a block has {nbytes} bytes"
            )
        matrix = replace(
            blocks,
            encoding="mxfp4",
            shape=(*lead, inputs * groups, rows),
            codes=(*lead, rows, nbytes * groups),
            transposed=True,
        )
        shape = (*lead, rows, groups)
        found.join((name, scale, stem), matrix, found.tensors[scale], shape, ("uint8",))


def _compressed(found: _Quantised) -> None:
    """compressed-tensors' `pack-quantized`: `X.weight_packed` int32 and `X.weight_scale`."""
    sizes = _group_sizes(found)
    for name, codes in found.tensors.items():
        if not name.endswith("weight_packed"):
            continue
        stem = name.removesuffix("_packed")
        scale = found.scale_of(name, "int32", 2, [f"{stem}_scale"])
        columns = codes.shape[-1] * BLOCKS["ct_int4"][0]
        stored = found.tensors[scale]
        runs = [min(size or columns, columns) for size in sizes]
        counts = [columns // run for run in runs if columns % run == 0]
        if not counts:
            raise found.undivided(name, columns, runs[0])
        # Which group a matrix belongs to: sizes that divide a row give different numbers.
        count = next((n for n in counts if stored.shape[-1:] == (n,)), counts[0])
        matrix = replace(
            codes, encoding="ct_int4", shape=(*codes.shape[:-1], columns), codes=codes.shape
        )
        found.join((name, scale, stem), matrix, stored, (*codes.shape[:-1], count), FLOATS)
        found.made.pop(f"{stem}_shape", None)
    if odd := next((name for name in found.made if name.endswith("weight_scale")), None):
        raise found.refused(f"{odd} belongs to another format")


def _group_sizes(found: _Quantised) -> list[int]:
    """The inputs that share a scale, of each group of matrices; 0: all of a row."""
    groups = found.settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise found.wrong("config_groups", groups, "a table of groups of matrices")
    sizes = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise found.wrong(f"config_groups.{name}", group, "a table with one of weights")
        form = group.get("format") or found.settings.get("format")
        what = f"{form}, {weights.get('num_bits')} bits"
        integers = weights.get("type") == "int" and weights.get("num_bits") == 4
        if form != "pack-quantized" or not integers:
            raise found.refused(what)
        if not weights.get("symmetric", True):
            raise found.refused(f"{what}, asymmetric")
        if weights.get("actorder") in ("group", True):
            raise found.refused(f"{what}, reordered by activation")
        size = weights.get("group_size")
        if size in (None, -1):
            size = 0
        elif not _positive(size):
            raise found.wrong(f"config_groups.{name}.weights.group_size", size, "a number")
        sizes.append(size)
    return sizes


def _positive(number: Any) -> bool:
    return type(number) is int and number > 0


METHODS: dict[str, Callable[[_Quantised], None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
