"""Every architecture of the table: streamed from disk, it gives transformers' eager bits.

Tiny random models are saved in shards by transformers and served with a cache that is smaller than
what one layer asks for. In `make soak`: both types, several prompts, transformers' `generate`.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from greenroom.hf.check.verify import greedy
from greenroom.hf.memory.budget import experts_per_token
from greenroom.hf.model.architectures import architectures
from tests.hf.check.test_parity import ids, streamed
from tests.models import SEQ2SEQ, TYPES, cached_tiny, folder_of, reference

TABLE = {row.name: row for row in architectures()}


def test_the_table_says_tested_where_there_is_a_test():
    said = {name for name, row in TABLE.items() if row.tested}
    assert said == {folder_of(name) for name in TYPES}


TOP_K = {"llama4": 1, "llama4_text": 1, "longcat_flash": 3, "switch_transformers": 1, "zaya": 1}
TOP_K |= {"nllb-moe": 1}  # not in its config; transformers always uses the first two experts


@pytest.mark.parametrize("name", TYPES)
def test_logits_and_greedy_tokens(name, caplog):
    """From the fake device's slots, which are poisoned when their bytes are stale."""
    folder = cached_tiny(name, dtype="bfloat16")
    wanted = greedy(reference(folder), ids(1, 9), 3)
    assert torch.isfinite(wanted.logits).all()
    parts = {"kernels": "eager", "fake": True, "guard": False}
    parts["prefetch"] = "off" if name in SEQ2SEQ else "auto"
    with streamed(folder, capacity=2, **parts) as model:
        assert experts_per_token(model) == TOP_K.get(name, 2)
        mine = greedy(model, ids(1, 9), 3)
        stats = model.greenroom.stats()
    assert mine.tokens == wanted.tokens
    assert torch.equal(mine.logits, wanted.logits)
    assert stats.expert_hits < stats.expert_requests
    assert stats.bytes_read > 0
    assert "no expert is prefetched any more" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TYPES)
def test_prompts_batches_and_generate(name, dtype):
    folder = cached_tiny(name, dtype=dtype)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    # A copy: some multimodal models keep the size of their last batch.
    wanted = deepcopy(reference(folder))
    with streamed(folder, capacity=3, kernels="eager") as model, torch.inference_mode():
        for shape in ((1, 1), (1, 40), (2, 9)):
            mine, theirs = (m.generate(ids(*shape), **options) for m in (model, wanted))
            assert torch.equal(mine.sequences, theirs.sequences)
            assert all(map(torch.equal, mine.logits, theirs.logits))


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_default_kernels_stay_near_and_do_not_depend_on_the_cache(name):
    folder = cached_tiny(name, dtype="bfloat16")
    theirs = greedy(reference(folder), ids(1, 9), 2).logits
    outputs = []
    for capacity in (1, 1000):
        with streamed(folder, capacity=capacity) as model:
            outputs.append(greedy(model, ids(1, 9), 2).logits[: len(theirs)])
    assert torch.equal(*outputs)
