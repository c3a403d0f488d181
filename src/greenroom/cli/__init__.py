"""The command line: one file a command; heavy imports happen inside a command."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from typing import Any, NoReturn

from greenroom import __version__
from greenroom.environment import check_platform, large_pages, wait_briefly
from greenroom.errors import GreenroomError, UsageError, VerifyError
from greenroom.interrupts import INTERRUPTED, InterruptWatch, caught

DESCRIPTION = "Run Mixture-of-Experts language models that are larger than memory."


class Parser(argparse.ArgumentParser):
    """argparse whose own errors are one line, as all others are; options are not abbreviated.

    A command with many options names those that people use; --help-all shows the others too.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})  # type: ignore[arg-type]
        self._common: tuple[str, ...] = ()

    def show_first(self, *names: str) -> None:
        """Have --help show only these options, beside those that must be given."""
        self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")
        self._common = (*names, "help", "help_all")

    def format_help(self) -> str:
        rare = [
            action
            for action in self._actions
            if action.option_strings and not action.required and action.dest not in self._common
        ]
        if not self._common:
            return super().format_help()
        texts = [action.help for action in rare]
        self.epilog = f"{len(rare)} more options: {self.prog} --help-all"
        try:
            for action in rare:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            self.epilog = None
            for action, text in zip(rare, texts, strict=True):
                action.help = text

    def format_all(self) -> str:
        """The help with every option, in groups."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _HelpAll(argparse.Action):
    """--help-all"""

    def __init__(self, option_strings: Any, dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        print(parser.format_all(), end="")
        parser.exit()


def parser() -> Parser:
    from greenroom.cli import (
        bench,
        chat,
        doctor,
        models,
        pack,
        plan,
        run,
        serve,
        simulate,
        trace,
        train_predictor,
        tune,
        verify,
    )

    top = Parser("greenroom", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"greenroom {__version__}")
    top.set_defaults(main=lambda args: print(top.format_help(), end=""))
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    asked = (run, chat, serve, doctor, plan, tune, bench, verify, pack, models)
    for command in (*asked, simulate, trace, train_predictor):
        command.add_to(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 verify failed, 2 the user's mistake or the model's, 130 interrupted.

    Without `argv` the process is this command's alone, and Ctrl-C ends it in time.
    """
    watch = InterruptWatch()
    if argv is not None or not watch.begin():
        return _ended(*_outcome(argv))
    try:
        code, message = _outcome(argv)
        watch.over()
    except KeyboardInterrupt:  # it came after what it was to end
        watch.over()
        code, message = INTERRUPTED, None
    except BaseException:
        watch.over()
        if not watch.asked:
            raise
        code, message = INTERRUPTED, None  # which a library made another exception of
    if watch.asked or code == INTERRUPTED:
        watch.said = True
        _ended(INTERRUPTED, message if code == INTERRUPTED and message else "interrupted")
        watch.exit()
    return _ended(code, message)


def _outcome(argv: list[str] | None) -> tuple[int, str | None]:
    """(exit code, the line that says why)."""
    # Before transformers is imported: its warnings are for its own users.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    wait_briefly()
    large_pages()
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()  # importing makes a million objects and no garbage
    try:
        args = parser().parse_args(argv)
        if args.command is not None:
            check_platform()
        code = int(args.main(args) or 0)
        sys.stdout.flush()  # a full disk shows here, and not when Python ends
        return code, None
    except VerifyError as error:
        return 1, str(error)
    except GreenroomError as error:
        return 2, str(error)
    except KeyboardInterrupt as error:
        caught(error)
        return INTERRUPTED, ": ".join(["interrupted", *map(str, error.args)])
    except BrokenPipeError:  # the reader of our output has gone: nothing more to say
        _drop_output()
        return 141, None
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else "cannot write the output: "
        return 2, f"{where}{error.strerror or error}"
    finally:
        if not frozen:  # by whoever called
            gc.unfreeze()  # libraries that count their instances as Python ends would miss some
        if collecting:
            gc.enable()


def _ended(code: int, message: str | None) -> int:
    """Say why the command ended, in one line, also where a message that came from elsewhere has
    more; the code is returned."""
    with contextlib.suppress(OSError):
        if code == INTERRUPTED and sys.stderr.isatty():  # where it shows ^C
            print(file=sys.stderr)
        if message is not None:
            print(f"greenroom: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _drop_output() -> None:
    """What is still buffered would fail once more when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
