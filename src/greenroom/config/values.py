"""Parsers of option values with their own syntax."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from greenroom.errors import UnknownName, UsageError
from greenroom.json_file import printable

DEVICES = ("auto", "cpu", "cuda", "fake")
KV = ("dynamic", "int8", "int4", "offloaded")
WORKER, INLINE = "worker", "inline"
PREDICT_IN = ("auto", WORKER, INLINE)
KERNELS = ("auto", "eager", "native", "precise", "rounded", "triton")


def parse_device(device: str) -> tuple[str, tuple[int, ...]]:
    """Parse the value of `--device` into a kind of device and the devices' numbers.

    `cuda:0,cuda:2` gives ("cuda", (0, 2)), `cuda` gives the first GPU, ("cuda", (0,)), and
    `fake,fake` gives two fake devices, which tests use. UnknownName or UsageError for an invalid
    value.
    """
    parts, shown = [part.strip() for part in device.split(",")], f"--device {printable(device)}"
    names, numbers = [], []
    for part in parts:
        name, colon, number = part.partition(":")
        if name not in DEVICES or (colon and name != "cuda"):
            raise UnknownName("device", part, DEVICES)
        if colon and not (number.isascii() and number.isdecimal()):
            raise UsageError(f"{shown}: write the number of a GPU after cuda:, as cuda:0")
        names.append(name)
        numbers.append(int(number or 0))
    if names == ["fake"] * len(parts):
        return "fake", tuple(range(len(parts)))
    if len(parts) > 1 and not all(part.startswith("cuda:") for part in parts):
        raise UsageError(
            f"{shown}: several devices must all be GPUs with numbers, as cuda:0,cuda:1"
        )
    if len(set(numbers)) < len(parts):
        raise UsageError(f"{shown}: name each GPU only once")
    return names[0], tuple(numbers)


class NamedAdapter(NamedTuple):
    """An adapter that a run loads: its name for clients, and its folder."""

    name: str
    path: str


def parse_adapters(value: str | tuple[str, ...] | None) -> tuple[NamedAdapter, ...]:
    """Parse the values of `--adapter`, each `DIR` or `NAME=DIR`.

    Without a name, an adapter has that of its folder. UsageError for an invalid or repeated name.
    """
    adapters: list[NamedAdapter] = []
    for text in (value,) if isinstance(value, str) else value or ():
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = Path(text).absolute().name, text
        if not path or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name, re.ASCII):
            raise UsageError(
                f"--adapter {printable(text)}: write NAME=DIR, with a name of at most 64 letters,"
                " digits, dots and dashes"
            )
        if name in [each.name for each in adapters]:
            raise UsageError(f"--adapter {printable(text)}: two adapters have the name {name}")
        adapters.append(NamedAdapter(name, path))
    return tuple(adapters)


def adapter_names(value: str | tuple[str, ...] | None, model: str) -> tuple[str, ...]:
    """Return the names of the adapters in `--adapter`; UsageError if the `model` has one of them.

    `model` is the model's name for clients.
    """
    names = tuple(each.name for each in parse_adapters(value))
    if model in names:
        raise UsageError(
            f"--adapter {model}: the model has this name: write NAME=DIR, or give --model-name"
        )
    return names
