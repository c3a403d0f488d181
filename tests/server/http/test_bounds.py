"""Bounds on the work of a request before the request is refused or begun."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from greenroom.errors import TooLong, UsageError
from greenroom.hf.text.dialogue import Dialogue, TextDecoder
from greenroom.hf.text.prompt_limit import PIECE, PromptLimit, count_chars
from greenroom.server.api.shared.formats import json_grammar
from greenroom.server.api.shared.schemas import MOST_NODES, schema_error
from greenroom.server.engine.tokens.grammar import Grammars
from greenroom.server.http import bodies
from greenroom.server.http.errors import ApiError
from greenroom.server.http.service import SMALL_BYTES
from tests.server.api.test_refusals import CHAT, PATHS, TOOL, refused
from tests.server.conftest import NAME, Running, Serve, demo_tokenizer, fake_engine, wait_for
from tests.server.fakes import FakeEngine

LONG = "word " * 700_000


class Counting:
    """A tokenizer that counts the characters that it gets."""

    def __init__(self) -> None:
        self._tokenizer, self.chars = demo_tokenizer(), 0

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def __call__(self, text: str, **options: Any) -> Any:
        self.chars += len(text)
        return self._tokenizer(text, **options)


class TestPrompts:
    def test_characters_are_counted_before_anything_is_tokenised(self) -> None:
        limit = PromptLimit(tokenizer := Counting(), 256)
        for refuses in (
            lambda: limit.check_text(LONG),
            lambda: limit.check_messages([{"role": "user", "content": LONG}]),
            lambda: limit.check_messages([{"role": "user", "content": "x", "tools": {LONG: 1}}]),
            lambda: limit.check_messages([{"role": "user", "content": "x"}], [LONG]),
            lambda: limit.check_messages([{"role": "user", "content": ""}] * 257),
        ):
            with pytest.raises(TooLong, match="context of 256 tokens"):
                refuses()
        assert tokenizer.chars == 0
        assert count_chars({"ab": ["c", {"de": "fgh"}, 1, None]}) == 8

    def test_a_text_is_tokenised_piece_by_piece_until_it_is_too_long(self) -> None:
        limit = PromptLimit(tokenizer := Counting(), 20_000)
        limit.most_chars = len(LONG)  # as of a vocabulary with long tokens
        with pytest.raises(TooLong, match="context of 20,000 tokens"):
            limit.check_text(LONG)
        assert tokenizer.chars < 8 * 2 * 20_000 + PIECE

    def test_a_text_that_fits_is_not_refused(self) -> None:
        text = " the" * 20_000
        tokens = len(demo_tokenizer()(text)["input_ids"])
        PromptLimit(Counting(), tokens).check_text(text)
        assert len(Dialogue(demo_tokenizer(), context=tokens).encode(text)) == tokens

    def test_every_api_refuses_a_prompt_without_room(self, running: Running) -> None:
        for path, body in PATHS.items():
            name = next(key for key in ("prompt", "input", "messages") if key in body)
            value: Any = LONG if name != "messages" else [{"role": "user", "content": LONG}]
            error = refused(running, path, {**body, name: value})
            assert "context of 512 tokens" in error["message"]
        tools = [{**TOOL, "function": {"name": "look", "description": LONG}}]
        assert "has no place for tools" in refused(
            running, "/v1/chat/completions", {**CHAT, "tools": tools}
        )["message"]  # fmt: skip

    def test_half_a_surrogate_pair_is_a_client_error(self) -> None:
        with pytest.raises(UsageError, match="surrogate"):
            Dialogue(demo_tokenizer()).encode("\ud800")


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def wide(count: int) -> Any:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


class TestSchemas:
    @pytest.mark.parametrize(
        ("schema", "why"),
        [
            (wide(1001), "more than 1,000 properties"),
            (wide(15_000), "more than"),
            (nested(33), "deeper than 64"),
            (nested(5000), "deeper than 64"),
            ({"enum": list(range(1001))}, "more than 1,000 values"),
            ({"const": [1] * 1_000_000}, "more than"),
            ({"enum": ["x" * 20_000]}, "characters in enums"),
            ({"type": "string", "pattern": "(a|b)" * 1000}, "characters in patterns"),
            ({"patternProperties": {"a" * 3000: {}}}, "characters in patterns"),
            ({"description": "x" * 70_000}, "more than 65,536"),
            ({"x": [0] * 2_000_000}, f"more than {MOST_NODES:,} parts"),
            ({"$ref": "http://localhost/x"}, "references begin with #"),
            ({"$defs": {"a": {"$ref": "file:///etc/passwd"}}}, "references begin with #"),
            ({"a": {1: object()}}, "not JSON"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_schema_that_is_too_large_is_refused(self, schema: Any, why: str) -> None:
        assert why in (schema_error(schema) or "")
        with pytest.raises(ApiError, match="a schema that is not supported") as error:
            json_grammar(schema, "format")
        assert error.value.param == "format"
        assert len(str(error.value)) < 400

    def test_a_schema_of_usual_size_is_accepted(self) -> None:
        assert schema_error(wide(1000)) is None
        assert schema_error(nested(31)) is None
        assert schema_error({"enum": list(range(1000))}) is None
        assert schema_error({"$defs": {"a": {}}, "$ref": "#/$defs/a"}) is None
        assert json_grammar(wide(1000), "format")

    @pytest.mark.parametrize("schema", [
        {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"allOf": [{"$ref": "#"}]},
    ])  # fmt: skip
    def test_a_schema_that_refers_to_itself_shows_no_parser(self, schema: Any) -> None:
        grammars = Grammars(demo_tokenizer(), len(demo_tokenizer()), (1,))
        with pytest.raises(UsageError, match="the grammar allows no answer") as error:
            grammars(json_grammar(schema, "format"))
        assert "state" not in str(error.value)

    @pytest.mark.parametrize("schema", [
        {"type": "string", "pattern": "a{1000000}"},
        {"type": "string", "pattern": "(a|b)*a(a|b){400}"},
        {"type": "string", "pattern": "((((a{0,50}){0,50}){0,50}){0,50}){0,50}"},
        {"type": "string", "minLength": 1_000_000},
        {"type": "array", "minItems": 100_000, "items": {"type": "integer"}},
        {"$defs": {f"d{i}": {"type": "object", "properties": {
            "x": {"$ref": f"#/$defs/d{i + 1}"}, "y": {"$ref": f"#/$defs/d{i + 1}"}}}
            for i in range(30)} | {"d30": {"type": "string"}}, "$ref": "#/$defs/d0"},
    ])  # fmt: skip
    def test_the_work_of_a_small_schema_is_bounded(self, schema: Any) -> None:
        grammars = Grammars(demo_tokenizer(), len(demo_tokenizer()), (1,))
        began = time.process_time()
        try:
            grammar = grammars(json_grammar(schema, "format"))
            for _ in range(10):
                grammar.take(int(grammar.allowed(len(demo_tokenizer())).nonzero()[-1]))
        except (ApiError, UsageError) as error:
            assert len(str(error)) < 400  # noqa: PT017
        assert time.process_time() - began < 5

    def test_choices_of_a_request_share_a_compiled_grammar(self, monkeypatch: Any) -> None:
        import llguidance

        compiled: list[str] = []

        original = llguidance.LLMatcher

        def matcher(tokens: Any, grammar: str, **options: Any) -> Any:
            compiled.append(grammar)
            return original(tokens, grammar, **options)

        grammars = Grammars(demo_tokenizer(), len(demo_tokenizer()), (1,))
        monkeypatch.setattr(llguidance, "LLMatcher", matcher)
        one, other = (grammars(json_grammar(None, "format")) for _ in range(2))
        assert len(compiled) == 1
        first = int(one.allowed(len(demo_tokenizer())).nonzero()[0])
        one.take(first)
        assert other.allowed(len(demo_tokenizer()))[first]  # each has a place of its own

    def test_schemas_of_all_tools_are_bounded_together(self, serve: Serve) -> None:
        from tests.server.conftest import reasoning_engine

        running = serve(reasoning_engine("x", context=1 << 20))
        tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": wide(900)}}
                 for i in range(2)]  # fmt: skip
        body = {**CHAT, "tools": tools, "tool_choice": "required"}
        assert "1,000 properties" in refused(running, "/v1/chat/completions", body)["message"]


class TestPreparing:
    def test_small_requests_do_not_wait_for_large_ones(
        self, serve: Serve, monkeypatch: Any
    ) -> None:
        go, stuck = threading.Event(), threading.Semaphore(0)
        encode = Dialogue.encode

        def slow(self: Dialogue, text: str) -> list[int]:
            if len(text) > SMALL_BYTES:
                stuck.release()
                go.wait(60)
                text = "x"
            return encode(self, text)

        monkeypatch.setattr(Dialogue, "encode", slow)
        running = serve(fake_engine("Hi"))
        body = {"model": NAME, "prompt": "x" * (SMALL_BYTES + 1)}
        with ThreadPoolExecutor(8) as threads:
            large = [threads.submit(running.post, "/v1/completions", body) for _ in range(4)]
            assert stuck.acquire(timeout=30)
            for _ in range(3):
                assert running.post("/v1/completions", {**body, "prompt": "x"}).status_code == 200
            go.set()
            assert {each.result().status_code for each in large} == {200}

    def test_preparing_counts_against_the_timeout(self, serve: Serve, monkeypatch: Any) -> None:
        go, begun = threading.Event(), threading.Event()
        encode = Dialogue.encode

        def slow(self: Dialogue, text: str) -> list[int]:
            begun.set()
            go.wait(60)
            return encode(self, text)

        monkeypatch.setattr(Dialogue, "encode", slow)
        running = serve(fake_engine("word " * 50, delay_s=0.05), timeout=0.3)
        body = {"model": NAME, "prompt": "x"}
        assert "0.3 seconds" in refused(running, "/v1/completions", body, 504)["message"]
        assert begun.is_set()
        go.set()
        wait_for(lambda: running.engine.tickets)
        assert running.engine.tickets[0].cancelled.wait(10)  # made too late: given up
        timeout = running.engine.tickets[0].request.timeout_s
        assert timeout is not None
        assert timeout < 0.01


class Panic(BaseException):
    """Like an exception of Rust's."""


