"""What a model with streamed experts refuses, and that nothing of it changes the output."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import greenroom
from greenroom.errors import ClosedError, UnsupportedCall
from greenroom.hf.attach import module_guard
from tests.hf.conftest import one_line
from tests.models import cached_tiny, reference

PROMPT = torch.tensor([[5, 6, 7, 8]])
GREEDY = {"max_new_tokens": 6, "do_sample": False}
WIDE = {"hidden_size": 64, "head_dim": 16, "dtype": "bfloat16", "tokenizer": True}


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny("qwen3_moe", **WIDE)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    """Shared: every test leaves it as it was. Its dense layers are computed by compiled code."""
    made, _ = greenroom.load(str(folder), cache="25%")
    assert made.greenroom.bindings.accelerated.counts["layer"] > 0
    yield made
    made.greenroom.detach()


@pytest.fixture(scope="module")
def wanted(model: Any) -> torch.Tensor:
    """The logits of the shared model."""
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.fixture
def fresh(folder: Path) -> Iterator[Any]:
    made, _ = greenroom.load(str(folder), cache="25%")
    yield made
    made.greenroom.detach()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(torch.float16),
    "to by name": lambda model: model.to(dtype=torch.float32),
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float32),
    "cuda": lambda model: model.cuda(),
    "a device": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "a part": lambda model: model.model.layers[0].half(),
    "the head": lambda model: model.lm_head.float(),
    "experts": lambda model: model.model.layers[0].mlp.experts.half(),
    "train": lambda model: model.train(),
    "train a part": lambda model: model.model.train(),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model.model.layers[0].state_dict(),
    "state_dict from around": lambda model: nn.ModuleList([model]).state_dict(),
    "pickle": lambda model: pickle.dumps(model),
    "pickle a part": lambda model: pickle.dumps(model.model.layers[0]),
    "deepcopy": lambda model: copy.deepcopy(model),
    "deepcopy a part": lambda model: copy.deepcopy(model.lm_head),
    "pickle the cache": lambda model: pickle.dumps(model.greenroom),
    "deepcopy the cache": lambda model: copy.deepcopy(model.greenroom),
    "copy the cache": lambda model: copy.copy(model.greenroom),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_refused_in_one_line_and_the_model_works_on(model, wanted, change):
    with pytest.raises(UnsupportedCall) as caught:
        CHANGES[change](model)
    assert len(one_line(caught)) > 40
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, wanted)


def test_another_type_is_named_with_the_way_to_it(model):
    with pytest.raises(UnsupportedCall, match=r"load\(\.\.\., dtype='float16'\).*materialize\(\)"):
        model.half()


SAME: dict[str, Callable[[Any], Any]] = {
    "its type": lambda model: model.to(torch.bfloat16),
    "its type by name": lambda model: model.to(dtype=model.dtype),
    "bfloat16": lambda model: model.bfloat16(),
    "its device": lambda model: model.to("cpu"),
    "cpu": lambda model: model.cpu(),
    "both": lambda model: model.to("cpu", torch.bfloat16),
    "eval": lambda model: model.eval(),
    "a part's": lambda model: model.model.to(torch.bfloat16),
}


@pytest.mark.parametrize("call", SAME)
def test_what_changes_nothing_does_nothing(model, call):
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    made = SAME[call](model)
    assert made is model or made is model.model
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before


def test_a_part_that_torch_alone_computes_is_converted(folder):
    """As models do with routers of their own; the whole is refused still."""
    model, _ = greenroom.load(str(folder), cache="50%", kernels="eager")
    norm = model.model.norm
    assert norm.float().weight.dtype is torch.float32
    norm.bfloat16()
    with pytest.raises(UnsupportedCall):
        model.model.float()
    assert torch.equal(
        model.generate(PROMPT, **GREEDY), reference(folder).generate(PROMPT, **GREEDY)
    )
    model.greenroom.detach()


@pytest.mark.parametrize("call", ["save_pretrained", "push_to_hub"])
def test_saving_is_refused_before_anything_is_written(model, tmp_path, call):
    target = tmp_path / "saved"
    for part in (model, model.model):
        with pytest.raises(UnsupportedCall, match=r"experts.*materialize\(\)"):
            getattr(part, call)(target)
    assert not target.exists()


def test_saving_stays_refused_without_experts(fresh, tmp_path):
    fresh.greenroom.detach()
    with pytest.raises(UnsupportedCall, match="experts"):
        fresh.save_pretrained(tmp_path / "saved")
    with pytest.raises(UnsupportedCall, match="on disk"):
        fresh.state_dict()


def test_parameters_are_counted_with_the_experts(model, folder):
    whole = reference(folder)
    for options in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == whole.num_parameters(**options)
        assert model.model.num_parameters(**options) == whole.model.num_parameters(**options)
    assert model.num_parameters(only_trainable=True) < whole.num_parameters()


def test_a_part_without_experts_has_its_state(model, folder):
    mine, theirs = model.model.norm.state_dict(), reference(folder).model.norm.state_dict()
    assert torch.equal(mine["weight"], theirs["weight"])


def test_a_state_with_experts_is_not_loaded_in_parts(model, folder):
    """Not even with strict=False; and nothing was written when it is refused."""
    state = {name: 2 * each for name, each in reference(folder).state_dict().items()}
    before = model.lm_head.weight.clone()
    with pytest.raises(UnsupportedCall, match="experts"):
        model.load_state_dict(state, strict=False)
    with pytest.raises(UnsupportedCall, match="experts"):
        nn.ModuleList([model]).load_state_dict({f"0.{k}": v for k, v in state.items()})
    assert torch.equal(model.lm_head.weight, before)


# ---- gradients


@pytest.mark.parametrize("kernels", ["eager", "native"])
def test_a_backward_pass_raises_and_a_forward_pass_does_not(folder, kernels):
    model, _ = greenroom.load(str(folder), cache="50%", kernels=kernels)
    out = model(PROMPT, labels=PROMPT)
    with pytest.raises(UnsupportedCall, match="gradients of streamed experts"):
        out.loss.backward()
    one = model(PROMPT[:, :1])  # the one token that compiled layers compute
    with pytest.raises(UnsupportedCall, match="gradients of streamed experts"):
        one.logits.sum().backward()
    with torch.no_grad():
        assert not model(PROMPT, labels=PROMPT).loss.requires_grad
    model.greenroom.detach()


def test_a_gradient_that_comes_by_no_expert_is_right(model, folder):
    grads = []
    for each in (model, reference(folder)):
        hidden = each.model(PROMPT).last_hidden_state.detach()
        (grad,) = torch.autograd.grad(each.lm_head(hidden).sum(), each.lm_head.weight)
        grads.append(grad)
    mine, theirs = grads
    assert (mine - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4_text", "dbrx"])
def test_shared_experts_and_adapters_have_no_gradient_either(name):
    model, _ = greenroom.load(str(cached_tiny(name, tokenizer=True)), cache="50%")
    for _ in range(2):  # in the second pass shared experts are computed ahead, without gradients
        with pytest.raises(UnsupportedCall, match="gradients of streamed experts"):
            model(PROMPT, labels=PROMPT).loss.backward()
    model.greenroom.detach()


# ---- dense weights that are given other values


def _scaled(weight: torch.Tensor) -> torch.Tensor:
    return 1.25 * weight.detach()


def _in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight.copy_(_scaled(module.weight))  # type: ignore[operator, arg-type]


def _by_state(module: nn.Module) -> None:
    module.load_state_dict({"weight": _scaled(module.weight)})  # type: ignore[arg-type]


def _another_parameter(module: nn.Module) -> None:
    module.weight = nn.Parameter(_scaled(module.weight))  # type: ignore[arg-type]


@pytest.mark.parametrize("give", [_in_place, _by_state, _another_parameter])
def test_values_that_dense_weights_are_given_are_served(fresh, folder, give):
    """As in transformers, also by the layers that compiled code computes."""
    fresh.generate(PROMPT, **GREEDY)
    whole = copy.deepcopy(reference(folder))
    for each in (fresh, whole):
        for layer in each.model.layers:
            give(layer.self_attn.q_proj)
            give(layer.input_layernorm)
        give(each.lm_head)
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    mine, theirs = (each.generate(PROMPT, **options) for each in (fresh, whole))
    assert torch.equal(mine.sequences, theirs.sequences)
    for ours, wanted in zip(mine.logits, theirs.logits, strict=True):
        assert (ours - wanted).norm() < 0.05 * wanted.norm()


class _Lora(nn.Module):
    """A low-rank addition to a linear layer, as peft puts it in the place of one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(1)
        rows, columns = base.weight.shape  # type: ignore[misc]
        self.down = nn.Parameter(torch.randn(4, int(columns), generator=generator).bfloat16() / 4)
        self.up = nn.Parameter(torch.randn(int(rows), 4, generator=generator).bfloat16() / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_a_module_in_the_place_of_a_dense_one_is_served(fresh, folder):
    fresh.generate(PROMPT, **GREEDY)
    whole = copy.deepcopy(reference(folder))
    for each in (fresh, whole):
        for layer in each.model.layers:
            layer.self_attn.q_proj = _Lora(layer.self_attn.q_proj)
    assert torch.equal(fresh.generate(PROMPT, **GREEDY), whole.generate(PROMPT, **GREEDY))


def test_memory_exchanged_behind_compiled_layers_is_noticed(fresh):
    fresh.generate(PROMPT, **GREEDY)
    weight = fresh.model.layers[0].input_layernorm.weight
    before = weight.data
    weight.data = 2 * before
    with pytest.raises(UnsupportedCall, match=r"layers\.0\.input_layernorm\.weight .*copy_"):
        fresh.generate(PROMPT, **GREEDY)
    weight.data = before
    fresh.generate(PROMPT, **GREEDY)


# ---- detached


def test_detached_a_second_time_nothing_happens_and_its_state_says_so(fresh):
    cache = fresh.greenroom
    fresh.generate(PROMPT, **GREEDY)
    before = cache.stats()
    for _ in range(2):
        fresh.greenroom.detach()
    assert cache.stats().expert_requests == before.expert_requests
    with pytest.raises(ClosedError, match=r"not attached.*materialize\(\)"):
        fresh(PROMPT)


def test_weights_and_submodules_that_are_replaced_are_a_change():
    def parameter(weight: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(weight.clone(), requires_grad=False)

    def replace(root: Any) -> None:
        root[1][0].weight = parameter(root[1][0].weight)

    def move(root: Any) -> None:
        root[1][0].weight.data = root[1][0].weight.data.clone()

    def wrap(root: Any) -> None:
        root[1][0] = nn.Sequential(root[1][0])

    def register(root: Any) -> None:
        root[1].register_buffer("scale", torch.ones(1))

    def write(root: Any) -> None:
        root[1][0].weight.data.mul_(2)

    for change in (replace, move, wrap, register, write):
        root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
        is_changed = module_guard.make_change_check(root)
        assert not is_changed()
        change(root)
        assert is_changed() == (change is not write)
