"""An option: its default, its help, and the checks that many have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from greenroom.errors import UnknownName, UnknownOption, UsageError

P = ParamSpec("P")
R = TypeVar("R")


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


def options_checked(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose unknown keywords raise UnknownOption, which names the nearest."""
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise UnknownOption(function.__name__, name, names)
        return function(*args, **kwargs)

    return checked
