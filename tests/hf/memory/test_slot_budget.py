"""Slots and keys and values within one budget."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import greenroom
from greenroom.errors import BudgetError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.sizes import kv_bytes
from greenroom.hf.memory import slot_budget as module
from greenroom.hf.memory.budget import ROWS_EXPANDED, SLACK, MemoryNeeds, Workspace
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.cuda.engine import Engine
from tests.gguf_architectures import FOLDER
from tests.gguf_models import write
from tests.models import cached_tiny, reference

CONTEXT, FEWEST = 600, 4
NOTHING = MemoryNeeds(0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def folder():
    return cached_tiny("qwen3_moe", tokenizer=True, max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 32)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(5))


def slot_budget_of(skeleton: ModelSkeleton, kind: str = "dynamic", **options: Any) -> SlotBudget:
    """A slot budget that leaves FEWEST slots with a full context, without activations."""
    sizes = kv_bytes(skeleton.model, kind, block=512, room=CONTEXT, on_a_gpu=bool(options))
    return SlotBudget(
        1 << 40, NOTHING, skeleton.catalog, sizes, Workspace(0, 0, 0, 0),
        context=CONTEXT, block=512, min_slots=1, **options,
    ).for_slots(FEWEST)  # fmt: skip


class Watched:
    """A model whose passes note (slots, bytes of them, bytes of keys and values)."""

    def __init__(self, model: Any, slot_budget: SlotBudget) -> None:
        self.model, self.slot_budget, self.passes = model, slot_budget, []
        self.greenroom = model.greenroom
        self.greenroom.use_slot_budget(slot_budget)
        self.resizes: list[int] = []
        resize = self.greenroom.driver.resize
        self.greenroom.driver.resize = lambda n: (self.resizes.append(n), resize(n))
        model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, kwargs: Any, out: Any) -> None:
        slots = self.greenroom.driver.slots
        segments = getattr(slots, "_segments", None)
        nbytes = slots.capacity * slots.stride if segments is None else sum(map(len, segments))
        cache_bytes = sum(
            kv.held_bytes(cache) for cache in {out.past_key_values, *self.slot_budget._caches}
        )
        self.passes.append((slots.capacity, nbytes, cache_bytes))

    def inside(self) -> bool:
        room = self.slot_budget.budget - SLACK
        return all(nbytes + cache_bytes <= room for _, nbytes, cache_bytes in self.passes)


@pytest.fixture
def watched(folder):
    model, _ = greenroom.load(str(folder), cache="100%", kernels="eager", context=CONTEXT)
    yield Watched(model, slot_budget_of(ModelSkeleton.of(folder)))
    model.greenroom.detach()


def test_slots_make_room_for_a_conversation_and_come_back_after(watched, folder):
    model, options = watched.model, {"max_new_tokens": 34, "do_sample": False}
    options |= {"min_new_tokens": 34}
    expected = reference(folder).generate(ids(1, 560), **options)
    experts = watched.greenroom.setup.catalog.experts
    model.generate(ids(1, 5), max_new_tokens=2)
    assert watched.greenroom.capacity == experts
    watched.passes.clear()
    watched.resizes.clear()
    assert torch.equal(model.generate(ids(1, 560), **options), expected)
    slots = [capacity for capacity, _, _ in watched.passes]
    assert slots == sorted(slots, reverse=True)
    assert slots[-1] == FEWEST
    assert watched.inside()
    assert len(watched.resizes) <= 34 // module.BLOCK + 2
    stats = watched.greenroom.stats()
    assert (stats.capacity_least, stats.capacity_most) == (FEWEST, experts)
    model.generate(ids(1, 5), max_new_tokens=2)
    assert watched.greenroom.capacity == experts
    watched.greenroom.reset_stats()
    stats = watched.greenroom.stats()
    assert (stats.capacity_least, stats.capacity_most) == (experts, experts)


def test_room_for_the_next_tokens_is_not_computed_again(watched, monkeypatch):
    settled = []
    settle = watched.slot_budget._resize_slots
    monkeypatch.setattr(
        watched.slot_budget, "_resize_slots", lambda *args: (settled.append(1), settle(*args))
    )
    watched.model.generate(ids(1, 40), max_new_tokens=65, min_new_tokens=65, do_sample=False)
    assert len(settled) == 4  # the prompt, the first token, and where 64 and 96 tokens are passed


@pytest.mark.parametrize(("kernels", "in_place"), [("native", True), ("eager", False)])
def test_quantised_keys_are_decoded_for_a_prompt_only_if_tokens_read_them(kernels, in_place):
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", head_dim=32)
    model, _ = greenroom.load(
        str(folder), cache="100%", kernels=kernels, context=CONTEXT, kv="int8"
    )
    try:
        watched = Watched(model, slot_budget_of(ModelSkeleton.of(folder), "int8"))
        with torch.no_grad():
            cache = model(ids(1, CONTEXT - 2)).past_key_values
            model(ids(1, 1), past_key_values=cache)
        (prompt, _, _), (token, _, _) = watched.passes
        assert (token > prompt) == in_place
        assert watched.inside()
    finally:
        model.greenroom.detach()


def test_all_live_conversations_are_counted(watched):
    model = watched.model
    with torch.no_grad():
        first = model(ids(1, 500)).past_key_values
        assert watched.greenroom.capacity < 16
        with pytest.raises(BudgetError, match=r"\d KiB for the KV cache.*; give --memory \d+MiB"):
            model(ids(1, 500))
        second = model(ids(1, 32)).past_key_values
        model(ids(1, 1), past_key_values=first)
        model(ids(1, 1), past_key_values=second)
        assert watched.inside()
        del first, second
        model(ids(1, 5))
    assert watched.greenroom.capacity == watched.greenroom.setup.catalog.experts
    assert watched.inside()


def test_sequences_of_a_batch_count_each(watched):
    with torch.no_grad():
        watched.model(ids(2, 100))
        some = watched.greenroom.capacity
        with pytest.raises(BudgetError):
            watched.model(ids(5, 100))
        watched.model(ids(1, 40))
    assert some < watched.greenroom.capacity
    assert watched.inside()


def test_a_context_that_does_not_fit_ends_that_answer_alone(watched):
    with pytest.raises(BudgetError, match="more than the budget of") as caught:
        watched.model.generate(ids(1, 690), max_new_tokens=2)
    assert "\n" not in str(caught.value)
    watched.model.generate(ids(1, 20), max_new_tokens=2)
    assert watched.inside()


def test_a_requested_cache_size_does_not_change(watched):
    assert watched.greenroom.resize("50%") == 8
    watched.model.generate(ids(1, 580), max_new_tokens=2)
    assert watched.greenroom.capacity == 8


def test_a_budget_that_cannot_hold_the_context_is_refused(folder):
    skeleton = ModelSkeleton.of(folder)
    sizes = kv_bytes(skeleton.model, block=512, room=CONTEXT)
    with pytest.raises(BudgetError, match="more than the budget of"):
        SlotBudget(
            SLACK + sizes.total_bytes(CONTEXT), NOTHING, skeleton.catalog, sizes,
            Workspace(0, 0, 0, 0), context=CONTEXT, block=512, min_slots=1,
        )  # fmt: skip


def test_gpu_memory_is_freed_in_whole_segments(folder, monkeypatch):
    """The CPU stands in the GPU's place."""
    skeleton, released = ModelSkeleton.of(folder), []
    slot = skeleton.catalog.slot_bytes
    monkeypatch.setattr("greenroom.runtime.cuda.slots.SEGMENT_BYTES", 3 * slot)
    monkeypatch.setattr("greenroom.hf.memory.devices.engine_for", lambda parts, number=0: Engine())
    monkeypatch.setattr(kv, "BLOCK", 32)
    monkeypatch.setattr("greenroom.hf.kv.sizes.BLOCK", 32)
    monkeypatch.setattr("greenroom.hf.kv.sizes.FREED", 0)
    monkeypatch.setattr(kv, "FREED", 0)
    model: Any = skeleton.load()
    parts = ModelSetup(skeleton.catalog, 1, cuda=True, kernels="eager", context=CONTEXT)
    model.greenroom = Greenroom(model, parts)
    try:
        watched = Watched(model, slot_budget_of(skeleton, release=lambda: released.append(1)))
        options = {"max_new_tokens": 34, "min_new_tokens": 34, "do_sample": False}
        expected = reference(folder).generate(ids(1, 530), **options)
        assert torch.equal(model.generate(ids(1, 530), **options), expected)
        assert watched.inside()
        assert watched.passes[-1][0] <= FEWEST < watched.passes[0][0]
        first, *fewer = watched.resizes
        assert [first, *fewer] == sorted(watched.resizes, reverse=True)
        assert fewer
        assert all((number - 1) % 3 == 0 for number in fewer)  # the first segment has one slot
        assert len(released) > len(watched.resizes)  # with what keys and values outgrew
        model.generate(ids(1, 5), max_new_tokens=2)
        assert watched.greenroom.capacity == skeleton.catalog.experts
    finally:
        model.greenroom.detach()


