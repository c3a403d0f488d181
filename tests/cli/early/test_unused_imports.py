"""The modules of torch and transformers whose imports are deferred, as they are installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from greenroom.cli.early.unused_imports import NAMES, SWITCH

START = """
import sys
from greenroom.cli.early.deferred import Placeholder, StandIn
from greenroom.cli.early.unused_imports import NAMES, defer_unused_imports
defer_unused_imports()
"""
IMPORTS = """
import transformers.models.qwen3_moe.modeling_qwen3_moe
stand_ins = {name for name in sys.modules if type(sys.modules[name]) is StandIn}
assert stand_ins == {name for group in NAMES for name in group}, stand_ins
loaded = [n for n in sys.modules if n.startswith(("torch._dynamo.", "torch.distributed.tensor.",
    "sympy", "torch.distributed.checkpoint.")) and n not in stand_ins]
assert not loaded, loaded
"""
USES = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.utils import is_dtensor
from transformers.integrations.eager_paged import eager_paged_attention_forward as paged
assert not is_dtensor(torch.ones(1))
assert "torch._dynamo.eval_frame" not in sys.modules
config = Qwen3MoeConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=8)
torch.manual_seed(0)
model, tokens = Qwen3MoeForCausalLM(config).eval(), torch.arange(6)[None]
model.tp_plan = {"lm_head": "colwise"}  # its styles are registered by deferred modules
with torch.no_grad():
    expected = model(tokens).logits
    compiled = torch.compile(model, backend="eager")(tokens).logits
assert torch.equal(expected, compiled)
import torch._dynamo
assert type(sys.modules["torch._dynamo"]) is type(sys)
assert paged._torchdynamo_disable and paged._torchdynamo_wrapper_id == id(paged)

def graph(x):
    paged_is_excluded(x)
    return x + 1

@torch.compiler.disable
def paged_is_excluded(x):
    assert not torch.compiler.is_compiling()

assert torch.equal(torch.compile(graph, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
from torch.distributed.tensor import Shard
import transformers.distributed.sharding_utils as sharding
assert sharding.Shard is Shard and isinstance(Shard(0), sharding.Shard)
left = {f"{n}.{k}": v for n, m in list(sys.modules.items()) if n.startswith("transformers.")
    for k, v in list(vars(m).items()) if isinstance(v, Placeholder)}
assert not left, left
"""


def python(code: str, **variables: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", START + code],
        env=os.environ | variables, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_what_is_deferred_can_still_be_used() -> None:
    """A model is compiled by torch, and DTensor's classes are the real ones."""
    python(IMPORTS + USES)


@pytest.mark.parametrize("value", ["off", "0", "no", "FALSE"])
def test_the_switch_leaves_imports_as_they_are(value: str) -> None:
    code = "assert not [f for f in sys.meta_path if type(f).__name__ == 'DeferringFinder']"
    python(code, **{SWITCH: value})


@pytest.mark.parametrize("group", NAMES, ids=lambda group: next(iter(group)))
def test_each_name_exists(group: dict[str, str]) -> None:
    for module, names in group.items():
        there = __import__(module, fromlist=["_"])
        assert not [name for name in names.split() if not hasattr(there, name)]
