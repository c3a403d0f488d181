"""Stop strings, characters and tool calls, token by token."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.hf.text.dialogue import ReplyPart, ToolCall
from greenroom.server.engine.requests import Finished, Token
from greenroom.server.engine.tokens.reader import AnswerReader, StopMatcher

ENDED = Finished("stop", 3, 0, 5, 0.0, 0.1, 0.2, None)
texts = st.text("ab<|>\n", max_size=12)


class Scripted:
    """A decoder whose token i decodes to the i-th part."""

    def __init__(self, *parts: ReplyPart) -> None:
        self._parts = parts

    def feed(self, token_id: int) -> list[ReplyPart]:
        return [self._parts[token_id]]

    def end(self) -> list[ReplyPart]:
        return []


def read(reader: AnswerReader, count: int) -> str:
    shown = ""
    for i in range(count):
        shown += "".join(delta.text for delta in reader.feed(Token(i)))
    deltas, _ = reader.end(ENDED)
    return shown + "".join(delta.text for delta in deltas)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(texts, max_size=8), st.lists(texts.filter(bool), min_size=1, max_size=3))
def test_a_stop_string_is_never_shown_however_text_is_split(
    parts: list[str], stops: list[str]
) -> None:
    matcher, shown, hit = StopMatcher(stops), "", None
    for part in parts:
        text, hit = matcher.feed(part)
        shown += text
        if hit:
            break
    else:
        shown += matcher.flush()
    full_text = "".join(parts)
    ends = [at for stop in stops if (at := full_text.find(stop)) >= 0]
    if hit is None:
        assert not ends
        assert shown == full_text
    else:
        assert not any(stop in shown for stop in stops)
        assert full_text.startswith(shown + hit)


def test_the_first_of_two_stop_strings_wins() -> None:
    assert StopMatcher(["cd", "bc"]).feed("abcd") == ("a", "bc")
    assert StopMatcher(["bc", "bcd"]).feed("abcd") == ("a", "bcd")


def test_text_is_held_back_only_while_it_can_become_a_stop_string() -> None:
    stops = StopMatcher(["END"])
    assert stops.feed("a E") == ("a ", None)
    assert stops.feed("N") == ("", None)
    assert stops.feed("O") == ("ENO", None)
    assert stops.feed("E") == ("", None)
    assert stops.flush() == "E"


def test_an_answer_ends_at_a_stop_string_with_the_tokens_before_it() -> None:
    reader = AnswerReader(
        Scripted(ReplyPart("one "), ReplyPart("tw"), ReplyPart("o STO"), ReplyPart("P more")),
        ["STOP"],
    )
    deltas = [delta for i in range(4) for delta in reader.feed(Token(i))]
    assert "".join(delta.text for delta in deltas) == "one two "
    assert [token.id for delta in deltas for token in delta.tokens] == [0, 1, 2]
    assert reader.stopped
    assert reader.feed(Token(0)) == []
    last_deltas, end = reader.end(Finished("cancelled", 3, 0, 5, 0.0, 0.1, 0.2, None))
    assert last_deltas == []
    assert (end.reason, end.stop) == ("stop", "STOP")


def test_held_back_text_comes_at_the_end() -> None:
    reader = AnswerReader(Scripted(ReplyPart("fine ST")), ["STOP"])
    assert read(reader, 1) == "fine ST"


def test_a_tool_call_sets_the_reason_and_reasoning_is_counted() -> None:
    call = ToolCall("look", "{}")
    reader = AnswerReader(Scripted(ReplyPart(reasoning="hm"), ReplyPart(call=call), ReplyPart("x")))
    deltas = [delta for i in range(3) for delta in reader.feed(Token(i))]
    assert [delta.call for delta in deltas if delta.call] == [call]
    _, end = reader.end(ENDED)
    assert (end.reason, end.reasoning_tokens) == ("tool_calls", 1)


def test_one_call_ends_the_answer_if_only_one_is_allowed() -> None:
    calls = [ReplyPart(call=ToolCall(name, "{}")) for name in "ab"]
    reader = AnswerReader(Scripted(*calls), one_call=True)
    calls_delivered = [
        delta.call for i in range(2) for delta in reader.feed(Token(i)) if delta.call
    ]
    assert [call.name for call in calls_delivered] == ["a"]
    assert reader.stopped


def test_a_cut_answer_with_a_call_has_the_reason_length() -> None:
    reader = AnswerReader(Scripted(ReplyPart(call=ToolCall("a", "{}"))))
    reader.feed(Token(0))
    assert reader.end(Finished("length", 3, 0, 5, 0.0, 0.1, 0.2, None))[1].reason == "length"


def test_an_end_token_is_not_part_of_the_answer() -> None:
    reader = AnswerReader(Scripted(ReplyPart("a"), ReplyPart()), end_ids=(1,))
    deltas = reader.feed(Token(0)) + reader.feed(Token(1)) + reader.end(ENDED)[0]
    assert [token.id for delta in deltas for token in delta.tokens] == [0]
