"""Attention of one token, compiled without a GPU: machine code, and how often it is compiled."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from greenroom.runtime.kernels.triton import token_attention
from tests.offline_gpu.compiler import compile_launch, disassemble, specialize
from tests.offline_gpu.findings import examine
from tests.offline_gpu.launches import Launch
from tests.offline_gpu.limits import SHARED
from tests.offline_gpu.listing import operation

# Heads, key heads, and the widths of a key and of a value.
MODELS = {
    "qwen3-30b-a3b": (32, 4, 128, 128),
    "olmoe-1b-7b": (16, 16, 128, 128),
    "mixtral-8x7b": (32, 8, 128, 128),
    "gpt-oss-120b": (64, 8, 64, 64),
    "deepseek-v3": (128, 1, 512, 64),  # the two vectors of a token
    "deepseek-v3, expanded": (128, 128, 192, 128),
}
WINDOWS = {"gpt-oss-120b": 128}
HAVE_SINKS, LATENT = {"gpt-oss-120b"}, {"deepseek-v3"}
ROOM = 4096
FLOATING = {"FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "MUFU", "HMMA", "HGMMA", "FSETP", "FSEL"}


def launches(
    model: str, in_place: bool, monkeypatch: pytest.MonkeyPatch, tokens: int = 300
) -> list[Launch]:
    """The launches of one token's attention, with tensors that are not there."""
    recorded: list[Launch] = []

    class Recorder:
        def __init__(self, program: Any, grid: Any, arguments: Any, constants: Any) -> None:
            label = program.fn.__name__
            recorded.append(Launch(label, "plain", program, arguments, constants))

        def start(self) -> None: ...

    monkeypatch.setattr(token_attention, "Launch", Recorder)
    heads, key_heads, width, values_width = MODELS[model]
    latent, room = model in LATENT, -(-tokens // 256) * 256

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query = empty(1, heads, 1, width + latent * values_width)
    keys, values = (empty(1, key_heads, room, n)[:, :, :tokens] for n in (width, values_width))
    sinks = empty(heads) if model in HAVE_SINKS else None
    if in_place:
        new = keys[:, :, :1], values[:, :, :1]
        numbers, most = (empty(n, dtype=torch.int64) for n in (4, 1)), WINDOWS.get(model, ROOM)
        token_attention.attend_in_place(query, *new, *numbers, 0.1, most, sinks, latent)
    else:
        mask = None if sinks is None else empty(1, 1, 1, tokens)  # as transformers has it then
        token_attention.attend_to_all(query, keys, values, 0.1, mask, sinks, latent)
    return recorded


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_the_machine_code_is_within_its_limits(architecture, monkeypatch):
    assert not triton.knobs.runtime.interpret, "run it by make check-gpu-offline"
    models = "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3"
    cases = product(models, (False, True))
    made = [each for case in cases for each in launches(*case, monkeypatch)]
    for launch, found in zip(made, examine(made, architecture), strict=True):
        assert not found.spills
        assert found.shared <= SHARED[architecture][0]
        assert not found.byte_loads
        if launch.label == "attend":
            assert found.wide_bytes > 0  # keys and values, by 128 bits
            assert found.tensor_cores


def arithmetic(made: list[Launch], architecture: int) -> list[Counter[str]]:
    """The numbers of floating-point operations in the machine code of launches."""
    code = [compile_launch(launch, architecture).cubin for launch in made]
    listings = disassemble(code, architecture)
    names = [[operation(each) for each in listing.instructions] for listing in listings]
    return [Counter(name for name in each if name in FLOATING) for each in names]


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_a_graph_s_kernels_round_as_those_without_a_graph(model, architecture, monkeypatch):
    """Neither fuses other operations, nor takes another order of sums."""
    once, again = (
        [each for each in launches(model, in_place, monkeypatch) if each.label != "append"]
        for in_place in (False, True)
    )
    counts = arithmetic([*once, *again], architecture)
    assert counts[: len(once)] == counts[len(once) :]
    assert sum(counts[: len(once)], Counter()).total() > 50


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["olmoe-1b-7b", "mixtral-8x7b", "deepseek-v3, expanded"])
def test_other_numbers_and_widths_of_heads_fit_too(model, monkeypatch):
    made = launches(model, False, monkeypatch)
    for launch, found in zip(made, examine(made, 80), strict=True):
        assert not found.spills
        assert found.wide_bytes > 0 or launch.label != "attend"


@pytest.mark.offline_gpu
def test_kernels_are_compiled_once_for_any_number_of_tokens(monkeypatch):
    keys = {
        (launch.label, specialize(launch, 90).key)
        for tokens in (2, 16, 17, 255, 256, 257, 4096, 5000)
        for launch in launches("qwen3-30b-a3b", False, monkeypatch, tokens)
    }
    assert len(keys) == 2
