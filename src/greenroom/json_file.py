"""Read JSON files from untrusted sources: a bounded parser, and typed access to values.

    pins = read_json(path, "greenroom-pins", "holds no pins", "greenroom trace hot", UsageError)
    pins.integer("version", least=1)          # or raises Malformed, with a message for users
    pins.list_of("losses", number)

A text that is too large or nested too deeply is refused before Python's parser reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from greenroom.errors import GreenroomError

LONGEST = 16 << 20  # bytes of a file
DEEPEST = 64  # nested brackets
MOST_BRACKETS = 1 << 21  # each becomes a Python object of 64 bytes
LONGEST_NAME = 100  # characters
MOST_DIGITS = 64  # of an integer; tokenizers write 10**30 for "no limit"
INT64 = 2**63 - 1
LARGEST = 1e30  # number that is accepted: sums and products stay finite

_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_DIGITS = bytes(ord("0") if chr(c).isdigit() and c < 128 else c for c in range(256))
_LONG = b"0" * (MOST_DIGITS + 1)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_REQUIRED: Any = object()
Value = TypeVar("Value")


class Malformed(ValueError):
    """A JSON text or a value in it is not valid; the message says why."""


def parse(data: bytes | str, longest: int = LONGEST, unique: bool = True) -> Any:
    """Parse a JSON text from an untrusted source, or raise Malformed.

    The text must be standard JSON in UTF-8, of at most `longest` bytes and 64 nested brackets. It
    must not have NaN or Infinity, a number that a float cannot represent, or half of a surrogate
    pair. With `unique`, an object must not have a name twice; otherwise the last value counts.
    """
    if isinstance(data, str):
        data = data.encode(errors="replace")
    if len(data) > longest:
        raise Malformed(f"not usable: larger than {longest} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"not JSON: byte {error.start} is not UTF-8") from error
    if text.startswith("\ufeff"):
        raise Malformed("not JSON: the text begins with a byte order mark")
    _check_brackets(data)
    try:
        value = json.loads(
            text,
            parse_int=_bounded_int if _LONG in data.translate(_DIGITS) else int,
            parse_float=_finite,
            parse_constant=_constant,
            object_pairs_hook=_unique if unique else None,
        )
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(f"not JSON: {error}") from error
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Malformed("not JSON: a string has half of a surrogate pair") from error
    return value


def read(path: str | Path, longest: int = LONGEST, unique: bool = True) -> Any:
    """Parse a JSON file from an untrusted source, with the limits of `parse`.

    Raises Malformed for wrong content, and OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        return parse(file.read(longest + 1), longest, unique)


def read_object(
    path: str | Path, error: type[GreenroomError], longest: int = LONGEST
) -> JsonObject:
    """Read the JSON object in another program's file.

    A name may occur twice in an object: its last value counts. Raises an exception of the class
    `error` if the file cannot be read or does not hold a JSON object.
    """
    try:
        return JsonObject(read(path, longest, unique=False))
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror or reason}") from reason
    except Malformed as reason:
        raise error(f"{path} cannot be used: it is {reason}") from reason


def read_json(
    path: str | Path, form: str, what: str, made_by: str, error: type[GreenroomError]
) -> JsonObject:
    """Read the object in a JSON file of one of Greenroom's formats.

    form:    the value of "format" in files of this format
    what:    text after the path in error messages about another format: "is no machine profile"
    made_by: the command that makes files of this format
    error:   the class of exception that is raised if the file cannot be read or has another format
    """
    try:
        value = read(path)
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror}") from reason
    except Malformed as reason:
        raise error(f"{path} {what}: it is {reason}") from reason
    if not isinstance(value, dict) or value.get("format") != form:
        raise error(f"{path} {what}: {made_by} makes such files")
    return JsonObject(value)


