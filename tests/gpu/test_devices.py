"""Experts over two GPUs: the bits of one."""

from __future__ import annotations

import pytest
import torch

import greenroom
from tests.gpu.test_models import OPTIONS, prompt
from tests.models import cached_tiny, reference

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("kernels", ["eager", "triton"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_bits_are_those_of_one_gpu(name, kernels):
    folder, answers = str(cached_tiny(name, dtype="bfloat16", tokenizer=True)), []
    for device in ("cuda:0", "cuda:0,cuda:1", "cuda:1,cuda:0"):
        for cache in ("25%", "100%"):
            model, _ = greenroom.load(folder, cache=cache, device=device, kernels=kernels)
            try:
                ids = prompt().to(model.device)
                with torch.inference_mode():
                    logits = model(ids).logits.cpu()
                answers.append((model.generate(ids, **OPTIONS).cpu(), logits))
            finally:
                model.greenroom.detach()
    assert all(torch.equal(a, answers[0][0]) and torch.equal(b, answers[0][1]) for a, b in answers)
    if kernels == "eager":
        wanted = reference(cached_tiny(name, dtype="bfloat16", tokenizer=True)).cuda()
        assert torch.equal(wanted.generate(prompt(), **OPTIONS).cpu(), answers[0][0])
        wanted.cpu()


def test_what_is_kept_in_host_memory_serves_both():
    folder = str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True))
    model, _ = greenroom.load(folder, memory="1GiB", device="cuda:0,cuda:1", host_memory="auto")
    try:
        model.generate(prompt(), **OPTIONS)
        stats = model.greenroom.stats()
        assert [link["link"] for link in stats.links][1:] == ["host -> cuda:0", "host -> cuda:1"]
        assert [slots.capacity for slots in model.greenroom.driver.slots.pools] == [
            stats.capacity // 2, stats.capacity // 2,
        ]  # fmt: skip
    finally:
        model.greenroom.detach()
