"""Generate an answer to one prompt, and measure the time of each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, set_seed

from greenroom.config import SamplingConfig, bounded_temperature
from greenroom.errors import UsageError
from greenroom.hf.text.drafting import DraftedLoop
from greenroom.hf.text.prompt_limit import token_ids
from greenroom.hf.text.templates import Templates
from greenroom.runtime.cuda.engine import device_errors

OnText = Callable[[str], None]
Prompt = str | list[dict[str, str]]  # a text, or the messages of a chat


@dataclass(slots=True)
class Answer:
    """Generated answer, with the time to its first token and between its tokens.

    text, token_ids: the answer, without the prompt
    ttft_s: seconds from the start until the first token
    gaps:   seconds between each token and the next
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    ttft_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cut_short: bool = False  # the context ended it, not the model or --max-new-tokens

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tpot_s(self) -> float | None:
        """Return the median time per output token in seconds; None for a single token."""
        return float(np.median(self.gaps)) if self.gaps else None

    @property
    def tpot_p95_s(self) -> float | None:
        return float(np.percentile(self.gaps, 95)) if self.gaps else None

    @property
    def tpot_p99_s(self) -> float | None:
        return float(np.percentile(self.gaps, 99)) if self.gaps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second after the first one; None for a single token."""
        return len(self.gaps) / sum(self.gaps) if self.gaps else None


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, raw: bool = False) -> torch.Tensor:
    """Convert a prompt to token ids [1, tokens], by the chat template if any.

    A text is sent as one user message, unless `raw` is true. Raises UsageError for an empty prompt,
    and for messages if the tokenizer has no chat template.
    """
    if not isinstance(prompt, str) and not tokenizer.chat_template:
        raise UsageError(
            "the model has no chat template for a prompt of messages: give each prompt as a text"
        )
    if tokenizer.chat_template and not (raw and isinstance(prompt, str)):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        with closing(Templates()) as templates:
            ids = token_ids(tokenizer, templates.chat(tokenizer, messages), special=False)
    else:
        ids = token_ids(tokenizer, str(prompt))
    if not ids:
        raise UsageError("the prompt is empty")
    return torch.tensor([ids])


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sampling: SamplingConfig,
    *,
    raw: bool = False,
    context: int,
    on_text: OnText = lambda text: None,
    on_start: Callable[[TokenClock], None] = lambda clock: None,
    to_the_end: bool = False,
    loop: DraftedLoop | None = None,
) -> Answer:
    """Generate an answer to a prompt, and measure the time of each token.

    `on_text` is called with each piece of text as it is decoded, and `on_start` once before, with
    the clock of the tokens. `context` limits the tokens of prompt and answer. With `to_the_end`,
    the model cannot end its answer before it has `sampling.max_new_tokens` tokens or the context
    is full. With `loop` passes verify drafts of the next tokens. Raises UsageError if the prompt
    leaves no room for an answer.
    """
    ids = encode(tokenizer, prompt, raw)
    room = context - ids.shape[1]
    if room < 1:
        raise UsageError(
            f"the prompt has {ids.shape[1]} tokens, which leaves no room for an answer in"
            f" --context {context}: raise --context, or shorten the prompt"
        )
    if sampling.seed is not None:
        set_seed(sampling.seed)
    most = min(sampling.max_new_tokens, room)
    clock = TokenClock(tokenizer, on_text, ids.shape[1], most)
    on_start(clock)
    ids = ids.to(model.device)
    with torch.inference_mode(), device_errors():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=clock,
            max_new_tokens=most,
            min_new_tokens=most if to_the_end else None,
            **_options(model, sampling),
            **({} if loop is None else loop.options(clock)),
        )
    tokens = clock.tokens
    return Answer(
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        token_ids=tokens,
        prompt_tokens=ids.shape[1],
        ttft_s=clock.times[0] - clock.begin,
        gaps=np.diff(clock.times).tolist(),
        cut_short=room < sampling.max_new_tokens and len(tokens) == room,
    )


def _options(model: PreTrainedModel, sampling: SamplingConfig) -> dict[str, Any]:
    """Return the options of transformers' `generate` that the user set."""
    options: dict[str, Any] = {}
    if sampling.temperature is not None and bounded_temperature(sampling.temperature) == 0:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    else:
        names = ("temperature", "top_p", "top_k")
        sampled = {n: getattr(sampling, n) for n in names if getattr(sampling, n) is not None}
        if "temperature" in sampled:
            sampled["temperature"] = bounded_temperature(sampled["temperature"])
        if sampled:
            options |= {"do_sample": True, **sampled}
    if model.generation_config.pad_token_id is None:
        end = model.generation_config.eos_token_id
        options["pad_token_id"] = end[0] if isinstance(end, list) else end
    return options


class TokenClock(TextStreamer):
    """Clock of an answer's tokens, which passes on text in complete words.

    begin, times: seconds of `time.perf_counter` at the start and at each token
    most_tokens:  the answer's greatest number of tokens
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: OnText,
        prompt_tokens: int,
        most_tokens: int,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.prompt_tokens, self.most_tokens = prompt_tokens, most_tokens
        self.begin = time.perf_counter()
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)
