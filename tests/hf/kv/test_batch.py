"""Several sequences in one pass: each gets what it gets by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.core.predictor import PassStart
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.kv import batch as together
from greenroom.hf.kv.batch import Batch, causal
from greenroom.hf.kv.kinds import CacheKind
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.codegen.entries.products import FEW
from greenroom.runtime.kernels.codegen.formats import codes
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer
from tests.gguf_models import write
from tests.models import cached_tiny

WIDE = {"hidden_size": 64, "head_dim": 16}
# What lies together as it is, what needs keys and values to go through its layers, what is apart.
TOGETHER = {
    "qwen3_moe": {},
    "mixtral": {"sliding_window": 4},
    "olmoe": {},
    "gpt_oss": {"sliding_window": 4},
    "qwen2_moe": {},
    "deepseek_v3": {},
}
APART = {
    "qwen3_next": "does not store keys and values token by token",
    "deepseek_v32": "does not store keys and values token by token",
}


@contextmanager
def served(name: str, dtype: str = "float32", **options: Any) -> Iterator[Any]:
    parts = options.pop("parts", {})
    with attached(cached_tiny(name, dtype=dtype, **options), **parts) as model:
        yield model


@contextmanager
def attached(path: Path, stored: bool = False, **parts: Any) -> Iterator[Any]:
    """A checkpoint's model; `stored`: its dense matrices as well stay as they are in the file."""
    skeleton = ModelSkeleton.of(path)
    if stored:
        skeleton.keep_dense_encoded()
    model: Any = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, **{"capacity": 6, **parts}))
    try:
        yield model
    finally:
        model.greenroom.detach()


def draw(*counts: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=random).tolist() for n in counts]


def caches(batch: Batch, count: int) -> list[Any]:
    return [batch.cache() for _ in range(count)]


def passes(batch: Batch, prompts: list[list[int]], ends: list[list[int]]) -> list[list[Any]]:
    """The logits of the parts that end at `ends` of each sequence."""
    found, own, begin = [], caches(batch, len(prompts)), [0] * len(prompts)
    with torch.inference_mode():
        for end in ends:
            given = [ids[a:b] for ids, a, b in zip(prompts, begin, end, strict=True)]
            found.append(batch(given, own))
            begin = end
    return found


@pytest.mark.parametrize("name", TOGETHER)
def test_each_gets_what_it_gets_by_itself(name: str) -> None:
    prompts = draw(14, 9, 21)
    ends = [[9, 3, 5], [10, 4, 17], [11, 5, 18], [12, 6, 19]]  # prompts, both, single tokens
    with served(name, **TOGETHER[name]) as model:
        batch = Batch(model)
        assert batch.sequential_reason == ""
        found = passes(batch, prompts, ends)
        for place in range(3):
            own = [[each[place]] for each in ends]
            for logits, (alone,) in zip(
                [each[place] for each in found],
                passes(batch, [prompts[place]], own),
                strict=True,
            ):
                torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", APART)
def test_what_cannot_lie_together_is_known(name: str) -> None:
    with served(name) as model:
        batch = Batch(model)
        assert APART[name] in batch.sequential_reason
        assert batch.can_batch([5])
        assert not batch.can_batch([1, 1])
        own = [batch.cache()]
        with torch.inference_mode():
            for ids in draw(7, 1, 1):
                (logits,) = batch([ids], own)
                assert torch.isfinite(logits).all()


def test_quantised_keys_and_values_are_not_each_token_s_own() -> None:
    with served("qwen3_moe", parts={"keys_values": KVBytes((), CacheKind("fp8"))}) as model:
        batch = Batch(model)
        assert "does not store keys and values token by token" in batch.sequential_reason
        assert batch.cache() is None


