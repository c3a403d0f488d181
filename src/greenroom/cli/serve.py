"""`greenroom serve MODEL`: an HTTP server with the OpenAI, Anthropic and Ollama APIs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.early.checks import check_early
from greenroom.cli.options.fields import add_model, add_options, add_verbose, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.progress import Progress, collect_garbage, quiet
from greenroom.config import LoadConfig, ServeConfig
from greenroom.config.values import adapter_names
from greenroom.errors import GreenroomError, UsageError
from greenroom.hf.checkpoint.names import check_name

if TYPE_CHECKING:
    from greenroom.server.http.service import Service

FAILED_S = 3.0  # how long a server still answers after its model failed
HELP = "serve a model over HTTP to clients of the OpenAI, Anthropic and Ollama APIs"


def add_to(parser: Parser) -> None:
    add_model(parser)
    add_options(parser, ServeConfig, "server")
    add_verbose(parser)
    add_options(parser, LoadConfig)
    parser.show("adapter")


def main(args: argparse.Namespace) -> None:
    load, config = take(args, LoadConfig), take(args, ServeConfig)
    name = checked_name(args.model, load, config)
    need_extra("serve")
    with contextlib.ExitStack() as stack:
        progress = None
        if config.log_format == "text":  # JSON lines are for programs
            progress = stack.enter_context(Progress(f"{args.model}: starting"))
        _serve(args, name, load, config, progress)


def checked_name(model: str, load: LoadConfig, config: ServeConfig) -> str:
    """Check a server's options together; return the model's name for clients.

    UsageError for options that exclude each other, or an adapter with the model's name.
    """
    check_early(load)
    if config.batch_invariant and load.approximation() is not None:
        raise UsageError(
            "--batch-invariant makes answers independent of other requests, but approximated misses"
            " and biased routers depend on the experts that other requests left in the cache: leave"
            " out --batch-invariant, or --miss-precision, --skip-below, --substitute-below and"
            " --cache-bias"
        )
    config.check_drafts()
    check_name(model)
    name = config.model_name or name_of(model)
    if adapter_names(load.adapter, name):
        config.check_variants(load)
    return name


def _serve(
    args: argparse.Namespace,
    name: str,
    load: LoadConfig,
    config: ServeConfig,
    progress: Progress | None,
) -> None:
    from greenroom.server.http.keys import check_address, read_api_key

    key = read_api_key(config.api_key_file)
    check_address(config.host, key)

    from greenroom.server.engine.start import start
    from greenroom.server.http.request_log import LogForwarder, RequestLog
    from greenroom.server.http.service import Service
    from greenroom.server.web.listen import open_socket, serve, url_of

    adapters = adapter_names(load.adapter, name)
    quiet()
    sock = open_socket(config.host, config.port)
    url = url_of(sock)
    log = RequestLog(config.log_format)
    logger, records = logging.getLogger("greenroom"), LogForwarder(log)
    logger.addHandler(records)
    if progress is not None:
        progress.clear()
    log.log_message(f"greenroom: {url} answers once {args.model} is loaded")
    try:
        with sock:
            engine = start(args.model, load, config, verbose=args.verbose, variants=True)
            service = Service(engine, config, name, key, log, adapters)
            serve(service, sock, ModelWatch(service, url))
    finally:
        logger.removeHandler(records)


def need_extra(command: str) -> None:
    """Check that the libraries of the HTTP server are installed.

    UsageError names a missing one, and how to install it for the `command`.
    """
    for name in ("fastapi", "httptools", "llguidance", "prometheus_client", "uvicorn"):
        if find_spec(name) is None:
            raise UsageError(
                f"`greenroom {command}` needs the library {name}: pip install 'greenroom[serve]'"
            )


def name_of(model: str) -> str:
    """Return a model's name for clients, from its folder, file or hub id."""
    path = Path(model)
    return (path if path.name else path.resolve()).name.removesuffix(".gguf")


class ModelWatch:
    """Watcher that reports when a server's model is ready or has failed.

    The server calls the watcher again and again. If the model fails after it was loaded, the
    process ends with exit code 1 after 3 seconds, so that a supervisor can restart it. Until then
    clients get an error, and /health gives the reason. GreenroomError if the model cannot be
    loaded.
    """

    def __init__(self, service: Service, url: str) -> None:
        self._service, self._url = service, url
        self._state = "loading"
        self._end: float | None = None
        self._warm: Future[Any] | None = None  # templates are read outside of the event loop

    def __call__(self) -> None:
        state, _, why = self._service.engine.state()
        if self._end is not None and time.monotonic() >= self._end:
            raise SystemExit(1)
        if (warm := self._warm) is not None and warm.done() and state == "ready":
            self._warm = None
            warm.result()  # raises if the tokenizer cannot be used
            self._service.log.log_message(self._service.engine.summary)
            if not self._service.config.no_page:
                self._service.log.log_message(f"live page: {self._url}")
            self._service.log.log_message(try_it(self._service, self._url))
        if state == self._state:
            return
        before, self._state = self._state, state
        if state == "ready":
            collect_garbage()
            self._warm = self._service.warm()
        elif state == "failed" and before == "loading":
            raise GreenroomError(why)
        elif state == "failed":
            self._service.log.log_message(
                f"greenroom: the model has failed, so the server ends: {why}"
            )
            self._end = time.monotonic() + FAILED_S


def try_it(service: Service, url: str) -> str:
    """Return a line with a curl command with which a user can try the server."""
    key = ' -H "Authorization: Bearer $GREENROOM_API_KEY"' if service.key is not None else ""
    path, example = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if not service.dialogue().has_template:
        path, example = "completions", '"prompt": "Hello"'
    return (
        f"try: curl {url}/v1/{path} -H 'Content-Type: application/json'{key}"
        f' -d \'{{"model": "{service.name}", {example}}}\''
    )
