"""A quantised checkpoint's tensors, and checks that codes and scales fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor

Tensors = dict[str, StoredTensor]
SERVED = "supported: fp8 with block scales, mxfp4, and compressed-tensors' pack-quantized int4"


class QuantisedCheckpoint:
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


def is_positive(number: Any) -> bool:
    """Check that a setting is a positive whole number."""
    return type(number) is int and number > 0
