"""The command line: one file a command; heavy imports happen inside a command."""

from __future__ import annotations

import argparse
import os
import sys

from greenroom import __version__
from greenroom.errors import GreenroomError, VerifyError

DESCRIPTION = "Run Mixture-of-Experts language models that are larger than memory."


def parser() -> argparse.ArgumentParser:
    from greenroom.cli import run, verify

    top = argparse.ArgumentParser("greenroom", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"greenroom {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (run, verify):
        command.add_to(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 verify failed, 2 the user's mistake or the model's, 130 interrupted."""
    args = parser().parse_args(argv)
    # Before transformers is imported: its warnings are for its own users.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see greenroom/__init__.py
    try:
        return int(args.main(args) or 0)
    except VerifyError as error:
        print(f"greenroom: {error}", file=sys.stderr)
        return 1
    except GreenroomError as error:
        print(f"greenroom: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ngreenroom: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"greenroom: {error.strerror or error}", file=sys.stderr)
        return 2
