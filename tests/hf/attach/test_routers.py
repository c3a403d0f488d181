"""Routers that prefer experts in the cache, in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import UsageError
from greenroom.hf.load.load import load_with
from greenroom.hf.load.report import startup_line
from tests.hf.check.test_parity import ids
from tests.hf.conftest import one_line
from tests.models import cached_tiny, reference
from tests.options import needs_option

pytestmark = [pytest.mark.usefixtures("no_threads_left"), needs_option("cache_bias")]
FOUR = {"num_experts_per_tok": 4}
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 12, "do_sample": False, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip
MODELS = {
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {},
    "gpt_oss": {},
}


def folder(name: str) -> Any:
    return cached_tiny(name, tokenizer=True, **FOUR, **MODELS[name])


def loaded(name: str, **options: Any) -> Any:
    config = LoadConfig(**{"cache": "34%", "prefetch": "off", "kernels": "eager", **options})
    return load_with(str(folder(name)), config, remember=False)[0]


def routers_of(model: Any) -> list[Any]:
    """The router modules of a model."""
    names = ("gate", "router")
    return [m for name, m in model.named_modules() if name.endswith(names) and hasattr(m, "top_k")]


def chosen_in(model: Any) -> list[torch.Tensor]:
    """Collect what every router call of a model chooses."""
    found: list[torch.Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda module, args, out: found.append(out[2].clone()))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_that_of_the_chosen_experts(name, monkeypatch):
    """transformers' eager model with the same choices gives the same bits."""
    model, prompt = loaded(name, cache_bias=0.5), ids(1, 6)
    choices = chosen_in(model)
    answer = model.generate(prompt, **OPTIONS)
    counts = model.greenroom.stats().approximated
    model.greenroom.detach()
    original, given, rerouted = reference(folder(name)), iter(choices), 0
    for router in routers_of(original):

        def forward(x, router=router, call=router.forward):
            nonlocal rerouted
            scores, weights, index = call(x)
            new, logits = next(given), scores.float()
            changed = (new != index).any(1, keepdim=True)
            each = logits.softmax(-1).gather(1, new)
            if name != "olmoe":
                each = each / each.sum(-1, keepdim=True)
            if len(x) == 1:
                assert {*index[0, :2].tolist()} <= {*new[0].tolist()}
                rerouted += len({*new[0].tolist()} - {*index[0].tolist()})
            else:
                assert torch.equal(new, index)  # prompts are exact
            return scores, torch.where(changed, each.to(weights.dtype), weights), new

        monkeypatch.setattr(router, "forward", forward)
    expected = original.generate(prompt, **OPTIONS)
    assert torch.equal(torch.stack(answer.logits), torch.stack(expected.logits))
    assert rerouted > 0
    assert counts["rerouted"] == rerouted


def test_a_bias_avoids_misses():
    misses = {}
    for bias in (0.0, 0.2, 1.0):
        model = loaded("qwen3_moe", cache_bias=bias)
        model.generate(ids(1, 6), **{**OPTIONS, "max_new_tokens": 40})
        stats = model.greenroom.stats()
        model.greenroom.detach()
        misses[bias] = stats.expert_requests - stats.expert_hits
    assert misses[0.0] > misses[0.2] > misses[1.0]


def test_compiled_kernels_choose_as_eager_ones_do():
    answers = []
    for kernels in ("eager", "auto"):
        model = loaded("qwen3_moe", cache_bias=0.5, kernels=kernels)
        answers.append(model.generate(ids(1, 6), **OPTIONS).sequences)
        model.greenroom.detach()
    assert torch.equal(*answers)


def test_off_leaves_routers_alone_and_exact():
    model = loaded("qwen3_moe", cache_bias=0.0)
    assert not any("forward" in vars(router) for router in routers_of(model))
    answer = model.generate(ids(1, 6), **OPTIONS)
    assert model.greenroom.stats().approximated is None
    model.greenroom.detach()
    expected = reference(folder("qwen3_moe")).generate(ids(1, 6), **OPTIONS)
    assert torch.equal(torch.stack(answer.logits), torch.stack(expected.logits))


def test_where_every_expert_has_a_slot_a_bias_is_off():
    model = loaded("qwen3_moe", cache="100%", cache_bias=0.5)
    assert model.greenroom.setup.approximation is None
    assert not any("forward" in vars(router) for router in routers_of(model))
    model.greenroom.detach()


def test_detaching_restores_the_routers():
    model = loaded("qwen3_moe", cache_bias=0.5)
    assert all("forward" in vars(router) for router in routers_of(model))
    model.greenroom.detach()
    assert not any("forward" in vars(router) for router in routers_of(model))


def test_the_start_up_line_says_that_the_output_changes():
    options: dict[str, Any] = {"cache": "34%", "cache_bias": 0.25}
    config = LoadConfig(**options)
    model, _ = load_with(str(folder("qwen3_moe")), config, remember=False)
    line = startup_line("tiny", model, config, verbose=True)
    model.greenroom.detach()
    assert "routers prefer experts in the cache by 0.25 of the range of scores" in line
    assert "which CHANGES THE OUTPUT" in line
    assert "misses" not in line
    assert line.endswith("--cache-bias 0.25")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepseek_v3", "DeepseekV3TopkRouter of DeepseekV3ForCausalLM does not"),
        ("mixtral", "MixtralForCausalLM uses 2 a token"),
        ("phimoe", "PhimoeTopKRouter of PhimoeForCausalLM does not"),
    ],
)
def test_routers_of_another_kind_are_refused_by_name(name, message):
    with pytest.raises(UsageError) as error:
        greenroom.load(str(cached_tiny(name, tokenizer=True)), cache="50%", cache_bias=0.1)
    assert message in one_line(error)
