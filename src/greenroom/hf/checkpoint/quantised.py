"""Quantised safetensors: codes and scales are combined into one encoded tensor.

A quantised checkpoint stores a matrix as codes and scales under separate names. This module
combines them to one `StoredTensor` with the name that the matrix has in an unquantised checkpoint.
So transformers' renamings and weight conversions apply to quantised checkpoints too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from greenroom.core.layout import BLOCKS, FLOATS
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.json_file import printable

Tensors = dict[str, StoredTensor]
SERVED = "supported: fp8 with block scales, mxfp4, and compressed-tensors' pack-quantized int4"
FP8_SCALES = (
    "_scale_inv",
    "scale",
    "qscale_weight",
)  # suffixes of the name, or replacements of `weight` in it
E8M0 = ("uint8", "float8_e8m0fnu")  # powers of two; some files call them uint8
UNUSED = ("activation_scale", "input_scale")  # Greenroom does not quantise activations


def combine_codes_and_scales(config: dict[str, Any], tensors: Tensors, folder: Path) -> Tensors:
    """Combine each quantised matrix's codes and scales into one encoded tensor.

    Returns all tensors of the checkpoint, by the names of an unquantised checkpoint; `tensors`
    itself if `config` has no quantization_config. Raises CheckpointError if the quantization_config
    is invalid, or if codes or scales are missing or have a wrong type or shape; UnsupportedModel
    for a quantisation method that Greenroom cannot decode.
    """
    settings = settings_of(config)
    if settings is None:
        return tensors
    method = str(settings.get("quant_method", "unknown"))
    checkpoint = _QuantisedCheckpoint(settings, tensors, folder)
    if method not in METHODS:
        raise UnsupportedModel(
            f"{checkpoint.config}: the quantisation method {printable(method)} is not supported"
            f" ({SERVED})"
        )
    METHODS[method](checkpoint)
    return checkpoint.combined


def settings_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a model's config, or of a config nested in it.

    None if the model is not quantised.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        settings = part.get("quantization_config")
        if isinstance(settings, dict):
            return settings
    return None


class _QuantisedCheckpoint:
    """A quantised checkpoint while its codes and scales are combined.

    settings: the config's quantization_config
    tensors:  the tensors in the files
    combined: the result: at first a copy of `tensors`, in which each pair of codes and scales is
              replaced by one encoded tensor
    """

    def __init__(self, settings: dict[str, Any], tensors: Tensors, folder: Path) -> None:
        self.settings, self.tensors, self.combined = settings, tensors, dict(tensors)
        self.folder, self.config = folder, folder / "config.json"

    def scale_name(self, name: str, dtype: str, axes: int, scales: Sequence[str]) -> str:
        """Return the name of the scales that belong to the codes tensor `name`.

        `scales` are the possible names, most likely first. Raises CheckpointError if none of them
        exists, or if the codes have another dtype or fewer axes than given.
        """
        codes = self.tensors[name]
        scale = next((each for each in scales if each in self.tensors), None)
        if scale is None:
            raise self.error(f"{name} is quantised, but its scales {scales[0]} are missing")
        if codes.dtype != dtype:
            raise self.error(
                f"the quantised matrix {name} has dtype {codes.dtype}, but must have {dtype}"
            )
        if len(codes.shape) < axes or 0 in codes.shape:
            raise self.error(
                f"the quantised matrix {name} has shape {list(codes.shape)}, but needs at least"
                f" {axes} axes, none of length 0"
            )
        return scale

    def combine(
        self,
        names: tuple[str, str, str],
        matrix: StoredTensor,
        scales: StoredTensor,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
    ) -> None:
        """Check a matrix's scales, and combine them with its codes into an encoded tensor.

        names:  of the codes, of the scales, and of the encoded tensor
        matrix: the encoded tensor without its scales
        shape:  the shape that the scales must have
        dtypes: the dtypes that the scales may have
        """
        codes, scale, target = names
        if scales.shape != shape:
            raise self.error(
                f"the scales {scale} have shape {list(scales.shape)}, but must have shape"
                f" {list(shape)} to fit {codes}, which has shape {list(self.tensors[codes].shape)}"
            )
        if scales.dtype not in dtypes:
            raise self.error(
                f"the scales {scale} have dtype {scales.dtype}, but must have one of"
                f" {', '.join(dtypes)}"
            )
        for name in {codes, scale} - {target}:
            del self.combined[name]
        self.combined[target] = replace(matrix, companions=(scales,))

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {what}")

    def indivisible_error(self, name: str, columns: int, size: int) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.folder}: {name} has {columns} columns, which is not a multiple of {size}, the"
            " columns that share a scale"
        )

    def unserved_error(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.config}: this form of compressed-tensors is not supported: {what} ({SERVED})"
        )

    def setting_error(self, key: str, value: Any, right: str) -> CheckpointError:
        """Return the error for a wrong value in a checkpoint's quantization_config."""
        text = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
        return CheckpointError(
            f"{self.config}: quantization_config.{key} is {text}, but must be {right}"
        )


