"""Options from config dataclasses: names, defaults and help are written there once."""

from __future__ import annotations

import argparse
import typing
from dataclasses import Field, fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def add_options(parser: argparse.ArgumentParser, config: type[Config], title: str) -> None:
    """One option a field, in a group of its own."""
    group = parser.add_argument_group(title)
    types = typing.get_type_hints(config)
    for option in _fields(config):
        name = f"--{option.name.replace('_', '-')}"
        if option.default is False:
            group.add_argument(name, action=_Flag, help=option.metadata["help"])
            continue
        kinds = {int, float, str} & set(
            typing.get_args(types[option.name]) or (types[option.name],)
        )
        kind: Any = str if str in kinds else kinds.pop()
        text = option.metadata["help"]
        if option.default is not None and "default" not in text:
            text += " (default: %(default)s)"
        group.add_argument(
            name,
            action=_Given,
            type=kind,
            default=option.default,
            metavar=choices_of(config, option.name) or option.metadata["metavar"],
            help=text,
        )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true",
        help="a longer start-up line: where all is, and the options that give the same again",
    )  # fmt: skip


class _Given(argparse.Action):
    """Stores a value, and remembers that the user gave it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {**given(namespace), self.dest: values}


class _Flag(_Given):
    """A flag without a value."""

    def __init__(self, option_strings: Any, dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        super().__call__(parser, namespace, True, option)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options of configs that the user gave, whatever their defaults are."""
    return dict(getattr(args, "given", {}))


def _fields(config: type) -> tuple[Field[Any], ...]:
    return fields(config)


def take(args: argparse.Namespace, config: type[Config]) -> Config:
    """The config that the arguments say, checked."""
    return config(**{option.name: getattr(args, option.name) for option in _fields(config)})


def choices_of(config: type[Config], name: str) -> str | None:
    """The names that an option takes, as its help shows them; None where it takes any value."""
    option = next(option for option in _fields(config) if option.name == name)
    choices = option.metadata["choices"]
    return "|".join(choices) if choices else None
