"""An option: its default, its help, and the checks that many have in common."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from greenroom.errors import UnknownName, UsageError


def option(default: Any, text: str, metavar: str | None = None, choices: Any = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar, "choices": choices})


def at_least(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if not least <= value < float("inf"):
        raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def check_choices(config: Any) -> None:
    for option in fields(config):
        choices, value = option.metadata["choices"], getattr(config, option.name)
        if choices and value not in choices:
            raise UnknownName(option.name, value, choices)
