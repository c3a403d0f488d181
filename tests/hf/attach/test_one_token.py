"""One token through whole decoder layers: the bits and the counts of the modules one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.forward import BINDING, experts_forward, experts_with_residual
from greenroom.runtime.kernels.dense.blocks.router import CompiledRouter
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer
from greenroom.runtime.kernels.dense.module_check import InputHook
from greenroom.runtime.kernels.resident.fused_layers import FusedLayers
from tests.models import cached_tiny

WIDE = {"hidden_size": 64}  # heads of 16, a vector's width
# An architecture -> what it is given, its layers that are known, and blocks among them whose parts
# are known.
KNOWN: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen3_moe": ({**WIDE, "head_dim": 16}, 3, 2),
    "mixtral": ({**WIDE, "head_dim": 16}, 3, 3),
    "qwen2_moe": (WIDE, 3, 0),  # a shared expert with a gate
    "glm4_moe": ({**WIDE, "head_dim": 16, "n_group": 1}, 3, 2),  # a dense layer, a shared expert
    "olmoe": (WIDE, 0, 0),  # a norm of all heads together
    "granitemoe": ({**WIDE, "residual_multiplier": 0.5}, 0, 0),
    "deepseek_v3": (WIDE, 0, 0),  # another attention
}


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@contextmanager
def served(name: str, capacity: int = 24, **parts: Any) -> Iterator[PreTrainedModel]:
    skeleton = ModelSkeleton.of(cached_tiny(name, dtype="bfloat16", **KNOWN[name][0]))
    model = skeleton.load()
    parts = {"policy": "lru", **parts}  # what `auto` is where every expert has a slot
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, capacity=capacity, **parts))
    try:
        yield model
    finally:
        model.greenroom.detach()


def layers_of(model: PreTrainedModel) -> list[Any]:
    return [each for each in model.model.layers if "forward" in vars(each)]


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def tokens(model: PreTrainedModel, count: int = 6, batch: int = 1, **options: Any) -> Tensor:
    """The logits of `count` tokens after a prompt of 7."""
    out = model(ids(batch, 7), use_cache=True)
    found = []
    for _ in range(count):
        chosen = out.logits[:, -1:].argmax(-1)
        out = model(chosen, past_key_values=out.past_key_values, use_cache=True, **options)
        found.append(out.logits)
    return torch.cat(found)


def one_by_one(model: PreTrainedModel, **options: Any) -> Tensor:
    """The same, with every module called by itself."""
    ways = [(layer, vars(layer).pop("forward")) for layer in layers_of(model)]
    try:
        return tokens(model, **options)
    finally:
        for layer, forward in ways:
            layer.forward = forward


class Calls:
    """How often whole layers, and steps at once, were computed, each alone or with others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = self.steps = 0
        layer, chain, several = (
            FusedDecoderLayer.__call__,
            FusedLayers.compute,
            Driver.resident_steps,
        )

        def counted(*args: Any) -> Any:
            out = layer(*args)
            self.layers += out is not None
            return out

        def chained(*args: Any) -> Any:
            out = chain(*args)
            self.layers += 0 if out is None else len(out)
            return out

        def asked(driver: Driver, *args: Any) -> int | None:
            done = several(driver, *args)
            self.steps += done or 0
            return done

        monkeypatch.setattr(FusedDecoderLayer, "__call__", counted)
        monkeypatch.setattr(FusedLayers, "compute", chained)
        monkeypatch.setattr(Driver, "resident_steps", asked)


@pytest.mark.parametrize(
    ("name", "threads"), [(name, n) for name in KNOWN for n in (1, 2) if n == 1 or KNOWN[name][1]]
)
def test_the_bits_of_modules_one_by_one(name, threads, monkeypatch):
    torch.set_num_threads(threads)
    calls, (_, known, plain) = Calls(monkeypatch), KNOWN[name]
    with served(name) as model:
        assert len(layers_of(model)) == known
        wanted = one_by_one(model)
        assert calls.layers == 0
        assert torch.equal(tokens(model), wanted)
        assert calls.layers == 6 * known
        assert calls.steps == 6 * plain
    assert not layers_of(model)


@pytest.mark.parametrize("capacity", [1, 5, 24])
def test_the_cache_s_size_and_what_it_holds_change_no_bit_and_no_count(capacity):
    with served("qwen3_moe") as model:
        wanted = one_by_one(model)
    with served("qwen3_moe", capacity) as model:
        assert torch.equal(tokens(model), wanted)  # from an empty cache
        model.greenroom.reset_stats()
        assert torch.equal(tokens(model), wanted)
        first = model.greenroom.stats()
        asked = model.greenroom.driver.request_counts.copy()
        model.greenroom.reset_stats()
        assert torch.equal(one_by_one(model), wanted)
        second = model.greenroom.stats()
        assert (model.greenroom.driver.request_counts == 1.5 * asked).all()
        assert first.expert_requests == second.expert_requests
        assert first.passes == second.passes == 7
        if capacity == 24:
            assert first.expert_hits == second.expert_hits == first.expert_requests


