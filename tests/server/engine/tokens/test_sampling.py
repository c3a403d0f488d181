"""Each sampling setting, against worked figures and transformers' processors."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from greenroom.errors import ModelError, UsageError
from greenroom.server.engine.requests import NotFinite, Request, Sampling
from greenroom.server.engine.tokens.sampling import Sampler, Settings, _cut

GREEDY_CONFIG = SimpleNamespace(do_sample=False)
LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])


def sampler(
    ids: tuple[int, ...] = (0,),
    config: Any = GREEDY_CONFIG,
    top: int | None = None,
    **sampling: Any,
) -> Sampler:
    return Sampler(Request(ids, 8, Sampling(**sampling), top_logprobs=top), config, 5)


def test_temperature_0_takes_the_likeliest_token() -> None:
    assert [sampler(temperature=0.0)(LOGITS).id for _ in range(3)] == [1, 1, 1]


def test_the_models_settings_are_the_defaults() -> None:
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, min_p=None,
                          repetition_penalty=1.1)  # fmt: skip
    assert Settings.of(Sampling(), config) == Settings(0.6, 0.9, 20, 0.0, 1.1)
    assert Settings.of(Sampling(temperature=0.0, top_k=3), config).temperature == 0
    assert Settings.of(Sampling(top_p=1.0, repetition_penalty=1.2), config).top_p == 1
    assert Settings.of(Sampling(), GREEDY_CONFIG) == Settings(0.0, 1.0, 0, 0.0, 1.0)


def test_penalties_and_bias_match_worked_figures() -> None:
    penalised = sampler(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4)
    # 2.0 is taken; then 2.0 - 0.7 - 0.4 = 0.9 is below 1.5; then 1.5 - 1.1 = 0.4: 1.0 is next;
    # then 0.9 against -0.1, 0.4, 0.0; then 2.0 - 0.7 - 0.8 = 0.5 against 0.4
    assert [penalised(LOGITS).id for _ in range(6)] == [1, 4, 2, 1, 1, 4]
    biased = sampler(temperature=0.0, logit_bias=((3, 4.0), (1, -0.1)))
    assert biased(LOGITS).id == 3
    assert LOGITS.tolist() == [0.0, 2.0, 1.0, -1.0, 1.5]  # as they were
    twice = sampler(temperature=0.0, logit_bias=((3, 2.0), (3, 2.0)))
    assert twice(LOGITS).id == 3


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    ids = (1, 3)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), LOGITS[None].clone())[0]
    assert torch.equal(sampler(ids, repetition_penalty=1.7)._changed(LOGITS), expected)


def test_log_probabilities_are_those_of_unchanged_logits() -> None:
    token = sampler(temperature=0.0, logit_bias=((3, 9.0),), top=2)(LOGITS)
    expected = LOGITS.log_softmax(-1)
    assert token.id == 3
    assert token.logprob == pytest.approx(float(expected[3]))
    assert [each for each, _ in token.top] == [1, 4]
    assert token.top[0][1] == pytest.approx(float(expected[1]))
    assert sampler(temperature=0.0, top=0)(LOGITS).top == ()
    assert sampler(temperature=0.0)(LOGITS).logprob is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.sampled_from([0, 1, 3, 8, 50]), st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.6]), st.integers(0, 1 << 30),
)  # fmt: skip
def test_truncation_is_that_of_transformers(
    size: int, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    left = logits[None].clone()
    if top_k:
        left = TopKLogitsWarper(min(top_k, size))(None, left)
    if top_p < 1:
        left = TopPLogitsWarper(top_p)(None, left)
    if min_p:
        left = MinPLogitsWarper(min_p)(None, left)
    values, ids = _cut(logits, Settings(1.0, top_p, top_k, min_p, 1.0))
    expected = set(torch.isfinite(left[0]).nonzero().flatten().tolist())
    assert set(ids.tolist()) == expected
    assert torch.equal(values, logits[ids])


def test_top_p_may_need_more_tokens_than_are_sorted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.server.engine.tokens.sampling.LIKELIEST", 4)
    logits = torch.zeros(20)
    _, ids = _cut(logits, Settings(1.0, 0.52, 0, 0.0, 1.0))
    assert len(ids) == 11
    logits[3] = 20.0
    assert _cut(logits, Settings(1.0, 0.5, 0, 0.0, 1.0))[1].tolist() == [3]


def test_tokens_are_drawn_by_their_probabilities() -> None:
    draw = sampler(temperature=2.0, seed=7)
    counts = Counter(draw(LOGITS).id for _ in range(4000))
    for token, chance in enumerate((LOGITS / 2).softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(chance, abs=4 * math.sqrt(chance / 4000))


def test_a_seed_determines_the_tokens() -> None:
    def draw_tokens(**options: Any) -> list[int]:
        draw = sampler(temperature=1.5, **options)
        return [draw(LOGITS).id for _ in range(30)]

    assert draw_tokens(seed=3) == draw_tokens(seed=3)
    assert draw_tokens(seed=3) != draw_tokens(seed=4)
    assert draw_tokens() != draw_tokens()
    assert draw_tokens(seed=-5) == draw_tokens(seed=-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature must be from 0 to 100, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be from 0 to 100, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "top_k must be from 0"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"seed": 1 << 63}, "seed must be from"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be from -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.01"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty must be from 0.01"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias must be from -100 to 100"),
        ({"logit_bias": ((5, 1.0),)}, "logit_bias: the model has no token 5: ids must be"),
        ({"top": 6}, "top_logprobs must be from 0 to 5, got 6"),
    ],
)  # fmt: skip
def test_invalid_settings_are_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampler(**wrong)


def test_infinite_logits_are_an_error() -> None:
    for odd in (float("nan"), float("inf")):
        for temperature in (0.0, 1.0):
            with pytest.raises(ModelError, match=r"logits is (NaN|.inf)"):
                sampler(temperature=temperature)(torch.tensor([0.0, odd, 1.0, 1.0, 1.0]))


EXTREME = [5e-324, 1e-45, 3e-38, 1e-10, 1e-5, 1e-2, 0.5, 1.0]
ANY: dict[str, Any] = {
    "temperature": st.sampled_from([0.0, *EXTREME, 2.0, 100.0]) | st.floats(0, 100),
    "top_p": st.sampled_from(EXTREME) | st.floats(0, 1, exclude_min=True),
    "top_k": st.sampled_from([0, 1, 2, 1 << 31]),
    "min_p": st.sampled_from([0.0, *EXTREME]) | st.floats(0, 1),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100))).map(tuple),
}
LOGIT = st.sampled_from([-math.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, 1e4]) | st.floats(-50, 50)


@given(
    chosen=st.fixed_dictionaries({}, optional=ANY),
    logits=st.lists(st.lists(LOGIT, min_size=5, max_size=5), min_size=1, max_size=3),
    allowed=st.lists(st.booleans(), min_size=5, max_size=5) | st.none(),
    top=st.none() | st.integers(0, 5),
)
def test_accepted_settings_give_a_token_or_a_known_error(
    chosen: dict[str, Any], logits: Any, allowed: Any, top: int | None
) -> None:
    token_sampler = sampler((1, 2), top=top, **chosen)
    token_sampler._grammar = Allowing(allowed) if allowed is not None else None
    for row in map(torch.tensor, logits):
        may_come = row > -torch.inf
        if allowed is not None:
            may_come &= torch.tensor(allowed)
        try:
            token = token_sampler(row)
        except (NotFinite, UsageError):
            overflows = chosen.get("repetition_penalty", 1.0) != 1.0 and row.abs().max() > 1e36
            assert not may_come.any() or overflows
            return
        assert may_come[token.id]
        if top is not None:
            assert not math.isnan(token.logprob)
            assert not any(math.isnan(logprob) for _, logprob in token.top)


class Allowing:
    """A grammar that lets the same tokens come at every step."""

    over = False

    def __init__(self, allowed: list[bool]) -> None:
        self._allowed = allowed

    def allowed(self, count: int) -> torch.Tensor:
        if not any(self._allowed):
            raise UsageError("grammar: no token can follow")
        return torch.tensor(self._allowed)

    def take(self, token: int) -> None:
        pass


@pytest.mark.parametrize("temperature", [5e-324, 3e-38, 1e-45, 9e-6])
def test_the_smallest_temperatures_take_the_likeliest(temperature: float) -> None:
    assert {sampler(temperature=temperature, seed=seed)(LOGITS).id for seed in range(20)} == {1}


def test_small_temperatures_are_bounded() -> None:
    token_sampler = sampler(temperature=1e-4, seed=0)
    assert token_sampler._settings.temperature == 0.01
