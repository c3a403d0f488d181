"""Parsers of `--scope` and `--split`: cache slots and split shares, one number for each layer."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from greenroom.errors import UnknownName, UsageError
from greenroom.json_file import JsonObject, Malformed, number, read_json

SCOPES = ("shared", "per-layer")


def scope_of(scope: str) -> str | tuple[float, ...]:
    """Parse `--scope`: a name, or one number of cache slots (or share) for each layer.

    Numbers are written as `12,8,8,4`, or read from the entry `slots` of a JSON file that `greenroom
    trace budgets` writes. UnknownName or UsageError for any other text.
    """
    if scope in SCOPES:
        return scope
    if Path(scope).suffix == ".json" or os.path.isfile(scope):
        return _numbers_in(scope, "slots")
    if not re.fullmatch(r"[0-9.,\s]+", scope):
        raise UnknownName("scope", scope, [*SCOPES, "N,N,...", "FILE"])
    return _numbers(scope.split(","), "--scope")


def split_of(split: str) -> float | tuple[float, ...] | str | None:
    """Parse `--split`: the share of an expert's bytes that is its top segment.

    Returns one share, or one for each layer; None for "off"; "auto" unchanged. Shares are written
    as `0.5` or `0.5,0.4,1`, or read from the entry `split` of a JSON file that `greenroom trace
    budgets` writes. UsageError for any other text.
    """
    if split in ("off", "auto"):
        return None if split == "off" else split
    if Path(split).suffix == ".json" or os.path.isfile(split):
        shares = _numbers_in(split, "split")
    else:
        shares = _numbers(split.split(","), "--split")
    if max(shares) > 1:
        raise UsageError(f"--split must be a share of an expert, at most 1, got {max(shares):g}")
    return shares[0] if len(shares) == 1 else shares


BUDGETS = "greenroom-budgets"  # the format in a file of budgets


def read_budgets(path: str | Path) -> JsonObject:
    """Read a file of each layer's cache slots and split shares, from `greenroom trace budgets`.

    Returns its JSON object. UsageError if the file cannot be read, or has another format.
    """
    return read_json(
        path, BUDGETS, "is no file of cache budgets", "greenroom trace budgets", UsageError
    )


def _numbers_in(path: str, name: str) -> tuple[float, ...]:
    """Read the numbers above 0 of a file of budgets, or raise UsageError."""
    try:
        numbers = read_budgets(path).list_of(name, number)
    except Malformed as error:
        raise UsageError(f"{path}: {error}") from None
    return _check_above_0(numbers, f"{path}: {name}")


def _numbers(texts: list[str], what: str) -> tuple[float, ...]:
    """Parse numbers above 0, or raise UsageError."""
    try:
        numbers = tuple(map(float, texts))
    except ValueError:
        raise UsageError(
            f"{what} must be numbers, one for each layer, got {','.join(texts)!r}"
        ) from None
    return _check_above_0(numbers, what)


def _check_above_0(numbers: tuple[float, ...], what: str) -> tuple[float, ...]:
    if not numbers or not all(0 < each < math.inf for each in numbers):
        text = ",".join(f"{each:g}" for each in numbers)
        raise UsageError(f"{what} must be numbers above 0, one for each layer, got {text[:80]!r}")
    return numbers
