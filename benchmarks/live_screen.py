"""Cost of the live screen: tokens/s with and without it, and processor time of its thread.

    python benchmarks/live_screen.py demo --cache 25% [--tokens 120] [--pairs 20] [--columns 120]

One process loads the model and answers the same prompt in turn with the screen and without it. The
screen is on a terminal of --columns x --lines that another process reads. The ratio is tokens/s
with the screen over tokens/s without, with its 95 % interval over the pairs.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import commit, machine, note, show_ratio, table

import greenroom

PROMPT = "Once upon a time"


@contextmanager
def terminal(columns: int, lines: int) -> Iterator[Any]:
    """A terminal as standard output, read by another process, as a context manager."""
    master, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    reader = subprocess.Popen(
        ["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(master)
    before = sys.stdout
    sys.stdout = os.fdopen(other, "w")
    try:
        yield sys.stdout
    finally:
        sys.stdout.close()
        sys.stdout = before
        reader.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="what the live screen costs")
    parser.add_argument("model")
    parser.add_argument("--memory", help="budget of the process")
    parser.add_argument("--cache", default="25%", help="in place of --memory (default: 25%%)")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--lines", type=int, default=40)
    args = parser.parse_args()

    from greenroom.cli.screen.frame import ModelFacts, RunReader
    from greenroom.cli.screen.layout import View
    from greenroom.cli.screen.screen import LiveScreen
    from greenroom.config import SamplingConfig
    from greenroom.hf.text.generate import answer

    os.environ.setdefault("TERM", "xterm-256color")
    os.environ.setdefault("COLORTERM", "truecolor")
    size = {"memory": args.memory} if args.memory else {"cache": args.cache}
    model, tokenizer = greenroom.load(args.model, **size)
    sampling = SamplingConfig(max_new_tokens=args.tokens, temperature=0.0)
    costs: list[tuple[int, float, float]] = []  # frames, processor time, and time of an answer

    class MeteredScreen(LiveScreen):
        """A live screen whose thread's processor time is counted."""

        def _draw(self) -> None:
            begin = time.perf_counter()
            super()._draw()
            frames = len(self._view.history.frames)
            costs.append((frames, time.thread_time(), time.perf_counter() - begin))

    def speed(**options: Any) -> float:
        result = answer(
            model, tokenizer, PROMPT, sampling, raw=True, context=model.greenroom.setup.context,
            to_the_end=True, **options,
        )  # fmt: skip
        return float(result.tokens_per_s or 0.0)

    def speed_with_screen() -> float:
        reader, view = RunReader(model), View(ModelFacts.of("model", model.greenroom))
        with (
            terminal(args.columns, args.lines),
            MeteredScreen(view, reader.read, lambda text, reasoning: None) as screen,
        ):
            return speed(on_start=reader.start, on_text=screen.write)

    print(f"{machine()}, {commit()}\n")
    speed(), speed_with_screen()
    costs.clear()
    pairs = []
    for number in range(args.pairs):
        ways = [speed_with_screen, speed]
        found = {way: way() for way in (ways if number % 2 else ways[::-1])}
        pairs.append((found[speed_with_screen], found[speed]))
        note(f"{number + 1}/{args.pairs}: {pairs[-1][0]:.1f} with, {pairs[-1][1]:.1f} without")
    model.greenroom.close()
    with_screen, without = (statistics.mean(each) for each in zip(*pairs, strict=True))
    frames, spent, seconds = (sum(each) for each in zip(*costs, strict=True))
    head = (
        "terminal",
        "tokens/s without",
        "with",
        "ratio",
        "frames/s",
        "ms a frame",
        "% of a core",
    )
    row = (
        f"{args.columns} x {args.lines}", f"{without:.1f}", f"{with_screen:.1f}",
        show_ratio(pairs), f"{frames / seconds:.1f}", f"{1e3 * spent / frames:.1f}",
        f"{100 * spent / seconds:.1f}",
    )  # fmt: skip
    print(table(head, [row]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
