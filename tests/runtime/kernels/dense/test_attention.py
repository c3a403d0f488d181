"""Compiled attention for one token: near torch's, only where it fits, and removable."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    GraniteMoeConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention
from transformers.models.phimoe.modeling_phimoe import PhimoeAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from greenroom.hf.kv.single_token import append_token
from greenroom.runtime.kernels.dense.accelerate import accelerate
from greenroom.runtime.kernels.dense.attention import is_common_attention

SHAPE = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "attention_dropout": 0.0,
}
FITTING: dict[str, tuple[type[nn.Module], Any]] = {
    "qwen3_moe": (Qwen3MoeAttention, Qwen3MoeConfig(**SHAPE, head_dim=48)),
    "qwen3_moe, no groups": (
        Qwen3MoeAttention,
        Qwen3MoeConfig(**SHAPE | {"num_key_value_heads": 6}, head_dim=64),
    ),
    "mixtral": (MixtralAttention, MixtralConfig(**SHAPE, head_dim=32)),
    "qwen2_moe": (Qwen2MoeAttention, Qwen2MoeConfig(**SHAPE, qkv_bias=True)),
    "granitemoe": (GraniteMoeAttention, GraniteMoeConfig(**SHAPE, attention_multiplier=0.3)),
    "phimoe": (PhimoeAttention, PhimoeConfig(**SHAPE, attention_bias=True)),
}
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make(cls: type[nn.Module], config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    config._attn_implementation = "sdpa"
    module = cls(config, 1).to(dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(1 if parameter.dim() == 1 else 0, 0.2)
    return module


def inputs(module: Any, tokens: int, dtype: torch.dtype, count: int = 1) -> tuple[Any, Any, Any]:
    """x [1, count, hidden], (cos, sin), a cache of two layers with `tokens` tokens."""
    width, heads = module.head_dim, module.k_proj.weight.shape[0] // module.head_dim
    cache = DynamicCache()
    for layer in range(2):
        cache.update(*torch.randn(2, 1, heads, tokens, width).to(dtype).unbind(), layer)
    angles = torch.randn(1, count, width // 2).repeat(1, 1, 2)
    x = torch.randn(1, count, module.q_proj.weight.shape[1]).to(dtype)
    return x, (angles.cos().to(dtype), angles.sin().to(dtype)), cache


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FITTING)
def test_attention_is_nearly_as_near_to_the_exact_result_as_torch(name, dtype):
    module = make(*FITTING[name], dtype)
    exact = copy.deepcopy(module).double()
    for tokens in (1, 30, 300):
        x, positions, cache = inputs(module, tokens, dtype)
        wide = DynamicCache()
        for layer in range(2):
            wide.update(
                cache.layers[layer].keys.double(), cache.layers[layer].values.double(), layer
            )
        expected = exact(x.double(), [p.double() for p in positions], None, wide)[0]
        theirs = module(x, positions, None, copy.deepcopy(cache))[0]
        done = accelerate(module, append_token)
        assert done.counts["attention"] == 1
        ours = module(x, positions, None, cache)[0]
        done.detach()
        assert not torch.equal(ours, torch.zeros_like(ours))
        assert ours.shape == theirs.shape
        assert distance(ours, expected) < 1.5 * distance(theirs, expected) + torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "room", [append_token, lambda cache, layer: None], ids=["in place", "copied"]
)
def test_the_kv_cache_gets_the_keys_and_values_of_torch(room):
    module = make(*FITTING["qwen3_moe"])
    x, positions, cache = inputs(module, 5, torch.bfloat16)
    theirs = copy.deepcopy(cache)
    for _ in range(70):  # more than there is room for at once
        x = torch.randn_like(x)
        module(x, positions, None, theirs)
    torch.manual_seed(1)
    done, outputs = accelerate(module, room), []
    for _ in range(70):
        outputs.append(module(x, positions, None, cache)[0])
    done.detach()
    assert cache.get_seq_length(1) == theirs.get_seq_length(1) == 75
    # The last token's input was the same: its keys and values differ by rounding at most.
    assert distance(cache.layers[1].keys[:, :, -1], theirs.layers[1].keys[:, :, -1]) < 1e-2
    assert distance(cache.layers[1].values[:, :, -1], theirs.layers[1].values[:, :, -1]) < 1e-2
    assert torch.equal(cache.layers[1].keys[:, :, :5], theirs.layers[1].keys[:, :, :5])


def test_the_number_of_threads_changes_no_bit():
    module = make(Qwen3MoeAttention, Qwen3MoeConfig(**SHAPE, head_dim=64))
    x, positions, cache = inputs(module, 200, torch.bfloat16)
    accelerate(module, append_token)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(module(x, positions, None, copy.deepcopy(cache))[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class Capped(Qwen3MoeAttention):
    """An attention that caps its scores, which no attribute shows."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **_):
        shape = (1, hidden_states.shape[1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) * self.scaling / 2).tanh() * 2
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o_proj(mixed.reshape(*hidden_states.shape[:2], -1)), None


