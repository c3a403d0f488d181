"""What a server and its clients read: requests, answers, batch files. See `formats`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2

from greenroom.errors import GreenroomError, UsageError
from tests.fuzz.checkpoints import tiny_catalog
from tests.fuzz.formats import Format, Pieces, lines, lines_join, plain, plain_join, saved

TRANSCRIPTS = Path(__file__).parents[1] / "clients" / "transcripts"
NAME = "tiny"
LONGEST_OPTION = 400  # characters
LONGEST = 3000  # bytes of a request of a real client that is a seed
MOST = 12  # seeds of an API
CONTEXT = 4096
TOOL = {
    "name": "look",
    "description": "Look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"enum": ["x"]}},
    "required": ["a"], "additionalProperties": False, "$defs": {"c": {"$ref": "#/$defs/c"}},
}  # fmt: skip
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)
USER = {"role": "user", "content": "Hello"}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7,
            "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1,
            "logit_bias": {"5": 1.5}}  # fmt: skip

# ---- requests of every API


class _Engine:
    """Checks a request as the serving engine does, and puts it into no queue."""

    def __init__(self) -> None:
        import torch
        from transformers import GenerationConfig

        from greenroom.server.engine.tokens.grammar import Grammars
        from tests.server.conftest import thinker_tokenizer

        self.tokenizer, self.model_type = thinker_tokenizer(), "qwen3_moe"
        self.end_ids = (self.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
        self.context, self.pictures, self.was_ready = CONTEXT, None, False
        self._vocabulary = len(self.tokenizer)
        self._grammars = Grammars(self.tokenizer, self._vocabulary, self.end_ids)
        self.model = SimpleNamespace(dtype=torch.float32, generation_config=GenerationConfig())
        bytes_of = SimpleNamespace(total_bytes=lambda length: length)
        self.greenroom = SimpleNamespace(setup=SimpleNamespace(keys_values=bytes_of))

    def submit(self, request: Any, listener: Any) -> Any:
        from greenroom.server.engine.loop import ContinuousEngine

        return ContinuousEngine._sequence(self, request, listener)  # type: ignore[arg-type]

    def _cancel(self, sequence: Any) -> None:
        sequence.cancelled = True

    def state(self) -> tuple[str, float, str]:
        return "ready", 1.0, ""


@cache
def _service() -> Any:
    from greenroom.config import ServeConfig
    from greenroom.server.http.service import Service

    return Service(_Engine(), ServeConfig(), NAME)  # type: ignore[arg-type]


def read_request(path: str, data: bytes, model: Any, builder: Any = None) -> Any:
    """A body on its way to the engine's queue; errors in the form of the API."""
    from greenroom.server.http import bodies
    from greenroom.server.http.answers import AnswerStream
    from greenroom.server.http.errors import as_api_error
    from greenroom.server.http.request_log import RequestRecord

    service, record = _service(), RequestRecord("request", "POST", path)
    if len(data) > service.max_body:
        return None
    try:
        body = bodies.parse(model, data)
        if name := getattr(body, "model", None):
            service.variant_of(name)
        if hasattr(body, "check_context"):
            body.check_context(CONTEXT)
        if hasattr(body, "job") and not getattr(body, "loads", False):
            dialogue = service.dialogue()
            loop = asyncio.new_event_loop()
            try:
                answers = AnswerStream(service, record, dialogue, body.job(dialogue), loop)
                answers.submit()
                if builder is not None:
                    json.dumps(builder(service, body, answers).result())
            finally:
                loop.close()
        return body
    except GreenroomError as error:
        answer = as_api_error(error)
        json.dumps(answer.body(path, record.id))
        assert answer.status < 500, f"{answer.status}: {answer}"
        raise
    finally:
        record.release()


def _sent(path: str) -> list[bytes]:
    """Bodies that real clients have sent to a path, the smallest first."""
    found = set()
    for file in TRANSCRIPTS.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("path", "").partition("?")[0] == path and entry.get("body"):
                found.add(json.dumps({**entry["body"], "model": NAME}).encode())
    return sorted((each for each in found if len(each) <= LONGEST), key=len)[-MOST:]