@pytest.mark.parametrize("threads", [1, 2])
def test_single_tokens_have_the_bits_of_one(threads: int, monkeypatch: Any) -> None:
    calls, batch_forward = [], FusedDecoderLayer.batch_forward
    monkeypatch.setattr(
        FusedDecoderLayer, "batch_forward", lambda *args: (calls.append(1), batch_forward(*args))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with served("qwen3_moe", "bfloat16", **WIDE) as model:
            batch = Batch(model, exact=True)
            assert batch.sequential_reason == ""
            prompts = draw(14, 9, 40)
            alone, own = [], []
            for ids in prompts:
                (found,) = zip(*passes(batch, [ids], [[n] for n in range(6, 10)]), strict=True)
                alone.append(found[1:])
                own += caches(batch, 1)
            with torch.inference_mode():
                for place, ids in enumerate(prompts):
                    batch([ids[:6]], own[place : place + 1])
                calls.clear()
                for step in range(3):
                    found = batch([[ids[6 + step]] for ids in prompts], own)
                    for place, logits in enumerate(found):
                        assert torch.equal(logits, alone[place][step])
            assert len(calls) == 3 * model.config.num_hidden_layers
    finally:
        torch.set_num_threads(before)


def test_they_do_where_many_of_a_stored_format_have_one_expert(tmp_path: Path) -> None:
    """One token of an expert is multiplied by whole numbers, many by its rows, expanded."""
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    prompt, count = draw(9)[0], 3 * FEW
    found = {}
    with attached(path, stored=True) as model:
        for exact in (True, False):
            batch = Batch(model, exact=exact)
            assert batch.sequential_reason == ""
            own = caches(batch, count + 1)
            with torch.inference_mode():
                for place in range(count + 1):
                    batch([prompt[:6]], own[place : place + 1])
                (alone,) = batch([prompt[6:7]], own[count:])
                found[exact] = [
                    torch.equal(logits, alone)
                    for logits in batch([prompt[6:7]] * count, own[:count])
                ]
    assert all(found[True])
    assert any(found[False]) != codes.INTEGERS


def test_a_sequence_may_begin_with_one_token_beside_others() -> None:
    with served("qwen3_moe", "bfloat16", **WIDE) as model:
        batch = Batch(model)
        one, two = draw(9, 3)
        own = caches(batch, 2)
        with torch.inference_mode():
            batch([one[:8]], own[:1])
            both = [batch([one[8:], two[:1]], own), batch([[5], two[1:2]], own)]
        alone = passes(batch, [[*one, 5]], [[8], [9], [10]])
        began = passes(batch, [two], [[1], [2]])
        for step in range(2):
            for found, wanted in ((both[step][0], alone[step + 1][0]),
                                  (both[step][1], began[step][0])):  # fmt: skip
                distance = (found - wanted).float().norm() / wanted.float().norm()
                assert distance < 0.05


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
def test_bits_are_not_promised_where_they_cannot_be_kept(name: str) -> None:
    with served(name) as model:  # float32, or another attention
        assert (
            "not every layer is computed token by token"
            in Batch(model, exact=True).sequential_reason
        )


def test_a_model_that_mixes_up_its_tokens_is_found_out(monkeypatch: Any) -> None:
    def everything(new: int, tokens: int, window: Any, like: Any) -> Any:
        return torch.ones(1, 1, new, tokens, dtype=torch.bool)

    with served("qwen3_moe") as model, monkeypatch.context() as patch:
        patch.setattr(together, "causal", everything)
        assert "mixes tokens of different sequences" in Batch(model).sequential_reason


def test_a_trial_reads_nothing_and_leaves_no_trace() -> None:
    with served("qwen3_moe") as model:
        driver = model.greenroom.driver
        attention = model.config._attn_implementation
        Batch(model), Batch(model, exact=True)
        assert driver.meter.bytes_read == driver.scheduler.counts.requests == 0
        assert model.config._attn_implementation == attention
        assert all("forward" not in vars(m) for m in model.greenroom.bindings.modules)
        (logits,) = passes(Batch(model), draw(5), [[5]])[0]
        assert driver.meter.passes == 1
        assert logits.abs().sum() > 0


def test_what_predictors_and_policies_are_told_of_a_batch(monkeypatch: Any) -> None:
    with served("qwen3_moe") as model:
        told: list[PassStart] = []
        begin = model.greenroom.driver.begin_pass
        monkeypatch.setattr(
            model.greenroom.driver, "begin_pass", lambda at: (told.append(at), begin(at))
        )
        batch, own = Batch(model), None
        own = caches(batch, 2)
        one, two = draw(6, 4)
        with torch.inference_mode():
            model.greenroom.hooks.announce_prompts(2)
            batch([one, two], own)
            model.greenroom.hooks.announce_prompts(0)
            batch([[7], [8]], own)
            third = caches(batch, 1)
            batch([[9]], third)  # nobody said: it begins, since it has no keys and values
            model.greenroom.hooks.announce_prompts(1)
            batch([[5], [6, 7, 8]], [own[0], third[0]])
    assert [(at.request, at.first, at.tokens, at.prefill) for at in told] == [
        (2, 0, 10, True), (2, 10, 2, False), (3, 12, 1, False), (4, 13, 4, True),
    ]  # fmt: skip
    assert told[0].token_ids is not None
    assert told[0].token_ids.tolist() == one + two


def test_what_a_token_looks_at() -> None:
    like = torch.zeros(())
    assert causal(1, 9, None, like) is None
    assert causal(1, 4, 4, like) is None
    found = causal(2, 5, 3, like)
    assert found is not None
    assert found[0, 0].tolist() == [[False, True, True, True, False],
                                    [False, False, True, True, True]]  # fmt: skip
    one = causal(1, 5, 3, like)
    assert one is not None
    assert one[0, 0].tolist() == [[False, False, True, True, True]]
