"""Completions, responses and Anthropic's messages, by the real packages over a real socket."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.server.conftest import NAME, Running, Serve, fake_engine, reasoning_engine

QUESTION: Any = [{"role": "user", "content": "Hello"}]
PARAMETERS: Any = {"type": "object", "properties": {"place": {"type": "string"}}}
CALLED = '<think>Hm.</think>I look.<tool_call>{"name": "look", "arguments": {"place": "here"}}'
CALLED += "</tool_call>"


def by_openai(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=100)


def by_anthropic(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=100)


def prompt_text(running: Running, index: int = -1) -> str:
    text: str = running.engine.tokenizer.decode(running.engine.tickets[index].request.ids)
    return text


class TestCompletions:
    def test_complete_and_streamed(self, serve: Serve) -> None:
        api = by_openai(serve(fake_engine(" there 🎉"))).completions
        complete = api.create(model=NAME, prompt="Hello", max_tokens=50)
        assert complete.choices[0].text == " there 🎉"
        assert complete.choices[0].finish_reason == "stop"
        options: Any = {"include_usage": True}
        chunks = list(
            api.create(
                model=NAME, prompt="Hello", max_tokens=50, stream=True, stream_options=options
            )
        )
        assert "".join(c.choices[0].text for c in chunks if c.choices) == " there 🎉"
        assert chunks[-1].usage == complete.usage

    def test_a_template_is_not_applied(self, serve: Serve) -> None:
        running = serve(fake_engine("x"))
        by_openai(running).completions.create(model=NAME, prompt="Hello")
        assert prompt_text(running) == "<|begin|>Hello"
        assert running.engine.tickets[0].request.max_new_tokens == 16

    def test_several_prompts_in_text_or_ids(self, serve: Serve) -> None:
        running = serve(fake_engine("x"))
        api = by_openai(running).completions
        response = api.create(model=NAME, prompt=["a", "b"], n=2)
        assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
        api.create(model=NAME, prompt=[40, 41])
        assert running.engine.tickets[-1].request.ids == (40, 41)
        api.create(model=NAME, prompt=[[42], [43]])
        assert sorted(t.request.ids for t in running.engine.tickets[-2:]) == [(42,), (43,)]

    def test_echo_returns_the_prompt(self, serve: Serve) -> None:
        api = by_openai(serve(fake_engine(" there"))).completions
        complete = api.create(model=NAME, prompt="Hello", echo=True)
        assert complete.choices[0].text == "Hello there"
        chunks = api.create(model=NAME, prompt="Hello", echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there"

    def test_logprobs_have_the_place_of_each_token(self, serve: Serve) -> None:
        api = by_openai(serve(fake_engine("one two"))).completions
        response = api.create(model=NAME, prompt="Hello", logprobs=2).choices[0]
        assert response.logprobs is not None
        assert "".join(response.logprobs.tokens or ()) == "one two<|end|>"  # it was chosen too
        assert response.logprobs.text_offset is not None
        assert response.logprobs.text_offset[0] == 0
        assert response.logprobs.token_logprobs == [-0.5] * len(response.logprobs.tokens or ())
        assert all(response.logprobs.top_logprobs or ())

    def test_stop_strings(self, serve: Serve) -> None:
        api = by_openai(serve(fake_engine("one STOP two"))).completions
        assert api.create(model=NAME, prompt="x", stop="STOP").choices[0].text == "one "


class TestResponses:
    def test_whole(self, serve: Serve) -> None:
        running = serve(fake_engine("Hello wörld", reused=3))
        response = by_openai(running).responses.create(
            model=NAME, input="Hi", instructions="Be kind.", metadata={"a": "b"}
        )
        assert response.output_text == "Hello wörld"
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 3
        assert response.metadata == {"a": "b"}
        assert prompt_text(running).startswith(
            "<|begin|><|system|>Be kind.<|end|><|user|>Hi<|end|>"
        )

    def test_streamed_events_give_the_same_answer(self, serve: Serve) -> None:
        api = by_openai(serve(fake_engine("Hello wörld"))).responses
        events = list(api.create(model=NAME, input="Hi", stream=True))
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
        last: Any = events[-1]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == last.response.output_text == "Hello wörld"

    def test_reasoning_and_calls_are_items(self, serve: Serve) -> None:
        running = serve(reasoning_engine(CALLED))
        tool: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
        with by_openai(running).responses.stream(model=NAME, input="Hi", tools=[tool]) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert "response.reasoning_text.delta" in kinds
        assert "response.function_call_arguments.done" in kinds
        call: Any = response.output[2]
        assert json.loads(call.arguments) == {"place": "here"}
        history: Any = [
            {"role": "user", "content": "Hi"},
            *(
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
                for item in response.output
            ),
            {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"},
        ]
        for item in history:
            for part in item.get("content", ()) if isinstance(item.get("content"), list) else ():
                part.pop("parsed", None)
        by_openai(running).responses.create(model=NAME, input=history, tools=[tool])
        assert "<think>Hm.</think>I look.<tool_call>" in prompt_text(running)
        assert "a wall" in prompt_text(running)

    def test_cut_short(self, serve: Serve) -> None:
        response = by_openai(serve(fake_engine("one two three"))).responses.create(
            model=NAME, input="Hi", max_output_tokens=2
        )
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"

    def test_json_by_a_schema(self, serve: Serve) -> None:
        running = serve(fake_engine("{}"))
        form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
        response = by_openai(running).responses.create(model=NAME, input="Hi", text=form)
        assert response.output_text == "{}"
        assert running.engine.tickets[0].request.grammar is not None

    def test_logprobs(self, serve: Serve) -> None:
        response: Any = by_openai(serve(fake_engine("one two"))).responses.create(
            model=NAME, input="Hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        logprobs = response.output[0].content[0].logprobs
        assert "".join(token.token for token in logprobs) == "one two"

    def test_further_fields_of_codex_change_no_answer(self, serve: Serve) -> None:
        running = serve(fake_engine("Hello"))
        body: Any = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
        response = by_openai(running).responses.create(
            model=NAME, input="Hi", **body, extra_body={"client_metadata": {"turn_id": "1"}}
        )
        assert response.output_text == "Hello"
        assert running.engine.tickets[0].request.top_logprobs is None

    def test_stored_responses_are_refused(self, serve: Serve) -> None:
        api = by_openai(serve(fake_engine("x"))).responses
        with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
            api.create(model=NAME, input="Hi", previous_response_id="resp_1")
        with pytest.raises(openai.BadRequestError, match="store must be"):
            api.create(model=NAME, input="Hi", store=True)
        assert api.create(model=NAME, input="Hi").store is False  # type: ignore[attr-defined]


class TestMessages:
    def test_whole(self, serve: Serve) -> None:
        running = serve(fake_engine("Hello wörld", reused=4))
        response = by_anthropic(running).messages.create(
            model=NAME, max_tokens=50, system="Be kind.", messages=QUESTION,
            extra_body={"temperature": 0.5, "top_k": 3},
        )  # fmt: skip
        block: Any = response.content[0]
        assert block.text == "Hello wörld"
        assert response.stop_reason == "end_turn"
        assert response.usage.cache_read_input_tokens == 4
        prompt = running.engine.tickets[0].request
        assert response.usage.input_tokens + 4 == len(prompt.ids)
        assert (prompt.sampling.temperature, prompt.sampling.top_k) == (0.5, 3)
        assert prompt_text(running).startswith("<|begin|><|system|>Be kind.<|end|>")

    def test_streamed_events_give_the_same_answer(self, serve: Serve) -> None:
        api = by_anthropic(serve(fake_engine("Hello wörld"))).messages
        with api.stream(model=NAME, max_tokens=50, messages=QUESTION) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_message()
        assert response.content[0].text == "Hello wörld"  # type: ignore[union-attr]
        assert response.stop_reason == "end_turn"
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"

    def test_the_raw_stream_names_its_events(self, serve: Serve) -> None:
        body = {"model": NAME, "max_tokens": 5, "messages": QUESTION, "stream": True}
        text = serve(fake_engine("Hi")).post("/v1/messages", body).text
        for line in text.split("\n\n")[:-1]:
            name, data = line.split("\n")
            assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]

    def test_stop_sequences_and_limits(self, serve: Serve) -> None:
        api = by_anthropic(serve(fake_engine("one STOP two"))).messages
        response = api.create(model=NAME, max_tokens=50, messages=QUESTION, stop_sequences=["STOP"])
        assert (response.stop_reason, response.stop_sequence) == ("stop_sequence", "STOP")
        assert response.content[0].text == "one "  # type: ignore[union-attr]
        assert api.create(model=NAME, max_tokens=1, messages=QUESTION).stop_reason == "max_tokens"

    def test_thinking_and_tools(self, serve: Serve) -> None:
        running = serve(reasoning_engine(CALLED))
        api = by_anthropic(running).messages
        tool: Any = {"name": "look", "input_schema": PARAMETERS}
        with api.stream(model=NAME, max_tokens=90, messages=QUESTION, tools=[tool]) as stream:
            response = stream.get_final_message()
        complete = api.create(model=NAME, max_tokens=90, messages=QUESTION, tools=[tool])
        for message in (response, complete):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert message.stop_reason == "tool_use"
            assert message.content[2].input == {"place": "here"}  # type: ignore[union-attr]
        use: Any = complete.content[2]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "a wall"}
        content = [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": use.id, "name": use.name, "input": use.input},
        ]
        history: Any = [
            *QUESTION,
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        api.create(model=NAME, max_tokens=9, messages=history, tools=[tool])
        assert "<think>Hm.</think>I look.<tool_call>" in prompt_text(running)
        assert "<|im_start|>tool\na wall" in prompt_text(running)
        assert "<|im_start|>user\nAnd?" in prompt_text(running)

    def test_instructions_may_come_later(self, serve: Serve) -> None:
        running = serve(fake_engine("Hi"))
        later: Any = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
        asked: Any = [*QUESTION, later]
        by_anthropic(running).messages.create(
            model=NAME, max_tokens=9, system="Be kind.", messages=asked
        )
        assert prompt_text(running) == (
            "<|begin|><|system|>Be kind.<|end|><|user|>Hello<|end|><|system|>Be brief.<|end|>"
            "<|assistant|>"
        )

    def test_defaults_of_anthropic_may_be_written_out(self, serve: Serve) -> None:
        """The default effort, and an edit of the context that keeps everything."""
        running = serve(reasoning_engine("Hi"))
        tool = {"name": "look", "input_schema": PARAMETERS, "eager_input_streaming": True}
        body: Any = {"model": NAME, "max_tokens": 9, "messages": QUESTION, "tools": [tool]}
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        written = {"output_config": {"effort": "high"}, "context_management": {"edits": edits}}
        for more in ({}, written):
            assert running.post("/v1/messages", {**body, **more}).status_code == 200
        assert prompt_text(running, 0) == prompt_text(running, 1)

    def test_a_started_answer_is_continued(self, serve: Serve) -> None:
        running = serve(fake_engine(" is blue"))
        begun: Any = [*QUESTION, {"role": "assistant", "content": "The sky"}]
        by_anthropic(running).messages.create(model=NAME, max_tokens=9, messages=begun)
        assert prompt_text(running).endswith("<|assistant|>The sky")

    def test_tokens_are_counted(self, serve: Serve) -> None:
        running = serve(fake_engine("x"))
        api = by_anthropic(running).messages
        count = api.count_tokens(model=NAME, messages=QUESTION, system="Be kind.").input_tokens
        api.create(model=NAME, max_tokens=9, messages=QUESTION, system="Be kind.")
        assert count == len(running.engine.tickets[0].request.ids)

    def test_thinking_can_be_switched_off_by_the_template(self, serve: Serve) -> None:
        running = serve(reasoning_engine("Hi"))
        off: Any = {"type": "disabled"}
        by_anthropic(running).messages.create(
            model=NAME, max_tokens=9, messages=QUESTION, thinking=off
        )
        assert prompt_text(running).endswith("</think>\n\n")

    def test_json_by_a_schema(self, serve: Serve) -> None:
        running = serve(fake_engine("{}"))
        config: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        by_anthropic(running).messages.create(
            model=NAME, max_tokens=9, messages=QUESTION, output_config=config
        )
        assert running.engine.tickets[0].request.grammar is not None


def test_models_are_listed_for_both_apis(serve: Serve) -> None:
    running = serve(fake_engine("x"))
    for client in (by_openai(running), by_anthropic(running)):
        assert [model.id for model in client.models.list()] == [NAME]  # type: ignore[attr-defined]
        assert client.models.retrieve(NAME).id == NAME
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
            client.models.retrieve("other")
