"""`greenroom view FILE`: plays a trace or a timeline back on the server's live page."""

from __future__ import annotations

import argparse
import signal
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.terminal.progress import Progress
from greenroom.config import ViewConfig
from greenroom.errors import TraceError, UsageError

LIMIT, CACHE = 2000, "25%"  # defaults for traces
HELP = "play a recorded trace or timeline back in the browser, on the page of `greenroom serve`"


def add_to(parser: Parser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path,
        help="a trace (of `greenroom trace`, its journal, or an npz file), or a timeline of"
        " `greenroom run --timeline`",
    )  # fmt: skip
    add_options(parser, ViewConfig)


def main(args: argparse.Namespace) -> None:
    config = take(args, ViewConfig)
    with Progress(f"reading {args.file}"):
        recording = _recording(args.file, config)

    from greenroom.server.page.viewer import Viewer

    with Viewer(recording, config.port) as viewer:
        print(f"{viewer.url} plays {args.file} ({len(recording['frames']):,} frames); Ctrl-C ends",
              flush=True)  # fmt: skip
        with _end_by_signal() as ended:
            threading.Thread(target=viewer.serve_forever, daemon=True).start()
            if not config.no_browser:
                webbrowser.open(viewer.url)
            ended.wait()
            viewer.shutdown()


def _recording(path: Path, config: ViewConfig) -> dict[str, Any]:
    """Read a recording: a timeline if the file is JSON, else a trace, with a simulated cache."""
    if _is_json(path):
        names = [name for name in ("cache", "policy", "limit") if getattr(config, name) is not None]
        if names:
            raise UsageError(f"--{names[0]} is for traces, but {path} is a timeline: leave it out")
        from greenroom.server.page.timeline_frames import timeline_frames

        return timeline_frames(path, path.name)
    from greenroom.policies import choose
    from greenroom.sim.page.recording import recording
    from greenroom.sim.study import Cell, Study, capacities
    from greenroom.trace import load

    trace = load(path).head(config.limit or LIMIT)
    experts = int(trace.offsets[-1])
    size = capacities(config.cache or CACHE, experts, "--cache")
    if len(size) > 1:
        raise UsageError(f"--cache must be one size, got {config.cache}")
    policy = choose(config.policy or "auto", size[0], experts)
    title = str(trace.meta.get("model", path.name))
    return recording(Study.of(trace, "runtime"), Cell(policy, size[0]), title)


def _is_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] in (b"{", b"[")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _end_by_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, as long as the block runs."""
    ended, before = threading.Event(), {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *_: ended.set())
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
