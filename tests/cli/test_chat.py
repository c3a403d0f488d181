"""`greenroom chat`: a conversation on a terminal or a pipe, with a model or a server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.screen import screen
from greenroom.cli.screen.screen_mode import ENTER, LEAVE
from greenroom.cli.terminal.session import Session, Terminal, closing_line, history_file
from greenroom.cli.terminal.summary import summary
from greenroom.errors import GreenroomError
from greenroom.server.chat.backend import Reply
from greenroom.server.engine.tokens.reader import AnswerDelta
from tests.cli.conftest import START, Ran, Run
from tests.cli.pty_process import PtyProcess
from tests.server.api.test_operations import STATS
from tests.server.conftest import Running, fake_engine, launch, reasoning_engine

NO_TORCH = "import sys; sys.modules['torch'] = None; "
DEMO = Path(__file__).parents[2] / "models" / "demo"


class Echo:
    """A talker that repeats what it is told."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, Any]]] = []
        self.fail: GreenroomError | None = None

    def answer(self, messages: list[dict[str, Any]], on_delta: Any) -> Reply:
        self.heard.append([dict(message) for message in messages])
        if self.fail:
            raise self.fail
        reply = Reply(prompt_tokens=3, reused_tokens=1, new_tokens=2, ttft_s=0.5, hit_ratio=0.25)
        for delta in (
            AnswerDelta(reasoning="hm"),
            AnswerDelta(text=messages[-1]["content"].upper()),
        ):
            reply.add(delta)
            on_delta(delta)
        return reply

    def stats(self) -> dict[str, Any]:
        return STATS | {"requests": {}, "tokens": {"prompt": 1, "reused": 0, "new": 2}} | _MORE

    def resize(self, cache: str) -> int:
        return 1234 if cache == "20%" else 0

    def close(self) -> None:
        pass


