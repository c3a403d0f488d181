"""Streamed from disk, a model gives transformers' eager bits: logits and greedy tokens.

The best known architectures; `test_architectures` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.models import cached_tiny, reference

NAMED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss",
    "glm4_moe", "phimoe", "granitemoe",
)  # fmt: skip


@contextmanager
def streamed(folder, **parts) -> Iterator[PreTrainedModel]:
    skeleton = ModelSkeleton.of(folder)
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, **parts))
    try:
        yield model
    finally:
        model.greenroom.detach()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(5))


@torch.inference_mode()
def assert_same(model: PreTrainedModel, original: PreTrainedModel, batch: torch.Tensor) -> None:
    mine, theirs = (m(input_ids=batch, use_cache=False).logits for m in (model, original))
    assert torch.isfinite(theirs).all()
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMED)
def test_logits_and_greedy_tokens_with_a_cache_below_one_layer_s_demand(name, dtype):
    folder = cached_tiny(name, dtype=dtype)
    original = reference(folder)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, original, ids(2, 9))
        prompt = ids(1, 7)
        mine, theirs = (m.generate(prompt, **options) for m in (model, original))
        assert torch.equal(mine.sequences, theirs.sequences)
        assert all(map(torch.equal, mine.logits, theirs.logits))
        stats = model.greenroom.stats()
        assert stats.expert_hits < stats.expert_requests
        assert stats.bytes_read > 0


@pytest.mark.parametrize("name", NAMED)
def test_default_kernels_give_the_same_bits_whatever_the_cache_and_the_arrival(name):
    folder, batch = cached_tiny(name, dtype="bfloat16"), ids(1, 6)
    outputs = []
    for capacity, fake, seed, readers in ((1, False, 0, 2), (24, True, 1, 3), (4, True, 2, 1)):
        with (
            streamed(folder, capacity=capacity, fake=fake, seed=seed, readers=readers) as model,
            torch.inference_mode(),
        ):
            first = model(input_ids=batch, use_cache=True)
            cache = first.past_key_values
            after = model(input_ids=ids(1, 1), past_key_values=cache, use_cache=True)
            outputs.append(torch.cat([first.logits, after.logits], 1))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    with torch.inference_mode():
        theirs = reference(folder)(input_ids=batch).logits
    assert (outputs[0][:, :-1].float() - theirs.float()).abs().max() < 0.1 * theirs.abs().max()


def test_cache_counts_equal_those_of_the_simulator():
    """A run requests what `runtime` order says, and the misses are the simulator's."""
    import numpy as np

    from greenroom.core.events import Routed
    from greenroom.policies import policy
    from greenroom.sim.clock import TraceStep
    from tests.sim.small import simulate

    steps: list[TraceStep] = []
    with streamed(cached_tiny("qwen3_moe"), capacity=5, kernels="eager") as model:
        driver = model.greenroom.driver
        tell, residents = driver._handle, driver.scheduler.resident_steps
        serve = residents.serve

        def note(event):
            steps.append(TraceStep(event.step, event.layer, event.experts.copy()))

        def recorded(event):
            if isinstance(event, Routed):
                note(event)
            tell(event)

        def served(event, now):
            slots = serve(event, now)
            if slots is not None:
                note(event)
            return slots

        driver._handle, residents.serve = recorded, served
        model.generate(ids(1, 7), max_new_tokens=12, do_sample=False)
        stats, pieces = model.greenroom.stats(), driver.scheduler.pieces
    result = simulate(steps, pieces, 5, policy("lru"))
    assert (stats.expert_requests, stats.expert_hits) == (
        result.requests,
        result.requests - result.misses,
    )
    assert stats.passes == 12
    assert all((np.diff(step.experts) > 0).all() for step in steps)
