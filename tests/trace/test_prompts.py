from __future__ import annotations

import json

import pytest

from greenroom.errors import UsageError
from greenroom.trace.prompts import Prompt, read_prompts

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def test_text_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "tales.txt"
    path.write_text("Once upon a time\n\n  The end. \n")
    assert read_prompts(path) == [Prompt("Once upon a time", "tales"), Prompt("The end.", "tales")]


@pytest.mark.parametrize("name", ["p.jsonl", "p"])
def test_json_lines_have_prompts_chats_and_labels(tmp_path, name):
    lines = [{"prompt": "One\ntwo", "label": "maths"}, {"messages": CHAT, "id": 7}]
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_prompts(path) == [Prompt("One\ntwo", "maths"), Prompt(CHAT, "p")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the prompt file has no prompts"),
        (b"\n \n", "the prompt file has no prompts"),
        (b"\xff\xfe", "not valid UTF-8"),
        (b'{"prompt": "a"}\nnonsense', "line 2: this line is not a JSON object"),
        (b'{"prompt": "a"}\n[1]', "line 2: this line is not a JSON object"),
        (b'{"prompt": " "}', 'line 1: this line needs a "prompt" that is text'),
        (b'{"prompt": 3}', "this line needs"),
        (b'{"text": "a"}', "this line needs"),
        (b'{"messages": []}', "this line needs"),
        (b'{"messages": [{"role": "user"}]}', "this line needs"),
        (b'{"messages": ["a"]}', "this line needs"),
    ],
)
def test_prompts_that_are_none(tmp_path, content, words):
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_prompts(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_no_file_of_prompts(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "p.txt")
