"""The progress of a command, as one line on standard error."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from greenroom.config import LoadConfig, show_bytes
from greenroom.hf.checkpoint.names import check_name

EVERY_S = 5.0  # between two lines in a file
LIVE_S = 0.2  # between two figures of a download on a terminal
CLEAR = "\r\x1b[2K"


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A line on standard error that shows a command's progress.

    On a terminal the line is replaced, and removed at the end. In a file, a line is written at the
    beginning, then at most every 5 seconds if it has changed. Each line ends in " ...".
    """

    def __init__(self, first: str | None = None) -> None:
        self._live = sys.stderr is not None and sys.stderr.isatty()
        self._due, self._shown, self._work = 0.0, "", ""
        self._began = time.monotonic()
        self._warnings = _WarningHandler(self)
        if self._live:
            logging.getLogger("greenroom").addHandler(self._warnings)
        if first is not None:
            self.say(first)

    def say(self, work: str, done: float = 0, of: float = 0) -> None:
        """Show what a command does now; with `of`, also the share done and the remaining time."""
        now = time.monotonic()
        if work != self._work:
            self._work, self._began = work, now
        text = work
        if of:
            text += f" {done / of:.0%}"
            if done and now - self._began > 1:
                text += f", {_time((now - self._began) * (of - done) / done)} left"
        if text == self._shown or (not self._live and now < self._due):
            return
        self._due, self._shown = now + EVERY_S, text
        line = f"{CLEAR}{text} ..." if self._live else f"{text} ...\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(line)
            sys.stderr.flush()

    def of(self, name: str) -> Callable[[float, str], None]:
        """Return a callback (share, stage) that shows the stages of loading the model `name`."""
        return lambda share, stage: self.say(f"{name}: {stage}")

    def clear(self) -> None:
        """Remove the progress line, to make room for other output."""
        if self._live and self._shown:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(CLEAR)
                sys.stderr.flush()
        self._shown = ""

    def __exit__(self, *_: object) -> None:
        self.clear()
        logging.getLogger("greenroom").removeHandler(self._warnings)


class DownloadRate:
    """A download in the progress line: bytes done and in total, rate, and remaining time."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._total = progress, -1.0
        self._began = self._done = self._due = 0.0

    def __call__(self, done: float, total: float) -> None:
        now = time.monotonic()
        if total != self._total:  # another model
            self._total, self._began, self._done = total, now, done
        elif now < self._due and done < total:
            return
        self._due = now + LIVE_S
        text = f"downloading: {show_bytes(done)} of {show_bytes(total)}"
        if now - self._began > 1 and done > self._done:
            rate = (done - self._done) / (now - self._began)
            text += f", {rate / 1e6:.3g} MB/s, {_time((total - done) / rate)} left"
        self._progress.say(text)


class _WarningHandler(logging.Handler):
    """A logging handler that prints warnings in place of the progress line."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.clear()
        print(self.format(record), file=sys.stderr, flush=True)


@contextlib.contextmanager
def model_progress(model: str) -> Iterator[Progress]:
    """Show the progress line of a command that uses a model, as a context manager.

    NotAModel for a name that cannot be a model's.
    """
    check_name(model)
    with Progress(f"{model}: starting") as progress:
        yield progress


@contextlib.contextmanager
def open_model(
    source: str, config: LoadConfig, progress: Progress, verbose: bool, mtp: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Load a model and its tokenizer, as a context manager.

    `mtp` adds the checkpoint's MTP layer. The expert cache is closed at the end. A line that
    describes the loaded model is printed on standard error.
    """
    from greenroom.hf.load.load import load_with
    from greenroom.hf.load.report import startup_line

    quiet(progress)
    model, tokenizer = load_with(source, config, progress=progress.of(source), mtp=mtp)
    collect_garbage()
    try:
        progress.clear()
        print(startup_line(source, model, config, verbose), file=sys.stderr, flush=True)
        model.greenroom.reset_stats()
        yield model, tokenizer
    finally:
        model.greenroom.close()


def collect_garbage() -> None:
    """Enable Python's garbage collector, for objects that are made from now on."""
    gc.freeze()
    # Python collects old garbage when a quarter as many objects are new as it has last counted:
    # without this, that is of the million that are frozen, and KV caches in cycles stay for hours.
    gc.collect()
    gc.enable()


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def quiet(progress: Progress | None = None) -> None:
    """Disable the progress bars of transformers and huggingface_hub.

    Downloads are shown in the line `progress` instead, if it is given.
    """
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    from greenroom.hf.checkpoint.hub.transfer import DownloadProgress

    logging.disable_progress_bar()
    disable_progress_bars()
    if progress is not None:
        DownloadProgress.show = DownloadRate(progress)
