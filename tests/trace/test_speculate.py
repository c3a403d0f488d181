"""Traces whose passes verify drafts have the same text in fewer passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import UsageError
from greenroom.trace import Trace
from greenroom.trace.speculate import speculate
from tests.sim import small


def of(ids: list[int], *requests: list[int]) -> Trace:
    """A random trace of tokens with these ids; requests as in `small.trace`."""
    trace = small.trace(list(requests))
    return replace(trace, token_ids=np.array(ids, np.int32))


def passes_of(trace: Trace) -> list[list[int]]:
    assert trace.token_ids is not None
    return [part.tolist() for part in np.split(trace.token_ids, trace.pass_starts[1:-1])]


def test_right_tokens_share_a_pass_and_wrong_ones_have_their_last_experts() -> None:
    prompt, answer = list(range(1, 13)), [*range(1, 6), 30, 31]
    trace = of([*prompt, *answer], [-12, *[1] * 7])
    drafted = speculate(trace, lambda tokens, experts: 1.0)
    passes = passes_of(drafted)
    assert passes[0] == prompt
    assert passes[1:4] == [[1], [2], [3]]  # the match is too short
    assert passes[4] == list(range(4, 4 + len(passes[4])))
    assert len(passes[4]) > 2  # 6 is wrong: 30 follows
    assert passes[5:] == [[30], [31]]
    assert drafted.new_tokens is not None
    assert drafted.new_tokens.tolist() == [1, 1, 1, 1, 2, 1, 1]
    assert drafted.pass_prefill.tolist() == [True, *[False] * 6]
    start = int(drafted.pass_starts[4])
    assert np.array_equal(drafted.experts[start : start + 2], trace.experts[15:17])
    assert np.array_equal(drafted.experts[start + 2], trace.experts[5])  # of 6 in the prompt


def test_drafts_are_verified_where_they_are_worth_it() -> None:
    trace = of([1, 2, 3] * 40, [1] * 120)
    costly, cheap = (
        speculate(trace, lambda tokens, experts, each=each: 1.0 + each * (tokens - 1))  # type: ignore[misc]
        for each in (2.0, 0.1)
    )
    assert costly.passes > 100  # after a few passes it is known what they cost
    assert cheap.passes < 30


def test_the_number_of_experts_decides_too() -> None:
    trace = of([1, 2, 3] * 8, [1] * 24)
    seen = []

    def seconds(tokens: int, experts: int) -> float:
        seen.append((tokens, experts))
        return 1.0

    speculate(trace, seconds)
    assert all(2 * 2 <= experts <= min(tokens * 2, 8) * 2 for tokens, experts in seen)
    assert any(tokens > 1 for tokens, _ in seen)


def test_a_trace_without_ids_is_refused() -> None:
    with pytest.raises(UsageError, match="which this trace does not have"):
        speculate(small.trace([[1, 1]]), lambda tokens, experts: 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=20)),
             min_size=1, max_size=3),
    st.floats(0, 1),
)  # fmt: skip
def test_the_text_of_every_request_stays(
    requests: list[tuple[int, list[int]]], each: float
) -> None:
    ids, shape = [], []
    for prompt, answer in requests:
        ids += [*range(prompt), *answer]
        shape.append([*([-prompt] if prompt else []), *[1] * len(answer)])
    trace = of(ids, *shape)
    drafted = speculate(trace, lambda tokens, experts: 1.0 + each * tokens)
    assert drafted.new_tokens is not None
    assert drafted.requests == trace.requests
    text: list[int] = []
    for tokens, new, prefill in zip(
        passes_of(drafted), drafted.new_tokens.tolist(), drafted.pass_prefill, strict=True
    ):
        text += tokens if prefill else tokens[:new]
        assert prefill or new <= len(tokens) <= 16
    assert text == ids
    part = drafted.head(max(1, drafted.tokens - 1))
    assert part.new_tokens is not None
    assert len(part.new_tokens) == part.passes
    chosen = drafted.select([drafted.requests - 1])
    assert chosen.new_tokens is not None
    assert len(chosen.new_tokens) == chosen.passes
