"""The live screen on a terminal: what is drawn, and that the terminal is restored."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from greenroom.cli.screen import screen
from greenroom.cli.screen.layout import View
from greenroom.cli.screen.screen import LiveScreen, Painter, has_terminal
from greenroom.cli.screen.screen_mode import ENTER, LEAVE, ScreenMode
from greenroom.interrupts import INTERRUPTED
from tests.cli.pty_process import PtyProcess
from tests.cli.screen.rig import facts, frame

SIZES = [4, 4]


class FakeTerminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def take(self) -> str:
        """What was written since the last call."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


def painter(file: FakeTerminal, **options: Any) -> tuple[Painter, ScreenMode]:
    mode = ScreenMode(file)
    options = {"color_system": "truecolor", "width": 80, "height": 24, **options}
    return Painter(Console(file=file, force_terminal=True, **options), mode), mode


def view_of(text: str = "") -> View:
    view = View(facts(SIZES), text=[(text, False)])
    view.history.add(frame(SIZES))
    return view


def test_lines_that_stay_the_same_are_drawn_once() -> None:
    file = FakeTerminal()
    paint, mode = painter(file)
    mode.enter()
    assert file.take() == ENTER
    paint.paint(view_of("Once"))
    assert file.take().count("\x1b[1;1H") == 1
    paint.paint(view_of("Once"))
    assert file.take() == screen.BEGIN + screen.END
    paint.paint(view_of("Twice"))
    drawn = file.take()
    assert "Twice" in drawn
    assert drawn.count("H") == 1
    mode.leave()
    assert file.take() == LEAVE
    paint.paint(view_of("Late"))
    mode.leave()
    assert file.take() == ""


def test_a_screen_that_begins_again_or_changes_its_size_is_drawn_anew() -> None:
    file = FakeTerminal()
    paint, mode = painter(file)
    mode.enter()
    paint.paint(view_of())
    mode.leave()
    file.take()
    mode.enter()
    paint.paint(view_of())
    assert "tiny" in file.take()
    paint._console.width = 70
    paint.paint(view_of())
    assert screen.CLEAR in file.take()
    mode.leave()


def test_a_stopped_process_restores_the_terminal_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, stops = FakeTerminal(), []

    def kill(process: int, number: int) -> None:
        assert signal.getsignal(number) is signal.SIG_DFL
        mode.write("a frame")
        stops.append((process, number, file.take()))

    monkeypatch.setattr(os, "kill", kill)
    mode = ScreenMode(file)
    mode.enter()
    assert file.take() == ENTER
    signal.raise_signal(signal.SIGTSTP)
    assert stops == [(os.getpid(), signal.SIGTSTP, LEAVE)]
    assert file.take() == ENTER
    assert mode.begun == 2
    mode.leave()
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


def test_without_colours_and_unicode() -> None:
    file = FakeTerminal()
    paint, mode = painter(file, no_color=True)
    mode.enter()
    file.take()
    paint.paint(view_of())
    drawn = file.take()
    codes = {
        code for part in drawn.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")
    }
    assert not codes & {"38", "48"}
    mode.leave()
    file.encoding = "ascii"  # type: ignore[misc]
    paint, mode = painter(file)
    mode.enter()
    file.take()
    paint.paint(view_of())
    assert file.take().isascii()
    mode.leave()


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """A terminal as this process's standard output and error, until the test ends."""
    file = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm-256color")
    return file


def test_the_text_is_written_when_the_screen_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    written: list[tuple[str, bool]] = []
    view = View(facts(SIZES))
    drawn = threading.Event()

    def read() -> Any:
        drawn.set()
        return frame(SIZES, time.monotonic())

    with LiveScreen(view, read, lambda *part: written.append(part)) as shown:
        shown.write("Hm.", True)
        shown.write("Good ")
        shown.write("day")
        print("a warning", file=sys.stderr)
        assert drawn.wait(20)
        assert written == []
    assert written == [("Hm.", True), ("Good day", False)]
    assert sys.stderr is terminal
    text = terminal.getvalue()
    assert text.startswith(ENTER)
    assert text.endswith(f"{LEAVE}a warning\n")


def test_an_error_ends_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    written: list[tuple[str, bool]] = []
    shown = LiveScreen(View(facts(SIZES)), lambda: frame(SIZES), lambda *part: written.append(part))
    with suppress(KeyError), shown:
        shown.write("Once")
        raise KeyError
    assert written == [("Once", False)]
    assert terminal.getvalue().endswith(LEAVE)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_frame_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    failed = threading.Event()

    def read() -> Any:
        failed.set()
        raise ZeroDivisionError

    shown = LiveScreen(View(facts(SIZES)), read, lambda *part: None)
    with pytest.raises(ZeroDivisionError), shown:
        assert failed.wait(20)
    assert terminal.getvalue() == ENTER + LEAVE


def test_frames_come_less_often_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    waits: list[float] = []
    shown = LiveScreen(View(facts(SIZES)), lambda: frame(SIZES), lambda *part: None)
    monkeypatch.setattr(shown._stopped, "wait", lambda seconds: waits.append(seconds) or
                        shown._stopped.set())  # fmt: skip
    times = iter([10.0, 10.001, 20.0, 20.5])
    for expected in (0.249, 9.5):
        monkeypatch.setattr(screen.time, "perf_counter", lambda: next(times))
        shown._stopped.clear()
        shown._draw()
        assert waits.pop() == pytest.approx(expected)


def test_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    assert has_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not has_terminal()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not has_terminal()


# ---- whole programs

OPTIONS = (
    "--cache", "25%", "--temperature", 0.8, "--seed", 7, "--max-new-tokens", 1900,
    "--read-limit", "10MB",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PtyProcess]:
    env = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color", "GREENROOM_LEARNED": "off"}
    process = PtyProcess("run", "demo", "Once upon a time", "--raw", "--live", *OPTIONS, env=env)
    yield process
    process.process.kill()
    process.process.wait()


@pytest.mark.process
@pytest.mark.timeout(180)
def test_ctrl_c_restores_the_terminal(run: PtyProcess) -> None:
    run.until(ENTER)
    assert not run.echoes
    run.until("out, the Pug")  # of the text
    run.resize(40, 130)
    run.until(screen.CLEAR)
    run.type("\x03")
    run.until(LEAVE)
    assert run.wait() == INTERRUPTED
    assert run.everything.count(ENTER) == run.everything.count(LEAVE) == 1
    # Numba starts colorama where it is installed, which resets colours at the very end.
    after = run.everything.rpartition(LEAVE)[2].removesuffix("\x1b[0m")
    assert after.rstrip().endswith("greenroom: interrupted")
    assert after.startswith("out, the Pug")
    assert "\x1b" not in after


@pytest.mark.process
@pytest.mark.timeout(180)
def test_a_terminated_process_restores_the_terminal(run: PtyProcess) -> None:
    run.until("of 1,900 tokens")
    run.process.send_signal(signal.SIGTERM)
    run.until(LEAVE)
    assert run.wait() == -signal.SIGTERM