def _bodies(path: str, *own: dict[str, Any]) -> list[bytes]:
    return [json.dumps({"model": NAME, **each}).encode() for each in own] + _sent(path)


def _completions() -> list[bytes]:
    common = {**SAMPLING, "max_tokens": 4, "n": 2, "stop": ["x"], "stream": True}
    return _bodies(
        "/v1/completions",
        {"prompt": "Hello", **common, "stream_options": {"include_usage": True}, "user": "u"},
        {"prompt": [[1, 2, 3], [4]], "logprobs": 2, "echo": True, "max_tokens": 0, "best_of": 1},
        {"prompt": ["a", "b"], "metadata": {"a": "b"}},
    )


def _chat() -> list[bytes]:
    function = {"type": "function", "function": TOOL}
    called = {
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"at": ""}'},
    }
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    return _bodies(
        "/v1/chat/completions",
        {"messages": [USER], **SAMPLING, "n": 2, "logprobs": True, "top_logprobs": 3, "stop": "x"},
        {"messages": [USER, {"role": "assistant", "tool_calls": [called], "reasoning_content": "r"},
                      {"role": "tool", "content": "x", "tool_call_id": "1"}],
         "tools": [function], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": [USER], "tools": [function],
         "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": "x"}]}]},
        {"messages": [USER], "response_format": schema, "max_completion_tokens": 9},
        {"messages": [USER], "response_format": {"type": "json_object"}, "reasoning_effort": "low"},
    )  # fmt: skip


def _responses() -> list[bytes]:
    function = {"type": "function", "strict": True, **TOOL}
    called = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": ""}'}
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
    return _bodies(
        "/v1/responses",
        {"input": "Hello", "instructions": "Be", "max_output_tokens": 5, "temperature": 0.5},
        {"input": [USER, called,
                   {"type": "function_call_output", "call_id": "1", "output": "x"}],
         "tools": [function], "tool_choice": {"type": "function", "name": "look"}},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, picture]}]},
        {"input": "x", "text": {"format": schema}, "reasoning": {"effort": "none"}, "top_p": 1},
    )  # fmt: skip


def _messages() -> list[bytes]:
    tool = {"name": "look", "input_schema": TOOL["parameters"], "description": "x"}
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {"at": ""}}
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    return _bodies(
        "/v1/messages",
        {"messages": [USER], "max_tokens": 4, "system": "x", "stop_sequences": ["x"], "top_k": 3},
        {"max_tokens": 4, "tools": [tool], "tool_choice": {"type": "tool", "name": "look"},
         "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, used]},
                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                                    "content": [{"type": "text", "text": "x"}]}]}]},
        {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image",
                                                                      "source": source}]}]},
        {"messages": [USER], "tools": [tool], "system": [{"type": "text", "text": "x"}]},
    )  # fmt: skip


def _ollama() -> list[bytes]:
    options = {"temperature": 0.5, "num_predict": 4, "stop": ["x"], "seed": 1, "num_ctx": 1000}
    function = {"type": "function", "function": TOOL}
    call = {"function": {"name": "look", "arguments": {"at": ""}}}
    bodies = {
        "chat": [
            {"messages": [USER, {"role": "assistant", "tool_calls": [call]},
                          {"role": "tool", "content": "x", "tool_name": "look"}],
             "tools": [function], "options": options, "keep_alive": "5m"},
            {"messages": [{**USER, "images": [PIXEL]}], "format": SCHEMA, "stream": False},
        ],
        "generate": [{"prompt": "x", "system": "y", "format": "json", "think": False},
                     {"prompt": "x", "raw": True, "options": options}],
        "show": [{"verbose": True}],
    }  # fmt: skip
    return [f"/api/{name}\n".encode() + one for name, each in bodies.items() for one in (
        *_bodies(f"/api/{name}", *each),)]  # fmt: skip


def _admin() -> list[bytes]:
    return [
        b'/v1/admin/cache\n{"cache": "50%"}',
        b'/v1/admin/devices\n{"devices": "cuda:0,cuda:1"}',
        b'/v1/admin/cancel\n{"request": "req_1"}',
    ]


