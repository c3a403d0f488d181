"""The command line: one file a command; heavy imports happen inside a command."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from typing import NoReturn

from greenroom import __version__
from greenroom.environment import large_pages, wait_briefly
from greenroom.errors import GreenroomError, UsageError, VerifyError

DESCRIPTION = "Run Mixture-of-Experts language models that are larger than memory."


class Parser(argparse.ArgumentParser):
    """argparse whose own errors are one line, as all others are; options are not abbreviated."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


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
    """Exit codes: 0 done, 1 verify failed, 2 the user's mistake or the model's, 130 interrupted."""
    # Before transformers is imported: its warnings are for its own users.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    wait_briefly()
    large_pages()
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()  # importing makes a million objects and no garbage
    try:
        args = parser().parse_args(argv)
        code = int(args.main(args) or 0)
        sys.stdout.flush()  # a full disk shows here, and not when Python ends
        return code
    except VerifyError as error:
        return _say(str(error), 1)
    except GreenroomError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt:
        if sys.stderr.isatty():  # where it shows ^C
            print(file=sys.stderr)
        return _say("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has gone: nothing more to say
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else "cannot write the output: "
        return _say(f"{where}{error.strerror or error}", 2)
    finally:
        if not frozen:  # by whoever called
            gc.unfreeze()  # libraries that count their instances as Python ends would miss some
        if collecting:
            gc.enable()


def _say(message: str, code: int) -> int:
    """One line, also where a message that came from elsewhere has more."""
    with contextlib.suppress(OSError):
        print(f"greenroom: {' '.join(message.split())}", file=sys.stderr)
    return code


def _drop_output() -> None:
    """What is still buffered would fail once more when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