def test_what_was_used_last_stays_when_the_cache_shrinks():
    residents = []
    for way in (tokens, one_by_one):
        with served("qwen3_moe") as model:
            tokens(model)
            way(model, count=2)
            model.greenroom.resize(5 * model.greenroom.setup.catalog.slot_bytes)
            residents.append(model.greenroom.driver.scheduler.residents().tolist())
            assert torch.equal(tokens(model), one_by_one(model))
    assert residents[0] == residents[1]


def test_prompts_batches_and_masks_go_their_own_way(monkeypatch):
    calls = Calls(monkeypatch)
    with served("mixtral") as model, torch.no_grad():
        model(ids(1, 9))
        tokens(model, batch=2)
        mask = torch.ones(1, 8, dtype=torch.int64)
        mask[0, 0] = 0
        out = model(ids(1, 7), attention_mask=mask[:, :7], use_cache=True)
        model(ids(1, 1), attention_mask=mask, past_key_values=out.past_key_values)
        assert calls.layers == 0
    with served("mixtral") as model:  # with gradients: every part may be differentiated
        assert torch.equal(torch.enable_grad()(model)(ids(1, 5)).logits, model(ids(1, 5)).logits)
        assert calls.layers == 0


def test_whoever_listens_hears():
    with served("mixtral") as model:
        wanted, heard = tokens(model), []
        for layer in model.model.layers:
            for part in (
                *(layer, layer.self_attn, layer.self_attn.q_proj, layer.input_layernorm),
                *(layer.post_attention_layernorm, layer.mlp, layer.mlp.gate, layer.mlp.experts),
            ):
                hook = part.register_forward_hook(lambda *_: heard.append(True))
                heard.clear()
                # Hooks on a part of the attention leave it to torch, whose bits are others.
                same = torch.equal(tokens(model, 1), wanted[:1])
                assert same or part in (layer.self_attn, layer.self_attn.q_proj), part
                assert len(heard) == 2, part
                hook.remove()
        states = tokens(model, 1, output_hidden_states=True, output_router_logits=True)
        assert torch.equal(states, wanted[:1])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_whoever_listens_changes_no_bit(name, monkeypatch):
    """A predictor that listens at routers must not have them computed by torch, whose products may
    differ in a last bit."""
    with served(name) as model:
        alone = tokens(model)
        routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
        assert routers

        def by_torch(*_: Any) -> None:
            raise AssertionError("one token's experts are chosen by other means than unheard")

        monkeypatch.setattr(type(routers[0]), "forward", by_torch)
        heard: list[int] = []
        hooks = [r.register_forward_pre_hook(lambda *_: heard.append(1)) for r in routers]
        assert torch.equal(tokens(model), alone)
        assert len(heard) == 7 * len(routers)
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_a_predictor_that_reads_a_router_s_input_changes_no_bit(name, monkeypatch):
    with served(name, 8) as model:
        wanted = tokens(model)
        routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        seen: list[Tensor] = []
        for router in routers:
            hook = InputHook(lambda x: seen.append(x.clone().view(-1)))
            router.register_forward_pre_hook(hook, with_kwargs=True)
        monkeypatch.setattr(CompiledRouter, "__call__", None)  # no router is called by itself
        assert torch.equal(tokens(model), wanted)
        one_token = [x for x in seen if x.numel() == WIDE["hidden_size"]]
        assert len(one_token) == 6 * len(routers) > 0
        heard: list[Tensor] = []
        routers[0].register_forward_pre_hook(lambda _, args: heard.append(args[0]))
        monkeypatch.undo()
        assert torch.equal(tokens(model), wanted)
        assert len(heard) == 7
        assert not any(torch.equal(a, b) for a, b in pairwise(heard[1:]))  # their own memory


def test_a_timeline_shows_every_step(tmp_path):
    with served("mixtral") as model:
        wanted = tokens(model)
        model.greenroom.timeline()
        assert torch.equal(tokens(model), wanted)
        line = model.greenroom.timeline(False)
    line.save(tmp_path / "line.json")
    assert (tmp_path / "line.json").read_text().count('"layer 2: ') == 7


def test_other_routing_is_a_step_like_any_other(monkeypatch):
    """Ids that come twice, or that are no expert of this layer."""
    with served("mixtral") as model, torch.no_grad():
        tokens(model)
        module = model.model.layers[0].mlp.experts
        binding, x = getattr(module, BINDING), torch.randn(1, 64).bfloat16()
        calls, residual = Calls(monkeypatch), torch.randn(1, 64).bfloat16()
        for chosen, at_once in (([3, 1], 1), ([2, 2], 0), ([8, 4], 0), ([8, 9], 0)):
            index, weights = torch.tensor([chosen]), torch.tensor([[0.75, 0.5]])
            calls.steps, before = 0, binding.driver.request_counts.sum()
            ours = experts_with_residual(module, x, index, weights, residual)
            assert calls.steps == at_once
            mine = binding.driver.request_counts.sum() - before
            assert torch.equal(ours, residual + experts_forward(module, x, index, weights))
            assert binding.driver.request_counts.sum() - before == 2 * mine