def with_path(data: bytes) -> Pieces:
    """A request whose first line is its path."""
    path, _, body = data.partition(b"\n")
    return [body], [path]


def with_path_join(pieces: Pieces) -> bytes:
    return pieces[1][0] + b"\n" + pieces[0][0]


def _reader(path: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        from greenroom.server.api import chat, completions, messages, responses

        models: Any = {
            "/v1/completions": (completions.CompletionRequest,),
            "/v1/chat/completions": (chat.ChatRequest,),
            "/v1/responses": (responses.ResponsesRequest, responses.ResponsesBuilder),
            "/v1/messages": (messages.MessagesRequest, messages.MessageBuilder),
        }
        read_request(path, data, *models[path])

    return read


def read_messages(data: bytes, folder: Path) -> None:
    from greenroom.server.api.messages import CountRequest

    if b"max_tokens" in data:
        _reader("/v1/messages")(data, folder)
    else:
        read_request("/v1/messages/count_tokens", data, CountRequest)


def read_ollama(data: bytes, folder: Path) -> None:
    from greenroom.server.api.ollama import answers, models

    path, _, body = data.partition(b"\n")
    model: Any = {b"/api/chat": answers.OllamaChatRequest, b"/api/show": models.OllamaShowRequest}
    read_request("/api/chat", body, model.get(path, answers.OllamaGenerateRequest))


def read_admin(data: bytes, folder: Path) -> None:
    """A change of the cache or the devices, as far as no model is needed."""
    from greenroom.config.values import parse_device
    from greenroom.hf.memory.slots import slots_for
    from greenroom.server.api import operations

    path, _, text = data.partition(b"\n")
    kinds: Any = {b"/v1/admin/devices": operations.Devices,
                  b"/v1/admin/cancel": operations.CancelledRequest}  # fmt: skip
    body = read_request("/v1/admin/cache", text, kinds.get(path, operations.CacheSize))
    if isinstance(body, operations.CacheSize):
        slots_for(body.cache, tiny_catalog())
    elif isinstance(body, operations.Devices):
        parse_device(body.devices)


# ---- options of commands


def _options() -> list[bytes]:
    values = {"amount": "8GiB", "memory": "60%", "device": "cuda:0,cuda:1", "adapter": "a=x,b=y",
              "scope": "12,8.5", "split": "0.5,1", "policy": "lru", "prefetch": "auto"}  # fmt: skip
    return [f"{name}\n{value}".encode() for name, value in values.items()]


def read_option(data: bytes, folder: Path) -> None:
    """A name, and the text that a user has written."""
    from greenroom.amounts import Amount, parse_memory
    from greenroom.config import scope_of, split_of
    from greenroom.config.values import parse_adapters, parse_device
    from greenroom.policies import policy
    from greenroom.predictors import predictor

    name, _, text = data.decode(errors="replace").partition("\n")
    text = "".join(text.replace("\0", "").splitlines())[:LONGEST_OPTION]
    readers: dict[str, Callable[[str], object]] = {
        "memory": lambda text: parse_memory(text, "--memory").of(1 << 40), "device": parse_device,
        "adapter": lambda text: parse_adapters((text,)), "scope": scope_of, "split": split_of,
        "policy": policy, "prefetch": predictor,
    }  # fmt: skip
    readers.get(name, lambda text: Amount.parse(text, "--cache").of(1 << 40))(text)


# ---- HTTP itself


def _http() -> list[bytes]:
    post = "POST /v1/messages?a=b HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
    made = (
        "GET / HTTP/1.1\nHost: x\n\nGET http://h:1/a HTTP/1.0\nConnection: keep-alive\n\n",
        post + 'Content-Length: 8\n\n{"a": 1}GET /b HTTP/1.1\nHost: x\nExpect: 100-continue\n\n',
        post + "Transfer-Encoding: chunked\n\n3;x=y\nabc\n0\nT: u\n\n",
        "GET / HTTP/1.1\nConnection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Key: a\n\n",
    )
    return [each.replace("\n", "\r\n").encode() for each in made]


class _Transport(asyncio.Transport):
    """A client that reads all at once; `data` is what it got."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 81)})
        self.data, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def pause_reading(self) -> None:
        """All was received already."""

    resume_reading = pause_reading


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    head = [(b"content-length", b"2"), (b"x-size", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"ok"})


@cache
def _loop() -> tuple[asyncio.AbstractEventLoop, Any]:
    import uvicorn

    from greenroom.server.web.connection import Connection

    config = uvicorn.Config(
        _echo, loop="asyncio", http=Connection, ws="none", lifespan="off", log_config=None,
        log_level="critical", access_log=False, proxy_headers=False, server_header=False,
    )  # fmt: skip
    config.load()
    return asyncio.new_event_loop(), config


def read_http(data: bytes, folder: Path) -> None:
    """A connection's bytes in two parts; each response is one of HTTP, and none says 500."""
    from uvicorn.server import ServerState

    from greenroom.server.web.connection import Connection

    loop, config = _loop()

    async def talk() -> bytes:
        transport, state = _Transport(), ServerState()
        connection = Connection(config, state, {}, loop)
        connection.connection_made(transport)
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            if part and not transport.closed:
                connection.data_received(part)
            for _ in range(20):
                await asyncio.sleep(0)
        connection.connection_lost(None)
        for task in [*state.tasks]:
            await task
        return bytes(transport.data)

    answer = loop.run_until_complete(talk())
    responses = answer.split(b"HTTP/1.1 ")[1:]
    assert bool(responses) == bool(answer), answer
    assert all(each[:1] in b"124" for each in responses), answer


def read_routing(data: bytes, folder: Path) -> None:
    """The replica that a request goes to."""
    from greenroom.server.replicas.affinity import Affinity, prefix_of

    affinity, prefix = Affinity(2), prefix_of(data)
    affinity.begin("a", "1", prefix)
    affinity.order(["a", "b"], prefix)


# ---- pictures


def _pictures() -> list[bytes]:
    from PIL import Image

    made = []
    image = Image.effect_noise((9, 7), 50).convert("RGB")
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        file = BytesIO()
        image.save(file, kind)
        made.append(file.getvalue())
    file = BytesIO()
    image.save(file, "WEBP", lossless=True)
    return [*made, file.getvalue(), base64.b64decode(PIXEL)]


def read_picture(data: bytes, folder: Path) -> None:
    """A picture in a chat's data URL."""
    from greenroom.hf.pictures.decode import decode, read_base64
    from greenroom.server.api.chat import CONTENT

    begins = {b"\xff": "jpeg", b"R": "webp", b"G": "gif"}
    url = f"data:image/{begins.get(data[:1], 'png')};base64,{base64.b64encode(data).decode()}"
    (part,) = CONTENT([{"type": "image_url", "image_url": {"url": url}}])
    assert not isinstance(part, str)
    found, header = read_base64(part.encoded)
    decode(found, header, lambda image: image.resize((32, 32)))


# ---- answers: of the model, and of servers to clients


def _answers() -> list[bytes]:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    return [f"<think>Well, é.</think>Hello{call}{call}".encode(), b"Hello <think>", b"Plain\n"]


def answer_pieces(data: bytes) -> Pieces:
    """The JSON of tool calls, and the text around it."""
    texts, others = [], []
    for part in data.split(b"<tool_call>"):
        call, end, rest = part.partition(b"</tool_call>")
        texts += [call] if end else []
        others.append(rest if end else call)
    return texts, others


def answer_join(pieces: Pieces) -> bytes:
    texts, (first, *others) = pieces
    calls = zip(texts, others, strict=True)
    return first + b"".join(b"<tool_call>\n%b</tool_call>%b" % each for each in calls)


def read_answer(data: bytes, folder: Path) -> None:
    """What a model writes, token by token."""
    from greenroom.server.api.shared.conversation import call_arguments
    from greenroom.server.engine.requests import Finished, Token
    from greenroom.server.engine.tokens.reader import AnswerReader

    dialogue = _service().dialogue()
    tools = [{"type": "function", "function": TOOL}]
    text = data.decode(errors="replace")[:2000]
    reader = AnswerReader(dialogue.reply_parser(_prompt(), tools), ("STOP",), ())
    ids = dialogue.tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = [part for token in ids for part in reader.feed(Token(token))]
    parts += reader.end(Finished("stop", 1, 0, len(ids), 0.0, 0.1, 0.2, 0.5))[0]
    for part in parts:
        if part.call is not None:
            json.dumps(call_arguments(part.call.arguments))


@cache
def _prompt() -> tuple[int, ...]:
    return tuple(_service().dialogue().chat([USER]))


def _streams() -> list[bytes]:
    choice: Any = {"index": 0, "finish_reason": None}
    chunks: list[Any] = [
        {"choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{**choice, "delta": {"reasoning_content": "r"}}]},
        {"choices": [{**choice, "delta": {"content": "Hi"}}]},
        {"choices": [{**choice, "delta": {"content": "!"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2,
                                  "prompt_tokens_details": {"cached_tokens": 1}}},
    ]  # fmt: skip
    stats: Any = {
        "queue": {"running": 1, "waiting": 0},
        "tokens": {"prompt": 1, "reused": 0, "new": 2},
        "requests": {},
    }
    whole: Any = {"data": [{"id": "m"}], "slots": 5, **stats, **chunks[2], "usage": {}}
    return [
        b"200\n" + json.dumps(whole).encode(),
        b"200\n" + b"\n".join(json.dumps(each).encode() for each in chunks),
        b'200\n{"error": {"message": "no"}}',
        b'500\n{"error": {"message": "busy", "type": "x"}}',
        b"200\n" + json.dumps(stats).encode(),
    ]


def stream(data: bytes) -> Pieces:
    """A status, and the JSON texts of a stream's events."""
    status, _, rest = data.partition(b"\n")
    return rest.split(b"\n"), [status]


def stream_join(pieces: Pieces) -> bytes:
    return pieces[1][0] + b"\n" + b"\n".join(pieces[0])


def _response(data: bytes, events: bool = False) -> httpx2.Response:
    """A server's response: a status, then events or another body."""
    status, _, body = data.partition(b"\n")
    code = int(status) if status.isdigit() and 200 <= int(status[:9]) < 600 else 200
    if events:
        body = b"".join(b"data: %b\n\n" % each for each in body.split(b"\n")) + b"data: [DONE]\n\n"
    return httpx2.Response(code, content=body, headers={"content-type": "text/event-stream"})


@cache
def _backend() -> Any:
    """A client of a server, of which each input is the next response."""
    from greenroom.config import SamplingConfig
    from greenroom.server.chat.remote import RemoteBackend

    backend = RemoteBackend("http://localhost", None, SamplingConfig(), NAME)
    backend.close()
    backend._client = httpx2.Client(base_url="http://localhost", transport=_transport())
    return backend


@cache
def _answerer() -> Any:
    from greenroom.server.batch.remote import RemoteAnswerer

    answerer = RemoteAnswerer("http://localhost", None)
    answerer._client = httpx2.AsyncClient(base_url="http://localhost", transport=_transport())
    return answerer


def _transport() -> httpx2.MockTransport:
    return httpx2.MockTransport(lambda request: httpx2.Response(200))


def read_stream(data: bytes, folder: Path) -> None:
    """As `greenroom chat --url` does: an answer, its last line, and what its commands show."""
    from greenroom.cli.terminal.session import closing_line
    from greenroom.cli.terminal.summary import summary

    backend = _backend()
    backend._client._transport.handler = lambda request: _response(  # type: ignore[attr-defined]
        data, request.url.path == "/v1/chat/completions"
    )
    first: GreenroomError | None = None
    for part in (
        lambda: closing_line(backend.answer([USER], lambda delta: f"{delta.text:s}")),
        lambda: summary(backend.stats()),
        lambda: f"{backend.resize('1GiB'):,}",
        backend._first_model,
    ):
        try:
            part()
        except GreenroomError as error:
            first = first or error
    if first is not None:
        raise first


def read_batch_answer(data: bytes, folder: Path) -> None:
    """As `greenroom batch --url` does."""
    from greenroom.server.batch.requests import read_requests
    from greenroom.server.batch.results import Results
    from greenroom.server.batch.run import BatchRun

    source = saved("requests", _batch()[0].partition(b"\n")[0], folder)
    requests = read_requests(source, NAME)
    (folder / "answers").unlink(missing_ok=True)

    async def run() -> BatchRun:
        answerer = _answerer()
        answerer._client._transport.handler = lambda request: _response(data)
        with Results(folder / "answers", requests) as results:
            made = BatchRun(answerer, 1, results, lambda: None)
            await made.run(source, requests)
            return made

    if data.partition(b"\n")[0] in (b"429", b"503"):
        return  # the request would be sent again, for minutes
    made = _loop()[0].run_until_complete(run())
    Results(folder / "answers", requests).__exit__()
    for _, message in made.failed:
        raise UsageError(message)


# ---- batch files


def _batch() -> list[bytes]:
    bodies = {
        "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
        "/v1/completions": {"prompt": "x"},
        "/v1/messages": {"messages": [USER], "max_tokens": 4},
    }
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"model": NAME, **body}}
        for i, (url, body) in enumerate(bodies.items())
    ]
    return [b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"]


def read_batch(data: bytes, folder: Path) -> None:
    from greenroom.server.batch.requests import read_requests

    path = saved("requests.jsonl", data, folder)
    with path.open("rb") as file:
        for request in read_requests(path, NAME):
            json.loads(request.read(file))


@cache
def _batch_requests() -> tuple[Any, ...]:
    from tempfile import TemporaryDirectory

    from greenroom.server.batch.requests import read_requests

    with TemporaryDirectory() as folder:
        return tuple(read_requests(saved("requests.jsonl", _batch()[0], Path(folder)), NAME))


def _results() -> list[bytes]:
    response = {"status_code": 200, "request_id": "x", "body": {"choices": []}}
    rows = [
        {"id": each.digest, "custom_id": each.custom_id, "response": response, "error": None}
        for each in _batch_requests()[:2]
    ]
    return [b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"]


def read_results(data: bytes, folder: Path) -> None:
    """The answers of an earlier run, to which one more is added."""
    from greenroom.server.batch.results import Results

    requests = _batch_requests()
    with Results(saved("answers.jsonl", data, folder), requests) as results:
        missing = [each for each in requests if each.custom_id not in results.done]
        if missing:
            results.add(missing[0], 200, {}, "x")


def read_api_key(data: bytes, folder: Path) -> None:
    from greenroom.server.http.keys import read_api_key

    read_api_key(str(saved("key", data, folder)))


def _iterate(*made: bytes) -> Callable[[], list[bytes]]:
    return lambda: [*made]


def _all_bodies() -> list[bytes]:
    return [*_chat()[:4], *_messages()[:2], *_responses()[:2], *_completions()[:1]]


SERVED = {
    "completions": Format(_completions, _reader("/v1/completions"), plain, plain_join),
    "chat": Format(_chat, _reader("/v1/chat/completions"), plain, plain_join),
    "responses": Format(_responses, _reader("/v1/responses"), plain, plain_join),
    "messages": Format(_messages, read_messages, plain, plain_join),
    "ollama": Format(_ollama, read_ollama, with_path, with_path_join),
    "admin": Format(_admin, read_admin, with_path, with_path_join),
    "options": Format(_options, read_option),
    "http": Format(_http, read_http),
    "routing": Format(_all_bodies, read_routing, plain, plain_join),
    "picture": Format(_pictures, read_picture),
    "answer": Format(_answers, read_answer, answer_pieces, answer_join),
    "sse": Format(_streams, read_stream, stream, stream_join),
    "batch": Format(_batch, read_batch, lines, lines_join),
    "batch-results": Format(_results, read_results, lines, lines_join),
    "batch-answers": Format(_streams, read_batch_answer, stream, stream_join),
    "api-key": Format(_iterate(b"secret-key\n", b"a"), read_api_key),
}
