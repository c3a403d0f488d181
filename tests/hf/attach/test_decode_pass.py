"""One token without the model's own forward: the same bits, or else the model's own forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from greenroom.runtime.kernels.resident.decode_pass import DecodePass, sees_all_tokens
from greenroom.runtime.kernels.resident.fused_layers import FusedLayers
from tests.hf.attach.test_one_token import KNOWN, ids, one_by_one, served, tokens

NAME = "mixtral"  # three layers, of which each is known


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """One whose experts are all in their slots, and whose own forward was compared."""
    with served(NAME) as model:
        for _ in range(3):
            tokens(model, 12)
        yield model


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The results that were computed without the model's own forward."""
    found: list[Any] = []
    compute = DecodePass._compute

    def noted(self: DecodePass, *args: Any) -> Any:
        own, called = self._original, []
        self._original = lambda **kwargs: called.append(True) or own(**kwargs)
        try:
            out = compute(self, *args)
        finally:
            self._original = own
        if not called:
            found.append(out)
        return out

    monkeypatch.setattr(DecodePass, "_compute", noted)
    return found


def decode_pass(model: PreTrainedModel) -> DecodePass:
    found = vars(model.model)["forward"].__self__
    assert isinstance(found, DecodePass)
    return found


def verdicts(model: PreTrainedModel) -> dict[bool, bool]:
    return {mask: each is not None for mask, each in decode_pass(model)._verdicts.items()}


def filled(model: PreTrainedModel, count: int = 7, **options: Any) -> Any:
    return model(ids(1, count), use_cache=True, **options).past_key_values


def test_every_token_after_the_compared_one_is_computed_from_parts(model, computed):
    wanted = one_by_one(model)
    assert computed == []
    assert torch.equal(tokens(model), wanted)
    assert len(computed) == 6
    assert verdicts(model) == {False: True}
    assert type(computed[0]) is type(model.model(ids(1, 3)))


@pytest.mark.parametrize("name", KNOWN)
def test_models_with_other_parts_keep_their_forward(name):
    with served(name) as model:
        for _ in range(3):
            tokens(model, 12)
        changed = "forward" in vars(model.model)
        assert changed == (name == "mixtral")  # others have layers that are not fused
    assert "forward" not in vars(model.model)


def test_answers_of_generate_are_computed_from_parts(model, computed):
    options = {"do_sample": False, "max_new_tokens": 8}
    with served(NAME) as other:
        for layer in other.model.layers:
            del layer.forward
        wanted = other.generate(ids(1, 5), **options)
    for _ in range(2):
        assert torch.equal(model.generate(ids(1, 5), **options), wanted)
    assert len(computed) == 14


