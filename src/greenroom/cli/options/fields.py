"""Command-line options from the fields of config dataclasses."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from greenroom.cli.options.parser import Parser
from greenroom.config import GROUPS, flag, options_in
from greenroom.option import REQUIRED

Config = TypeVar("Config")
MODEL = (
    "a model: a Hugging Face folder, a pack, a GGUF file, a hub id (owner/name, or"
    " owner/name:Q4_K_M for a quantisation of a GGUF repository), or demo (ships with Greenroom)"
)


def add_options(
    parser: Parser,
    config: type,
    title: str | None = None,
    names: Sequence[str] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Add a command-line option for each option field of a config dataclass.

    title: heading of the options in the help (default: each field's own group)
    names: the fields to add (default: all)
    texts: help texts of options that mean something else to this command, by field
    """
    types = typing.get_type_hints(config)
    fields = [each for each in options_in(config) if names is None or each.name in names]
    titles = [title or each.metadata["group"] or "options" for each in fields]
    order = [*dict.fromkeys(each for each in titles if each not in GROUPS), *GROUPS]
    groups = {each: _group(parser, each) for each in order if each in titles}
    for each, group in zip(fields, titles, strict=True):
        about = each.metadata
        text = (texts or {}).get(each.name, about["help"])
        if each.default is False:
            groups[group].add_argument(flag(each.name), action=_Flag, help=text)
            continue
        if each.default not in (None, REQUIRED) and "default" not in text:
            text += " (default: %(default)s)"
        choices = about["choices"]
        groups[group].add_argument(
            flag(each.name),
            action=_AppendValue if _is_repeatable(types[each.name]) else _StoreValue,
            type=_kind(types[each.name]),
            required=each.default is REQUIRED,
            default=None if each.default is REQUIRED else each.default,
            metavar="|".join(choices) if choices else about["metavar"],
            help=text,
        )
    parser.show(*(each.name for each in fields if each.metadata["shown"]))


def _is_repeatable(hint: Any) -> bool:
    """Check whether an option may be given several times: its value may be a tuple."""
    return any(typing.get_origin(each) is tuple for each in typing.get_args(hint))


def _group(parser: Parser, title: str) -> Any:
    """Return the parser's group of options with this title, or add the group."""
    groups = (each for each in parser._action_groups if each.title == title)
    return next(groups, None) or parser.add_argument_group(title)


def _kind(hint: Any) -> Any:
    """Return the type of an option's value for a type hint such as `float | None`."""
    kinds = [each for each in (str, Path, float, int) if each in (typing.get_args(hint) or (hint,))]
    return kinds[0]


def add_model(parser: Parser) -> None:
    """Add the positional argument MODEL to a command."""
    parser.add_argument("model", metavar="MODEL", help=MODEL)


def add_verbose(parser: Parser) -> None:
    """Add the option --verbose to a command that loads a model."""
    parser.add_argument(
        "--verbose", action="store_true",
        help="print more when the model is loaded: what is in which memory, and the options that"
        " reproduce this run",
    )  # fmt: skip
    parser.show("verbose")


class _StoreValue(argparse.Action):
    """An argparse action that stores a value, and records that the user gave the option."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.configured = {**configured(namespace), self.dest: values}


class _AppendValue(_StoreValue):
    """An argparse action for an option that may be given several times: a tuple of values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest) or ()
        super().__call__(parser, namespace, (*before, values), option)


class _Flag(_StoreValue):
    """An argparse action for a flag without a value."""

    def __init__(self, option_strings: Any, dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        super().__call__(parser, namespace, True, option)


def configured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user gave, by field, even if they equal the defaults."""
    return dict(getattr(args, "configured", {}))


def take(args: argparse.Namespace, config: type[Config]) -> Config:
    """Make a config of class `config` from the parsed command-line arguments.

    Fields without an option in this command keep their defaults. UsageError for a wrong value.
    """
    names = [each.name for each in options_in(config) if hasattr(args, each.name)]
    return config(**{name: getattr(args, name) for name in names})
