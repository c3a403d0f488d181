"""A quantised checkpoint's tensors, and checks that codes and scales fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.json_file import printable

Tensors = dict[str, StoredTensor]
SERVED = (
    "supported: fp8, mxfp4 and nvfp4 of DeepSeek, ModelOpt, Quark, FBGEMM and compressed-tensors;"
    " integers of 4 and 8 bits of AWQ, GPTQ and compressed-tensors"
)
E8M0 = ("uint8", "float8_e8m0fnu")  # powers of two; some files call them uint8
# Endings of names of scales that belong to activations and to keys and values, which Greenroom does
# not quantise.
UNUSED = (
    "activation_scale",
    "input_scale",
    "input_global_scale",
    *(f".{what}_scale" for what in ("k", "v", "q", "output")),
)


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
        self.combined.pop(codes)
        self.combined[target] = matrix
        self.add_companion(target, scale, scales, shape, dtypes)

    def add_companion(
        self,
        target: str,
        name: str,
        stored: StoredTensor,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
    ) -> None:
        """Check one of a matrix's tensors of scales, and combine it with the encoded tensor.

        target, name:  the names of the encoded tensor and of the scales
        stored:        the scales
        shape, dtypes: the shape that the scales must have, and the dtypes that they may have
        """
        matrix = self.combined[target]
        if stored.dtype not in dtypes:
            raise self.error(
                f"the scales {name} have dtype {stored.dtype}, but must have one of"
                f" {', '.join(dtypes)}"
            )
        if stored.shape != shape:
            raise self.error(
                f"the scales {name} have shape {list(stored.shape)}, but must have shape"
                f" {list(shape)} to fit {target}, whose codes have shape {list(matrix.codes)}"
            )
        del self.combined[name]
        self.combined[target] = replace(matrix, companions=(*matrix.companions, stored))

    def drop_scales_of_activations(self) -> None:
        """Drop scales of activations, keys and values, which Greenroom does not quantise."""
        for name in [name for name in self.combined if name.endswith(UNUSED)]:
            del self.combined[name]

    def check_no_scales_left(self) -> None:
        """Raise UnsupportedModel if scales belong to no matrix that could be combined."""
        ends = ("weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point")
        if odd := next((name for name in self.combined if name.endswith(ends)), None):
            raise self.unserved_error(f"{odd} belongs to no quantised matrix that is recognised")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {what}")

    def indivisible_error(self, name: str, columns: int, size: int) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.folder}: {name} has {columns} columns, which is not a multiple of {size}, the"
            " columns that share a scale"
        )

    def unserved_error(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.config}: this form of {printable(self.settings.get('quant_method'))} is not"
            f" supported: {what} ({SERVED})"
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
