"""Compiled dense layers are near torch's, for supported inputs only, and removable."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from greenroom.runtime.kernels.dense import norms
from greenroom.runtime.kernels.dense.accelerate import accelerate, norm_style
from tests.runtime.kernels.toys import experts

DTYPES = (torch.bfloat16, torch.float16)

NORMS = {
    Qwen3MoeRMSNorm: norms.ROUND_THEN_SCALE,
    GptOssRMSNorm: norms.SCALE_IN_FLOAT,
    Gemma3RMSNorm: norms.ONE_PLUS_IN_FLOAT,
}


class Toy(nn.Module):
    """Dense layers, a router and experts, as a decoder layer has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain, self.biased = nn.Linear(72, 130, bias=False), nn.Linear(130, 67)
        self.gate = nn.Linear(72, 6)
        self.norm = Qwen3MoeRMSNorm(72)
        self.layer_norm = nn.LayerNorm(72)
        self.experts = experts("muse_spark", dtype)
        self.to(dtype).requires_grad_(False)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.biased(self.plain(self.norm(x)))


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for a few last bits."""
    distance = (a.double() - b.double()).norm() / b.double().norm()
    return (
        a.dtype == b.dtype and a.shape == b.shape and float(distance) < 2 * torch.finfo(a.dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eligible_modules_have_compiled_forwards_until_detach(dtype):
    model = Toy(dtype)
    small, large = torch.randn(1, 3, 72).to(dtype), torch.randn(2, 9, 72).to(dtype)
    expected = [model(small), model(large)]
    done = accelerate(model)
    assert done.counts == {"linear": 2, "norm": 1}
    swapped = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert swapped == {"plain", "biased", "norm"}
    assert near(model(small), expected[0])
    assert near(model(large), expected[1])
    done.detach()
    done.detach()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(small), expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (130, 64), (257, 200), (1024, 1024)])
def test_linear_is_nearer_to_the_exact_product_than_one_rounding(shape, rows, dtype):
    module = nn.Linear(shape[1], shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    exact = x.double() @ module.weight.double().T + module.bias.double()
    accelerate(module)
    assert (module(x).double() - exact).abs().max() <= 1.01 * torch.finfo(
        dtype
    ).eps / 2 * exact.abs().max() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_distinguished_by_their_results(kind, dtype):
    module = kind(200).to(dtype)
    module.weight.data.normal_()
    x = torch.randn(3, 4, 200).to(dtype)
    expected = module(x)
    assert norm_style(module) == (NORMS[kind], 1e-6)
    assert accelerate(module).counts == {"norm": 1}
    assert near(module(x), expected)


def test_a_norm_that_takes_a_gate_too_stays_torch_s():
    class Gated(Qwen3MoeRMSNorm):
        def forward(self, x, gate=None):
            return super().forward(x if gate is None else x * gate)

    module = Gated(64)
    x = torch.randn(1, 64)
    expected = module(x, x)
    assert accelerate(module).counts == {}
    assert torch.equal(module(x, x), expected)


def test_unsupported_inputs_use_the_original_forward():
    module = nn.Linear(64, 8, bias=False).bfloat16()
    plain = nn.Linear(64, 8, bias=False).bfloat16()
    plain.load_state_dict(module.state_dict())
    accelerate(module)
    wide = torch.randn(64, 3).bfloat16()
    assert torch.equal(module(wide.T), plain(wide.T))  # not contiguous
    assert torch.equal(module(wide[:0].new_empty(0, 64)), plain(wide.new_empty(0, 64)))
    with pytest.raises(RuntimeError):
        module(torch.randn(1, 64))  # float32 into bfloat16: torch's own error
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 32).bfloat16())
    other = nn.Parameter(torch.randn(8, 64).bfloat16(), requires_grad=False)
    module.weight = plain.weight = other  # replaced: the address known is no longer the weight's
    x = torch.randn(1, 64).bfloat16()
    assert torch.equal(module(x), plain(x))
    with torch.enable_grad():
        x.requires_grad_()
        assert module(x).grad_fn is not None


def test_meta_float32_and_hooked_modules_get_no_compiled_forward():
    with torch.device("meta"):
        assert accelerate(nn.Linear(8, 8)).counts == {}
    assert accelerate(nn.Linear(8, 8)).counts == {}  # float32
    hooked = nn.Linear(8, 8).bfloat16()
    hooked.register_forward_hook(lambda *_: None)
    assert accelerate(hooked).counts == {}


def test_calls_from_many_threads_give_the_same_bits():
    """Every thread has its own OpenMP team; nothing is shared but the weights."""
    torch.set_num_threads(2)
    module = nn.Linear(512, 600, bias=False).bfloat16()
    x = torch.randn(1, 512).bfloat16()
    accelerate(module)
    want, wrong = module(x), []

    def work() -> None:
        with torch.no_grad():
            wrong.extend(i for i in range(300) if not torch.equal(module(x), want))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("rows", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_rows_have_the_bits_of_single_rows(dtype, rows):
    model = Toy(dtype)
    done = accelerate(model)
    for layer, width in ((model.plain, 72), (model.biased, 130)):
        x = torch.randn(1, rows, width).to(dtype)
        sequential = torch.cat([layer(each) for each in x.split(1, 1)], 1)
        assert torch.equal(layer(x), sequential)
        assert near(sequential, type(layer).forward(layer, x))
    done.detach()
