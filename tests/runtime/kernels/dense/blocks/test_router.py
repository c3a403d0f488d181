"""A compiled router chooses as the module does, but for last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from greenroom.runtime.kernels.dense.blocks import router
from greenroom.runtime.kernels.dense.blocks.router import CompiledRouter
from greenroom.runtime.kernels.dense.blocks.router_call import RouterCall
from greenroom.runtime.kernels.launch import sequence

HIDDEN = 96
ONE = 1, HIDDEN


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def router_of(cls: type[nn.Module], config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    module = cls(config).to(dtype).requires_grad_(False)
    module.weight.normal_(0, 0.3)
    return module


def qwen(experts: int = 64, top_k: int = 8, summed: bool = True) -> Any:
    return Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=summed
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (Qwen3MoeTopKRouter, qwen()),
        (Qwen3MoeTopKRouter, qwen(128, 1)),
        (Qwen3MoeTopKRouter, qwen(8, 8)),
        (Qwen3MoeTopKRouter, qwen(256, 4, summed=False)),
        (OlmoeTopKRouter, OlmoeConfig(hidden_size=HIDDEN)),
        (MixtralTopKRouter, MixtralConfig(hidden_size=HIDDEN)),
    ],
)
def test_ids_and_weights_equal_those_of_the_module(cls, config, dtype, monkeypatch):
    module = router_of(cls, config, dtype)
    ours, by_torch = CompiledRouter.of(module, ONE, dtype), []
    assert ours is not None
    slow = CompiledRouter.choose_by_torch
    monkeypatch.setattr(
        CompiledRouter, "choose_by_torch", lambda *a: by_torch.append(True) or slow(*a)
    )
    same = near = 0
    for scale in (0.1, 1, 10):
        for _ in range(100):
            x = (torch.randn(1, HIDDEN) * scale).to(dtype)
            _, weights, ids = module(x)
            mine = ours(x)
            assert mine[1].dtype == weights.dtype
            assert mine[1].shape == mine[0].shape == ids.shape
            assert (mine[1][:, :-1] >= mine[1][:, 1:]).all()
            expected, got = dense((ids, weights), module), dense(mine, module)
            same += torch.allclose(got, expected, rtol=4e-7, atol=0)  # of float32 weights two units
            near += bool((got - expected).norm() <= 1e-2 * expected.norm())
    assert near >= 297  # a last bit of a product may decide between two experts
    assert same >= 250  # or change the weights of all
    # Where the last one that is chosen and the next are equal.
    assert len(by_torch) <= (0 if ours.knows_ties else 60)
    assert ours.knows_ties == (len(module.weight) < 64 * ids.shape[1])  # else torch uses a heap


def dense(chosen: tuple[torch.Tensor, torch.Tensor], module: nn.Module) -> torch.Tensor:
    """A choice as the weights of all experts."""
    return torch.zeros(1, len(module.weight)).scatter_add_(1, chosen[0], chosen[1].float())


@pytest.mark.parametrize("compiled", [True, False])
def test_equal_scores_and_nan_are_ordered_as_by_torch(compiled, monkeypatch) -> None:
    """Ties for the last place. The products are exact here, so they equal torch's."""
    if not compiled:
        monkeypatch.setattr(router, "_ties_match_torch", lambda router: False)
    module = router_of(Qwen3MoeTopKRouter, qwen())
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    assert ours.knows_ties == compiled
    module.weight.copy_(torch.randint(-2, 3, module.weight.shape))
    least = 0
    for _ in range(50):
        x = torch.randint(-2, 3, (1, HIDDEN)).bfloat16()
        _, weights, ids = module(x)
        products = (x @ module.weight.T)[0].sort(descending=True).values
        mine = ours(x)
        assert torch.equal(dense(mine, module), dense((ids, weights), module))
        least += bool(products[7] == products[8])
    assert 5 < least < 45
    for x in (torch.zeros(1, HIDDEN), torch.full((1, HIDDEN), torch.nan)):
        _, weights, ids = module(x.bfloat16())
        mine = ours(x.bfloat16())
        assert torch.equal(mine[0], ids)
        assert torch.equal(mine[1], weights) or weights.isnan().all()


