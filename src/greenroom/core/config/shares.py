"""Numbers of slots and shares of experts, one a layer, as users write them."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from greenroom.errors import UnknownName, UsageError
from greenroom.json_file import JsonObject, Malformed, number, read_json

SCOPES = ("shared", "per-layer")


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


BUDGETS = "greenroom-budgets"  # the format of such a file


def budgets_file(path: str | Path) -> JsonObject:
    """What `greenroom trace budgets` wrote: `slots` and, where experts are split, `split` of each
    layer. UsageError where it cannot be read, or is another file."""
    return read_json(path, BUDGETS, "holds no budgets", "greenroom trace budgets", UsageError)


def _numbers_in(path: str, name: str) -> tuple[float, ...]:
    """Numbers above 0 of a file of budgets, or UsageError."""
    try:
        found = budgets_file(path).list_of(name, number)
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
