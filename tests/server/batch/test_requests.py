"""Which batch files are read, and what is said of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import UsageError
from greenroom.server.batch.requests import digest_of, read_requests
from tests.server.batch.conftest import MODEL, line_of, write

BODY = line_of("a")["body"]


def test_requests_keep_their_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [line_of("a"), line_of("é"), {**line_of("c"), "method": "POST"}]
    path.write_bytes(b"\n".join(json.dumps(each).encode() for each in lines) + b"\n \n")
    requests = read_requests(path, MODEL)
    assert [each.custom_id for each in requests] == ["a", "é", "c"]
    with path.open("rb") as file:
        assert [json.loads(each.read(file)) for each in requests] == [
            each["body"] for each in lines
        ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("\xff", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        (line_of("a", custom_id=""), "custom_id must be a text"),
        (line_of("a", custom_id=3), "custom_id must be a text"),
        (line_of("a", method="GET"), "method must be POST, got 'GET'"),
        (line_of("a", url="/v1/embeddings"), "url must be one of /v1/chat/completions,"),
        (line_of("a", url=None), "got None"),
        (line_of("a", body="x"), "body must be an object"),
        (line_of("a", body=BODY | {"stream": True}), "leave out stream"),
        (line_of("a", body=BODY | {"model": "gpt"}), "'tiny' answers: give --model-name gpt"),
        (line_of("a", body=BODY | {"model": 1}), "model must be a text"),
        (line_of("first"), "line 1 has the same custom_id 'first'"),
    ],
)
def test_the_first_wrong_line_is_named(tmp_path: Path, line: Any, why: str) -> None:
    path = write(tmp_path / "requests.jsonl", [line_of("first")])
    text = line if isinstance(line, str) else json.dumps(line)
    with path.open("ab") as file:
        file.write(text.encode("latin-1") + b"\n")
    with pytest.raises(UsageError, match="line 2") as caught:
        read_requests(path, MODEL)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_request_may_name_an_adapter(tmp_path: Path) -> None:
    lines = [line_of(name, body=BODY | {"model": name}) for name in (MODEL, "math", "law")]
    path = write(tmp_path / "requests.jsonl", lines)
    assert len(read_requests(path, MODEL, ("math", "law"))) == 3
    with pytest.raises(UsageError, match="line 3: the model is 'law', but 'tiny' or 'math'"):
        read_requests(path, MODEL, ("math",))


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no requests"):
        read_requests(write(tmp_path / "none.jsonl", []), MODEL)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_requests(tmp_path / "missing.jsonl", MODEL)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_requests(tmp_path, MODEL)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "requests.jsonl", [line_of("a")])
    (request,) = read_requests(path, MODEL)
    for changed in ([line_of("b")], [], ["x"]):
        write(path, changed)
        with path.open("rb") as file, pytest.raises(UsageError, match="'a' has changed"):
            request.read(file)


def test_an_id_depends_on_path_and_body_alone() -> None:
    first = digest_of(line_of("a"))
    assert first == digest_of(line_of("b", body=dict(reversed(BODY.items()))))
    assert first != digest_of(line_of("a", body=BODY | {"max_tokens": 5}))
    assert first != digest_of(line_of("a", url="/v1/completions"))
    assert digest_of([]) == ""