@pytest.mark.parametrize("error", [RecursionError("odd /secret"), MemoryError(), Panic("odd")],
                         ids=lambda error: type(error).__name__)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "where"),
    [
        *((path, where) for path in PATHS for where in ("decode", "submit")),
        *((path, "encode" if path == "/v1/completions" else "chat") for path in PATHS),
    ],
)
def test_a_librarys_exception_ends_only_its_request(
    serve: Serve, monkeypatch: Any, error: BaseException, where: str, path: str
) -> None:
    running = serve(fake_engine("one two"))
    raising = _raising(error)
    with monkeypatch.context() as patch:
        if where == "decode":
            patch.setattr(TextDecoder, "feed", raising)
        elif where == "submit":
            patch.setattr(FakeEngine, "submit", raising)
        else:
            patch.setattr(Dialogue, where, raising)
        error_body = refused(running, path, PATHS[path], 500)
        assert "secret" not in json.dumps(error_body)
        name = type(error).__name__
        wait_for(lambda: any(name in line and "req_" in line for line in running.lines))
        stream = running.post(path, {**PATHS[path], "stream": True})
        assert "error" in stream.text
        assert "[DONE]" not in stream.text
    assert running.post(path, PATHS[path]).status_code == 200


def _raising(error: BaseException) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raises


