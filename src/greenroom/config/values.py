"""What options with a form of their own mean, and what is none."""

from __future__ import annotations

import math
import os
import re
from itertools import pairwise
from pathlib import Path

from greenroom.config.amounts import Amount
from greenroom.errors import UnknownName, UsageError
from greenroom.json_file import JsonObject, Malformed, number, read_json

DEVICES = ("auto", "cpu", "cuda", "fake")
KV = ("dynamic", "fp8", "int4", "int2", "offloaded")
SCOPES = ("shared", "per-layer")
PRECISIONS = ("off", "int8", "int4")  # that misses may be served in
CO_COMPUTE = ("auto", "off")
LOW_SHARE = "12.5%"  # of the cache's memory, for low-precision copies
KERNELS = ("auto", "eager", "numba", "rounded", "triton")


def devices_of(device: str) -> tuple[str, tuple[int, ...]]:
    """A `--device`: what computes, and the numbers of the devices that do.

    `cuda:0,cuda:2` is ("cuda", (0, 2)), `cuda` the first GPU, `fake,fake` two fake devices.
    UnknownName or UsageError for what is none.
    """
    parts = [part.strip() for part in device.split(",")]
    names, numbers = [], []
    for part in parts:
        name, colon, number = part.partition(":")
        if name not in DEVICES or (colon and name != "cuda"):
            raise UnknownName("device", part, DEVICES)
        if colon and not (number.isascii() and number.isdecimal()):
            raise UsageError(f"--device {device}: GPUs are numbered, as cuda:0 or cuda:1")
        names.append(name)
        numbers.append(int(number or 0))
    if names == ["fake"] * len(parts):
        return "fake", tuple(range(len(parts)))
    if len(parts) > 1 and not all(part.startswith("cuda:") for part in parts):
        raise UsageError(f"--device {device}: several devices are GPUs, as cuda:0,cuda:1")
    if len(set(numbers)) < len(parts):
        raise UsageError(f"--device {device}: each GPU once")
    return names[0], tuple(numbers)


def scope_of(scope: str) -> str | tuple[float, ...]:
    """A `--scope`: a name, or numbers of slots (or shares of them), one a layer.

    They are written as `12,8,8,4`, or are the `slots` of a JSON file, which `greenroom trace
    budgets` writes. UnknownName or UsageError for what is none.
    """
    if scope in SCOPES:
        return scope
    if Path(scope).suffix == ".json" or os.path.isfile(scope):
        return _numbers_in(scope, "slots")
    if not re.fullmatch(r"[0-9.,\s]+", scope):
        raise UnknownName("scope", scope, [*SCOPES, "N,N,...", "FILE"])
    return _numbers(scope.split(","), "--scope")


def split_of(split: str) -> float | tuple[float, ...] | str | None:
    """A `--split`: the share of an expert that is its top, for all layers or for each; None: off.

    Written as `0.5` or `0.5,0.4,1`, or the `split` of a JSON file, which `greenroom trace budgets`
    writes; "auto" is itself. UsageError for what is none.
    """
    if split in ("off", "auto"):
        return None if split == "off" else split
    if Path(split).suffix == ".json" or os.path.isfile(split):
        found = _numbers_in(split, "split")
    else:
        found = _numbers(split.split(","), "--split")
    if max(found) > 1:
        raise UsageError(f"--split is a share of an expert, at most 1: {max(found):g}")
    return found[0] if len(found) == 1 else found


LOW_BELOW = 0.4  # of a token's gate weights: HOBBIT's T1 = 0.6, from the other end


def thresholds_of(
    miss_precision: str, low_below: float | None, skip_below: float, substitute_below: float
) -> tuple[float, float, float]:
    """(low, skip, substitute): tails below which misses get less; 0 where that is off. UsageError
    where one of them leaves another nothing to do."""
    low = 0.0
    if miss_precision != "off":
        low = LOW_BELOW if low_below is None else low_below
        if low == 0:
            raise UsageError("--low-below 0 serves no miss from its copy: leave out both")
    order = [(name, v) for name, v in (
        ("skip-below", skip_below), ("substitute-below", substitute_below), ("low-below", low),
    ) if v]  # fmt: skip
    for (name, value), (above, more) in pairwise(order):
        if value >= more:
            raise UsageError(f"--{name} {value:g} must be less than --{above} {more:g}")
    return low, skip_below, substitute_below


def gate_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is a share of the gate weights, from 0 to 1: {value}")


def share_of(value: str | int, name: str, example: str = "12.5%") -> float:
    """A share, written as 12.5%. UsageError for what is none."""
    share = Amount.parse(value, name).share
    if share is None:
        raise UsageError(f"{name} is a share, as {example}: {value!r}")
    return share


BUDGETS = "greenroom-budgets"  # the format of such a file


def budgets_file(path: str | Path) -> JsonObject:
    """What `greenroom trace budgets` wrote: `slots` and, where experts are split, `split` of each
    layer. UsageError where it cannot be read, or is another file."""
    return read_json(path, BUDGETS, "holds no budgets", "greenroom trace budgets", UsageError)


def _numbers_in(path: str, name: str) -> tuple[float, ...]:
    """Numbers above 0 of a file of budgets, or UsageError."""
    try:
        found = budgets_file(path).each(name, number)
    except Malformed as error:
        raise UsageError(f"{path}: {error}") from None
    return _above_0(found, f"{path}: {name}")


def _numbers(words: list[str], what: str) -> tuple[float, ...]:
    """Numbers above 0, or UsageError."""
    try:
        found = tuple(map(float, words))
    except ValueError:
        raise UsageError(f"{what} must be numbers, one a layer: {','.join(words)!r}") from None
    return _above_0(found, what)


def _above_0(numbers: tuple[float, ...], what: str) -> tuple[float, ...]:
    if not numbers or not all(0 < each < math.inf for each in numbers):
        said = ",".join(f"{each:g}" for each in numbers)
        raise UsageError(f"{what} must be numbers above 0, one a layer: {said[:80]!r}")
    return numbers