_MORE: dict[str, Any] = {
    "memory": {**STATS["memory"], "experts": 256},
    "experts": {**STATS["experts"], "hit_ratio": 0.5, "policy": "lru"},
}


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`talk(talker, "line\\n...")` -> (standard output, standard error)."""

    def call(
        talker: Any, text: str, system: str | None = None, open_screen: Any = None
    ) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with Terminal() as terminal:
            Session(talker, terminal, "tiny", system, open_screen).run()
        found = capsys.readouterr()
        return found.out, found.err

    return call


def test_each_line_is_a_turn_and_all_are_remembered(talk: Any) -> None:
    echo = Echo()
    out, err = talk(echo, "one\n\ntwo\n", "Be kind.")
    assert out == "ONE\nTWO\n"
    assert [message["role"] for message in echo.heard[1]] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    assert "3 prompt (1 reused) + 2 new tokens · TTFT 0.50 s · hit ratio 25.0%" in err


def test_a_line_goes_on_after_a_backslash(talk: Any) -> None:
    assert talk(Echo(), "one \\\ntwo\n")[0] == "ONE \nTWO\n"


def test_commands(talk: Any) -> None:
    echo = Echo()
    out, err = talk(
        echo, "one\n/reset\n/cache 20%\n/stats\n/help\n/system Be.\ntwo\n/exit\nthree\n"
    )
    assert out == "ONE\nTWO\n"
    assert [message["content"] for message in echo.heard[-1]] == ["Be.", "two"]
    assert "1,234 slots" in err
    assert "hit ratio 50.0%" in err
    assert "/cache SIZE" in err


class FakeScreen:
    """A live screen that stores what it shows, and writes it at its end."""

    def __init__(self, on_text: Any) -> None:
        self._on_text, self.parts = on_text, list[tuple[str, bool]]()

    def __enter__(self) -> FakeScreen:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            self._on_text(*part)

    def write(self, text: str, reasoning: bool) -> None:
        self.parts.append((text, reasoning))


def test_answers_on_the_live_screen(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "has_terminal", lambda: True)
    screens: list[FakeScreen] = []

    def open_screen(on_text: Any) -> FakeScreen:
        screens.append(FakeScreen(on_text))
        return screens[-1]

    out, err = talk(Echo(), "one\n/live\ntwo\n/live\nthree\n", None, open_screen)
    assert out == "ONE\nTWO\nTHREE\n"
    assert [each.parts for each in screens] == [[("hm", True), ("TWO", False)]]
    assert err.index("the live screen is on") < err.index("the live screen is off")


def test_no_live_screen_without_a_terminal_or_with_a_server(talk: Any) -> None:
    assert f"{screen.NO_TERMINAL}\nthe live screen is off" in talk(Echo(), "/live\n", None, id)[1]
    with pytest.raises(GreenroomError, match="a server's model is on its own page"):
        talk(Echo(), "/live\n")


def test_what_begins_with_a_space_is_no_command(talk: Any) -> None:
    assert talk(Echo(), " /etc/passwd\n")[0] == " /ETC/PASSWD\n"


@pytest.mark.parametrize(("line", "said"), [("/nothing", "no command"), ("/cache", "needs a size")])
def test_on_a_pipe_the_first_mistake_ends_it(talk: Any, line: str, said: str) -> None:
    with pytest.raises(GreenroomError, match=said):
        talk(Echo(), f"{line}\nmore\n")


def test_a_turn_that_fails_is_forgotten(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    echo.fail = GreenroomError("no")
    monkeypatch.setattr(Terminal, "typed", True, raising=False)
    with pytest.raises(GreenroomError):
        talk(echo, "one\n")
    assert len(echo.heard[0]) == 1


def test_an_answer_cannot_speak_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    terminal = Terminal()
    terminal.write(AnswerDelta(text="a\x1b]0;title\x07b\x9bc\n"))
    assert capsys.readouterr().out == "a]0;titlebc\n"


def test_how_an_answer_ended() -> None:
    assert closing_line(Reply(reason="length")) == "[cut short]"
    assert closing_line(Reply(reason="cancelled", tokens_per_s=2.0)) == "[2.0 tokens/s · stopped]"


def test_statistics_of_other_servers_are_shown_as_they_are() -> None:
    assert summary({"a": 1}) == '{\n  "a": 1\n}'


def test_reads_between_requests_are_a_part_of_the_statistics() -> None:
    stats = Echo().stats()
    assert "idle" not in summary(stats)
    stats["prefetch"] = stats["prefetch"] | {"idle": 1200, "idle_used": 30}
    assert "wasted; 1,200 read while idle, 30 of them used\n" in summary(stats)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    found = launch(reasoning_engine("<think>Hm.</think>Hello there!<|im_end|>"), key="k")
    yield found
    found.stop()


def remote(url: str, text: str, *argv: str, key: str = "k") -> Ran:
    """`greenroom chat --url` as a process, which needs no torch."""
    command = [sys.executable, "-c", NO_TORCH + START, "chat", "--url", url, *argv]
    ran = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=110,
        env={**os.environ, "GREENROOM_API_KEY": key},
    )  # fmt: skip
    return Ran.of(ran.returncode, ran.stdout, ran.stderr)


def test_a_server_by_its_address(server: Running, tmp_path: Path) -> None:
    before = len(server.engine.tickets)
    ran = remote(server.url, "Hi\n/cache 30%\nAnd?\n", "--seed", "5", "--system", "Be kind.")
    assert (ran.code, ran.out) == (0, "Hello there!\nHello there!\n"), ran.err
    assert "new tokens" in ran.err
    assert server.engine.resized[-1] == "30%"
    assert [t.request.sampling.seed for t in server.engine.tickets[before:]] == [5, 5]
    told = server.engine.tokenizer.decode(server.engine.tickets[-1].request.ids)
    assert "Be kind." in told
    assert "Hello there!" in told
    file = tmp_path / "key"
    file.write_text("k\n")
    again = remote(f"{server.url}/v1", "Hi\n", "tiny", "--api-key-file", str(file), key="wrong")
    assert again.out == "Hello there!\n"


def test_a_server_that_refuses(server: Running) -> None:
    assert "wrong API key" in remote(server.url, "Hi\n", key="wrong").mistake
    assert "does not exist" in remote(server.url, "Hi\n", "other").line


def test_a_server_that_is_not_there() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    assert f"http://127.0.0.1:{port}: " in remote(f"http://127.0.0.1:{port}", "Hi\n").mistake


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "give a MODEL to load, or the address of a server"),
        (("--url", "localhost:8000"), "must begin with http"),
        (
            ("--url", "http://localhost:8000", "--cache", "10%"),
            "with --url the server loads the model",
        ),
        (
            ("--url", "http://localhost:8000", "--speculate", "lookup"),
            "with --url the server loads the model",
        ),
        (
            ("--url", "http://localhost:8000", "--no-idle-prefetch"),
            "with --url the server loads the model",
        ),
        (("--url", "http://localhost:8000", "--live"), "on its page: http://localhost:8000"),
        (("demo", "--api-key-file", "x"), "--api-key-file is for a server"),
    ],
)
def test_options_that_cannot_be_right(cli: Run, argv: tuple[str, ...], said: str) -> None:
    assert said in cli("chat", *argv).mistake


def test_a_model_that_cannot_be_loaded(cli: Run, tmp_path: Path) -> None:
    assert str(tmp_path) in cli("chat", tmp_path).mistake


@pytest.mark.timeout(240)
def test_the_demo_model_on_a_pipe(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--cache", "25%", "--context", 256, "--temperature", 0, "--max-new-tokens", 6)
    text = "Hello\n/cache 50%\n/stats\nHello again\n/reset\nHello\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    ran = cli("chat", DEMO, *options)
    assert ran.code == 0, ran.err
    first, second, third = ran.out.splitlines()
    assert first == third != ""
    assert second
    assert "64 of 256 experts in slots" in ran.err
    assert "128 slots" in ran.err
    assert "hit ratio" in ran.err


@pytest.mark.timeout(120)
def test_a_terminal_with_history_and_an_answer_that_is_stopped(tmp_path: Path) -> None:
    slow = launch(fake_engine("word " * 200, delay_s=0.05))
    state = {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    terminal = PtyProcess("chat", "--url", slow.url, before=NO_TORCH, env=state)
    try:
        terminal.until("/help")
        terminal.until("> ")
        terminal.type("Hello\n")
        terminal.until("word word")
        terminal.type("\x03")
        terminal.until("stopped]")
        terminal.until("> ")
        assert slow.engine.tickets[0].cancelled.wait(5)
        terminal.press("\x03", "Ctrl-D or type /exit")
        terminal.type("/nothing\n")
        terminal.until("there is no command")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    finally:
        terminal.process.kill()
        slow.stop()
    history = tmp_path / "greenroom" / "chat_history"
    assert "Hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.process
@pytest.mark.timeout(180)
def test_answers_are_shown_on_a_screen_with_live_numbers(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color", "GREENROOM_LEARNED": "off"}
    # Slow enough for several pictures.
    limits = ("--cache", "25%", "--temperature", "0", "--max-new-tokens", "40",
              "--read-limit", "4MB", "--prefetch", "off")  # fmt: skip
    terminal = PtyProcess("chat", "demo", "--live", *limits, env=env)
    try:
        for question in ("Hello", "And then?"):
            terminal.until("> ")
            assert terminal.everything.count(ENTER) == terminal.everything.count(LEAVE)
            terminal.type(question + "\n")
            terminal.until(ENTER)
            terminal.until(LEAVE)
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    finally:
        terminal.process.kill()
    _, *screens = terminal.everything.split(ENTER)
    assert len(screens) == 2
    for text in screens:
        live, left, after = text.partition(LEAVE)
        assert left
        for each in ("tokens/s", "of 256 in memory", "Memory"):
            assert each in live
        assert "\x1b[?1049h" not in after
    assert "Hello!" in screens[0].partition(LEAVE)[2]  # the answer stays


def test_typed_lines_are_stored_in_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "greenroom" / "chat_history"
