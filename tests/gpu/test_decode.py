"""Decoding on a real GPU: graphs, reports to the host, and nothing else that is waited for."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import greenroom
from greenroom.runtime.kernels.triton import TritonKernel
from tests.gpu.test_models import prompt
from tests.models import cached_tiny

OPTIONS = ({"cache": "100%"}, {}, {"cache": "10%", "host_memory": "auto"}, {"prefetch": "auto"})
TOKENS = 6


def logits(name: str, **options) -> torch.Tensor:
    """Logits of a prompt, and of tokens that are decoded one by one."""
    folder = str(cached_tiny(name, dtype="bfloat16", tokenizer=True))
    options = {"cache": "25%", "prefetch": "off", "kernels": "triton", **options}
    model, _ = greenroom.load(folder, device="cuda", **options)
    try:
        return answer(model)
    finally:
        model.greenroom.detach()


@torch.inference_mode()
def answer(model: Any) -> torch.Tensor:
    out = model(prompt(), use_cache=True)
    found = [out.logits]
    for token in prompt()[0, :TOKENS]:
        out = model(token.view(1, 1), past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_bits_are_those_of_routing_on_the_host(name, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        got = [logits(name, **options) for options in OPTIONS]
    assert "kernel by kernel" not in caplog.text  # graphs were captured
    monkeypatch.setattr(TritonKernel, "token_launches", lambda *_: None)
    expected = logits(name)
    assert expected.isfinite().all()
    for each in got:
        assert torch.equal(each, expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_token_is_one_graph(name, caplog):
    """With the bits of passes that load experts; it follows the KV cache of each request."""
    folder, found = str(cached_tiny(name, dtype="bfloat16", tokenizer=True)), []
    for cache in ("100%", "25%"):
        model, _ = greenroom.load(
            folder, device="cuda", cache=cache, prefetch="off", kernels="triton"
        )
        try:
            with torch.inference_mode(), caplog.at_level(logging.WARNING):
                caches = [model(prompt(), use_cache=True).past_key_values for _ in range(2)]
                for n, token in enumerate(prompt()[0].repeat(60)):  # the KV cache grows
                    keys = caches[n % 3 == 0]
                    out = model(token.view(1, 1), past_key_values=keys, use_cache=True)
                    found.append(out.logits)
            graph = model.greenroom.bindings._graph
            assert not graph._refused
            assert (graph._threads.graph is not None) == (cache == "100%")
        finally:
            model.greenroom.detach()
    assert "as a graph" not in caplog.text
    half = len(found) // 2
    assert half * 2 == len(found)
    assert all(map(torch.equal, found[:half], found[half:]))


def test_threads_with_streams_of_their_own_share_the_slots():
    folder = str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True))
    model, _ = greenroom.load(
        folder, device="cuda", cache="25%", prefetch="off", kernels="triton", host_memory="auto"
    )

    def answer_on(stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            got = answer(model)
        stream.synchronize()
        return got

    try:
        expected = answer(model)
        torch.cuda.synchronize()
        with ThreadPoolExecutor(2) as threads:
            for _ in range(5):
                both = [threads.submit(answer_on, torch.cuda.Stream()) for _ in range(2)]
                for each in both:
                    assert torch.equal(each.result(), expected)
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("cache", ["100%", "25%"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_decode_pass_waits_for_no_operation(name, cache):
    """Torch's own check raises where an operation waits for the device unasked."""
    folder = str(cached_tiny(name, dtype="bfloat16", tokenizer=True))
    model, _ = greenroom.load(
        folder, device="cuda", cache=cache, prefetch="off", kernels="triton", host_memory="auto"
    )
    try:
        with torch.inference_mode():
            tokens = prompt()[0]
            cache_of_keys = model(prompt(), use_cache=True).past_key_values
            for n, token in enumerate(tokens):
                if n == 4:  # kernels are compiled, graphs captured, inputs compared once
                    torch.cuda.set_sync_debug_mode("error")
                model(token.view(1, 1), past_key_values=cache_of_keys, use_cache=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        model.greenroom.detach()


@pytest.mark.parametrize("prefetch", ["off", "auto"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_prompts_have_the_same_bits_while_their_experts_are_copied(name, prefetch):
    """Copies are in order, from host memory; tokens between two prompts change the cache."""
    folder, found = str(cached_tiny(name, dtype="bfloat16", tokenizer=True)), []
    drawn = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (1, n), generator=drawn).cuda() for n in (7, 60, 9, 200, 33)]
    for cache in ("100%", "25%"):
        model, _ = greenroom.load(
            folder, device="cuda", cache=cache, prefetch=prefetch, kernels="triton",
            host_memory="auto",
        )  # fmt: skip
        try:
            with torch.inference_mode():
                for ids in [*prompts, *prompts]:
                    out = model(ids, use_cache=True)
                    after = model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
                    found += [out.logits, after.logits]
        finally:
            model.greenroom.detach()
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))
