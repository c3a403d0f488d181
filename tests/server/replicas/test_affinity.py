"""The replica that holds a conversation is chosen, unless it has no place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from greenroom.server.replicas import affinity as module
from greenroom.server.replicas.affinity import PIECE, Affinity, Prefix, prefix_of

REPLICAS = ("a", "b", "c")


def chat(*texts: str, system: str = "Be kind.", model: str = "demo") -> Prefix:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    head = [{"role": "system", "content": system}] if system else []
    return prefix_of(json.dumps({"model": model, "messages": [*head, *messages]}).encode())


def test_a_later_turn_goes_to_the_replica_of_the_first() -> None:
    affinity = Affinity(places=2)
    affinity.begin("b", "1", chat("Hello"))
    affinity.end("b", "1")
    affinity.begin("b", "2", chat("Something else"))
    assert affinity.order(REPLICAS, chat("Hello", "Hi!" * 999, "And then?"))[0] == "b"


def test_a_new_conversation_goes_to_the_replica_with_the_fewest_requests() -> None:
    affinity = Affinity(places=8)
    affinity.begin("a", "1", chat("one"))
    affinity.begin("b", "2", chat("two"))
    assert affinity.order(REPLICAS, chat("three"))[0] == "c"  # the instructions alone are the same
    affinity.begin("c", "3", chat("three"))
    assert affinity.order(REPLICAS, chat("four"))[0] == "a"  # longest without a request
    affinity.end("b", "2")
    assert affinity.order(REPLICAS, chat("four"))[0] == "b"


def test_a_conversation_belongs_to_the_variant_that_answered_it() -> None:
    affinity = Affinity(places=8)
    for replica, model in (("a", "demo"), ("b", "math")):
        affinity.begin(replica, replica, chat("Hello", model=model))
        affinity.end(replica, replica)
    turn = "Hello", "Hi!", "And then?"
    assert affinity.order(REPLICAS, chat(*turn, model="demo"))[0] == "a"
    assert affinity.order(REPLICAS, chat(*turn, model="math"))[0] == "b"
    assert affinity.order(REPLICAS, chat(*turn, model="law"))[0] == "c"


def test_a_replica_without_a_free_place_is_left_alone() -> None:
    affinity = Affinity(places=2)
    for request in "12":
        affinity.begin("a", request, chat("Hello"))
    affinity.begin("b", "3", chat("Something else"))
    turn = chat("Hello", "Hi", "Again")
    assert affinity.order(REPLICAS, turn) == ["c", "b", "a"]
    affinity.end("a", "1")
    assert affinity.order(REPLICAS, turn)[0] == "a"
    assert affinity.order(REPLICAS, turn, failed=["a"]) == ["c", "b", "a"]


def test_a_page_that_watches_takes_no_place() -> None:
    affinity = Affinity(places=1)
    affinity.begin("a", "1", chat("Hello"))
    affinity.end("a", "1")
    affinity.begin("a", "page", Prefix())
    assert affinity.order(REPLICAS, chat("Hello", "Hi", "Again"))[0] == "a"
    affinity.end("a", "page")


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    affinity = Affinity(places=2)
    affinity.begin("a", "1", chat("Hello"))
    assert affinity.order(["b"], chat("Hello")) == ["b"]


def test_the_oldest_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 3)
    affinity = Affinity(places=9)
    for number in range(4):
        affinity.begin("a", str(number), chat(str(number), system=""))
    assert affinity.order(("b", "a"), chat("3", system=""))[0] == "a"
    assert affinity.order(("b", "a"), chat("0", system=""))[0] == "b"


@pytest.mark.parametrize(
    ("body", "pieces", "instructions"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, 1, 0),
        ({"system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}]}, 2, 1),
        ({"tools": [{}], "messages": [{"role": "system"}, {"role": "user"}]}, 3, 2),
        ({"instructions": "x" * 3 * PIECE, "input": "Hi"}, 5, 4),
        ({"input": [{"role": "user", "content": "Hi"}, {"type": "reasoning"}]}, 2, 0),
        ({"prompt": "x" * PIECE}, 2, 0),
        ({"prompt": [1, 2, 3]}, 1, 0),
        ({"prompt": ["a", "b"]}, 1, 0),
        ([], 0, 0),
        ("text", 0, 0),
    ],
)
def test_beginnings_of_every_api(body: Any, pieces: int, instructions: int) -> None:
    found = prefix_of(json.dumps(body).encode())
    assert (len(found.digests), found.instructions) == (pieces, instructions)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_has_no_beginnings(body: bytes) -> None:
    assert prefix_of(body) == Prefix()


def test_long_messages_with_the_same_beginning_share_it() -> None:
    document = "word " * 600
    one, two = (chat(f"{document} {question}", system="") for question in ("Why?", "When?"))
    assert one.digests[:2] == two.digests[:2]
    assert one.digests[-1] != two.digests[-1]
