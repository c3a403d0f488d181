"""The MTP layer guesses what transformers' MtpModel guesses, with experts from slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from greenroom.config import LoadConfig
from greenroom.hf.load.load import load_with
from greenroom.hf.text.next_tokens import NextTokens
from tests.hf.mtp.checkpoints import LAYERS, mtp_folder

PARTS = (7, 4, 1, 1, 2, 1, 3)  # tokens of the passes: two of the prompt, then with right drafts


def loaded(folder: Path, **options: Any) -> Any:
    config = LoadConfig(device="cpu", **{"cache": "50%", **options})
    return load_with(str(folder), config, remember=False, mtp=True)[0]


def guesses_of_transformers(folder: Path, ids: list[int], dtype: Any) -> list[Any]:
    """The logits of transformers' MtpModel after each of `PARTS` but the first."""
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    mtp = MtpModel.from_pretrained(main)
    cache, logits, begin = MtpCache(config=main.config.get_mtp_config()), [], 0
    out = main.model(torch.tensor([ids[:-1]]))
    for count in (PARTS[0] + PARTS[1], *PARTS[2:]):
        end = begin + count
        _, guess, _ = mtp(
            input_ids=torch.tensor([ids[begin + 1 : end + 1]]),
            last_hidden_states=out.last_hidden_state[:, begin:end],
            attention_mask=None,
            position_ids=torch.arange(begin + 1, end + 1)[None],
            mtp_cache=cache,
        )
        logits.append(guess[0, -1].float())
        begin = end
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_logits_are_those_of_transformers(dtype: str) -> None:
    folder, random = mtp_folder(dtype=dtype), torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (sum(PARTS) + 1,), generator=random).tolist()
    expected = guesses_of_transformers(folder, ids, getattr(torch, dtype))
    model = loaded(folder)
    try:
        layer, begin, cache, guesses = NextTokens(model), 0, None, []
        layer.begin()
        for number, count in enumerate(PARTS):
            end = begin + count
            wrong = [9, 9] * (number > 1)  # draft tokens that are cut from the KV cache
            out = model(
                torch.tensor([[*ids[begin:end], *wrong]]), past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            if wrong:
                cache.crop(-2)
            layer.see(ids[: end + 1], begin, count)
            begin = end
            if number:
                assert layer.is_ready
                guesses.append(layer.logits().float())
        layer.end()
    finally:
        model.greenroom.close()
    for guess, other in zip(guesses, expected, strict=True):
        near = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.1, "atol": 0.15}
        torch.testing.assert_close(guess, other, **near)
