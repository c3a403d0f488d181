"""The library of compiled kernels for this machine's processor.

One library is built for each kind of processor: avx512 (with VNNI), avx2 or neon. All have the same
functions, and compute the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from greenroom.errors import UnknownName, UsageError

FOLDER = Path(__file__).parent / "lib"
SOURCES = Path(__file__).parents[5] / "native"  # in a clone; an installed package has none
VARIANTS = ("avx512", "avx2", "neon")  # the fastest first
CHOICE = "GREENROOM_SIMD"  # environment variable that names a variant
NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}
# Fields of one type; the stars, name and sizes of one of them, as in " **rows[2]".
DECLARATION = re.compile(r"(\w+)\b(.+)")
DECLARATOR = re.compile(r"([ *]*)(\w+)((?:\[\d+\])*)")
BUILD = (
    "build them (`make native` in a clone, or pip install with a C++20 compiler), or choose"
    " --kernels eager"
)


_STRUCTURES: dict[tuple[str, str], type[ctypes.Structure]] = {}  # by name and declaration


class MissingKernels(UsageError):
    """Compiled kernels are not available for this machine's processor.

    reason: why, in a few words
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: {BUILD}")
        self.reason = reason


class Library:
    """A library of compiled kernels.

    variant: kind of processor that the library is built for
    """

    def __init__(self, path: Path) -> None:
        """Load a library; UsageError if the file is damaged or not for this kind of machine."""
        self.variant = path.stem.removeprefix("greenroom-")
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise UsageError(f"compiled kernels cannot be loaded ({error}): {BUILD}") from error
        self._structures: dict[str, type[ctypes.Structure]] = {}
        self._path = path

    @property
    def runs_here(self) -> bool:
        """Check that this machine's processor has the library's instructions."""
        return bool(self._library.runs_here())

    @property
    def source_digest(self) -> str:
        """Return the digest of the sources from which the library was built."""
        return ctypes.string_at(self.address("source_digest")).decode()

    def symbols(self) -> list[str]:
        """List the names of the library's functions and constants, from its ELF symbol table."""
        data = self._path.read_bytes()
        sections = struct.unpack_from("<Q", data, 40)[0]
        size, count = struct.unpack_from("<HH", data, 58)
        headers = [struct.unpack_from("<2I4Q2I2Q", data, sections + i * size) for i in range(count)]
        table = next(each for each in headers if each[1] == 11)  # SHT_DYNSYM
        names, symbols = headers[table[6]][4], []
        for name, _, _, section, _, _ in struct.iter_unpack(
            "<IBBHQQ", data[table[4] : table[4] + table[5]]
        ):
            if section:  # 0: defined in another library
                start = names + name
                symbols.append(data[start : data.index(b"\0", start)].decode())
        return sorted(symbols)

    def address(self, name: str) -> int:
        """Return the address of a function or constant, or 0 if the library lacks it."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._library, name))
        except ValueError:
            return 0

    def structure(self, name: str) -> Any:
        """Make the ctypes.Structure of a kernel's arguments from their C++ declaration."""
        if name not in self._structures:
            if not (address := self.address(f"fields_of_{name}")):
                raise AttributeError(f"the library has no structure {name}")
            text = ctypes.string_at(address).decode()
            if (name, text) in _STRUCTURES:  # of another library: a call may be passed to both
                self._structures[name] = _STRUCTURES[name, text]
                return self._structures[name]
            # Without slots, a misspelt field would be set in the instance's dict.
            parts = {"__slots__": (), "_fields_": self.fields(text)}
            kind = type(name, (ctypes.Structure,), parts)
            nbytes = ctypes.c_int64.from_address(self.address(f"bytes_of_{name}")).value
            assert ctypes.sizeof(kind) == nbytes, f"{name}: {ctypes.sizeof(kind)}, not {nbytes}"
            self._structures[name] = _STRUCTURES[name, text] = kind
        return self._structures[name]

    def fields(self, declarations: str) -> list[tuple[str, Any]]:
        """Parse C++ declarations such as "int64_t rows, columns; const float* x;" for ctypes."""
        fields = []
        for line in filter(None, map(str.strip, declarations.split(";"))):
            declaration = DECLARATION.fullmatch(re.sub(r"\bconst\b ?", "", line))
            declarators = declaration[2].split(",") if declaration else [""]
            for part in map(DECLARATOR.fullmatch, declarators):
                if not declaration or not part:
                    raise ValueError(f"not the declaration of a field: {line}")
                stars, name, sizes = part.groups()
                kind = ctypes.c_void_p if "*" in stars else self._kind(declaration[1])
                for size in reversed(re.findall(r"\d+", sizes)):
                    kind = kind * int(size)
                fields.append((name, kind))
        return fields

    def _kind(self, name: str) -> Any:
        """Return the ctypes type of a number or of another shared structure."""
        return NUMBERS[name] if name in NUMBERS else self.structure(name)


def digest_of(folder: Path) -> str:
    """Compute the digest of the C++ sources in a folder, as native/CMakeLists.txt does."""
    names = sorted(glob("**/*.[ch]pp", root_dir=folder, recursive=True))
    digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@cache
def library() -> Library:
    """Load the fastest library of kernels that this machine's processor runs.

    The environment variable GREENROOM_SIMD names another: avx512, avx2 or neon. Raises
    MissingKernels if no library was built or none runs here, and UsageError if GREENROOM_SIMD names
    none that runs here, a file is damaged, or in a clone the sources have changed since.
    """
    paths = {name: FOLDER / f"greenroom-{name}.so" for name in VARIANTS}
    if variant := os.environ.get(CHOICE):
        if variant not in VARIANTS:
            raise UnknownName(CHOICE, variant, VARIANTS)
        if not paths[variant].exists():
            raise UsageError(f"{CHOICE}={variant}: {paths[variant]} was not built")
        paths = {variant: paths[variant]}
    built = {name: path for name, path in paths.items() if path.exists()}
    if not built:
        raise MissingKernels("compiled kernels were not built")
    fitting = next((each for each in map(Library, built.values()) if each.runs_here), None)
    if fitting is None and variant:
        raise UsageError(f"{CHOICE}={variant}: this processor lacks the instructions")
    if fitting is None:
        raise MissingKernels(f"this processor has no {' or '.join(built)}")
    if SOURCES.is_dir() and fitting.source_digest != digest_of(SOURCES):
        raise UsageError(f"compiled kernels are older than {SOURCES}: run `make native`")
    return fitting


@cache
def missing_reason() -> str:
    """Return why there are no compiled kernels for this processor, or "" if there are.

    Raises the other errors of `library`, which the user can mend.
    """
    try:
        library()
    except MissingKernels as error:
        return error.reason
    return ""
