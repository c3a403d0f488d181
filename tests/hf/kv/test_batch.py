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
from greenroom.runtime.kernels.cpu import FEW
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer
from tests.gguf_models import write
from tests.models import cached_tiny

WIDE = {"hidden_size": 64, "head_dim": 16}
# What lies together as it is, what needs keys and values to go through its layers, what is apart.
BATCHED = {
    "qwen3_moe": {},
    "mixtral": {"sliding_window": 4},
    "olmoe": {},
    "gpt_oss": {"sliding_window": 4},
    "qwen2_moe": {},
    "deepseek_v3": {},
}
SEQUENTIAL = {
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
    logits, own_caches, begin = [], caches(batch, len(prompts)), [0] * len(prompts)
    with torch.inference_mode():
        for end in ends:
            new_ids = [ids[a:b] for ids, a, b in zip(prompts, begin, end, strict=True)]
            logits.append(batch(new_ids, own_caches))
            begin = end
    return logits


@pytest.mark.parametrize("name", BATCHED)
def test_each_sequence_has_the_logits_of_a_pass_of_its_own(name: str) -> None:
    prompts = draw(14, 9, 21)
    ends = [[9, 3, 5], [10, 4, 17], [11, 5, 18], [12, 6, 19]]  # prompts, both, single tokens
    with served(name, **BATCHED[name]) as model:
        batch = Batch(model)
        assert batch.sequential_reason == ""
        batched = passes(batch, prompts, ends)
        for place in range(3):
            own_caches = [[each[place]] for each in ends]
            for logits, (single,) in zip(
                [each[place] for each in batched],
                passes(batch, [prompts[place]], own_caches),
                strict=True,
            ):
                torch.testing.assert_close(logits, single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_models_that_cannot_batch_name_the_reason(name: str) -> None:
    with served(name) as model:
        batch = Batch(model)
        assert SEQUENTIAL[name] in batch.sequential_reason
        assert batch.can_batch([5])
        assert not batch.can_batch([1, 1])
        own_caches = [batch.cache()]
        with torch.inference_mode():
            for ids in draw(7, 1, 1):
                (logits,) = batch([ids], own_caches)
                assert torch.isfinite(logits).all()


def test_offloaded_keys_and_values_cannot_be_batched() -> None:
    with served("qwen3_moe", parts={"keys_values": KVBytes((), CacheKind("offloaded"))}) as model:
        batch = Batch(model)
        assert "does not store keys and values token by token" in batch.sequential_reason
        assert batch.cache() is None


@pytest.mark.parametrize(
    ("threads", "kind"), [(1, "dynamic"), (2, "dynamic"), (2, "int8"), (1, "int4")]
)
def test_batched_single_tokens_have_the_bits_of_one_sequence(
    threads: int, kind: str, monkeypatch: Any
) -> None:
    calls, batch_forward = [], FusedDecoderLayer.batch_forward
    monkeypatch.setattr(
        FusedDecoderLayer, "batch_forward", lambda *args: (calls.append(1), batch_forward(*args))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = {"keys_values": KVBytes((), CacheKind(kind))}
        with served("qwen3_moe", "bfloat16", parts=parts, **WIDE) as model:
            batch = Batch(model, exact=True)
            assert batch.sequential_reason == ""
            prompts = draw(14, 9, 40)
            single, own_caches = [], []
            for ids in prompts:
                (logits,) = zip(*passes(batch, [ids], [[n] for n in range(6, 10)]), strict=True)
                single.append(logits[1:])
                own_caches += caches(batch, 1)
            with torch.inference_mode():
                for place, ids in enumerate(prompts):
                    batch([ids[:6]], own_caches[place : place + 1])
                calls.clear()
                for step in range(3):
                    batched = batch([[ids[6 + step]] for ids in prompts], own_caches)
                    for place, logits in enumerate(batched):
                        assert torch.equal(logits, single[place][step])
            assert len(calls) == 3 * model.config.num_hidden_layers
    finally:
        torch.set_num_threads(before)


def test_bits_are_equal_where_many_tokens_choose_one_expert_of_a_stored_format(
    tmp_path: Path,
) -> None:
    """Products of integers have the same bits for one token of an expert and for many."""
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    prompt, count = draw(9)[0], 3 * FEW
    equal_bits = {}
    with attached(path, stored=True) as model:
        for exact in (True, False):
            batch = Batch(model, exact=exact)
            assert batch.sequential_reason == ""
            own_caches = caches(batch, count + 1)
            with torch.inference_mode():
                for place in range(count + 1):
                    batch([prompt[:6]], own_caches[place : place + 1])
                (single,) = batch([prompt[6:7]], own_caches[count:])
                equal_bits[exact] = [
                    torch.equal(logits, single)
                    for logits in batch([prompt[6:7]] * count, own_caches[:count])
                ]
    assert all(equal_bits[True])
    assert all(equal_bits[False])


def test_a_sequence_may_begin_with_one_token_in_a_batch() -> None:
    with served("qwen3_moe", "bfloat16", **WIDE) as model:
        batch = Batch(model)
        one, two = draw(9, 3)
        own_caches = caches(batch, 2)
        with torch.inference_mode():
            batch([one[:8]], own_caches[:1])
            both = [batch([one[8:], two[:1]], own_caches), batch([[5], two[1:2]], own_caches)]
        single = passes(batch, [[*one, 5]], [[8], [9], [10]])
        began = passes(batch, [two], [[1], [2]])
        for step in range(2):
            for actual, expected in ((both[step][0], single[step + 1][0]),
                                  (both[step][1], began[step][0])):  # fmt: skip
                distance = (actual - expected).float().norm() / expected.float().norm()
                assert distance < 0.05


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
def test_exact_batches_are_refused_where_bits_would_differ(name: str) -> None:
    with served(name) as model:  # float32, or another attention
        assert (
            "not every layer is computed token by token"
            in Batch(model, exact=True).sequential_reason
        )


def test_a_model_that_mixes_sequences_is_not_batched(monkeypatch: Any) -> None:
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


def test_predictors_and_policies_observe_a_batch_as_one_pass(monkeypatch: Any) -> None:
    with served("qwen3_moe", parts={"prefetch": "token"}) as model:
        passes_begun: list[PassStart] = []
        begin = model.greenroom.driver.begin_pass
        monkeypatch.setattr(
            model.greenroom.driver, "begin_pass", lambda at: (passes_begun.append(at), begin(at))
        )
        batch, own_caches = Batch(model), None
        own_caches = caches(batch, 2)
        one, two = draw(6, 4)
        with torch.inference_mode():
            model.greenroom.hooks.announce_prompts(2)
            batch([one, two], own_caches)
            model.greenroom.hooks.announce_prompts(0)
            batch([[7], [8]], own_caches)
            third = caches(batch, 1)
            batch([[9]], third)  # nobody said: it begins, since it has no keys and values
            model.greenroom.hooks.announce_prompts(1)
            batch([[5], [6, 7, 8]], [own_caches[0], third[0]])
    assert [(at.request, at.first, at.tokens, at.prefill) for at in passes_begun] == [
        (2, 0, 10, True), (2, 10, 2, False), (3, 12, 1, False), (4, 13, 4, True),
    ]  # fmt: skip
    assert passes_begun[0].token_ids is not None
    assert passes_begun[0].token_ids.tolist() == one + two


def test_the_causal_mask_has_each_token_s_window() -> None:
    like = torch.zeros(())
    assert causal(1, 9, None, like) is None
    assert causal(1, 4, 4, like) is None
    mask = causal(2, 5, 3, like)
    assert mask is not None
    assert mask[0, 0].tolist() == [[False, True, True, True, False],
                                    [False, False, True, True, True]]  # fmt: skip
    one = causal(1, 5, 3, like)
    assert one is not None
    assert one[0, 0].tolist() == [[False, False, True, True, True]]
