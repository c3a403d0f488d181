"""The library of compiled kernels for this machine's processor.

One library is built for each kind of processor: avx512 (with VNNI), avx2 or neon. All have the same
functions, and compute the same bits.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from greenroom.errors import UsageError

FOLDER = Path(__file__).parent / "lib"
VARIANTS = ("avx512", "avx2", "neon")  # the fastest first
CHOICE = "GREENROOM_SIMD"  # environment variable that names a variant
NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


class Library:
    """A library of compiled kernels.

    variant: kind of processor that the library is built for
    """

    def __init__(self, path: Path) -> None:
        self.variant = path.stem.removeprefix("greenroom-")
        self._library = ctypes.CDLL(str(path))
        self._structures: dict[str, type[ctypes.Structure]] = {}

    @property
    def runs_here(self) -> bool:
        """Check that this machine's processor has the library's instructions."""
        return bool(self._library.runs_here())

    def address(self, name: str) -> int:
        """Return the address of a function or constant, or 0 if the library lacks it."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._library, name))
        except ValueError:
            return 0

    def structure(self, name: str) -> Any:
        """Make the ctypes.Structure of a kernel's arguments from their C++ declaration."""
        if name not in self._structures:
            text = ctypes.string_at(self.address(f"fields_of_{name}")).decode()
            fields = [field for line in text.split(";") for field in self._fields(line.strip())]
            kind = type(name, (ctypes.Structure,), {"_fields_": fields})
            self._structures[name] = kind
        return self._structures[name]

    def _fields(self, declaration: str) -> list[tuple[str, Any]]:
        """Parse a C++ declaration of some fields, such as "int64_t rows, columns"."""
        if not declaration:
            return []
        found = re.fullmatch(r"(?:const )?(\w+) ?(\*?) ?(.+)", declaration)
        assert found is not None, declaration
        of, pointer, names = found.groups()
        kind = ctypes.c_void_p if pointer else NUMBERS.get(of) or self.structure(of)
        fields = []
        for name in names.split(", "):
            plain, _, count = name.strip("* ").partition("[")
            fields.append((plain, kind * int(count[:-1]) if count else kind))
        return fields


@cache
def library() -> Library:
    """Load the fastest library of kernels that this machine's processor runs.

    The environment variable GREENROOM_SIMD names another: avx512, avx2 or neon. Raises UsageError
    if no library was built, or none runs here.
    """
    chosen = os.environ.get(CHOICE)
    for variant in [chosen] if chosen else VARIANTS:
        path = FOLDER / f"greenroom-{variant}.so"
        if path.exists() and (found := Library(path)).runs_here:
            return found
    raise UsageError(
        f"no compiled kernels for this processor in {FOLDER}: build them with `make native`, or"
        " choose --kernels eager"
    )