@pytest.mark.parametrize(
    ("experts", "top_k"), [(64, 8), (128, 8), (60, 4), (512, 10), (8, 2), (5, 3), (3, 1), (72, 17)]
)
def test_equal_scores_are_chosen_in_the_order_of_torch(experts, top_k) -> None:
    ours = CompiledRouter.of(
        router_of(Qwen3MoeTopKRouter, qwen(experts, top_k)), ONE, torch.bfloat16
    )
    assert ours.knows_ties
    for values in (2, 9, 40):
        for _ in range(60):
            call = RouterCall(ours, 0)
            call.products.copy_(torch.randint(values, call.products.shape) / 8)
            sequence.run(call.stages[1:])
            assert call.is_chosen
            _, expected = call.products.float().softmax(-1).topk(top_k)
            last, following = call.products[0].sort(descending=True).values[top_k - 1 : top_k + 1]
            if last != following:  # then it is only a question of their order
                expected, call.ids = expected.sort().values, call.ids.sort().values
            assert torch.equal(call.ids, expected)


def test_another_order_of_ties_in_torch_is_detected(monkeypatch) -> None:
    """A trial shows that another library sorts otherwise, once for all such routers."""
    monkeypatch.setattr(router, "_TIES", {})
    slow = CompiledRouter.choose_by_torch

    def choose_last_ties(self, products):
        ids, weights = slow(self, products.flip(-1))
        return len(self.weight) - 1 - ids, weights

    monkeypatch.setattr(CompiledRouter, "choose_by_torch", choose_last_ties)
    assert not CompiledRouter.of(
        router_of(Qwen3MoeTopKRouter, qwen()), ONE, torch.bfloat16
    ).knows_ties
    assert list(router._TIES.values()) == [False]


@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(512, 8), (64, 1), (64, 18)],  # torch uses a heap; it sorts so many not by insertion
)
def test_torch_chooses_between_equal_scores_that_it_orders_by_other_means(experts, top_k) -> None:
    module = router_of(Qwen3MoeTopKRouter, qwen(experts, top_k))
    assert not CompiledRouter.of(module, ONE, torch.bfloat16).knows_ties


class Biased(Qwen3MoeTopKRouter):
    """A router with the same parts and other gate weights."""

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * 1.5, ids


def test_routers_of_other_kinds_are_not_compiled():
    assert CompiledRouter.of(router_of(Biased, qwen()), ONE, torch.bfloat16) is None
    assert CompiledRouter.of(router_of(Qwen3MoeTopKRouter, qwen()), ONE, torch.float16) is None
    assert CompiledRouter.of(router_of(Qwen3MoeTopKRouter, qwen()), (1, 64), torch.bfloat16) is None
    config = DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=64)
    assert CompiledRouter.of(router_of(DeepseekV3TopkRouter, config), ONE, torch.bfloat16) is None
    assert (
        CompiledRouter.of(nn.Linear(HIDDEN, 8, bias=False).bfloat16(), ONE, torch.bfloat16) is None
    )


def glm(summed: bool = True, scale: float = 1.5, groups: int = 1) -> Any:
    return Glm4MoeConfig(
        hidden_size=HIDDEN,
        n_routed_experts=64,
        num_experts_per_tok=6,
        norm_topk_prob=summed,
        routed_scaling_factor=scale,
        n_group=groups,
        topk_group=1,
    )


def glm_router(config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    module = router_of(Glm4MoeTopkRouter, config, dtype)
    module.e_score_correction_bias = torch.randn(64) * 0.3
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("summed", "scale"), [(True, 1.0), (True, 2.5), (False, 1.5)])
def test_sigmoid_routers_choose_by_score_and_bias(summed, scale, dtype, monkeypatch):
    module = glm_router(glm(summed, scale), dtype)
    ours = CompiledRouter.of(module, ONE, dtype)
    assert ours is not None
    assert ours.settings == (summed, scale)
    monkeypatch.setattr(CompiledRouter, "choose_by_torch", None)  # no choice is left to torch
    same = 0
    for scale in (0.1, 1, 10):
        for _ in range(100):
            x = (torch.randn(1, HIDDEN) * scale).to(dtype)
            _, weights, ids = module(x)
            mine = ours(x)
            assert mine[1].dtype == weights.dtype == torch.float32
            expected, got = dense((ids, weights), module), dense(mine, module)
            same += torch.allclose(got, expected, rtol=1e-5, atol=0)
    assert same >= 298


def test_the_forward_of_a_sigmoid_router_has_the_module_s_outputs():
    module = glm_router(glm())
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    x = torch.randn(1, HIDDEN).bfloat16()
    for mine, expected in zip(ours.forward(x), module(x), strict=True):
        assert mine.shape == expected.shape
        assert mine.dtype == expected.dtype
    assert torch.allclose(ours.forward(x)[0], module(x)[0], rtol=1e-4, atol=1e-4)
    call = RouterCall(ours, torch.randn(3, HIDDEN).bfloat16().data_ptr(), 3)
    assert call.products.dtype is torch.float32