def test_a_class_that_computes_otherwise_keeps_its_own_forward():
    module = make(Capped, Qwen3MoeConfig(**SHAPE, head_dim=32))
    x, positions, cache = inputs(module, 20, torch.bfloat16)
    expected = module(x, positions, None, copy.deepcopy(cache))[0]
    done = accelerate(module, append_token)
    assert done.counts["attention"] == 1  # its parts are those of the common kind
    assert distance(module(x, positions, None, cache)[0], expected) < 1e-2


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (GptOssAttention, GptOssConfig(**SHAPE, head_dim=32)),  # sinks
        (OlmoeAttention, OlmoeConfig(**SHAPE)),  # norms of all heads together
    ],
)
def test_unsupported_attention_classes_get_no_compiled_forward(cls, config):
    done = accelerate(make(cls, config), append_token)
    assert "attention" not in done.counts


def test_unsupported_calls_use_the_forward_of_the_class():
    module = make(*FITTING["qwen3_moe"])
    cases = {}
    x, positions, cache = inputs(module, 9, torch.bfloat16)
    mask = torch.zeros(1, 1, 1, 10).bfloat16()
    mask[..., :4] = -torch.inf
    many = inputs(module, 9, torch.bfloat16, count=3)
    calls = {
        "a mask": lambda: module(x, positions, mask, copy.deepcopy(cache))[0],
        "several tokens": lambda: module(many[0], many[1], None, copy.deepcopy(many[2]))[0],
        "no cache": lambda: module(x, positions, None, None)[0],
    }
    plain = {name: call() for name, call in calls.items()}
    done = accelerate(module, append_token)
    for part in module.children():  # the linear layers' own forwards differ by rounding
        part.__dict__.pop("forward", None)
    for name, call in calls.items():
        assert torch.equal(call(), plain[name]), name
    hook_calls = []
    hook = module.k_proj.register_forward_hook(lambda *_: hook_calls.append(True))
    module(x, positions, None, copy.deepcopy(cache))
    assert hook_calls
    hook.remove()
    module.config._attn_implementation = "eager"
    assert module(x, positions, None, copy.deepcopy(cache))[1] is not None  # the weights
    module.config._attn_implementation = "sdpa"
    module.v_proj.weight = nn.Parameter(torch.zeros_like(module.v_proj.weight), requires_grad=False)
    cases = inputs(module, 1, torch.bfloat16)
    cases[2].layers[1].values.zero_()
    assert not module(*cases[:2], None, cases[2])[0].any()
    done.detach()
    assert "forward" not in vars(module)


def test_a_module_with_other_parts_is_no_common_attention():
    module = make(*FITTING["qwen3_moe"])
    assert is_common_attention(module)
    module.register_buffer("more", torch.zeros(1))
    assert not is_common_attention(module)
    assert not is_common_attention(make(*FITTING["qwen3_moe"]).float())
    assert not is_common_attention(nn.Linear(3, 3))
