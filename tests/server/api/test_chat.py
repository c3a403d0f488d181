"""Chat completions, by the real `openai` package over a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.conftest import NAME, Running, Serve, fake_engine, reasoning_engine, wait_for

QUESTION: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLED = '<think>Hm.</think>I look.<tool_call>{"name": "look", "arguments": {"place": "here"}}'
CALLED += "</tool_call>"


def client(running: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=100)


def streamed(chunks: Any) -> tuple[str, list[Any]]:
    chunk_list = list(chunks)
    text = "".join(c.choices[0].delta.content or "" for c in chunk_list if c.choices)
    return text, chunk_list


def test_complete_and_streamed_answers_are_equal(serve: Serve) -> None:
    api = client(serve(fake_engine("Hello wörld 🎉!", reused=2))).chat.completions
    complete = api.create(model=NAME, messages=QUESTION)
    assert complete.choices[0].message.content == "Hello wörld 🎉!"
    assert complete.choices[0].finish_reason == "stop"
    assert complete.object == "chat.completion"
    assert complete.usage is not None
    assert complete.usage.prompt_tokens_details is not None
    assert complete.usage.prompt_tokens_details.cached_tokens == 2
    assert (
        complete.usage.total_tokens
        == complete.usage.prompt_tokens + complete.usage.completion_tokens
    )
    text, chunks = streamed(api.create(model=NAME, messages=QUESTION, stream=True))
    assert text == "Hello wörld 🎉!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_done_and_usage_on_request(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    options: Any = {"include_usage": True}
    _, chunks = streamed(
        client(running).chat.completions.create(
            model=NAME, messages=QUESTION, stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == running.engine.tickets[0].sent_tokens
    body = {"model": NAME, "messages": QUESTION, "stream": True}
    raw = running.post("/v1/chat/completions", body)
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")


def test_stop_strings_are_not_shown_and_end_the_answer(serve: Serve) -> None:
    running = serve(fake_engine("one two STOP three " * 20, delay_s=0.005))
    api = client(running).chat.completions
    complete = api.create(model=NAME, messages=QUESTION, stop=["STOP"])
    assert complete.choices[0].message.content == "one two "
    assert complete.choices[0].finish_reason == "stop"
    assert running.engine.tickets[0].cancelled.is_set()
    text, _ = streamed(api.create(model=NAME, messages=QUESTION, stop="o STOP", stream=True))
    assert text == "one tw"


def test_max_tokens_cut_an_answer(serve: Serve) -> None:
    running = serve(fake_engine("one two three four"))
    for name in ("max_tokens", "max_completion_tokens"):
        options: Any = {name: 2}
        cut = client(running).chat.completions.create(model=NAME, messages=QUESTION, **options)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 2


def test_an_answer_may_fill_the_context(serve: Serve) -> None:
    running = serve(fake_engine("Hi", context=64), max_tokens=20)
    prompt = len(running.engine.tokenizer.apply_chat_template(QUESTION)["input_ids"]) + 1
    body = {"model": NAME, "messages": QUESTION}
    running.post("/v1/chat/completions", body)
    running.post("/v1/chat/completions", {**body, "max_tokens": 1000})
    assert [t.request.max_new_tokens for t in running.engine.tickets] == [20, 20]
    assert prompt < 44


def test_choices_have_different_seeds(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    response = client(running).chat.completions.create(model=NAME, messages=QUESTION, n=3, seed=7)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert {choice.message.content for choice in response.choices} == {"Hi"}
    assert sorted(t.request.sampling.seed for t in running.engine.tickets) == [7, 8, 9]
    chunks = list(
        client(running).chat.completions.create(model=NAME, messages=QUESTION, n=2, stream=True)
    )
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_sampling_settings_reach_the_engine(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    client(running).chat.completions.create(
        model=NAME, messages=QUESTION, temperature=0.5, top_p=0.9, seed=-1, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"5": -100},
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
    )  # fmt: skip
    sampling = running.engine.tickets[0].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5, 0.9, 3, 0.1,
    )  # fmt: skip
    assert sampling.seed == (1 << 63) - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, ((5, -100.0),))


def test_logprobs_have_the_bytes_of_each_token(serve: Serve) -> None:
    api = client(serve(fake_engine("a 🎉"))).chat.completions
    response = api.create(model=NAME, messages=QUESTION, logprobs=True, top_logprobs=2)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = [bytes(token.bytes or ()) for token in logprobs.content]
    assert b"".join(data).decode() == "a 🎉"
    assert all(token.logprob == -0.5 for token in logprobs.content)
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    chunks = api.create(model=NAME, messages=QUESTION, logprobs=True, stream=True)
    streamed_tokens = [
        t for c in chunks for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else ())
    ]
    assert [bytes(token.bytes or ()) for token in streamed_tokens] == data
    assert api.create(model=NAME, messages=QUESTION).choices[0].logprobs is None


def test_tools_are_described_called_and_answered(serve: Serve) -> None:
    running = serve(reasoning_engine(CALLED))
    api = client(running).chat.completions
    response = api.create(model=NAME, messages=QUESTION, tools=[TOOL], tool_choice="auto")
    choice = response.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"place": "here"}
    decode = running.engine.tokenizer.decode
    assert '"name": "look"' in decode(running.engine.tickets[0].request.ids)
    history = [
        *QUESTION,
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "a wall"},
    ]
    chunks = list(api.create(model=NAME, messages=history, tools=[TOOL], stream=True))
    prompt_text = decode(running.engine.tickets[1].request.ids)
    assert '{"name": "look", "arguments": {"place": "here"}}' in prompt_text
    assert "a wall" in prompt_text
    assert "<think>Hm.</think>" in prompt_text
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in calls] == [(0, "look")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tool_choice_none_hides_the_tools(serve: Serve) -> None:
    running = serve(reasoning_engine("Hi"))
    client(running).chat.completions.create(
        model=NAME, messages=QUESTION, tools=[TOOL], tool_choice="none"
    )
    assert "look" not in running.engine.tokenizer.decode(running.engine.tickets[0].request.ids)


def test_parallel_tool_calls_false_gives_one_call(serve: Serve) -> None:
    running = serve(reasoning_engine(CALLED * 3, delay_s=0.002))
    response = client(running).chat.completions.create(
        model=NAME, messages=QUESTION, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(response.choices[0].message.tool_calls or ()) == 1
    assert running.engine.tickets[0].cancelled.is_set()


def test_a_call_with_invalid_json_is_text(serve: Serve) -> None:
    running = serve(reasoning_engine("So: <tool_call>{nonsense}</tool_call> well"))
    response = client(running).chat.completions.create(model=NAME, messages=QUESTION, tools=[TOOL])
    assert response.choices[0].finish_reason == "stop"
    assert "{nonsense}" in (response.choices[0].message.content or "")


def test_reasoning_can_be_switched_off_by_the_template(serve: Serve) -> None:
    running = serve(reasoning_engine("Hi"))
    client(running).chat.completions.create(model=NAME, messages=QUESTION, reasoning_effort="none")
    prompt_text = running.engine.tokenizer.decode(running.engine.tickets[0].request.ids)
    assert prompt_text.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(
        openai.BadRequestError, match="reasoning_effort 'high': this model's chat template"
    ):
        client(running).chat.completions.create(
            model=NAME, messages=QUESTION, reasoning_effort="high"
        )


def test_json_mode_is_a_grammar_for_the_engine(serve: Serve) -> None:
    running = serve(fake_engine('{"a":1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    forms: list[Any] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        {"type": "text"},
    ]
    for form in forms:
        response = client(running).chat.completions.create(
            model=NAME, messages=QUESTION, response_format=form
        )
        assert response.choices[0].message.content == '{"a":1}'
    grammars = [ticket.request.grammar for ticket in running.engine.tickets]
    assert grammars[0] is not None
    assert grammars[1] is not None
    assert '"integer"' in grammars[1]
    assert grammars[2] is None


def test_text_parts_are_joined(serve: Serve) -> None:
    running = serve(fake_engine("Hi"))
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}]
    client(running).chat.completions.create(model=NAME, messages=messages)
    prompt_text = running.engine.tokenizer.decode(running.engine.tickets[0].request.ids)
    assert "<|system|>Be.<|end|><|user|>one\ntwo<|end|>" in prompt_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_its_place(serve: Serve, stream: bool) -> None:
    running = serve(fake_engine("word " * 400, delay_s=0.02))
    with client(running) as api:
        if stream:
            chunks = api.chat.completions.create(model=NAME, messages=QUESTION, stream=True)
            for _ in range(3):
                next(iter(chunks))
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                api.chat.completions.create(model=NAME, messages=QUESTION, timeout=2.0)
    ticket = running.engine.tickets[0]
    wait_for(ticket.done.is_set, 2)
    assert ticket.sent_tokens < 100
    line = running.line()
    assert " 499 " in line
    assert "cancelled" in line


def test_requests_run_concurrently(serve: Serve) -> None:
    running = serve(fake_engine("one two three", delay_s=0.03))
    api = client(running).chat.completions
    streams = [api.create(model=NAME, messages=QUESTION, stream=True) for _ in range(4)]
    wait_for(lambda: len(running.engine.tickets) == 4)
    assert {streamed(each)[0] for each in streams} == {"one two three"}
