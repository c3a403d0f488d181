"""Options: dataclass fields that carry their help text, check and help group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from greenroom.errors import UnknownName, UnknownOption, UsageError

P = ParamSpec("P")
R = TypeVar("R")
# Called with a value and the option's name as users write it; raises UsageError if it is wrong.
Check = Callable[[Any, str], object]
REQUIRED = MISSING
MEMORY, CACHE, PREFETCHING, INEXACT, MACHINE = GROUPS = (  # headings of the help, in their order
    "memory", "expert cache", "prefetching", "misses that get less, which changes the output",
    "machine",
)  # fmt: skip


def option(
    default: Any,
    text: str,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    *,
    check: Check | None = None,
    needs: str | None = None,
    group: str | None = None,
    shown: bool = False,
) -> Any:
    """Define a dataclass field that is an option of every command with this config.

    check: check of the value, called unless it is None
    needs: the option without which this one does nothing
    group: its heading in the help, in place of the config's
    shown: whether `--help` shows it; otherwise only `--help-all` does
    """
    about = {
        "help": text, "metavar": metavar, "choices": choices, "check": check, "needs": needs,
        "group": group, "shown": shown,
    }  # fmt: skip
    return field(default=default, metadata=about)


def options_in(config: Any) -> list[Field[Any]]:
    """Return the fields of a config, or of its class, that are command options."""
    return [each for each in fields(config) if "help" in each.metadata]


def flag(name: str) -> str:
    """Return a config field's name as users write the option: `--max-batch`."""
    return f"--{name.replace('_', '-')}"


def changed_options(config: Any) -> dict[str, Any]:
    """Return the options of a config whose values differ from their defaults."""
    values = ((each, getattr(config, each.name)) for each in options_in(config))
    return {each.name: value for each, value in values if value != each.default}


def check_options(config: Any) -> None:
    """Check every option of a config: its choices, value, and the option that it needs."""
    for each in options_in(config):
        value, check = getattr(config, each.name), each.metadata["check"]
        choices = each.metadata["choices"]
        if value is not None and choices and value not in choices:
            raise UnknownName(each.name, value, choices)
        if value is not None and check:
            check(value, flag(each.name))
    for each in options_in(config):
        if each.metadata["needs"]:
            check_needed(config, each, each.metadata["needs"])


def check_needed(config: Any, option: Field[Any], needed: str) -> None:
    """Raise UsageError if an option is given without the option that it needs."""
    if getattr(config, option.name) == option.default:
        return
    if getattr(config, needed) is None:
        raise UsageError(f"{flag(option.name)} has an effect only with {flag(needed)}")
    if getattr(config, needed) == "off":
        raise UsageError(f"{flag(option.name)} is for {flag(needed)}, which is off: give both")


def at_least(least: float, most: float | None = None, unit: str = "") -> Check:
    def check(value: Any, name: str) -> None:
        if not least <= value < float("inf"):
            raise UsageError(f"{name} must be at least {least}{unit and ' '}{unit}, got {value}")
        if most is not None and value > most:
            raise UsageError(f"{name} must be at most {most}, got {value}")

    return check


def within(least: float, most: float) -> Check:
    def check(value: Any, name: str) -> None:
        if not least <= value <= most:
            raise UsageError(f"{name} must be from {least} to {most}, got {value}")

    return check


def above(least: float, below: float = float("inf")) -> Check:
    def check(value: Any, name: str) -> None:
        if not least < value < below:
            limit = f" and below {below:g}" if below < float("inf") else ""
            raise UsageError(f"{name} must be above {least}{limit}, got {value}")

    return check


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that unknown keywords raise UnknownOption."""
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise UnknownOption(function.__name__, name, names)
        return function(*args, **kwargs)

    return checked
