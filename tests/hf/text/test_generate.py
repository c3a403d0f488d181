from __future__ import annotations

import pytest

import greenroom
from greenroom.config import SamplingConfig
from greenroom.errors import UsageError
from greenroom.hf.text.generate import answer, encode
from tests.models import cached_tiny

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def ready():
    model, tokenizer = greenroom.load(str(cached_tiny("qwen3_moe", tokenizer=True)), cache="50%")
    yield model, tokenizer
    model.greenroom.detach()


def test_an_answer_has_its_tokens_and_times(ready):
    pieces: list[str] = []
    sampling = SamplingConfig(max_new_tokens=9, temperature=0)
    result = answer(*ready, "The green", sampling, context=256, on_text=pieces.append)
    assert result.new_tokens == 9 == len(result.gaps) + 1
    assert "".join(pieces) == result.text
    assert result.ttft_s > 0
    assert result.tpot_s <= result.tpot_p95_s
    assert result.tokens_per_s > 0
    assert not result.cut_short


def test_a_seed_repeats_a_sample(ready):
    def sample(seed):
        sampling = SamplingConfig(max_new_tokens=12, temperature=1.5, top_p=0.95, seed=seed)
        return answer(*ready, "The", sampling, context=256).token_ids

    assert sample(1) == sample(1) != sample(2)


def test_top_k_of_one_is_greedy(ready):
    greedy = answer(*ready, "The", SamplingConfig(8, temperature=0), context=256)
    top = answer(*ready, "The", SamplingConfig(8, top_k=1), context=256)
    assert greedy.token_ids == top.token_ids


def test_an_answer_ends_with_the_context(ready):
    length = encode(ready[1], "The green").shape[1]
    sampling = SamplingConfig(max_new_tokens=50, temperature=0)
    result = answer(*ready, "The green", sampling, context=length + 3)
    assert (result.new_tokens, result.cut_short) == (3, True)
    with pytest.raises(UsageError, match="no room for an answer in --context 2: raise --context"):
        answer(*ready, "The green", sampling, context=2)


def test_the_chat_template_is_applied_unless_raw(ready):
    _, tokenizer = ready
    tokenizer.chat_template = TEMPLATE
    try:
        assert tokenizer.decode(encode(tokenizer, "hello")[0]) == "[user] hello[assistant]"
        assert tokenizer.decode(encode(tokenizer, "hello", raw=True)[0]) == "hello"
    finally:
        tokenizer.chat_template = None


def test_an_empty_prompt_is_refused(ready):
    with pytest.raises(UsageError, match="the prompt is empty"):
        encode(ready[1], "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"temperature": -1}, "--temperature"),
        ({"top_p": 0}, "--top-p"),
        ({"top_k": 0}, "--top-k"),
        ({"temperature": 0, "top_p": 0.5}, "leave out --top-p"),
    ],
)
def test_sampling_options_are_checked(options, message):
    with pytest.raises(UsageError, match=message):
        SamplingConfig(**options)