def test_a_budget_of_the_process_grows_and_a_cache_of_a_size_does_not(folder):
    model, _ = greenroom.load(str(folder), memory="3GiB", kernels="eager")
    assert model.greenroom.slot_budget.full_context_slots == model.greenroom.capacity == 16
    model.generate(ids(1, 20), max_new_tokens=2)
    model.greenroom.detach()
    model, _ = greenroom.load(str(folder), cache="50%", kernels="eager")
    assert model.greenroom.slot_budget is None
    model.greenroom.detach()


def caches(count: int) -> list[Any]:
    return [DynamicCache() for _ in range(count)]


def test_all_sequences_of_a_batch_are_counted(watched):
    from greenroom.hf.kv.batch import Batch

    batch, own_caches = Batch(watched.model), caches(3)
    prompts = [ids(1, n)[0].tolist() for n in (200, 60, 31)]
    with torch.inference_mode():
        batch(prompts, own_caches)
        some = watched.greenroom.capacity
        assert some < watched.greenroom.setup.catalog.experts
        watched.resizes.clear()
        for _ in range(32):
            batch([[5]] * 3, own_caches)
        assert watched.inside()
        assert 1 <= len(watched.resizes) <= 3  # as each of them enters another block
        with pytest.raises(BudgetError):
            batch([[5] * 150] * 3, own_caches)
        before = watched.greenroom.capacity
        del own_caches
        batch([[5]], caches(1))
    assert watched.greenroom.capacity > before
    assert watched.inside()


