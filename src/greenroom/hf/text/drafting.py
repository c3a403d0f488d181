"""Generate one answer with speculation: transformers' loop, with drafts verified in its passes.

`generate` prepares logits processors and stopping criteria, and calls `DraftedLoop` in place of its
own loop. Tokens are chosen one by one, with the operations and the random numbers of that loop; so
the text is the same. A pass computes some tokens ahead, and those that are not chosen are dropped.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer, GenerationMode

from greenroom.core.speculation.drafts import Drafter
from greenroom.core.speculation.model_drafts import ModelDrafter
from greenroom.core.speculation.speculation import Speculation
from greenroom.hf.kv.cache import truncate
from greenroom.hf.kv.draft_pass import MOST_ROWS, DraftPass
from greenroom.hf.text.next_tokens import NextTokens

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class DraftedLoop:
    """The loop of transformers' `generate` for one sequence, with drafts.

    obstacle: why this model's answers cannot have drafts; "" if they can
    description: the same in a few words, for the start-up line
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._pass = DraftPass(model)
        assert model.generation_config is not None
        if (mode := model.generation_config.get_generation_mode()) not in MODES:
            self._pass.obstacle = f"the model's generation config asks for {mode.value}"
        self.obstacle, self.description = self._pass.obstacle, self._pass.description
        self.speculation = Speculation(MOST_ROWS)
        self._mtp = NextTokens.of(model, self.obstacle)

    def options(self, streamer: BaseStreamer) -> dict[str, Any]:
        """Return the options of `generate` that make it call this loop.

        `generate` passes no streamer to another loop, so it must be given here too.
        """
        if self.obstacle:
            return {}
        return {"custom_generate": partial(self._generate, streamer=streamer)}

    def _generate(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: BaseStreamer,
        **model_kwargs: Any,
    ) -> Tensor:
        """Generate tokens after a prompt [1, tokens]; return both."""
        ids, mtp, drafts = input_ids[0].tolist(), self._mtp, [list[int]()]
        drafter = self._drafter(ids)
        with nullcontext() if mtp is None else mtp.reading(ids):
            out = model._prefill(input_ids, generation_config, model_kwargs)
        cache, logits, seconds = out.past_key_values, out.logits[:, -1], 0.0
        del out  # its logits may be large
        while True:
            before = input_ids.shape[1]
            for row, guess in zip(logits, (*drafts[0], None), strict=True):
                scores = logits_processor(input_ids, row[None].to(copy=True, dtype=torch.float32))
                token = _choose(scores, generation_config.do_sample)
                input_ids = torch.cat([input_ids, token[:, None]], dim=-1)
                streamer.put(token.cpu())
                ended = bool(stopping_criteria(input_ids, None).all())
                if ended or token.item() != guess:
                    break
            tokens = input_ids.shape[1]
            if drafts[0]:
                truncate(cache, tokens - 1)
            if seconds:  # not of the prompt
                self.speculation.record(drafts, tokens - before, seconds)
            if ended:
                break
            begin = time.perf_counter()
            drafter.extend(new := input_ids[0, before:].tolist())
            ids += new
            if mtp is not None and seconds:
                mtp.see(ids, before - 1, len(new))
            room = stopping_criteria.max_length - tokens - 1
            drafts = self.speculation.choose([drafter], [room])
            (logits,) = self._pass([[int(token), *drafts[0]]], [cache])
            seconds = time.perf_counter() - begin
        if mtp is not None:
            mtp.end()
        streamer.end()
        return input_ids

    def _drafter(self, prompt: list[int]) -> Drafter | ModelDrafter:
        """Begin to draft for a prompt."""
        if self._mtp is None:
            return self.speculation.drafter(prompt)
        return self.speculation.model_drafter(self._mtp.predict)


def _choose(scores: Tensor, do_sample: bool) -> Tensor:
    """Choose a token by its scores [1, vocabulary], as transformers' loop does: [1]."""
    if do_sample:
        return torch.multinomial(torch.softmax(scores, -1), num_samples=1).squeeze(1)
    return scores.argmax(-1)
