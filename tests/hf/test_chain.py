"""Layers in one region: the bits, the caches and the counts of layers one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.errors import StoreError
from greenroom.runtime.driver import Driver
from greenroom.runtime.kernels import ties
from greenroom.runtime.kernels.chain import Chain
from greenroom.runtime.kernels.decoder import OneLayer
from tests.hf.test_one_token import ids, layers_of, one_by_one, served, tokens

NAME = "mixtral"  # three layers, of which each is known


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Of each region: how many layers it was for, and how many it did."""
    found: list[tuple[int, int | None]] = []
    several = Driver.several

    def seen(driver: Driver, layers: Any, find: Any) -> int | None:
        done = several(driver, layers, find)
        found.append((len(layers), done))
        return done

    monkeypatch.setattr(Driver, "several", seen)
    return found


@pytest.fixture
def unknown_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose choice among equal scores is its own secret."""
    monkeypatch.setattr(ties, "known", lambda number, top_k: False)


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """One whose experts are all in their slots, and which has found out its layers' order."""
    with served(NAME) as model:
        for _ in range(3):
            tokens(model, 12)
        assert chain_of(model)._in_order
        yield model


def chain_of(model: PreTrainedModel) -> Chain:
    forward = layers_of(model)[0].forward
    parts = [cell.cell_contents for cell in forward.__closure__]
    (one,) = (part for part in parts if isinstance(part, OneLayer))
    assert one.chain is not None
    return one.chain[0]


def passed(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """What a layer is given beside a token's hidden states."""
    cos = torch.ones(1, 1, model.config.head_dim).bfloat16()
    return {"position_embeddings": (cos, cos.clone()), "past_key_values": cache}


def make_ties(model: PreTrainedModel) -> None:
    """All experts are liked as one of two: always more than can be chosen."""
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        weight.copy_(weight[:2].repeat(len(weight) // 2, 1))


def lengths(cache: Any) -> list[int]:
    return [cache.get_seq_length(i) for i in range(len(cache.layers))]


def test_every_token_after_the_first_goes_through_in_one_region(model, regions):
    wanted = one_by_one(model)
    assert regions == []
    assert torch.equal(tokens(model), wanted)
    assert regions == 6 * [(3, 3)]


def test_equal_scores_do_not_end_a_region(model, regions):
    make_ties(model)
    wanted = one_by_one(model)
    assert torch.equal(tokens(model), wanted)
    assert regions == 6 * [(3, 3)]


def test_a_missing_expert_is_fetched_and_the_region_entered_again(regions):
    with served(NAME) as model:
        tokens(model, 3)
        model.greenroom.resize(3 * model.greenroom.parts.catalog.slot_bytes)
        model.greenroom.resize(24 * model.greenroom.parts.catalog.slot_bytes)
        wanted = one_by_one(model, count=6)
        model.greenroom.resize(3 * model.greenroom.parts.catalog.slot_bytes)
        model.greenroom.resize(24 * model.greenroom.parts.catalog.slot_bytes)
        regions.clear()
        assert torch.equal(tokens(model), wanted)
    assert any(done is not None and 0 <= done < layers for layers, done in regions)


def test_a_choice_that_is_torch_s_is_made_between_two_regions(unknown_ties, model, regions):
    make_ties(model)
    wanted = one_by_one(model)
    assert torch.equal(tokens(model), wanted)
    assert regions == 6 * [(3, 0), (2, 0), (1, 0)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_does_something_between_its_layers_is_left_alone(when, regions):
    def doubles(layer: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return 2 * out

    with served(NAME) as model:
        if when == "after":
            tokens(model, 4)
            assert chain_of(model)._in_order
        hook = model.model.layers[1].register_forward_hook(doubles)
        regions.clear()
        found = tokens(model)
        assert len(regions) == (when == "after")
        assert chain_of(model)._in_order is False
        assert torch.equal(found, one_by_one(model))
        hook.remove()
        assert torch.equal(tokens(model), one_by_one(model))


def test_whoever_listens_to_a_part_has_the_layers_one_by_one(model, regions):
    wanted, heard = tokens(model), []
    regions.clear()
    hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: heard.append(True))
    assert torch.equal(tokens(model), wanted)
    assert (len(heard), regions) == (7, [])
    hook.remove()
    layer = model.model.layers[2]
    own, layer.forward = layer.forward, lambda *a, **k: type(layer).forward(layer, *a, **k)
    assert torch.equal(tokens(model), wanted)
    assert regions == []
    layer.forward = own
    assert torch.equal(tokens(model), wanted)
    assert regions


def test_who_listens_to_layers_hears_what_each_returns(model, regions):
    heard: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: heard.extend((*args, out)))
    cache = model(ids(1, 7), use_cache=True).past_key_values
    heard.clear()
    model(ids(1, 1), past_key_values=cache)
    assert regions
    assert lengths(cache) == [8, 8, 8]
    together, chain_of(model)._in_order = heard.copy(), False
    cache.crop(-1)
    heard.clear()
    model(ids(1, 1), past_key_values=cache)
    assert len(heard) == len(together) == 6
    assert all(map(torch.equal, heard, together))


def test_a_failure_leaves_no_token_in_the_layers_that_did_not_see_it(
    unknown_ties, model, monkeypatch
):
    make_ties(model)
    cache = model(ids(1, 7), use_cache=True).past_key_values
    wanted, calls = tokens(model), []

    def fails(*args: Any) -> Any:
        calls.append(True)
        raise StoreError("cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(OneLayer, "from_choice", fails)
        with pytest.raises(StoreError):
            model(ids(1, 1), past_key_values=cache)
    assert calls == [True]
    assert lengths(cache) == [7, 7, 7]
    assert torch.equal(tokens(model), wanted)


def test_a_cache_of_which_one_layer_has_no_room_is_left_alone(model, regions, monkeypatch):
    wanted, room = one_by_one(model), OneLayer.room

    def of_the_first_two(one: OneLayer, cache: Any) -> Any:
        return room(one, cache) if one.index < 2 else None

    monkeypatch.setattr(OneLayer, "room", of_the_first_two)
    cache = model(ids(1, 7), use_cache=True).past_key_values
    chain = chain_of(model)
    assert chain(0, torch.zeros(1, 1, 64).bfloat16(), passed(model, cache)) is None
    assert regions == [(3, 0)]
    assert lengths(cache) == [7, 7, 7]
    monkeypatch.undo()
    assert torch.equal(tokens(model), wanted)


def test_no_regions_while_a_timeline_is_kept_or_the_cache_is_small(model, regions):
    wanted = one_by_one(model)
    model.greenroom.timeline()
    assert torch.equal(tokens(model), wanted)
    model.greenroom.timeline(False)
    model.greenroom.resize(4 * model.greenroom.parts.catalog.slot_bytes)
    assert torch.equal(tokens(model), wanted)
    assert {done for _, done in regions} == {None}
