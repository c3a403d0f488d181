"""`quant_method: compressed-tensors`: integers of four or eight bits, and floats."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from greenroom.core.layout import FLOATS
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.quantised.float_groups import combine_floats
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint, is_positive
from greenroom.json_file import printable

PACKED = "pack-quantized"
BYTES = ("int-quantized", "naive-quantized")
WORD = 32  # bits of an int32


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a config group of compressed-tensors stores matrices.

    size:     inputs that share a scale; 0: all inputs of a row
    bits:     of a code
    zeros:    has each scale a zero?
    packed:   are codes and zeros packed into int32? If not, they are int8
    patterns: regular expressions of the names of its modules
    """

    size: int
    bits: int
    zeros: bool
    packed: bool
    patterns: tuple[str, ...]

    def columns(self, codes: StoredTensor) -> int:
        return codes.shape[-1] * WORD // self.bits if self.packed else codes.shape[-1]

    def groups(self, columns: int) -> int | None:
        """Count the groups of a row; None if they do not divide it."""
        size = min(self.size or columns, columns)
        return columns // size if columns % size == 0 else None

    def names(self, module: str) -> bool:
        return any(re.match(pattern, module) for pattern in self.patterns)


def combine_compressed(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of compressed-tensors' formats, by its config groups."""
    groups = _groups(checkpoint)
    integers = [_scheme(checkpoint, *group) for group in groups if group[1].get("type") != "float"]
    floats = [weights for _, weights in groups if weights.get("type") == "float"]
    checkpoint.drop_scales_of_activations()
    if floats:
        combine_floats(checkpoint, floats)
    if integers:
        _combine_integers(checkpoint, integers)
    checkpoint.check_no_scales_left()


def _combine_integers(checkpoint: QuantisedCheckpoint, schemes: list[Scheme]) -> None:
    """Combine codes, scales and zeros of compressed-tensors' integer formats.

    `NAME.weight_packed` holds codes packed into int32, or `NAME.weight` int8 codes;
    `NAME.weight_scale` the scales; `NAME.weight_zero_point` the zeros, if there are any.
    """
    for name, codes in checkpoint.tensors.items():
        packed = name.endswith("weight_packed")
        if not packed and (not name.endswith(".weight") or codes.dtype != "int8"):
            continue
        if name not in checkpoint.combined:
            continue
        stem = name.removesuffix("_packed")
        fitting = [scheme for scheme in schemes if scheme.packed == packed]
        if not fitting:
            raise checkpoint.unserved_error(f"{name} belongs to no config group")
        scale = checkpoint.scale_name(name, "int32" if packed else "int8", 2, [f"{stem}_scale"])
        scales = checkpoint.tensors[scale]
        scheme = _scheme_of(fitting, stem, codes, scales)
        columns = scheme.columns(codes)
        groups = scheme.groups(columns)
        if groups is None:
            raise checkpoint.indivisible_error(name, columns, scheme.size)
        kind = "affine" if scheme.zeros else "symmetric"
        matrix = replace(
            codes,
            encoding=f"{kind}{scheme.bits}",
            shape=(*codes.shape[:-1], columns),
            codes=codes.shape,
        )
        shape = (*codes.shape[:-1], groups)
        checkpoint.combine((name, scale, stem), matrix, scales, shape, FLOATS)
        _add_zeros(checkpoint, stem, scheme, shape)
        checkpoint.combined.pop(f"{stem}_shape", None)


def _scheme_of(
    schemes: list[Scheme], stem: str, codes: StoredTensor, scales: StoredTensor
) -> Scheme:
    """Return the config group of a matrix: one whose number of scales fits, by name if several."""
    module = stem.rpartition(".")[0]
    fitting = [s for s in schemes if scales.shape[-1:] == (s.groups(s.columns(codes)),)]
    possible = fitting or [s for s in schemes if s.groups(s.columns(codes))] or schemes
    return next((scheme for scheme in possible if scheme.names(module)), possible[0])


def _add_zeros(
    checkpoint: QuantisedCheckpoint, stem: str, scheme: Scheme, shape: tuple[int, ...]
) -> None:
    """Check a matrix's zeros, and add them to its parts; `shape` is that of its scales."""
    name = f"{stem}_zero_point"
    zeros = checkpoint.combined.pop(name, None)
    if (zeros is not None) != scheme.zeros:
        state, symmetric = ("missing", "false") if scheme.zeros else ("present", "true")
        raise checkpoint.error(f"{name} is {state}, but the config says symmetric: {symmetric}")
    if zeros is None:
        return
    *lead, rows, groups = shape
    length = -(-rows * scheme.bits // WORD) if scheme.packed else rows
    right = ("int32" if scheme.packed else "int8", (*lead, length, groups))
    if (zeros.dtype, zeros.shape) != right:
        raise checkpoint.error(
            f"{name} has dtype {zeros.dtype} and shape {list(zeros.shape)}, but must have"
            f" {right[0]} and {list(right[1])} to fit the scales of shape {list(shape)}"
        )
    if scheme.packed:
        zeros = replace(zeros, dtype="uint8", shape=shape, form=f"rows{scheme.bits}")
    matrix = checkpoint.combined[stem]
    checkpoint.combined[stem] = replace(matrix, companions=(*matrix.companions, zeros))


def _groups(checkpoint: QuantisedCheckpoint) -> list[tuple[str, dict[str, Any]]]:
    """Return the name of each config group, and its settings of weights with format and targets."""
    groups = checkpoint.settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise checkpoint.setting_error("config_groups", groups, "a table of config groups")
    schemes = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise checkpoint.setting_error(
                f"config_groups.{name}", group, "a table with a table `weights`"
            )
        form = group.get("format") or checkpoint.settings.get("format")
        schemes.append((name, {**weights, "format": form, "targets": group.get("targets")}))
    return schemes


def _scheme(checkpoint: QuantisedCheckpoint, name: str, weights: dict[str, Any]) -> Scheme:
    """Return how a config group with integers stores matrices."""
    form, bits = weights["format"], weights.get("num_bits")
    what = f"format {printable(form)}, {printable(bits)} bits"
    served = (4, 8) if form == PACKED else (8,) if form in BYTES else ()
    if weights.get("type") != "int" or type(bits) is not int or bits not in served:
        raise checkpoint.unserved_error(what)
    if weights.get("actorder") in ("group", "dynamic", True):
        raise checkpoint.unserved_error(f"{what}, columns reordered by activation (actorder)")
    strategy = weights.get("strategy")
    if strategy not in (None, "group", "channel"):
        raise checkpoint.unserved_error(f"{what}, strategy {printable(strategy)}")
    size = weights.get("group_size")
    if size in (None, -1):
        size = 0
    elif not is_positive(size):
        raise checkpoint.setting_error(
            f"config_groups.{name}.weights.group_size", size, "a positive number, -1 or null"
        )
    targets = weights["targets"]
    targets = targets if isinstance(targets, list) else []
    patterns = [t[3:] for t in targets if isinstance(t, str) and t.startswith("re:")]
    zeros = not weights.get("symmetric", True)
    return Scheme(size, bits, zeros, form == PACKED, tuple(patterns))
