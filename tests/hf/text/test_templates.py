"""Chat templates: what they write is what transformers writes, and none of them harms us."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest

from greenroom.errors import UsageError
from greenroom.hf.text import templates as module
from greenroom.hf.text.templates import Templates
from tests.hf.text.hostile import HOSTILE
from tests.server.conftest import demo_tokenizer

ENDLESS = ("nested_ranges", "nested_silent", "batches", "sorting", "lipsum", "macro_tree",
           "wordwrap")  # fmt: skip
HARMLESS = ("power", "regex_like", "strftime", "globals", "unicode")
QUESTION = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "ä<b>", "parameters": {"b": 1, "a": []}}}]
TURNS: Any = [
    {"role": "system", "content": " Be <b>brief</b> & 'kind' "},
    {"role": "user", "content": "Grüße 🌱\n", "name": None},
    {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1.5}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "1"},
    {"role": "assistant", "content": "Well  "},
]  # fmt: skip
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n"
    "    {%- elif m.content is string %}\nA: {{ m.content | trim }}\n{% endif %}\n{% endfor %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{# content #}{{ tools|tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index0 == 2 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ add_generation_prompt }}",
    "{% set ns = namespace(found=false, self=1) %}{% for m in messages[::-1] %}"
    "{% set ns.found = m.role %}{% endfor %}{{ ns.found }}{{ dict(a=1) }}{{ dict.fromkeys('ab') }}"
    "{{ messages[-1]['content'] }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% macro show(m) %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}{{ documents }}{{ enable_thinking }}",
    "{{ strftime_now('%Y')|length }}{{ messages|length }}{{ tools is none }}{{ eos_token }}"
    "{{ messages[-1].content.strip() }}",
]


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    with pytest.MonkeyPatch.context() as patch, closing(Templates()) as rendering:
        patch.setattr(module, "CPU_S", 1)
        yield rendering


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("how", ["asks", "ends", "resume"])
def test_a_rendered_text_equals_that_of_transformers(
    templates: Templates, template: str, tools: Any, how: str
) -> None:
    tokenizer = demo_tokenizer()
    original, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        expected = tokenizer.apply_chat_template(
            TURNS, tools=tools, tokenize=False, add_generation_prompt=how == "asks",
            continue_final_message=how == "resume", enable_thinking=False,
        )  # fmt: skip
        text = templates.chat(
            tokenizer, TURNS, tools, resume=how == "resume", ends=how == "ends",
            enable_thinking=False,
        )  # fmt: skip
    finally:
        tokenizer.chat_template = original
    assert text == expected


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ENDLESS[1:] else name
     for name in HOSTILE],
)  # fmt: skip
def test_a_hostile_template_raises_an_error_of_one_line(templates: Templates, name: str) -> None:
    before = psutil.Process().memory_info().rss
    if name in HARMLESS:
        assert len(templates.render(HOSTILE[name], {"messages": QUESTION})) <= templates.most_chars
    else:
        with pytest.raises(UsageError) as error:
            templates.render(HOSTILE[name], {"messages": QUESTION})
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300
        assert "/" not in str(error.value)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert templates.render("{{ messages[0].content }}", {"messages": QUESTION}) == "Hello"


def test_a_template_process_is_small_and_limited(templates: Templates) -> None:
    templates.close()  # one that has rendered large texts holds more
    templates.render("x", {})
    assert templates._process is not None
    process = psutil.Process(templates._process.pid)
    assert process.memory_info().rss < 30 << 20
    for most_chars, most in ((templates.most_chars, 200 << 20), (1000, 65 << 20)):
        with closing(Templates(most_chars)) as small_limit:
            small_limit.render("x", {})
            assert small_limit._process is not None
            limit = psutil.Process(small_limit._process.pid).rlimit(psutil.RLIMIT_AS)
            assert limit[0] < most


def test_a_killed_process_is_replaced(templates: Templates) -> None:
    templates.render("x", {})
    assert templates._process is not None
    os.kill(templates._process.pid, signal.SIGKILL)
    templates._process.wait()
    assert templates.render("y", {}) == "y"


def test_memory_of_a_large_text_is_freed(templates: Templates) -> None:
    text = "ä" * 4_000_000
    assert templates.render("{{ x }}{{ '' }}", {"x": text}) == text
    with pytest.raises(UsageError, match="more than 4,194,304 characters"):
        templates.render("{{ x }}{{ x }}", {"x": text})
    templates.render("x", {})
    assert templates._process is not None
    assert psutil.Process(templates._process.pid).memory_info().rss < 40 << 20


def test_many_threads_share_a_process(templates: Templates) -> None:
    results: dict[int, str] = {}

    def render_number(number: int) -> None:
        for _ in range(20):
            results[number] = templates.render("{{ x }}", {"x": number})

    threads = [threading.Thread(target=render_number, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == {number: str(number) for number in range(8)}


def test_the_process_ends_with_its_templates_object() -> None:
    abandoned = Templates()
    abandoned.render("x", {})
    process = abandoned._process
    assert process is not None
    del abandoned
    gc.collect()
    until = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert process.poll() is not None


def test_conversations_that_cannot_be_rendered_are_refused(templates: Templates) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        templates.render("x", {"x": deep})
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        templates.render("x", {"x": {(1, 2): "a key that is no text"}})
    with pytest.raises(UsageError, match="has no messages"):
        templates.chat(demo_tokenizer(), [])
    assert templates.render("{{ x|length }}", {"x": "\ud800"}) == "1"
