"""`quant_method: compressed-tensors`: integers of four bits, and floats of four or eight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from greenroom.core.layout import BLOCKS, FLOATS
from greenroom.hf.checkpoint.quantised.float_groups import combine_floats
from greenroom.hf.checkpoint.quantised.parts import QuantisedCheckpoint, is_positive
from greenroom.json_file import printable


def combine_compressed(checkpoint: QuantisedCheckpoint) -> None:
    """Combine codes and scales of compressed-tensors' formats, by its config groups."""
    schemes = _schemes(checkpoint)
    integers = {name: each for name, each in schemes.items() if each.get("type") != "float"}
    floats = [each for name, each in schemes.items() if name not in integers]
    checkpoint.drop_scales_of_activations()
    if floats:
        combine_floats(checkpoint, floats)
    if integers:
        _combine_integers(checkpoint, integers)
    checkpoint.check_no_scales_left()


def _combine_integers(checkpoint: QuantisedCheckpoint, schemes: dict[str, Any]) -> None:
    """Combine codes and scales of compressed-tensors' `pack-quantized` format.

    `NAME.weight_packed` holds eight 4-bit codes in each int32, `NAME.weight_scale` the scales.
    """
    sizes = _group_sizes(checkpoint, schemes)
    for name, codes in checkpoint.tensors.items():
        if not name.endswith("weight_packed") or name not in checkpoint.combined:
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


def _schemes(checkpoint: QuantisedCheckpoint) -> dict[str, dict[str, Any]]:
    """Return the settings of weights, with their `format`, of each config group by name."""
    groups = checkpoint.settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise checkpoint.setting_error("config_groups", groups, "a table of config groups")
    schemes = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise checkpoint.setting_error(
                f"config_groups.{name}", group, "a table with a table `weights`"
            )
        form = group.get("format") or checkpoint.settings.get("format")
        schemes[name] = {**weights, "format": form}
    return schemes


def _group_sizes(checkpoint: QuantisedCheckpoint, schemes: dict[str, Any]) -> list[int]:
    """Return how many inputs share a scale, for each of compressed-tensors' config groups.

    0 means that all inputs of a row share one scale.
    """
    sizes = []
    for name, weights in schemes.items():
        form = weights["format"]
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
        elif not is_positive(size):
            raise checkpoint.setting_error(
                f"config_groups.{name}.weights.group_size", size, "a positive number, -1 or null"
            )
        sizes.append(size)
    return sizes
