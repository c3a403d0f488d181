"""A compiled gated MLP has torch's values but for last bits, and one token's bits for several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from greenroom.runtime.kernels.dense.accelerate import accelerate
from greenroom.runtime.kernels.dense.blocks.mlp import FEW, LINEAR, CompiledMlp
from greenroom.runtime.kernels.dense.stored import attach_matrix
from tests.runtime.kernels.codes import STYLES
from tests.runtime.kernels.dense.test_stored import BY_NAME, matrix

HIDDEN, INNER = 512, 768
SHAPES = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Mlp(nn.Module):
    """The common kind; the others differ in one thing each."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        for name, (inputs, outputs) in zip(
            LINEAR, ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)), strict=True
        ):
            setattr(self, name, nn.Linear(inputs, outputs, bias=bias))
        self.act_fn = nn.SiLU()
        self.to(DTYPE).requires_grad_(False)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))


class Gelu(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return gelu(gate) * up


class Clamped(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate.clamp(max=7)) * up


class InFloat(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return (silu(gate.float()) * up.float()).to(gate.dtype)


class Swapped(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu(up) * gate


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Owner(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, dtype=DTYPE), requires_grad=False)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_mlp_is_computed_like_torch_s(bias: bool, dtype: torch.dtype) -> None:
    module = Mlp(bias).to(dtype)
    ours = CompiledMlp.of(module, dtype)
    assert ours is not None
    for scale in (0.1, 1, 30):
        for shape in ((1, 1, HIDDEN), (5, HIDDEN), (1, FEW, HIDDEN)):
            x = (torch.randn(shape) * scale).to(dtype)
            out = ours(x)
            assert out.shape == x.shape
            assert out.dtype is dtype
            assert distance(out, module(x)) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kernels", ["native", "precise", "rounded"])
@pytest.mark.parametrize("style", [None, *STYLES], ids=str)
def test_tokens_have_the_same_bits_alone_and_together(style: Any, kernels: str) -> None:
    module = Mlp()
    if style is not None:
        for part, shape in zip(LINEAR, SHAPES, strict=True):
            attach_matrix(module._modules[part], matrix(style, shape))
    done = accelerate(module, kernels=kernels)
    assert done.counts["mlp"] == 1
    x = torch.randn(FEW, HIDDEN).to(DTYPE)
    together = module(x)
    assert torch.equal(together, torch.cat([module(row[None]) for row in x]))
    assert torch.equal(module(x[:3]), together[:3])
    done.detach()


@pytest.mark.parametrize("name", ["q8_0", "q6_k", "int4-float16"])
def test_the_compiled_forward_calls_no_part(name: str) -> None:
    module = Mlp()
    attach_matrix(module.down_proj, matrix(BY_NAME[name], (HIDDEN, INNER)))
    done = accelerate(module)
    x = torch.randn(2, HIDDEN).to(DTYPE)
    parts = [vars(module._modules[each]) for each in LINEAR]
    one_by_one = module.down_proj(silu(module.gate_proj(x)) * module.up_proj(x))
    assert distance(module(x), one_by_one) < 4 * torch.finfo(DTYPE).eps
    for part in parts:
        part["forward"] = None
    module(x)
    done.detach()


@pytest.mark.parametrize("kind", [Gelu, Clamped, InFloat, Swapped, Scaled, Owner])
def test_mlps_of_other_kinds_are_not_compiled(kind: type[Mlp]) -> None:
    assert CompiledMlp.of(kind(), DTYPE) is None
    assert "mlp" not in accelerate(kind()).counts


def test_mlps_of_other_types_and_shapes_are_not_compiled() -> None:
    assert CompiledMlp.of(Mlp().float(), torch.float32) is None
    assert CompiledMlp.of(Mlp(), torch.float16) is None
    wrong = Mlp()
    wrong.up_proj = nn.Linear(HIDDEN, INNER + 64, dtype=DTYPE)
    assert CompiledMlp.of(wrong, DTYPE) is None
    missing = Mlp()
    del missing.gate_proj
    assert CompiledMlp.of(missing, DTYPE) is None
    assert CompiledMlp.of(nn.Linear(HIDDEN, INNER, dtype=DTYPE), DTYPE) is None


def test_other_calls_and_changed_parts_go_to_the_module_s_forward(monkeypatch) -> None:
    module, plain = Mlp(), None
    plain = copy.deepcopy(module)
    accelerate(module)
    called: list[Any] = []
    run = CompiledMlp.__call__
    monkeypatch.setattr(CompiledMlp, "__call__", lambda *a: called.append(a) or run(*a))
    many = torch.randn(FEW + 1, HIDDEN).to(DTYPE)
    assert torch.equal(module(many), plain(many))
    x = many[:1]
    with torch.enable_grad():
        module(x)
    module(many.T.contiguous().T[:1])
    hook = module.up_proj.register_forward_hook(lambda *_: None)
    module(x)
    hook.remove()
    assert not called
    module(x)
    assert len(called) == 1
    module.up_proj = copy.deepcopy(plain.up_proj)
    module(x)
    assert len(called) == 1