class JsonObject:
    """A JSON object whose values are read by name and type.

    A value that is missing, of another type or out of range raises Malformed, which names the
    value. `where` is the object's place in the file, for these errors. A value with a default may
    be missing; if it is present, it must be valid.
    """

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            problem = f"{where} must be an object, got" if where else "not an object, but"
            raise Malformed(f"{problem} {show_value(values)}")
        self._values: dict[str, Any] = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @property
    def values(self) -> dict[str, Any]:
        """Return the JSON object as a dict."""
        return self._values

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the JSON object's value with this name, of any type."""
        value = self._values.get(name, default)
        if value is _REQUIRED:
            raise Malformed(f"{self._place(name)} is missing")
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        return text(self.value(name, default), self._place(name))

    def name(self, name: str, default: str = _REQUIRED) -> str:
        return name_text(self.value(name, default), self._place(name))

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        return flag(self.value(name, default), self._place(name))

    def integer(
        self, name: str, default: int = _REQUIRED, *, least: int = 0, most: int = INT64
    ) -> int:
        return integer(self.value(name, default), self._place(name), least, most)

    def number(self, name: str, default: float = _REQUIRED) -> float:
        return number(self.value(name, default), self._place(name))

    def object(self, name: str, default: Any = _REQUIRED) -> JsonObject:
        return JsonObject(self.value(name, default), self._place(name))

    def list_of(
        self, name: str, kind: Callable[[Any, str], Value], default: Any = _REQUIRED
    ) -> tuple[Value, ...]:
        """Return the values of the JSON list with this name, each checked by `kind`.

        `kind` is `integer`, `JsonObject`, `text` or another function of a value and the value's
        place in the file.
        """
        return list_of(kind)(self.value(name, default), self._place(name))

    def fields_of(self, kind: Any) -> dict[str, Any]:
        """Read the int, float, str and bool fields of a dataclass from the JSON object.

        Returns the values by field name. Fields of other types are left out.
        """
        readers: dict[str, Callable[..., Any]] = {
            "int": self.integer,
            "float": self.number,
            "str": self.text,
            "bool": self.flag,
        }
        return {
            field.name: readers[str(field.type)](
                field.name, _REQUIRED if field.default is MISSING else field.default
            )
            for field in fields(kind)
            if str(field.type) in readers
        }

    def _place(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name


def text(value: Any, where: str) -> str:
    """Return a JSON value if it is a string, else raise Malformed."""
    if not isinstance(value, str):
        raise Malformed(f"{where} must be text, got {show_value(value)}")
    return value


def name_text(value: Any, where: str) -> str:
    """Return a JSON value if it is a one-line name, else raise Malformed."""
    if not (text(value, where) and len(value) <= LONGEST_NAME and value.isprintable()):
        raise Malformed(f"{where} must be a name of 1 to {LONGEST_NAME} characters in one line")
    return str(value)


def flag(value: Any, where: str) -> bool:
    """Return a JSON value if it is true or false, else raise Malformed."""
    if not isinstance(value, bool):
        raise Malformed(f"{where} must be true or false, got {show_value(value)}")
    return value


def integer(value: Any, where: str, least: int = 0, most: int = INT64) -> int:
    """Return a JSON value if it is an integer in range, else raise Malformed.

    The range is from `least` to `most`.
    """
    if type(value) is not int or not least <= value <= most:
        top = " upwards" if most == INT64 else f" to {most}"
        raise Malformed(
            f"{where} must be a whole number from {least}{top}, got {show_value(value)}"
        )
    return value


def number(value: Any, where: str) -> float:
    """Return a JSON number from 0 to 1e30 as a float, else raise Malformed."""
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        top = f" to {LARGEST:g}" if type(value) in (int, float) and value > LARGEST else ""
        raise Malformed(f"{where} must be a number from 0{top}, got {show_value(value)}")
    return float(value)


def list_of(kind: Callable[[Any, str], Value]) -> Callable[[Any, str], tuple[Value, ...]]:
    """Return a check for JSON lists, whose values must all pass the check `kind`."""

    def check(values: Any, where: str) -> tuple[Value, ...]:
        if not isinstance(values, list):
            raise Malformed(f"{where} must be a list, got {show_value(values)}")
        return tuple(kind(value, f"{where}[{i}]") for i, value in enumerate(values))

    return check


def show_value(value: Any) -> str:
    """Format a JSON value for an error message: short, in one line."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def printable(value: Any) -> str:
    """Return the first 100 characters of a text, without unprintable characters."""
    return one_line(str(value)[:100])


def one_line(text: str) -> str:
    """Return a text without its unprintable characters, which include ends of lines."""
    return "".join(filter(str.isprintable, text))


def _check_brackets(data: bytes) -> None:
    """Raise Malformed if JSON brackets are too many, too deep, or unpaired."""
    opening = data.count(b"[") + data.count(b"{")
    if opening <= DEEPEST:
        return
    if opening > MOST_BRACKETS:
        raise Malformed(f"not usable: it has more than {MOST_BRACKETS} lists and objects")
    data = without_strings(data, _OTHERS)
    for _ in range(DEEPEST):
        data = data.replace(b"[]", b"").replace(b"{}", b"")
        if not data:
            return
    pairs = b"[]" in data or b"{}" in data
    too_deep = f"not usable: nested deeper than {DEEPEST} levels"
    raise Malformed(too_deep if pairs else "not JSON: its brackets are not in pairs")


def without_strings(data: bytes, others: bytes = b"") -> bytes:
    """Return a JSON text without its strings, and without the bytes in `others`."""
    import numpy as np  # a regular expression takes 0.2 s for each MB of short strings

    data = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, others)
    text = np.frombuffer(data, np.uint8)
    quotes = text == ord('"')
    inside = np.logical_xor.accumulate(quotes) | quotes
    return text[~inside].tobytes()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore
        raise Malformed(f"not clear: the name {show_value(twice)} occurs twice in one object")
    return values


def _bounded_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS + digits.startswith("-"):
        raise Malformed(f"not usable: it has a number of more than {MOST_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Malformed(f"not usable: no float can represent the number {show_value(digits)}")
    return value


def _constant(name: str) -> float:
    raise Malformed(f"not JSON: {name} is not a number in JSON")