def test_reserve_makes_room_for_further_keys_and_values(watched):
    slot_budget, slot = watched.slot_budget, watched.greenroom.setup.catalog.slot_bytes
    most = slot_budget.max_kv_bytes()
    assert most + SLACK + slot == slot_budget.budget  # one slot is the least
    for slots in (4, 7, 1):
        slot_budget.reserve(most - (slots - 1) * slot)
        assert watched.greenroom.capacity == slots
    with pytest.raises(BudgetError):
        slot_budget.reserve(most + 1)
    with torch.no_grad():
        watched.model(ids(1, 5))
    assert watched.greenroom.capacity == watched.greenroom.setup.catalog.experts


def test_compiled_kernels_expand_some_rows_of_an_expert_and_eager_a_whole_one(
    tmp_path: Path,
) -> None:
    """A large expert would otherwise cost memory that no compiled kernel uses."""
    small = {"num_hidden_layers": 1, "num_experts": 2}
    path = write(tmp_path / "a.gguf", types={"": "Q4_0"}, moe_intermediate_size=4096, **small)
    skeleton = ModelSkeleton.of(path)
    model, catalog = skeleton.model, skeleton.catalog
    (up, *_) = [catalog.layouts[0].weight(s.name) for s in catalog.layouts[0].tensors]
    logits = 16 * model.config.vocab_size
    assert Workspace.of(model, catalog, False).fixed == 16 * prod(up.shape) + logits
    rows = ROWS_EXPANDED * 4 * max(up.shape) * torch.get_num_threads()
    assert Workspace.of(model, catalog, True).fixed == rows + logits
    other = write(tmp_path / "b.gguf", types={"": "TQ1_0"}, **small)
    skeleton = ModelSkeleton.of(other)  # no product reads this type
    both = [Workspace.of(skeleton.model, skeleton.catalog, kind).fixed for kind in (True, False)]
    assert both[0] == both[1]


def test_layers_with_numbers_of_heads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """dots3: its first layer has 4 heads of width 16, its second 2 of width 24."""
    monkeypatch.setattr("greenroom.hf.kv.sizes._LAYERS", {})
    # As for a model whose pass cannot run on the meta device.
    monkeypatch.setattr("greenroom.hf.kv.sizes._layers", lambda *_: 1 / 0)
    heads = {"dots3_note_text": [(4, 16, 16), (2, 24, 24)], "qwen3_moe": [(2, 8, 8)] * 3}
    for name, shapes in heads.items():
        skeleton = ModelSkeleton.of(FOLDER / name / "model.gguf")
        model, catalog = skeleton.model, skeleton.catalog
        assert [layer.shape for layer in kv_bytes(model, block=64).layers] == shapes
        model.set_attn_implementation("eager")
        workspace = Workspace.of(model, catalog, True)
        assert workspace.pair == 10 * 4
        assert workspace.context == (2 * 4 * 8 * 2 if name == "qwen3_moe" else 0)


def test_memory_that_is_set_aside_comes_from_the_slots(watched: Watched) -> None:
    budget, experts = watched.slot_budget, watched.greenroom.capacity
    slot = watched.greenroom.setup.catalog.slot_bytes
    budget.set_aside(2 * slot)
    assert budget.full_context_slots == FEWEST - 2
    with pytest.raises(BudgetError, match="for read buffers"):
        budget.set_aside(FEWEST * slot)
    assert budget.full_context_slots == FEWEST - 2
    budget.set_aside(slot)
    watched.model.generate(ids(1, 590), max_new_tokens=2)
    assert watched.greenroom.capacity == budget.full_context_slots == FEWEST - 3
    assert budget.initial_slots() <= experts


def test_a_pass_that_began_before_a_resize_does_not_change_the_size(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread resizes the cache after the pass has looked for the budget."""
    make_room, experts = watched.slot_budget.make_room, watched.greenroom.setup.catalog.experts

    def resize_first(*args: Any) -> None:
        assert watched.greenroom.resize("100%") == experts
        make_room(*args)

    monkeypatch.setattr(watched.slot_budget, "make_room", resize_first)
    watched.model(ids(1, 500))
    assert watched.greenroom.capacity == experts
