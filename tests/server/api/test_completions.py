"""Completions that give the prompt back with its log-probabilities, as evaluation harnesses ask."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.completions import TokenOffsets
from greenroom.server.engine.requests import Request
from tests.server.conftest import NAME, Running, Serve, demo_tokenizer, fake_engine
from tests.server.fakes import FakeEngine

HELLO = "Hello, wörld 🙂 there"


BEGIN = "<|begin|>"  # which the tokenizer puts before a text


def ids_of(text: str) -> list[int]:
    return list(demo_tokenizer()(text, add_special_tokens=False)["input_ids"])


def complete(running: Running, **body: Any) -> Any:
    response = running.post("/v1/completions", {"model": NAME, **body})
    assert response.status_code == 200, response.text
    return response.json()


def joined(tokens: list[str]) -> str:
    """The text that tokens are of; half characters are written as their bytes."""
    data = b""
    for token in tokens:
        if token.startswith("bytes:"):
            data += bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        else:
            data += token.encode()
    return data.decode()


@pytest.mark.parametrize("as_ids", [False, True])
def test_echoed_prompt_tokens_come_before_the_answer(serve: Serve, as_ids: bool) -> None:
    ids, begin = ids_of(HELLO), [] if as_ids else [0]
    running = serve(fake_engine(" you"))
    response = complete(
        running, prompt=ids if as_ids else HELLO, echo=True, logprobs=2, max_tokens=9
    )
    (choice,) = response["choices"]
    assert choice["text"] == HELLO + " you"
    logprobs, ids = choice["logprobs"], begin + ids
    assert joined(logprobs["tokens"]) == BEGIN * len(begin) + HELLO + " you<|end|>"
    assert logprobs["token_logprobs"][: len(ids)] == [None, *(-float(each) for each in ids[1:])]
    assert set(logprobs["token_logprobs"][len(ids) :]) == {-0.5}
    assert logprobs["top_logprobs"][0] is None
    assert all(2 <= len(each) <= 3 for each in logprobs["top_logprobs"][1:])
    for tokens, logprob, top in zip(*(logprobs[name][1:] for name in (
        "tokens", "token_logprobs", "top_logprobs")), strict=True):  # fmt: skip
        assert top[tokens] == logprob  # the token itself is always there
    (ticket,) = running.engine.tickets
    assert (ticket.request.prompt_logprobs, ticket.request.top_logprobs) == (2, 2)
    assert response["usage"]["prompt_tokens"] == len(ids)


def test_each_token_begins_at_its_offset(serve: Serve) -> None:
    response = complete(serve(fake_engine(" you")), prompt=HELLO, echo=True, logprobs=0)
    (choice,) = response["choices"]
    places = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    text_tokens = [(token, at) for token, at in places if not token.startswith("bytes:")][:-1]
    assert len(text_tokens) > 5
    assert text_tokens.pop(0) == (BEGIN, 0)  # it is no part of the text
    for token, at in text_tokens:
        assert choice["text"].startswith(token, at)


def test_added_special_tokens_have_no_length_in_the_text() -> None:
    dialogue, offsets = Dialogue(demo_tokenizer()), TokenOffsets()
    ids = [0, *ids_of("ab cd")]
    assert [offsets.next(dialogue, each, "ab cd") for each in ids][:2] == [0, 0]
    assert offsets.at == len("ab cd")


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_max_tokens_0_returns_only_the_prompt(serve: Serve, logprobs: int | None) -> None:
    running = serve(fake_engine(" you"))
    response = complete(running, prompt="Hello", echo=True, max_tokens=0, logprobs=logprobs)
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert response["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert "".join(choice["logprobs"]["tokens"]) == BEGIN + "Hello"
    assert running.engine.tickets[0].request.prompt_logprobs == logprobs


def test_without_echo_no_prompt_is_scored(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    complete(running, prompt="Hello", logprobs=1)
    complete(running, prompt="Hello", echo=True)
    assert [each.request.prompt_logprobs for each in running.engine.tickets] == [None, None]


def test_one_of_several_choices_scores_the_prompt(serve: Serve) -> None:
    """The others may have their first tokens earlier."""

    def script(request: Request) -> list[int]:
        return ids_of(" you")

    engine = FakeEngine(demo_tokenizer(), script, first_s=0.0)
    answer = engine._answer

    def slow_where_scored(ticket: Any) -> None:
        if ticket.request.prompt_logprobs is not None:
            ticket.cancelled.wait(0.2)
        answer(ticket)

    engine._answer = slow_where_scored  # type: ignore[method-assign]
    running = serve(engine)
    body = {"prompt": ["one two", "three"], "echo": True, "logprobs": 1, "n": 3, "best_of": 3}
    response = complete(running, **body)
    texts = [choice["text"] for choice in response["choices"]]
    assert texts == ["one two you"] * 3 + ["three you"] * 3
    requested = [each.request.prompt_logprobs for each in running.engine.tickets]
    assert requested == [1, None, None] * 2
    for choice in response["choices"]:
        assert joined(choice["logprobs"]["tokens"]) == BEGIN + choice["text"]

    streamed = [""] * 6
    tokens: list[list[str]] = [[] for _ in range(6)]
    offsets: list[list[int]] = [[] for _ in range(6)]
    for chunk in _chunks(running, **body):
        (choice,) = chunk["choices"]
        at = choice["index"]
        streamed[at] += choice["text"]
        tokens[at] += choice["logprobs"]["tokens"]
        offsets[at] += choice["logprobs"]["text_offset"]
    assert streamed == texts
    assert ["".join(each) for each in tokens] == [BEGIN + text for text in texts]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in response["choices"]]


def _chunks(running: Running, **body: Any) -> list[Any]:
    response = running.post("/v1/completions", {"model": NAME, "stream": True, **body})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_client_may_disconnect_while_choices_wait(serve: Serve) -> None:
    engine = fake_engine(" you")
    answer = engine._answer

    def slow_where_scored(ticket: Any) -> None:
        if ticket.request.prompt_logprobs is not None:
            ticket.cancelled.wait(30)
        answer(ticket)

    engine._answer = slow_where_scored  # type: ignore[method-assign]
    running = serve(engine)
    api = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        api.completions.create(model=NAME, prompt="Hello", echo=True, logprobs=1, n=2)
    assert " 499 " in running.line()
    assert all(ticket.done.is_set() for ticket in engine.tickets)


class TestHarness:
    """The requests of lm_eval's local-completions, and what it reads of the answers."""

    def ask(self, running: Running, prompts: list[list[int]], ctxlens: list[int]) -> Any:
        response = complete(running, prompt=prompts, temperature=0, max_tokens=1, logprobs=1,
                         seed=1234, echo=True)  # fmt: skip
        results = []
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        for choice, ctxlen in zip(choices, ctxlens, strict=True):
            logprob = choice["logprobs"]["token_logprobs"][ctxlen:-1]
            top = choice["logprobs"]["top_logprobs"][ctxlen:-1]
            greedy = all(one == max(each.values()) for one, each in zip(logprob, top, strict=True))
            results.append((sum(logprob), greedy))
        return results

    @pytest.mark.parametrize("answer", [" you", ""])
    def test_log_likelihoods(self, serve: Serve, answer: str) -> None:
        """One token is chosen after the prompt, which may be the end."""
        prompts = [ids_of("one two three"), ids_of("four five")]
        running = serve(fake_engine(answer))
        response = self.ask(running, prompts, [2, 1])
        assert response == [
            (-float(sum(prompts[0][2:])), False), (-float(sum(prompts[1][1:])), False)
        ]  # fmt: skip
