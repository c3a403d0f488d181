"""Record a client: python -m tests.clients.record NAME COMMAND...

COMMAND runs tests/clients/drivers/NAME.* with the client's own Python or Node. The driver finds the
server's address in GREENROOM_URL, and its first line is the client's name and version. The
transcript is written to tests/clients/transcripts/NAME.jsonl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.engine.requests import Request
from greenroom.server.engine.start import start
from tests.clients.transcripts import FOLDER, HEADERS, Exchange, Transcript, parts_of
from tests.server.conftest import DEMO, Running, answer_ids, launch, wait_for
from tests.server.fakes import FakeEngine

Message = MutableMapping[str, Any]
LONGEST = 120  # characters of a text in a request; the server gets no more, either
SCRIPTS = Path(__file__).with_name("drivers") / "answers.json"  # scripted answers, by client


class Recorder:
    """ASGI middleware that cuts long texts in requests, and records the exchanges of a server."""

    def __init__(self, home: str) -> None:
        self.home = home.encode()
        self.exchanges: list[dict[str, Any]] = []
        self.app: Any = None

    def wrap(self, app: Any) -> Any:
        self.app = app
        return self

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent, more = b"", True
        while more:
            message = await receive()
            sent, more = sent + message.get("body", b""), message.get("more_body", False)
        body = cut(json.loads(sent.replace(self.home, b"/home/user"))) if sent else None
        exchange: dict[str, Any] = {"body": body, "answered": b"", "scope": scope}
        self.exchanges.append(exchange)
        left = [json.dumps(body).encode() if sent else b""]

        async def receiving() -> Message:
            return {"type": "http.request", "body": left.pop()} if left else await receive()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange["start"] = message
            exchange["answered"] += message.get("body", b"")
            await send(message)

        await self.app(scope, receiving, sending)

    def results(self) -> list[Exchange]:
        """Return what was recorded; an exchange that the client broke off is left out."""
        return [_exchange(**each) for each in self.exchanges if "start" in each]


def cut(value: Any, key: str = "") -> Any:
    """Shorten the long texts of a request, such as an agent's own instructions."""
    if isinstance(value, dict):
        return {name: cut(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [cut(each) for each in value]
    long = isinstance(value, str) and len(value) > LONGEST and key != "arguments"
    return f"{value[:LONGEST]} ..." if long else value


def _exchange(scope: Message, body: Any, start: Message, answered: bytes) -> Exchange:
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
    media_type = dict(start["headers"]).get(b"content-type", b"").decode()
    return Exchange(
        method=scope["method"],
        path=scope["path"] + query,
        headers={name: headers[name] for name in HEADERS if name in headers},
        body=body,
        status=start["status"],
        media_type=media_type,
        parts=[] if scope["method"] == "HEAD" else parts_of(media_type, answered),
    )


def scripted_engine(answers: Iterable[Iterable[str]]) -> FakeEngine:
    """Make an engine with the demo's tokenizer and template, whose answers are scripted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    pairs = [tuple(pair) for pair in answers]

    def script(request: Request) -> list[int]:
        prompt = tokenizer.decode(request.ids)
        answer = next(answer for text, answer in pairs if text in prompt)
        return answer_ids(answer, tokenizer)

    end_ids = (tokenizer.convert_tokens_to_ids("<|end|>"),)
    return FakeEngine(tokenizer, script, end_ids=end_ids, model_type="qwen3_moe", context=200_000)


@contextmanager
def serving(answers: list[list[str]], recorder: Recorder | None = None) -> Iterator[Running]:
    """Run a server with the demo model, or with scripted answers, in a thread.

    Answers are computed one at a time and whole, so that they do not depend on other requests.
    """
    options: dict[str, Any] = {"max_batch": 1, "no_prefix_reuse": True, "model_name": "demo"}
    engine: Any = scripted_engine(answers)
    if not answers:
        engine = start(str(DEMO), LoadConfig(cache="100%", context=2048), ServeConfig(**options))
        wait_for(lambda: engine.state()[0] == "ready", 100)
    running = launch(engine, wrap=recorder and recorder.wrap, **options)
    try:
        yield running
    finally:
        running.stop()


def main(name: str, *command: str) -> None:
    answers = json.loads(SCRIPTS.read_text()).get(name, [])
    arguments = [os.path.abspath(each) if os.path.exists(each) else each for each in command]
    with tempfile.TemporaryDirectory() as home:
        recorder = Recorder(home)
        with serving(answers, recorder) as running:
            # A client gets no settings of its user, and leaves none.
            own = {"HOME": home, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
            surroundings = {**os.environ, **own, "GREENROOM_URL": running.url}
            done = subprocess.run(
                arguments, cwd=home, env=surroundings, text=True, stdout=subprocess.PIPE
            )
    print(done.stdout)
    exchanges = recorder.results()
    print("\n".join(exchange.summary for exchange in exchanges))
    if done.returncode:
        sys.exit(f"{name}: the driver ended with {done.returncode}")
    transcript = Transcript(done.stdout.splitlines()[0], answers, exchanges)
    transcript.write(FOLDER / f"{name}.jsonl")


if __name__ == "__main__":
    main(*sys.argv[1:])