def _fp8(checkpoint: _QuantisedCheckpoint) -> None:
    """Combine codes and scales of DeepSeek's fp8 format.

    `NAME.weight` holds 8-bit floats, `NAME.weight_scale_inv` one scale for each block of
    `weight_block_size` rows and columns.
    """
    block = _block(checkpoint)
    for name, codes in checkpoint.tensors.items():
        if name.endswith(UNUSED):
            del checkpoint.combined[name]
        if codes.dtype != "float8_e4m3fn":
            continue
        stem = name.removesuffix("weight")
        names = [name + FP8_SCALES[0], *(stem + last for last in FP8_SCALES[1:] if stem != name)]
        scale = checkpoint.scale_name(name, codes.dtype, 2, names)
        *lead, rows, columns = codes.shape
        down, across = block or (rows, columns)
        shape = (*lead, -(-rows // down), -(-columns // across))
        stored = checkpoint.tensors[scale]
        if block is None and stored.shape in ((), (1,)):  # one scale for the matrix
            stored = replace(stored, shape=shape)
        if stored.dtype in E8M0:
            stored = replace(stored, dtype="float8_e8m0fnu")
        matrix = replace(codes, encoding="fp8", codes=codes.shape, unit=min(down, rows))
        checkpoint.combine((name, scale, name), matrix, stored, shape, (*FLOATS, *E8M0))
        if columns % min(across, columns):
            raise checkpoint.indivisible_error(name, columns, across)


def _block(checkpoint: _QuantisedCheckpoint) -> tuple[int, int] | None:
    """Return the rows and columns that share an fp8 scale; None for matrix-wide scales."""
    block = checkpoint.settings.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(_positive, block)):
        raise checkpoint.setting_error("weight_block_size", block, "two positive numbers, or null")
    return block[0], block[1]


def _mxfp4(checkpoint: _QuantisedCheckpoint) -> None:
    """Combine codes and scales of gpt-oss's MXFP4 format.

    `NAME_blocks` has the shape [experts, outputs, groups, 16 bytes of codes], `NAME_scales` the
    shape [experts, outputs, groups]; a group is 32 inputs.
    """
    inputs, nbytes = BLOCKS["mxfp4"]
    for name, blocks in checkpoint.tensors.items():
        stem = name.removesuffix("_blocks")
        scale = f"{stem}_scales"
        if stem == name or (blocks.dtype != "uint8" and scale not in checkpoint.tensors):
            continue
        checkpoint.scale_name(name, "uint8", 3, [scale])
        *lead, rows, groups, width = blocks.shape
        if width != nbytes:
            raise checkpoint.error(
                f"{name} has shape {list(blocks.shape)}, but the last axis of MXFP4 codes must"
                f" have {nbytes} bytes"
            )
        matrix = replace(
            blocks,
            encoding="mxfp4",
            shape=(*lead, inputs * groups, rows),
            codes=(*lead, rows, nbytes * groups),
            transposed=True,
        )
        shape = (*lead, rows, groups)
        checkpoint.combine(
            (name, scale, stem), matrix, checkpoint.tensors[scale], shape, ("uint8",)
        )


def _compressed(checkpoint: _QuantisedCheckpoint) -> None:
    """Combine codes and scales of compressed-tensors' `pack-quantized` format.

    `NAME.weight_packed` holds eight 4-bit codes in each int32, `NAME.weight_scale` the scales.
    """
    sizes = _group_sizes(checkpoint)
    for name, codes in checkpoint.tensors.items():
        if not name.endswith("weight_packed"):
            continue
        stem = name.removesuffix("_packed")
        scale = checkpoint.scale_name(name, "int32", 2, [f"{stem}_scale"])
        columns = codes.shape[-1] * BLOCKS["ct_int4"][0]
        stored = checkpoint.tensors[scale]
        runs = [min(size or columns, columns) for size in sizes]
        counts = [columns // run for run in runs if columns % run == 0]
        if not counts:
            raise checkpoint.indivisible_error(name, columns, runs[0])
        # The number of scales in a row shows which config group the matrix belongs to.
        count = next((n for n in counts if stored.shape[-1:] == (n,)), counts[0])
        matrix = replace(
            codes, encoding="ct_int4", shape=(*codes.shape[:-1], columns), codes=codes.shape
        )
        checkpoint.combine((name, scale, stem), matrix, stored, (*codes.shape[:-1], count), FLOATS)
        checkpoint.combined.pop(f"{stem}_shape", None)
    if odd := next((name for name in checkpoint.combined if name.endswith("weight_scale")), None):
        raise checkpoint.unserved_error(f"{odd} belongs to no pack-quantized matrix")


def _group_sizes(checkpoint: _QuantisedCheckpoint) -> list[int]:
    """Return how many inputs share a scale, for each of compressed-tensors' config groups.

    0 means that all inputs of a row share one scale.
    """
    groups = checkpoint.settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise checkpoint.setting_error("config_groups", groups, "a table of config groups")
    sizes = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise checkpoint.setting_error(
                f"config_groups.{name}", group, "a table with a table `weights`"
            )
        form = group.get("format") or checkpoint.settings.get("format")
        what = f"format {printable(form)}, {printable(weights.get('num_bits'))} bits"
        integers = weights.get("type") == "int" and weights.get("num_bits") == 4
        if form != "pack-quantized" or not integers:
            raise checkpoint.unserved_error(what)
        if not weights.get("symmetric", True):
            raise checkpoint.unserved_error(f"{what}, with zero points (asymmetric)")
        if weights.get("actorder") in ("group", True):
            raise checkpoint.unserved_error(f"{what}, columns reordered by activation (actorder)")
        size = weights.get("group_size")
        if size in (None, -1):
            size = 0
        elif not _positive(size):
            raise checkpoint.setting_error(
                f"config_groups.{name}.weights.group_size", size, "a positive number, -1 or null"
            )
        sizes.append(size)
    return sizes


def _positive(number: Any) -> bool:
    return type(number) is int and number > 0


METHODS: dict[str, Callable[[_QuantisedCheckpoint], None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
