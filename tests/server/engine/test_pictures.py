"""Requests with pictures in the engine: answers, batches, prefixes, faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.hf.pictures.decode import EncodedPicture
from greenroom.hf.pictures.tower import VisionTower
from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.engine.journal import Journal, Pass
from tests.models import reference
from tests.pictures import encode, expected_answer, in_base64, picture, picture_checkpoint
from tests.server.rig import AnswerRecorder, Served

NEW = 10  # tokens of each answer
IMAGES = [picture(100, 70), picture(128, 128, 1), picture(300, 200, 2), picture(128, 128, 3)]


def user(*parts: str | int) -> dict[str, Any]:
    """Make a message of texts, and of pictures by their numbers."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    return {"role": "user", "content": content, "pictures": [p for p in parts if p != str(p)]}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user(0, "What is this?")],
    [user("Compare", 1, "with", 2)],
    [{"role": "user", "content": "Only text, and a longer one than the others are."}],
    [user(2, "one"), {"role": "assistant", "content": "yes"}, user("and", 0, "?")],
    [user("Again", 3, 3)],
]


class Asked:
    """An engine over the tiny model that reads pictures."""

    def __init__(self, **options: Any) -> None:
        options = {"capacity": 8, "context": 600, "max_batch": 5, **options}
        self.served = Served(picture_checkpoint(), **options)
        self.engine = self.served.engine
        self._dialogue = Dialogue(self.engine.tokenizer, "qwen3_vl_moe", 600)

    def ask(self, messages: list[dict[str, Any]], new: int = NEW, **request: Any) -> AnswerRecorder:
        """Send a conversation to the engine."""
        images = [IMAGES[number] for each in messages for number in each.get("pictures", ())]
        turns = [{k: v for k, v in each.items() if k != "pictures"} for each in messages]
        ids, pictures = tuple(self._dialogue.chat(turns)), None
        if images:
            assert self.engine.pictures is not None
            sent = [EncodedPicture(in_base64(encode(each))) for each in images]
            ids, pictures = self.engine.pictures.read(ids, sent)
        return self.served.ask(ids, new, pictures=pictures, **request)

    def answer(self, messages: list[dict[str, Any]], **request: Any) -> AnswerRecorder:
        recorder = self.ask(messages, **request)
        finished = recorder.end()
        assert finished.reason == "length", finished.error
        return recorder


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Transformers' greedy answers to the conversations."""
    folder = picture_checkpoint()
    model, answers = reference(folder), []
    for messages in CONVERSATIONS:
        images = [IMAGES[number] for each in messages for number in each.get("pictures", ())]
        turns = [{k: v for k, v in each.items() if k != "pictures"} for each in messages]
        sequences = expected_answer(model, folder, turns, images, NEW).sequences
        answers.append(sequences[0, -NEW:].tolist())
    return answers


@pytest.fixture
def asked(no_threads_left: None) -> Iterator[Any]:
    engines: list[Asked] = []

    def make(**options: Any) -> Asked:
        engines.append(Asked(**options))
        return engines[-1]

    yield make
    for each in engines:
        each.served.close()


def test_answers_are_those_of_transformers(asked: Any, expected: list[list[int]]) -> None:
    one = asked(no_prefix_reuse=True)
    for messages, answer in zip(CONVERSATIONS, expected, strict=True):
        recorder = one.answer(messages)
        assert recorder.ids == answer
        assert recorder.finished.reused_tokens == 0
    assert "pictures in messages, of up to 64 tokens each" in one.engine.summary
    assert len({tuple(each) for each in expected}) == len(expected)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 5}, {"capacity": 100}])
def test_several_at_once_are_answered_as_alone(
    asked: Any, expected: list[list[int]], options: dict[str, Any]
) -> None:
    one = asked(journal=Journal(), no_prefix_reuse=True, **options)
    assert one.engine.batch.sequential_reason == ""
    first = one.ask(CONVERSATIONS[2], 200)
    first.first.wait(60)  # so that all prompts are computed beside an answer, in chunks
    recorders = [one.ask(messages) for messages in CONVERSATIONS]
    for recorder, answer in zip(recorders, expected, strict=True):
        assert recorder.end().reason == "length"
        assert recorder.ids == answer
    first.cancel()
    passes = [each for each in one.engine.journal.events if isinstance(each, Pass)]
    assert max(len(each.shares) for each in passes) > 2


