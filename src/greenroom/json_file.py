"""JSON of files that may come from strangers: one bounded reader, and values by name and kind.

    found = read_json(path, "greenroom-pins", "holds no pins", "greenroom trace hot", UsageError)
    found.integer("version", least=1)          # Malformed: "version must be a whole number from 1"
    found.list_of("losses", number)

Whatever is too large, too deep, or not JSON is refused before Python's parser sees it, or by it.
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
DEEPEST = 64  # brackets in brackets
MOST_BRACKETS = 1 << 21  # each is an object of Python's, of 64 bytes
LONGEST_NAME = 100  # characters
MOST_DIGITS = 64  # of a whole number; tokenizers write 10**30 where there is no limit
INT64 = 2**63 - 1
LARGEST = 1e30  # of numbers that are computed with: sums and products stay finite

_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_STRING = re.compile(rb'"[^"]*"?')  # where no quote is escaped
_DIGITS = bytes(ord("0") if chr(c).isdigit() and c < 128 else c for c in range(256))
_LONG = b"0" * (MOST_DIGITS + 1)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_REQUIRED: Any = object()
Value = TypeVar("Value")


class Malformed(ValueError):
    """JSON text, or a value in it, is not what it must be; the message says how, in one line."""


def parse(data: bytes | str, longest: int = LONGEST, unique: bool = True) -> Any:
    """The value that a JSON text holds, or Malformed.

    Standard JSON in UTF-8, of bounded size and depth: no NaN or Infinity, no number that a float
    cannot hold, no half of a surrogate pair. `unique`: no name twice in an object; else the last
    one counts.
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
        raise Malformed("not JSON: it begins with a byte order mark")
    _check_brackets(data)
    try:
        found = json.loads(
            text,
            parse_int=_whole if _LONG in data.translate(_DIGITS) else int,
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
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Malformed("not JSON: a string has half of a surrogate pair") from error
    return found


def read(path: str | Path, longest: int = LONGEST, unique: bool = True) -> Any:
    """What `parse` gives of a file; Malformed, or OSError as it comes."""
    with open(path, "rb") as file:
        return parse(file.read(longest + 1), longest, unique)


def read_object(
    path: str | Path, error: type[GreenroomError], longest: int = LONGEST
) -> JsonObject:
    """The object in a file of another program, which may have a name twice; `error` says what is
    wrong with it."""
    try:
        return JsonObject(read(path, longest, unique=False))
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror or reason}") from reason
    except Malformed as reason:
        raise error(f"{path}: not readable: it is {reason}") from reason


def read_json(
    path: str | Path, form: str, what: str, made_by: str, error: type[GreenroomError]
) -> JsonObject:
    """What a file of the format `form` holds.

    what:    says of another file that it is none, as "is no machine profile" after its path
    made_by: the command that makes such files
    error:   what is raised where it cannot be read, or is another file
    """
    try:
        found = read(path)
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror}") from reason
    except Malformed as reason:
        raise error(f"{path} {what}: it is {reason}") from reason
    if not isinstance(found, dict) or found.get("format") != form:
        raise error(f"{path} {what}: {made_by} makes such files")
    return JsonObject(found)


class JsonObject:
    """An object of JSON, whose values are asked for by name and kind.

    Malformed names the value that is missing, of another kind, or out of range; `where` is the
    object's own place in the file. A value with a default may be missing, but not wrong.
    """

    def __init__(self, found: Any, where: str = "") -> None:
        if not isinstance(found, dict):
            said = f"{where} must be an object, got" if where else "not an object, but"
            raise Malformed(f"{said} {show_value(found)}")
        self._found: dict[str, Any] = found
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    @property
    def values(self) -> dict[str, Any]:
        """The object as it is."""
        return self._found

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value of any kind."""
        found = self._found.get(name, default)
        if found is _REQUIRED:
            raise Malformed(f"{self._place(name)} is missing")
        return found

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
        """The values of a list, each of a kind: `integer`, `JsonObject`, `list_of(number)` ..."""
        return list_of(kind)(self.value(name, default), self._place(name))

    def fields_of(self, kind: Any) -> dict[str, Any]:
        """The values of a dataclass's fields that are numbers, texts or flags, by their names."""
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
    """A string, or Malformed."""
    if not isinstance(value, str):
        raise Malformed(f"{where} must be text, got {show_value(value)}")
    return value


def name_text(value: Any, where: str) -> str:
    """A short text in one line, as messages can show it, or Malformed."""
    if not (text(value, where) and len(value) <= LONGEST_NAME and value.isprintable()):
        raise Malformed(f"{where} must be a name of 1 to {LONGEST_NAME} characters in one line")
    return str(value)


def flag(value: Any, where: str) -> bool:
    """True or false, or Malformed."""
    if not isinstance(value, bool):
        raise Malformed(f"{where} must be true or false, got {show_value(value)}")
    return value


def integer(value: Any, where: str, least: int = 0, most: int = INT64) -> int:
    """A whole number from `least` to `most`, or Malformed."""
    if type(value) is not int or not least <= value <= most:
        top = "" if most == INT64 else f" to {most}"
        raise Malformed(
            f"{where} must be a whole number from {least}{top}, got {show_value(value)}"
        )
    return value


def number(value: Any, where: str) -> float:
    """A number from 0 to LARGEST, as a float, or Malformed."""
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        top = f" to {LARGEST:g}" if type(value) in (int, float) and value > LARGEST else ""
        raise Malformed(f"{where} must be a number from 0{top}, got {show_value(value)}")
    return float(value)


def list_of(kind: Callable[[Any, str], Value]) -> Callable[[Any, str], tuple[Value, ...]]:
    """A check for lists, whose values are each of a kind."""

    def check(values: Any, where: str) -> tuple[Value, ...]:
        if not isinstance(values, list):
            raise Malformed(f"{where} must be a list, got {show_value(values)}")
        return tuple(kind(value, f"{where}[{i}]") for i, value in enumerate(values))

    return check


def show_value(value: Any) -> str:
    """A value as messages show it: short, in one line."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


def printable(value: Any) -> str:
    """The beginning of a text, without what would break a line."""
    return "".join(filter(str.isprintable, str(value)[:100]))


def _check_brackets(data: bytes) -> None:
    """Malformed where brackets are too many, too deep, or not in pairs. It does not recurse."""
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
    said = f"not usable: nested deeper than {DEEPEST} levels"
    raise Malformed(said if pairs else "not JSON: its brackets are not in pairs")


def without_strings(data: bytes, others: bytes = b"") -> bytes:
    """A JSON text without its strings, and without these bytes."""
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, others)
    return _STRING.sub(b"", data.replace(b'""', b""))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore
        raise Malformed(f"not clear: {show_value(twice)} is twice in one object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS + digits.startswith("-"):
        raise Malformed(f"not usable: a number of more than {MOST_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Malformed(f"not usable: {show_value(digits)} is beyond any float")
    return value


def _constant(name: str) -> float:
    raise Malformed(f"not JSON: {name} is not a number of JSON's")
