"""`greenroom chat MODEL`, or `greenroom chat --url URL`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import MODEL, add_options, add_verbose, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.serve import name_of, need_extra
from greenroom.cli.terminal.progress import collect_garbage, model_progress, quiet
from greenroom.cli.terminal.session import OpenScreen, Session, Terminal
from greenroom.config import OFF, LoadConfig, SamplingConfig, ServeConfig
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.cli.screen.frame import EngineReader
    from greenroom.cli.screen.layout import View
    from greenroom.cli.screen.screen import LiveScreen
    from greenroom.server.chat.backend import ChatBackend
    from greenroom.server.engine.loop import ContinuousEngine

HELP = "talk to a model in the terminal, which is loaded here or runs on a server (--url)"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help=f"{MODEL}; with --url: the name of one of the server's models",
    )  # fmt: skip
    parser.add_argument(
        "--url",
        metavar="URL",
        help="talk to a model of the OpenAI-compatible server at this address",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE",
        help="with --url, file whose first line is the server's API key; the environment variable"
        " GREENROOM_API_KEY does the same",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    parser.add_argument(
        "--live",
        action="store_true",
        help="show a screen during each answer: speed, memory, which experts are in memory, misses,"
        " reads and the text; /live switches it",
    )
    add_options(parser, SamplingConfig, "sampling")
    add_verbose(parser)
    add_options(parser, ServeConfig, names=["speculate", "no_idle_prefetch"])
    add_options(parser, LoadConfig)
    parser.show("system", "url")


def main(args: argparse.Namespace) -> None:
    load, sampling = take(args, LoadConfig), take(args, SamplingConfig)
    if args.url is None and args.model is None:
        raise UsageError("no model: give a MODEL to load, or the address of a server with --url")
    chosen = load != LoadConfig() or args.no_idle_prefetch or args.speculate != OFF
    if args.url is not None and chosen:
        raise UsageError(
            "with --url the server loads the model, so leave out the options of memory, expert"
            " cache,"
            " prefetching, speculation and machine, or give them to `greenroom serve`"
        )
    if args.url is not None and args.live:
        raise UsageError(
            f"--live shows a model of this process; a server's model is on its page: {args.url}"
        )
    if args.url is None and args.api_key_file is not None:
        raise UsageError("--api-key-file is for a server: give its address with --url")
    backend = _remote(args, sampling) if args.url else _local(args, load, sampling)
    talker, name, open_screen = backend
    try:
        with Terminal() as terminal:
            session = Session(talker, terminal, name, args.system, open_screen)
            if args.live:
                session.begin_live()
            session.run()
    finally:
        talker.close()


def _remote(
    args: argparse.Namespace, sampling: SamplingConfig
) -> tuple[ChatBackend, str, OpenScreen | None]:
    from greenroom.server.chat.remote import RemoteBackend
    from greenroom.server.http.keys import read_api_key

    talker = RemoteBackend(args.url, read_api_key(args.api_key_file), sampling, args.model)
    return talker, f"{talker.model} at {args.url}", None


def _local(
    args: argparse.Namespace, load: LoadConfig, sampling: SamplingConfig
) -> tuple[ChatBackend, str, OpenScreen | None]:
    check_early(load)
    need_extra("chat")
    with model_progress(args.model) as progress:
        from greenroom.server.chat.local import LocalBackend, wait_until_loaded
        from greenroom.server.engine.start import start

        quiet(progress)
        once = ServeConfig(
            max_batch=1, max_queue=1, speculate=args.speculate,
            no_idle_prefetch=args.no_idle_prefetch, picture_tokens=0,
        )  # fmt: skip
        engine = start(args.model, load, once, verbose=args.verbose)
        try:
            wait_until_loaded(
                engine, lambda share: progress.say(f"{args.model}: loading", share, 1)
            )
            progress.clear()
            print(engine.summary, file=sys.stderr, flush=True)
            talker = LocalBackend(engine, sampling)
        except Exception:
            engine.stop(0.0)
            raise
    collect_garbage()
    return talker, name_of(args.model), _screens(engine, name_of(args.model))


def _screens(engine: ContinuousEngine, name: str) -> OpenScreen:
    """Return a function that makes a live screen of an engine; screens share one history."""

    @cache
    def source() -> tuple[View, EngineReader]:
        from greenroom.cli.screen.frame import EngineReader, ModelFacts
        from greenroom.cli.screen.layout import View

        return View(ModelFacts.of(name, engine.greenroom)), EngineReader(engine)

    def open_screen(on_text: Callable[[str, bool], None]) -> LiveScreen:
        from greenroom.cli.screen.screen import LiveScreen

        view, reader = source()
        return LiveScreen(view, reader.read, on_text)

    return open_screen
