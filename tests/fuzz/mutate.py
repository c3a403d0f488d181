"""Change a valid file at random: bytes, lengths, and values of its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
        "nested": "[" * 5000 + "]" * 5000,
        "nothing": "",
        "twice": '{"a": 1, "a": 2}',
    }.items()
}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 65536, 2**31, 2**32, 2**53, 10**9, 2**62, 2**63, 2**64,
    10**30, 0.5, -0.0, 1.5, -1.5, 1e-320, 1e308, "", "x", "0", "-1", "auto", "../x", "/", "\u0663",
    "é\u2028", "a\nb", "a" * 3000, [], {}, [[]], [0] * 40, [-1], ["x"], {"a": 1}, {"": None},
]  # fmt: skip
NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1,
           2**63, 2**64 - 1]  # fmt: skip
ACTIONS = ("odd", "odd", "odd", "near", "near", "drop", "swap", "graft", "repeat", "rename", "add")


class Mutator:
    """Changes files at random; `constants` are numbers and texts in the code that reads them."""

    def __init__(self, random: Random, constants: Sequence[int | bytes] = ()) -> None:
        self._random = random
        texts = [each for each in constants if isinstance(each, bytes)]
        self._bytes = texts or [b"\0"]
        self._names = [each.decode(errors="replace") for each in texts] or [""]
        self._numbers = [*NUMBERS, *(each for each in constants if isinstance(each, int))]

    # ---- JSON

    def edit_json(self, text: bytes, other: bytes) -> bytes:
        """The same JSON with one to three values changed, taken out, moved or repeated.

        Values may come from the JSON text `other`.
        """
        found = json.loads(text)
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            found = self._edited(found, other)
        made = json.dumps(found, ensure_ascii=self._random.random() < 0.5)
        if '"@' in made:
            for name, raw in RAW.items():
                made = made.replace(json.dumps(name), raw)
        return made.encode(errors="surrogatepass")

    def _edited(self, found: Any, other: bytes) -> Any:
        random, place = self._random, self._place(found)
        if place is None or random.random() < 0.02:
            return self._odd(found)
        inside, key = place
        action = random.choice(ACTIONS)
        if action == "near" and type(inside[key]) in (int, float):
            inside[key] = random.choice(
                [0, inside[key] + 1, inside[key] - 1, -inside[key], 2 * inside[key]]
            )
        elif action == "near" and isinstance(inside[key], str):
            text = inside[key].encode(errors="surrogatepass")
            inside[key] = self.edit_bytes(text, b"").decode(errors="replace")
        elif action == "drop":
            del inside[key]
        elif action == "swap":
            there, name = self._place(found) or place
            inside[key], there[name] = json.loads(json.dumps([there[name], inside[key]]))
        elif action == "graft":
            source, name = self._place(json.loads(other)) or ([None], 0)
            inside[key] = source[name]
        elif action == "repeat" and isinstance(inside[key], list):
            inside[key] = (inside[key] * 50)[:1000]
        elif action == "rename" and isinstance(inside, dict):
            names = ["", f"{key}x", random.choice([*inside]), random.choice(self._names)]
            inside[random.choice(names)] = inside.pop(key)
        elif action == "add" and isinstance(inside, dict):
            inside[random.choice(self._names)] = self._odd(None)
        else:
            inside[key] = self._odd(inside[key])
        return found

    def _odd(self, before: Any) -> Any:
        """A value in place of another one; often of its type, which more readers let pass."""
        random, chance = self._random, self._random.random()
        if chance < 0.03:
            return random.choice([*RAW])
        if chance < 0.15:
            return random.choice(self._names)
        if chance < 0.25:
            return random.choice(self._numbers) + random.choice((-1, 0, 0, 1))
        same = [each for each in ODD if type(each) is type(before)] if chance < 0.6 else []
        return deepcopy(random.choice(same or ODD))

    def _place(self, found: Any) -> tuple[Any, Any] | None:
        """A list or an object in a JSON value, and a key of it; lower ones are as likely."""
        if not isinstance(found, dict | list) or not found:
            return None
        random, inside = self._random, found
        while True:
            key = random.choice([*inside]) if isinstance(inside, dict) else (
                random.randrange(len(inside))
            )  # fmt: skip
            below = inside[key]
            if not isinstance(below, dict | list) or not below or random.random() < 0.35:
                return inside, key
            inside = below

    # ---- bytes

    def edit_bytes(self, data: bytes, other: bytes) -> bytes:
        """The same bytes with one to four places changed; `other` is a file to splice with."""
        made = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 4))):
            made = self._random.choice(_CHANGES)(self, made, other)
        return bytes(made)

    def _at(self, data: bytes | bytearray) -> int:
        """A place, more often near the beginning, where headers are."""
        size, random = len(data), self._random
        return random.randrange(min(size, 200) if random.random() < 0.4 else size) if size else 0

    def _flip(self, data: bytearray, other: bytes) -> bytearray:
        if data:
            data[self._at(data)] ^= 1 << self._random.randrange(8)
        return data

    def _byte(self, data: bytearray, other: bytes) -> bytearray:
        if data:
            values = (0, 1, 0x0A, 0x7F, 0x80, 0xFF, self._random.randrange(256))
            data[self._at(data)] = self._random.choice(values)
        return data

    def _cut(self, data: bytearray, other: bytes) -> bytearray:
        return data[: self._at(data)]

    def _insert(self, data: bytearray, other: bytes) -> bytearray:
        at = self._at(data)
        return data[:at] + self._random.randbytes(self._random.choice((1, 4, 8, 100))) + data[at:]

    def _constant(self, data: bytearray, other: bytes) -> bytearray:
        at, text = self._at(data), self._random.choice(self._bytes)
        return data[:at] + text + data[at + self._random.choice((0, len(text))) :]

    def _remove(self, data: bytearray, other: bytes) -> bytearray:
        at = self._at(data)
        return data[:at] + data[at + self._random.choice((1, 4, 8, 100)) :]

    def _repeat(self, data: bytearray, other: bytes) -> bytearray:
        at, size = self._at(data), self._random.choice((1, 8, 64, 1000))
        return data[:at] + data[at : at + size] * 2 + data[at + size :]

    def _splice(self, data: bytearray, other: bytes) -> bytearray:
        return data[: self._at(data)] + other[self._at(other) :]

    def _number(self, data: bytearray, other: bytes) -> bytearray:
        random = self._random
        width, order = random.choice((2, 4, 4, 8, 8)), random.choice(("little", "little", "big"))
        at = self._at(data)
        if random.random() < 0.7:
            at -= at % width
        value = random.choice(self._numbers) % 256**width
        data[at : at + width] = value.to_bytes(width, order)  # type: ignore[arg-type]
        return data

    def _digits(self, data: bytearray, other: bytes) -> bytearray:
        """Another number in place of digits: a count or an offset that is written as text."""
        at = next((i for i in range(self._at(data), len(data)) if 48 <= data[i] < 58), None)
        if at is None:
            return data
        end = next((i for i in range(at, len(data)) if not 48 <= data[i] < 58), len(data))
        return data[:at] + b"%d" % self._random.choice(self._numbers) + data[end:]


_CHANGES: tuple[Callable[[Mutator, bytearray, bytes], bytearray], ...] = (
    Mutator._flip, Mutator._flip, Mutator._byte, Mutator._cut, Mutator._insert, Mutator._constant,
    Mutator._remove, Mutator._repeat, Mutator._splice, Mutator._number, Mutator._number,
    Mutator._number, Mutator._digits,
)  # fmt: skip
