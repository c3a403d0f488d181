"""The command line of Greenroom: one file for each command.

Heavy libraries are imported inside of the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from importlib import import_module

from greenroom import __version__
from greenroom.cli.early.unused_imports import defer_unused_imports
from greenroom.cli.options.parser import Parser, add_commands
from greenroom.environment import check_platform, limit_spinning, request_large_pages
from greenroom.errors import GreenroomError, VerifyError
from greenroom.interrupts import INTERRUPTED, InterruptWatch, mark_caught
from greenroom.refusals import name_refusals

DESCRIPTION = "Run Mixture-of-Experts language models that are larger than memory."

COMMANDS = {
    name: name.replace("-", "_")
    for name in (
        "run", "chat", "serve", "batch", "pull", "list", "rm", "doctor", "plan", "tune", "bench",
        "verify", "pack", "models", "simulate", "trace", "view", "train-predictor",
        "train-policy",
    )
} | {"trace": "trace.group"}  # fmt: skip


def parser() -> Parser:
    """Make the argument parser of the command `greenroom` with all its subcommands."""
    top = Parser("greenroom", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"greenroom {__version__}")
    commands = {name: import_module(f"greenroom.cli.{where}") for name, where in COMMANDS.items()}
    add_commands(top, "command", commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a Greenroom command line and return its exit code.

    0: done; 1: `greenroom verify` found a difference; 2: a mistake of the user or an unusable
    model; 130: interrupted by Ctrl-C; 141: the reader of the output has gone. Without `argv` the
    arguments are those of the process, which the command then owns: it may end the process on
    Ctrl-C.
    """
    if argv is None:
        defer_unused_imports()
    watch = InterruptWatch()
    if argv is not None or not watch.begin():
        return _ended(*_outcome(argv))
    try:
        code, message = _outcome(argv)
        watch.stop_raising()
    except KeyboardInterrupt:  # Ctrl-C came after the command had ended
        watch.stop_raising()
        code, message = INTERRUPTED, None
    except BaseException:
        watch.stop_raising()
        if not watch.requested:
            raise
        code, message = INTERRUPTED, None  # a library replaced the KeyboardInterrupt
    if watch.requested or code == INTERRUPTED:
        watch.announced = True
        _ended(INTERRUPTED, message if code == INTERRUPTED and message else "interrupted")
        watch.exit()
    return _ended(code, message)


def _outcome(argv: list[str] | None) -> tuple[int, str | None]:
    """Run a command line, and return its exit code and the error in one line, or None."""
    # Before transformers is imported: its warnings are for its own users.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    limit_spinning()
    request_large_pages()
    collecting = gc.isenabled()
    gc.disable()  # importing makes a million objects and no garbage
    try:
        arguments = sys.argv[1:] if argv is None else argv
        args = parser().parse_args(arguments, argparse.Namespace(command_line=arguments))
        if args.command is not None:
            check_platform()
        with name_refusals():
            code = int(args.main(args) or 0)
        sys.stdout.flush()  # a full disk shows here, and not when Python ends
        return code, None
    except VerifyError as error:
        return 1, str(error)
    except GreenroomError as error:
        return 2, str(error)
    except KeyboardInterrupt as error:
        mark_caught(error)
        return INTERRUPTED, ": ".join(["interrupted", *map(str, error.args)])
    except BrokenPipeError:  # nobody reads the output any more
        _drop_output()
        return 141, None
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else "cannot write the output: "
        return 2, f"{where}{error.strerror or error}"
    finally:
        if argv is None:  # a caller's own frozen objects stay frozen
            gc.unfreeze()  # libraries that count their instances as Python ends would miss some
        if collecting:
            gc.enable()


def _ended(code: int, message: str | None) -> int:
    """Print on standard error why the command ended, if not None, and return the exit code."""
    with contextlib.suppress(OSError):
        if code == INTERRUPTED and sys.stderr.isatty():  # where it shows ^C
            print(file=sys.stderr)
        if message is not None:
            print(f"greenroom: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _drop_output() -> None:
    """Discard buffered output, which would fail once more when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
