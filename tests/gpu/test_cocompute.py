"""A GPU and the host's processor in one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import greenroom
from greenroom.core.cost import Work
from greenroom.runtime.cuda.engine import Cuda
from tests.gpu.test_models import OPTIONS, prompt
from tests.models import cached_tiny, reference

CoCompute = pytest.importorskip("greenroom.core.options.rules.cocompute").CoCompute


def test_inputs_come_down_and_outputs_go_up():
    engine, there = Cuda(), torch.randn(5, 64, device="cuda").bfloat16()
    host, mark = engine.copy_to_host(there)
    engine.wait(mark)
    assert host.device.type == "cpu"
    assert host.is_pinned()
    assert torch.equal(host, there.cpu())
    assert torch.equal(engine.copy_to_device(host * 2), there * 2)


@pytest.mark.parametrize("kernels", ["triton", "eager"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_what_the_host_computes_is_near_to_the_model(name, kernels):
    """Every miss is left to the host, as if it took no time there."""
    folder = cached_tiny(name, dtype="bfloat16", tokenizer=True)
    model, _ = greenroom.load(
        str(folder), device="cuda", cache="25%", prefetch="off", host_memory="auto",
        co_compute="auto", kernels=kernels,
    )  # fmt: skip
    try:
        rates = model.greenroom.driver.scheduler.option(CoCompute).rates
        rates.set_costs(replace(rates._costs, host=Work.constant(1e-9)))
        model.generate(prompt(), **OPTIONS)
        with torch.inference_mode():
            got = model(prompt()).logits.float().cpu()
            theirs = reference(folder)(prompt().cpu()).logits.float()
        assert model.greenroom.stats().co_compute["on_host"] > 0
    finally:
        model.greenroom.detach()
    assert (got - theirs).abs().max() < 0.1 * theirs.abs().max()
