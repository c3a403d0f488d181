"""ggml's rounding of inputs, by hand-worked blocks and in a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from greenroom.config import LoadConfig
from greenroom.core.layout import BLOCKS, PLAIN
from greenroom.hf.check.ggml_inputs import (
    GgmlInputs,
    ggml_arithmetic,
    round_q8_0,
    round_q8_k,
    rounding_of,
)
from greenroom.hf.check.passes import logits_of, streamed_model
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_models import write

IDS = torch.arange(3, 23)[None]


def block(size: int, *first: float) -> Tensor:
    """A block of inputs that is zero after its first ones."""
    return torch.tensor([*first, *[0.0] * (size - len(first))])


def test_a_block_of_q8_0() -> None:
    """A scale of 1, then one that float16 cannot hold: 1 / 127 becomes 129 / 2^14."""
    rounded = round_q8_0(torch.cat([block(32, -127, 1.4, 0.6, 2.5), block(32, 1, 0.5)]))
    assert rounded[:5].tolist() == [-127, 1, 1, 2, 0]
    assert rounded[32:35].tolist() == [127 * 129 / 2**14, 64 * 129 / 2**14, 0]


def test_a_block_of_q8_k() -> None:
    """A scale of 2 for 256 inputs: small ones beside a large one vanish."""
    rounded = round_q8_k(torch.cat([block(256, -254, 3, 1, 5), torch.full((256,), 254.0)]))
    assert rounded[:5].tolist() == [-254, 4, 0, 4, 0]
    assert (rounded[256:] == 254).all()
    far = block(256, 254)
    far[200] = 0.9
    assert round_q8_k(far)[200] == 0
    assert round_q8_0(far)[200] == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("rounding", [round_q8_0, round_q8_k])
def test_blocks_of_zeros_stay_zeros(rounding: Any) -> None:
    assert not rounding(torch.zeros(2, 512)).any()


def test_every_type_of_ggml_has_its_inputs() -> None:
    assert {n for n, (inputs, _) in BLOCKS.items() if inputs == 256} == {
        name for name in BLOCKS if rounding_of(name) is round_q8_k
    }
    assert rounding_of("iq4_nl") is rounding_of("gguf_mxfp4") is round_q8_0
    assert rounding_of(PLAIN, "float32") is None
    half = rounding_of(PLAIN, "bfloat16")
    assert half is not None
    assert half(torch.tensor([1 + 2**-9])).item() == 1


@torch.inference_mode()
def test_parts_of_a_weight_have_its_rounding() -> None:
    """Experts of some classes multiply halves of a matrix, or its transpose in a batch."""
    x, weight, other = torch.randn(3, 64), torch.randn(8, 64), torch.randn(8, 64)
    expected = round_q8_0(x) @ weight.T
    inputs = GgmlInputs()
    inputs.register(weight, "q8_0", "uint8")
    with inputs:
        halves = [linear(x, half) for half in weight.chunk(2)]
        batch = torch.bmm(x[None], weight.T.contiguous()[None])[0]
        assert torch.equal(x @ other.T, linear(x, other))
    assert torch.allclose(torch.cat(halves, 1), expected, atol=1e-4)
    assert torch.allclose(batch, expected, atol=1e-4)
    assert not torch.allclose(x @ weight.T, expected, atol=1e-4)


class RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of all linear layers but a router of some experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is linear and args[1].shape[0] != self.experts:
            args = (round_q8_0(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_all_products_of_a_model_have_rounded_inputs(tmp_path: Path) -> None:
    """Logits have the bits of transformers' model in memory, with the same inputs."""
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    skeleton = ModelSkeleton.of(path, "float32")
    model = load_reference_model(ModelSkeleton.of(path, "float32"))
    exact = model(input_ids=IDS).logits[0]
    with RoundedInputs(model.config.num_experts):
        expected = model(input_ids=IDS).logits[0]
    config = LoadConfig(cache="50%", dtype="float32", kernels="eager", device="cpu")
    with streamed_model(str(path), config) as streamed:
        with ggml_arithmetic(streamed, skeleton):
            rounded = logits_of(streamed, [IDS])
        assert torch.equal(logits_of(streamed, [IDS]), exact)
    assert torch.equal(rounded, expected)
    assert not torch.equal(rounded, exact)
