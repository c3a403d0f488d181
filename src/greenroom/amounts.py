"""Parse amounts of memory from user input, and format them for messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.errors import BudgetError, UsageError

UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
# At most 100 ASCII digits: their product with a unit still fits in a float.
AMOUNT = re.compile(r"\s*([0-9]{1,100}(?:\.[0-9]{1,100})?)\s*([A-Za-z]*|%)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of memory, given either in bytes or as a share of a total."""

    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: Amount | str | int, what: str) -> Amount:
        """Parse an amount of memory such as `8GiB`, `500MB`, `60%`, or a number of bytes.

        `what` is the option's name in errors. Raises BudgetError for an amount of 0 or less, and
        UsageError for other wrong values.
        """
        if isinstance(value, Amount):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if value <= 0:
                raise BudgetError(f"{what} must be more than 0 bytes, got {value}")
            return cls(nbytes=value)
        match = AMOUNT.fullmatch(str(value))
        if match is None or (match[2] != "%" and match[2].upper() not in UNITS):
            raise UsageError(f"{what} is {value!r}: write bytes as 8GiB or 500MB, a share as 60%")
        number = float(match[1])
        if number <= 0:
            raise BudgetError(f"{what} must be more than 0, got {value!r}")
        if match[2] == "%":
            if number > 100:
                raise UsageError(f"{what} is {value!r}: a share is at most 100%")
            return cls(share=number / 100)
        return cls(nbytes=int(number * UNITS[match[2].upper()]))

    def of(self, total: int) -> int:
        """Return the amount of memory in bytes, rounded down; a share is multiplied by `total`."""
        if self.share is not None:
            return int(total * self.share + 1e-9)
        assert self.nbytes is not None
        return self.nbytes


def parse_memory(value: str | int, what: str) -> Amount:
    """Parse a memory budget, and refuse a small number without a unit, such as `8`.

    `what` is the option's name in errors. Raises BudgetError or UsageError as Amount.parse does.
    """
    amount = Amount.parse(value, what)
    text = str(value).strip()
    if amount.nbytes is not None and amount.nbytes < UNITS["M"] and text[-1:].isdigit():
        raise UsageError(f"{what} is {text}, which are bytes: give a unit, as in {text}GiB")
    return amount


def bytes_check(what: str) -> Callable[[str | int, str], int]:
    """Return a function that parses an option's value as bytes, and refuses a share.

    what: describes a valid value in the error message "{option} must be {what}"
    """

    def check(value: str | int, name: str) -> int:
        nbytes = Amount.parse(value, name).nbytes
        if nbytes is None:
            raise UsageError(f"{name} must be {what}, got {value!r}")
        return nbytes

    return check


def show_bytes(n: float) -> str:
    """Format a number of bytes for people: 3.2 GiB, 18 MiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n) >= size:
            return f"{n / size:.3g} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


def format_amount(least: int, most: int) -> str:
    """Format an amount of memory between two bounds as an option's value, such as `3.75MiB`.

    The bounds `least` and `most` are in bytes. The unit is the largest in which an amount between
    them has at most three decimal places. A bound that can be written exactly is preferred,
    `most` to `least`.
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if least < size:
            continue
        texts = [f"{math.ceil(least * 10**d / size) / 10**d:.{d}f}{unit}" for d in range(4)]
        amounts = {text: Amount.parse(text, "an amount").of(0) for text in texts}
        for low, high in ((most, most), (least, least), (least, most)):
            for text, nbytes in amounts.items():
                if low <= nbytes <= high:
                    return text
    return f"{least}B"


def parse_share(value: str | int, name: str, example: str = "12.5%") -> float:
    """Parse a share of a total, such as 12.5%.

    Raises UsageError for any other value. `name` is the option and `example` is a valid value; the
    error message names both.
    """
    share = Amount.parse(value, name).share
    if share is None:
        raise UsageError(f"{name} must be a share such as {example}, got {value!r}")
    return share