def test_equal_scores_of_a_sigmoid_router_are_left_to_torch():
    module = glm_router(glm())
    module.e_score_correction_bias = torch.zeros(64)
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    assert not ours.knows_ties
    for x in (torch.zeros(1, HIDDEN), torch.full((1, HIDDEN), torch.nan)):
        _, weights, ids = module(x.bfloat16())
        mine = ours(x.bfloat16())
        assert torch.equal(mine[0].sort().values, ids.sort().values)
        assert torch.equal(mine[1], weights) or weights.isnan().all()


def test_a_changed_bias_is_noticed():
    module = glm_router(glm())
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    assert ours.is_unchanged()
    assert ours.check.passes()
    module.e_score_correction_bias = torch.zeros(64)
    assert not ours.is_unchanged()
    assert not ours.check.passes()
    assert not ours.observed_check.passes()
    x = torch.randn(1, HIDDEN).bfloat16()
    for mine, expected in zip(ours.forward(x), module(x), strict=True):
        assert torch.equal(mine, expected)


def test_sigmoid_routers_with_groups_are_not_compiled():
    assert CompiledRouter.of(glm_router(glm(groups=8)), ONE, torch.bfloat16) is None
    odd = glm_router(glm())
    odd.e_score_correction_bias = torch.zeros(64, dtype=torch.float64)
    assert CompiledRouter.of(odd, ONE, torch.bfloat16) is None


class Scored(Qwen3MoeTopKRouter):
    """A router that returns the softmax of all experts."""

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits.softmax(-1, dtype=torch.float32), weights, ids


@pytest.mark.parametrize("cls", [Qwen3MoeTopKRouter, Scored])
def test_the_forward_chooses_the_same_experts_with_and_without_hooks(cls) -> None:
    module = router_of(cls, qwen())
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    module.forward = ours.forward
    assert ours.is_unchanged()
    calls = []
    module.register_forward_hook(lambda module, args, out: calls.append(out))
    for _ in range(20):
        x = torch.randn(*ONE).bfloat16()
        of_all, weights, ids = module(x)
        expected = cls.forward(module, x)[0]
        assert calls.pop()[1] is weights
        assert all(map(torch.equal, ours(x), (ids, weights)))
        assert of_all.dtype is expected.dtype
        assert (of_all - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("change", ["several", "type", "strided", "gradients"])
def test_other_calls_use_the_forward_of_the_class(change, monkeypatch) -> None:
    module = router_of(Qwen3MoeTopKRouter, qwen())
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    monkeypatch.setattr(ours, "_original", lambda module, x: "the class")
    assert ours.forward(torch.ones(*ONE).bfloat16()) != "the class"
    x = {
        "several": torch.ones(2, HIDDEN).bfloat16(),
        "type": torch.ones(*ONE),
        "strided": torch.ones(1, 2 * HIDDEN).bfloat16()[:, ::2],
    }.get(change, torch.ones(*ONE).bfloat16())
    with torch.set_grad_enabled(change == "gradients"):
        assert ours.forward(x) == "the class"


def test_a_changed_or_hooked_router_is_called_as_a_module():
    module = router_of(Qwen3MoeTopKRouter, qwen())
    ours = CompiledRouter.of(module, ONE, torch.bfloat16)
    assert ours.is_unchanged()
    hook = module.register_forward_hook(lambda *_: None)
    assert not ours.is_unchanged()
    hook.remove()
    assert ours.is_unchanged()
    module.forward = lambda x: x
    assert not ours.is_unchanged()
    assert CompiledRouter.of(module, ONE, torch.bfloat16) is None
    del module.forward
    module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)
    assert not ours.is_unchanged()


class Counted(Qwen3MoeTopKRouter):
    """A router that counts its calls; an object, not a plain attribute, may undo its sum."""

    calls = 0

    def forward(self, hidden_states):
        type(self).calls += 1
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * self.factor[0], ids


def test_only_the_first_router_of_a_kind_is_tried_on_all_inputs(monkeypatch) -> None:
    monkeypatch.setattr(router, "_SETTINGS", {})
    calls = []
    for factor in (1.0, 1.0, 1.5):
        module, Counted.calls = router_of(Counted, qwen()), 0
        module.factor = [factor]
        found = CompiledRouter.of(module, ONE, torch.bfloat16)
        assert (found is not None) == (factor == 1.0)
        calls.append(Counted.calls)
    assert calls == [router._TRIALS, 2, 2 + router._TRIALS]
