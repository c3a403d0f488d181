"""The size of a prompt's blocks: given, of a CPU, and of a GPU by its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import greenroom
from greenroom.config import LoadConfig
from greenroom.errors import UsageError
from greenroom.hf.load.describe import Description
from greenroom.hf.memory.budget import Workspace
from greenroom.hf.memory.prompt_block import GPU_BLOCKS, largest_block, prompt_block
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.models import cached_tiny

GIB = 1 << 30
# Activations of 100 KiB a token, and a mask of 8 bytes a pair of tokens.
SPACE = Workspace(fixed=5 * GIB, token=100 << 10, context=0, pair=8)


@pytest.mark.parametrize(
    ("memory", "context", "block"),
    [
        (80 * GIB, 8192, 8192),  # 800 MiB and 512 MiB: under 5 GiB
        (16 * GIB, 8192, 4096),  # 1,312 MiB are more than 1 GiB, 400 and 256 MiB are not
        (8 * GIB, 8192, 2048),
        (1 * GIB, 8192, 2048),  # the least, although it takes more than 64 MiB
        (0, 8192, 2048),  # no GPU is here
        (16 * GIB, 4096, 8192),  # a prompt has no more tokens than the context: 528 MiB
    ],
)
def test_activations_take_at_most_a_sixteenth_of_a_gpu(memory, context, block):
    assert largest_block(SPACE, context, memory) == block


def test_a_cpu_and_a_given_number_need_no_gpu(monkeypatch):
    skeleton = ModelSkeleton.of(cached_tiny("qwen3_moe"))
    assert prompt_block(LoadConfig(), skeleton, 4096, on_a_gpu=False) == 512
    assert prompt_block(LoadConfig(prompt_block="96"), skeleton, 4096, on_a_gpu=True) == 96
    assert prompt_block(LoadConfig(), skeleton, 4096, on_a_gpu=True) == GPU_BLOCKS[-1]

    def properties(number: int) -> Any:
        return SimpleNamespace(total_memory=(80 * GIB, 1 << 20)[number])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert prompt_block(LoadConfig(), skeleton, 4096, on_a_gpu=True) == GPU_BLOCKS[0]
    both = LoadConfig(device="cuda:0,cuda:1")  # the smaller one decides
    assert prompt_block(both, skeleton, 4096, on_a_gpu=True) == GPU_BLOCKS[-1]


@pytest.mark.parametrize("wrong", [63, 8193, "many", "-64", "1e3"])
def test_an_impossible_block_is_refused(wrong):
    with pytest.raises(UsageError, match="--prompt-block must be"):
        LoadConfig(prompt_block=wrong)


def test_larger_blocks_take_memory_from_the_slots():
    skeleton = ModelSkeleton.of(cached_tiny("qwen3_moe"))

    def needs(block: int) -> int:
        config = LoadConfig(prompt_block=block, context=4096)
        description = Description.of(skeleton, config, on_a_gpu=False)
        return description.slot_budget(2, True).first_block_needs().workspace

    assert needs(256) > needs(128) > needs(64)


@pytest.mark.parametrize("block", [64, 128])
def test_a_prompt_is_computed_in_blocks(block):
    model, _ = greenroom.load("demo", cache="50%", prompt_block=block, device="cpu")
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = torch.arange(3, 203)[None]
    with torch.inference_mode():
        model.generate(prompt, max_new_tokens=2, do_sample=False, min_new_tokens=2)
    model.greenroom.detach()
    full, rest = divmod(200, block)
    assert lengths[: full + 1] == [block] * full + [rest]