def test_batch_invariant_answers_are_the_same(asked: Any, expected: list[list[int]]) -> None:
    one = asked(batch_invariant=True, prefill_chunk=16)
    recorders = [one.ask(messages) for messages in CONVERSATIONS * 2]
    for recorder, answer in zip(recorders, expected * 2, strict=True):
        assert recorder.end().reason == "length"
        assert recorder.ids == answer


def test_drafts_leave_requests_with_pictures_alone(asked: Any, expected: list[list[int]]) -> None:
    one = asked(speculate="lookup", no_prefix_reuse=True)
    for messages, answer in zip(CONVERSATIONS, expected, strict=True):
        assert one.answer(messages).ids == answer
    recorders = [one.ask(messages) for messages in CONVERSATIONS]
    for recorder, answer in zip(recorders, expected, strict=True):
        recorder.end()
        assert recorder.ids == answer


def test_other_pictures_share_no_prefix(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, encoded = asked(), []
    encode_one = VisionTower.encode
    monkeypatch.setattr(
        VisionTower, "encode", lambda self, each: encoded.append(each) or encode_one(self, each)
    )
    first = one.answer([user("Look at this picture:", 1, "What is in it?")])
    other = one.answer([user("Look at this picture:", 3, "What is in it?")])
    same_ids = first.ticket.request.ids == other.ticket.request.ids
    begin = other.ticket.request.pictures.begins[0]
    assert same_ids
    assert begin - 2 <= other.finished.reused_tokens <= begin
    assert first.ids != other.ids
    assert len(encoded) == 2
    again = one.answer([user("Look at this picture:", 1, "And what is not?")])
    assert again.finished.reused_tokens >= begin + 16
    follow = [
        user("Look at this picture:", 1, "What is in it?"),
        {"role": "assistant", "content": "A cat"},
        user("Sure?"),
    ]
    assert one.answer(follow).finished.reused_tokens >= begin + 16
    assert len(encoded) == 2  # its keys and values were there


def test_pictures_behind_a_reused_prefix_are_read(asked: Any, expected: list[list[int]]) -> None:
    one = asked()
    first = [user(2, "one"), {"role": "assistant", "content": "yes"}, user("and nothing else")]
    one.answer(first)
    recorder = one.answer(CONVERSATIONS[3])
    assert recorder.finished.reused_tokens > recorder.ticket.request.pictures.begins[0] + 40
    assert recorder.ids == expected[3]


def test_prompts_with_pictures_survive_a_restart(
    asked: Any, expected: list[list[int]], tmp_path: Any
) -> None:
    messages = CONVERSATIONS[1]
    first = asked(prompt_cache=str(tmp_path))
    assert first.answer(messages).ids == expected[1]
    first.served.close()
    second = asked(prompt_cache=str(tmp_path))
    other = second.answer([user("Compare", 3, "with", 2)])
    assert other.finished.reused_tokens == 0
    assert other.ids != expected[1]
    recorder = second.answer(messages)
    assert recorder.ids == expected[1]
    assert recorder.finished.reused_tokens >= 64


def test_a_failed_pass_is_repeated_with_its_pictures(asked: Any, expected: list[list[int]]) -> None:
    one = asked(store={"fails": lambda read: read in (3, 90)}, capacity=4)
    for messages, answer in zip(CONVERSATIONS, expected, strict=True):
        assert one.answer(messages).ids == answer
    assert one.engine.stats()["passes"]["faults"] >= 1


def test_a_tower_that_fails_ends_one_request(
    asked: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = asked()
    encode_one = VisionTower.encode

    def encode_some(self: VisionTower, each: Any) -> Any:
        if each.tokens == 16:
            raise RuntimeError("no memory for it")
        return encode_one(self, each)

    monkeypatch.setattr(VisionTower, "encode", encode_some)
    text, lost, other = (one.ask(CONVERSATIONS[i]) for i in (2, 1, 0))
    assert lost.end().reason == "error"
    for recorder, answer in ((text, expected[2]), (other, expected[0])):
        assert recorder.end().reason == "length"
        assert recorder.ids == answer
    assert one.engine.state()[0] == "ready"


def test_a_cancelled_request_frees_its_place(asked: Any, expected: list[list[int]]) -> None:
    one, begun = asked(max_batch=1), threading.Event()
    recorder = AnswerRecorder()
    recorder.on_token = lambda token: begun.set()
    long = one.ask(CONVERSATIONS[1], 300, recorder=recorder)
    assert begun.wait(60)
    long.cancel()
    assert long.end().reason == "cancelled"
    assert one.answer(CONVERSATIONS[0]).ids == expected[0]
    assert one.engine.stats()["kv"]["reserved_bytes"] == 0