def test_masks_and_positions_of_a_plain_token_are_understood(model, computed):
    cache = filled(model)
    given = {"attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    for _ in range(2):
        wanted = model(ids(1, 1), past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        with_mask = model(ids(1, 1), past_key_values=cache, **given).logits
        cache.crop(-1)
        given["position_ids"] = torch.tensor([[7]])
        assert torch.equal(with_mask, wanted)
    assert len(computed) == 3  # the first with a mask was compared
    assert verdicts(model) == {False: True, True: True}


@pytest.mark.parametrize(
    "given",
    [
        {"output_hidden_states": True},
        {"output_router_logits": True},
        {"use_cache": False},
        {"position_ids": torch.tensor([[3]])},
        {"attention_mask": torch.tensor([[0] + 7 * [1]])},
        {"attention_mask": torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)},
    ],
    ids=lambda given: "-".join(given),
)
def test_other_calls_have_the_results_of_the_model_s_own_forward(model, computed, given):
    def results() -> list[Tensor]:
        cache = filled(model)
        out = model(ids(1, 1), past_key_values=cache, **given)
        values = out.values() if isinstance(out, dict) else out
        return [
            t
            for each in values
            if not isinstance(each, DynamicCache)
            for t in (each if isinstance(each, tuple) else (each,))
        ]

    found = results()
    assert computed == []
    own = vars(model.model).pop("forward")
    wanted = results()
    model.model.forward = own
    assert len(found) == len(wanted) > 0
    assert all(map(torch.equal, found, wanted))


def test_hidden_states_in_place_of_ids_take_the_model_s_own_way(model, computed):
    cache = filled(model)
    wanted = model(ids(1, 1), past_key_values=cache).logits
    cache.crop(-1)
    computed.clear()
    x = model.model.embed_tokens(ids(1, 1))
    assert torch.equal(model(inputs_embeds=x, past_key_values=cache).logits, wanted)
    assert computed == []


@pytest.mark.parametrize("part", ["embed_tokens", "norm", "rotary_emb", "layers.1"])
def test_a_hook_on_a_part_is_called(model, computed, part):
    heard: list[Any] = []
    wanted = tokens(model)
    computed.clear()
    hook = model.model.get_submodule(part).register_forward_hook(lambda *_: heard.append(True))
    assert torch.equal(tokens(model), wanted)
    assert (len(heard), computed) == (7, [])
    hook.remove()
    assert torch.equal(tokens(model), wanted)
    assert len(computed) == 6


def test_a_part_in_the_place_of_another_is_used(model, computed):
    class Doubled(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.norm(x)

    wanted, norm = tokens(model, 1), model.model.norm
    computed.clear()
    model.model.norm = Doubled(norm)
    assert torch.equal(tokens(model, 1), 2 * wanted)
    assert computed == []
    model.model.norm = norm
    assert torch.equal(tokens(model, 1), wanted)
    assert len(computed) == 1


def test_settings_that_change_are_followed(model, computed):
    cache = filled(model)
    model.config.output_hidden_states = True
    out = model(ids(1, 1), past_key_values=cache)
    assert (len(out.hidden_states), computed) == (4, [])


@pytest.mark.parametrize("doubled", ["input", "output", "result"])
def test_a_forward_that_does_something_else_stays(monkeypatch, computed, doubled):
    own = type_of_model().forward

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        if doubled == "input":
            del kwargs["inputs_embeds"]
            return own(self, inputs_embeds=2 * self.embed_tokens(input_ids), **kwargs)
        out = own(self, input_ids, **kwargs)
        if doubled == "output":
            out.last_hidden_state = 2 * out.last_hidden_state
        else:
            out["extra"] = out.last_hidden_state
        return out

    monkeypatch.setattr(type_of_model(), "forward", forward)
    with served(NAME) as model:
        wanted = one_by_one(model)
        for _ in range(3):
            assert torch.equal(tokens(model), wanted)
        assert verdicts(model) == {False: False}
    assert computed == []


def test_a_forward_that_gives_its_layers_another_tensor_stays(monkeypatch, computed):
    own = type_of_model().forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs, output_numbers=torch.zeros(1))

    monkeypatch.setattr(type_of_model(), "forward", forward)
    with served(NAME) as model:
        for _ in range(3):
            tokens(model)
        assert verdicts(model) == {False: False}
    assert computed == []


def type_of_model() -> Any:
    from transformers import MixtralModel

    return MixtralModel


@pytest.mark.parametrize(
    ("settings", "all_tokens"),
    [
        ({}, True),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 3}, True),
        ({"sliding_window": 64}, False),
        ({"attention_chunk_size": 64}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_layers_that_see_some_tokens_are_known_by_the_settings(settings, all_tokens):
    assert sees_all_tokens(SimpleNamespace(**settings)) == all_tokens


def test_an_expert_that_is_missing_is_fetched_on_the_way(computed):
    with served(NAME) as model:
        for _ in range(3):
            tokens(model)
        wanted = one_by_one(model)
        slot = model.greenroom.setup.catalog.slot_bytes
        for _ in range(2):
            model.greenroom.resize(3 * slot)
            model.greenroom.resize(24 * slot)
            computed.clear()
            assert torch.equal(tokens(model), wanted)
        assert computed


def test_a_timeline_has_the_model_s_own_forward(model, computed):
    wanted = one_by_one(model)
    model.greenroom.timeline()
    assert torch.equal(tokens(model), wanted)
    assert computed == []


def test_a_failure_leaves_the_kv_cache_as_it_was(model, monkeypatch):
    wanted, cache = tokens(model), filled(model)
    with monkeypatch.context() as patch:
        patch.setattr(FusedLayers, "compute", raises)
        with pytest.raises(RuntimeError, match="no more"):
            model(ids(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 7
    with pytest.raises(IndexError):
        model(torch.tensor([[10**6]]), past_key_values=cache)
    assert cache.get_seq_length() == 7
    assert torch.equal(tokens(model), wanted)


def raises(*args: Any) -> Any:
    raise RuntimeError("no more")


def test_a_compared_token_keeps_no_kv_cache():
    with served(NAME) as model:
        for _ in range(2):
            tokens(model)
        cache = filled(model)
        model(ids(1, 1), past_key_values=cache, attention_mask=torch.ones(1, 8))
        assert verdicts(model)[True]
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        assert gone() is None
