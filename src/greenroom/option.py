"""Define command-line options as dataclass fields with a help text and a check."""

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
    "memory", "expert cache", "prefetching", "options that change the output", "machine",
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
    """Define a dataclass field that is an option of all commands with this config class.

    text:    the help text
    metavar, choices: as in argparse
    check:   function of the value and the option's name; raises UsageError; not called for None
    needs:   name of the field without which this option has no effect
    group:   the option's heading in the help, in place of the config's
    shown:   whether `--help` shows the option; otherwise only `--help-all` does
    """
    about = {
        "help": text, "metavar": metavar, "choices": choices, "check": check, "needs": needs,
        "group": group, "shown": shown,
    }  # fmt: skip
    return field(default=default, metadata=about)


def options_in(config: Any) -> list[Field[Any]]:
    """Return the fields of a config, or of a config class, that are command-line options."""
    return [each for each in fields(config) if "help" in each.metadata]


def flag(name: str) -> str:
    """Return a config field's name as a command-line option: `--max-batch` for `max_batch`."""
    return f"--{name.replace('_', '-')}"


def changed_options(config: Any) -> dict[str, Any]:
    """Return a config's options that differ from their defaults: field names and values."""
    values = ((each, getattr(config, each.name)) for each in options_in(config))
    return {each.name: value for each, value in values if value != each.default}


def check_options(config: Any) -> None:
    """Check the value of every option in a config.

    Raises UnknownName for a value that is not among the choices. Raises UsageError for other wrong
    values, and for an option that has an effect only with another option that is not given.
    """
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
    """Raise UsageError if `option` is changed from its default, but `needed` is not set."""
    if getattr(config, option.name) == option.default:
        return
    if getattr(config, needed) is None:
        raise UsageError(f"{flag(option.name)} has an effect only with {flag(needed)}")
    if getattr(config, needed) == "off":
        raise UsageError(
            f"{flag(option.name)} has an effect only with {flag(needed)}, which is off: give both"
        )


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
    """Decorate a function so that unknown keyword arguments raise UnknownOption."""
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise UnknownOption(function.__name__, name, names)
        return function(*args, **kwargs)

    return checked