class TestBodies:
    def test_json_members_are_counted_before_parsing(self) -> None:
        many = b'{"a": [' + b"[]," * bodies.MOST_NESTS + b"[]]}"
        with pytest.raises(ApiError, match="objects and lists"):
            bodies.check_parts(many)
        with pytest.raises(ApiError, match="members"):
            bodies.check_parts(b"[" + b"0," * bodies.MOST_MEMBERS + b"0,0]")
        code = json.dumps({"prompt": '{"[,\\' * bodies.MOST_MEMBERS}).encode()
        bodies.check_parts(code)  # brackets in a text are a text

    def test_large_bodies_have_a_common_budget(self, serve: Serve) -> None:
        running = serve(fake_engine("word " * 20, delay_s=0.2), max_body="1MiB")
        body = {"model": NAME, "prompt": "x", "user": "x" * 900_000}
        with ThreadPoolExecutor(4) as threads:
            both = [threads.submit(running.post, "/v1/completions", body) for _ in range(2)]
            wait_for(lambda: len(running.engine.tickets) == 2)
            third = running.post("/v1/completions", body)
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            small = {"model": NAME, "prompt": "x", "max_tokens": 1}
            assert running.post("/v1/completions", small).status_code == 200
            assert [each.result().status_code for each in both] == [200, 200]
        assert running.post("/v1/completions", {**body, "max_tokens": 1}).status_code == 200
