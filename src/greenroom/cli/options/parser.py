"""The argument parser of all commands: one-line errors, short help by default."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from greenroom.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors and without abbreviated options.

    --help shows the options that people use most; --help-all shows all of them.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})  # type: ignore[arg-type]
        self._common: set[str] = set()

    def show(self, *names: str) -> None:
        """Show the named options in --help.

        All options are shown until the first call, then only required and named ones; --help-all
        shows all.
        """
        if names and not self._common:
            self.add_argument(
                "--help-all", action=_HelpAll, help="show the help of all options and exit"
            )
            self._common = {"help", "help_all"}
        self._common.update(names)

    def format_help(self) -> str:
        rare = [
            action
            for action in self._actions
            if action.option_strings and not action.required and action.dest not in self._common
        ]
        if not self._common:
            return super().format_help()
        texts = [action.help for action in rare]
        self.epilog = f"{len(rare)} more options: {self.prog} --help-all" if rare else None
        try:
            for action in rare:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            self.epilog = None
            for action, text in zip(rare, texts, strict=True):
                action.help = text

    def format_all(self) -> str:
        """Format the help of all options of a command, in groups."""
        return super().format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an error about unknown ones names the help of the given command.

        argparse before Python 3.12.7 takes an optional positional for missing if options stand
        before it: `run MODEL --memory 8GB PROMPT`. Here it has its value.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        for action in getattr(parsed, "optional_positionals", ()):
            is_missing = getattr(parsed, action.dest) is action.default
            if is_missing and unknown and not unknown[0].startswith("-"):
                setattr(parsed, action.dest, unknown.pop(0))
        if unknown:
            self.prog = getattr(parsed, "command_name", self.prog)
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_commands(parser: Parser, dest: str, commands: Mapping[str, Any]) -> None:
    """Add subcommands to a parser, each from a module with HELP, `add_to` and `main`.

    `dest` is the attribute of the parsed arguments that holds the chosen name. A module that is
    itself a group of commands has no `main`.
    """
    parser.set_defaults(main=lambda args: print(parser.format_help(), end=""))
    below = parser.add_subparsers(dest=dest, metavar="COMMAND")
    for name, module in commands.items():
        command = below.add_parser(name, help=module.HELP, description=module.HELP)
        if hasattr(module, "main"):
            command.set_defaults(main=module.main, command_name=command.prog)
        module.add_to(command)
        command.set_defaults(
            optional_positionals=[
                action for action in command._get_positional_actions() if action.nargs == "?"
            ]
        )


class _HelpAll(argparse.Action):
    """An argparse action that prints the help of all options, for --help-all."""

    def __init__(self, option_strings: Any, dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        print(parser.format_all(), end="")
        parser.exit()
