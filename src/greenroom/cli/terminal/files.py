"""Files that a command writes: checks before its work, and atomic writes."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from greenroom.errors import OutputError


def add_out(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the required option --out, the file that a command writes."""
    parser.add_argument("-o", "--out", metavar="FILE", required=True, type=Path, help=text)


def add_json(parser: argparse.ArgumentParser, what: str = "one JSON object") -> None:
    """Add the option --json, with which a command prints only `what`, as JSON."""
    parser.add_argument("--json", action="store_true", help=f"print {what}, and nothing else")


def check_target(path: Path) -> None:
    """Check that a command can write a file at `path`; raises OutputError if it cannot."""
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder")
    if path.exists() and not path.is_file():
        raise OutputError(f"cannot write {path}: it is not an ordinary file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: you may not write in the folder {path.parent}")


def command_of(args: argparse.Namespace) -> str:
    """Return the command line as the user gave it, quoted for a shell."""
    return shlex.join(["greenroom", *map(str, args.command_line)])


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically: no reader sees half of the text.

    OutputError if the file cannot be written.
    """
    from greenroom.trace.container import atomic_file

    check_target(path)
    with atomic_file(path) as file:
        file.write(text.encode())
