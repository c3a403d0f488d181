"""Change a valid file at random: bytes, lengths, and values of its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

DEEP = 200_000
RAW = {  # text that no encoder writes, by what stands for it until the JSON is written
    f"@{name}@": text
    for name, text in {
        "nan": "NaN",
        "infinity": "-Infinity",
        "exponent": "1e999",
        "digits": "9" * 400,
        "more digits": "9" * 5000,
        "surrogate": '"\\ud800"',
        "control": '"a\\u0000\\nb"',
        "brackets": "[" * DEEP,
        "objects": '{"a":' * DEEP,
        "deep": "[" * 70 + "]" * 70,
        "nothing": "",
        "twice": '{"a": 1, "a": 2}',
    }.items()
}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 65536, 2**31, 2**32, 2**53, 10**9, 2**62, 2**63, 2**64,
    10**30, 0.5, -0.0, 1.5, -1.5, 1e-320, 1e308, "", "x", "0", "-1", "auto", "../x", "/", "\u0663",
    "é\u2028", "a" * 3000, [], {}, [[]], [0] * 40, [-1], ["x"], {"a": 1}, {"": None}, *RAW,
]  # fmt: skip
NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1,
           2**63, 2**64 - 1]  # fmt: skip


def edit_json(random: Random, text: bytes) -> bytes:
    """The same JSON with one to three values changed, taken out, moved or repeated."""
    found = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = _edited(random, found)
    made = json.dumps(found, ensure_ascii=random.random() < 0.5)
    for name, raw in RAW.items():
        made = made.replace(json.dumps(name), raw)
    return made.encode(errors="surrogatepass")


def _edited(random: Random, found: Any) -> Any:
    places = list(_places(found))
    if not places or random.random() < 0.02:
        return deepcopy(random.choice(ODD))
    inside, key = random.choice(places)
    action = random.choice(("odd", "odd", "odd", "near", "drop", "swap", "repeat", "rename"))
    if action == "odd":
        inside[key] = deepcopy(random.choice(ODD))
    elif action == "near" and type(inside[key]) in (int, float):
        inside[key] = random.choice(
            [inside[key] + 1, inside[key] - 1, -inside[key], 2 * inside[key]]
        )
    elif action == "drop":
        del inside[key]
    elif action == "swap":
        other, name = random.choice(places)
        inside[key], other[name] = json.loads(json.dumps([other[name], inside[key]]))
    elif action == "repeat" and isinstance(inside[key], list):
        inside[key] = (inside[key] * 50)[:1000]
    elif action == "rename" and isinstance(inside, dict):
        inside[random.choice(["", "a", f"{key}x", *inside])] = inside.pop(key)
    else:
        inside[key] = deepcopy(random.choice(ODD))
    return found


def _places(found: Any) -> Any:
    keys = found if isinstance(found, dict) else range(len(found) if isinstance(found, list) else 0)
    for key in keys:
        yield found, key
        yield from _places(found[key])


def edit_bytes(random: Random, data: bytes, others: list[bytes]) -> bytes:
    """The same bytes with one to four places changed; `others` are valid files to splice with."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        made = random.choice(_CHANGES)(random, made, random.choice(others))
    return bytes(made)


def _at(random: Random, data: bytearray) -> int:
    """A place, more often near the beginning, where headers are."""
    size = len(data)
    return random.randrange(min(size, 200) if random.random() < 0.4 else size) if size else 0


def _flip(random: Random, data: bytearray, other: bytes) -> bytearray:
    if data:
        data[_at(random, data)] ^= 1 << random.randrange(8)
    return data


def _byte(random: Random, data: bytearray, other: bytes) -> bytearray:
    if data:
        data[_at(random, data)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return data


def _cut(random: Random, data: bytearray, other: bytes) -> bytearray:
    return data[: _at(random, data)]


def _insert(random: Random, data: bytearray, other: bytes) -> bytearray:
    at = _at(random, data)
    return data[:at] + random.randbytes(random.choice((1, 4, 8, 100))) + data[at:]


def _remove(random: Random, data: bytearray, other: bytes) -> bytearray:
    at = _at(random, data)
    return data[:at] + data[at + random.choice((1, 4, 8, 100)) :]


def _repeat(random: Random, data: bytearray, other: bytes) -> bytearray:
    at, size = _at(random, data), random.choice((1, 8, 64, 1000))
    return data[:at] + data[at : at + size] * 2 + data[at + size :]


def _splice(random: Random, data: bytearray, other: bytes) -> bytearray:
    return data[: _at(random, data)] + other[_at(random, bytearray(other)) :]


def _number(random: Random, data: bytearray, other: bytes) -> bytearray:
    width = random.choice((2, 4, 4, 8, 8))
    at = _at(random, data)
    if random.random() < 0.7:
        at -= at % width
    data[at : at + width] = (random.choice(NUMBERS) % 256**width).to_bytes(width, "little")
    return data


_CHANGES: tuple[Callable[[Random, bytearray, bytes], bytearray], ...] = (
    _flip, _flip, _byte, _cut, _insert, _remove, _repeat, _splice, _number, _number, _number,
)  # fmt: skip
