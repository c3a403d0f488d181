"""Composition of forward passes: worked examples and properties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from greenroom.server.engine.batches import compose, split

BLOCK = 300


def sequence(pending: int, computed: int = 0, scored: int | None = None) -> Any:
    """`scored` tokens a pass of a prompt whose log-probabilities are wanted."""
    scores = None if scored is None else SimpleNamespace(pass_tokens=scored)
    return SimpleNamespace(pending=pending, computed=computed, scores=scores)


def counts(passes: Any) -> list[list[int]]:
    return [[count for _, count in shares] for shares in passes]


def test_a_pass_has_answers_and_a_chunk_of_prompts() -> None:
    running = [sequence(100), sequence(1, 50), sequence(30), sequence(1, 9)]
    assert counts(compose(running, 64, BLOCK, exact=False)) == [[1, 1, 64]]
    assert counts(compose(running, 110, BLOCK, exact=False)) == [[1, 1, 100, 10]]
    assert counts(compose([sequence(900), sequence(30)], 64, BLOCK, exact=False)) == [[BLOCK]]
    assert counts(compose([sequence(290), sequence(30)], 64, BLOCK, exact=False)) == [[290, 10]]
    assert compose([], 64, BLOCK, exact=False) == []


def test_scored_prompts_share_the_logits_of_a_pass() -> None:
    running = [sequence(100, scored=40), sequence(30), sequence(100, scored=60), sequence(1, 9)]
    assert counts(compose(running, 512, BLOCK, exact=False)) == [[1, 40, 30, 20]]
    assert counts(compose(running[:1] * 3, 512, BLOCK, exact=False)) == [[40]]
    assert counts(compose(running, 50, BLOCK, exact=False)) == [[1, 40, 10]]


def test_exact_chunks_are_those_of_an_unbatched_prompt() -> None:
    running = [sequence(100), sequence(1, 50), sequence(30), sequence(1, 9)]
    assert counts(compose(running, 64, BLOCK, exact=True)) == [[1, 1], [64]]
    assert counts(compose([sequence(36, 64)], 64, BLOCK, exact=True)) == [[36]]
    assert counts(compose([sequence(90, 10)], 64, BLOCK, exact=True)) == [[54]]


@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 300)), min_size=1, max_size=9),
    st.integers(1, 512), st.booleans(),
)  # fmt: skip
def test_every_round_advances_all_answers_and_a_prompt(
    states: list[tuple[int, int]], chunk: int, exact: bool
) -> None:
    running = [sequence(*each) for each in states]
    passes = compose(running, chunk, BLOCK, exact)
    shares = [share for each in passes for share in each]
    assert all(1 <= count <= each.pending for each, count in shares)
    assert len({id(each) for each, _ in shares}) == len(shares)
    served = {id(each) for each, _ in shares}
    answering = [each for each in running if each.pending == 1 and each.computed]
    assert all(id(each) in served for each in answering)
    prompts = [count for each, count in shares if each.pending > 1 or not each.computed]
    assert bool(prompts) == (len(answering) < len(running))
    answers = len(shares) - len(prompts)
    assert sum(prompts) <= (chunk if answers or exact else BLOCK)


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    running = [sequence(1, 5), sequence(1, 0), sequence(1, 7)]
    assert counts(compose(running, 64, BLOCK, exact=False)) == [[1, 1, 1]]
    assert counts(compose(running, 64, BLOCK, exact=True)) == [[1, 1], [1]]


def test_passes_that_cannot_be_batched_are_split() -> None:
    passes = compose([sequence(5), sequence(1, 3), sequence(4)], 64, BLOCK, exact=False)
    assert counts(split(passes, lambda lengths: True)) == [[1, 5, 4]]
    assert counts(split(passes, lambda lengths: len(lengths) == 1)) == [[1], [5], [4]]
