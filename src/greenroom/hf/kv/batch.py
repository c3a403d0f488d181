"""Run several sequences in one forward pass, each with its own KV cache.

transformers' continuous batching stores all keys and values in blocks of one tensor of fixed size.
It cannot share a memory budget with experts, and its single tokens could use neither Greenroom's
compiled layers nor KV caches that grow in place. So this module forms its own batches. The tokens
of all sequences are concatenated, [1, tokens], like one prompt. Modules that compute token by token
need no change. Attention functions (`ATTENTION`) in place of the model's own compute each sequence
separately. A layer's experts are called once for all tokens, so that each expert is fetched once.

When a `Batch` is made, `try_batching` tests batched passes without experts. If a model cannot batch
(recurrent states, sparse attention, another kind of KV cache), each sequence has a pass of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from greenroom.hf.kv.batched_cache import BatchedCache
from greenroom.hf.kv.kinds import OFFLOADED
from greenroom.runtime.kernels.dense.accelerate import FEW
from greenroom.runtime.kernels.dense.attention import BATCHED_ATTENTION as SDPA

ATTENTION = {"sdpa": SDPA, "eager": "greenroom_eager"}  # in place of the model's own
LAYERS = {"full_attention", "sliding_attention"}  # kinds of attention that can be batched

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

Attend = Callable[..., tuple[Tensor, Any]]


def _model_attention(module: nn.Module, name: str) -> Attend:
    """Return the attention function that a model uses without batching."""
    function: Attend
    if name == "eager":  # every modelling file has one
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[name]
    return function


def _attention_of(name: str) -> Attend:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        batched_cache: BatchedCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        attention = _model_attention(module, name)
        if batched_cache is None:
            return attention(module, query, key, value, attention_mask, **kwargs)
        window, outputs = kwargs.get("sliding_window"), []
        states = batched_cache.split_states(key, value)
        for q, (k, v) in zip(query.split(batched_cache.lengths, 2), states, strict=True):
            mask = causal(q.shape[2], k.shape[2], window, q)
            if mask is not None and name == "eager":  # it adds the mask to the scores
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(
                    ~mask, torch.finfo(q.dtype).min
                )
            elif mask is not None and window is None and q.shape[2] == k.shape[2]:
                mask = None  # sdpa's own causal mask does
            outputs.append(attention(module, q, k, v, mask, **kwargs)[0])
        return torch.cat(outputs, 1), None

    return attend


for _name, _batched_name in ATTENTION.items():
    ALL_ATTENTION_FUNCTIONS.register(_batched_name, _attention_of(_name))


def causal(new: int, tokens: int, window: int | None, like: Tensor) -> Tensor | None:
    """Return the causal attention mask [1, 1, new, tokens] of a sequence's last `new` tokens.

    The mask is boolean and on the device of `like`. `window` is the width of sliding-window
    attention. The result is None for a single token that attends to all tokens.
    """
    if new == 1 and (window is None or tokens <= window):
        return None
    rows = torch.arange(tokens - new, tokens, device=like.device)[:, None]
    columns = torch.arange(tokens, device=like.device)[None]
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return mask[None, None]


class Batch:
    """Runs forward passes of many sequences, batched if the model allows it.

    sequential_reason: why sequences cannot be batched; "" if they can
    has_dynamic_cache: whether the KV cache has separate keys and values for each token

    With `exact`, every token has the same bits as without batching. Then only single new tokens are
    batched, and only if compiled kernels compute all dense layers token by token.
    """

    def __init__(self, model: PreTrainedModel, *, exact: bool = False) -> None:
        self._model: Any = model
        self._configs = _configs(model)
        self.exact, self.joined = exact, False
        self.has_dynamic_cache = has_dynamic_cache(model)
        self.sequential_reason = self._find_obstacle()

    def _find_obstacle(self) -> str:
        model = self._model
        if reason := unbatchable_reason(model, self._configs):
            return reason
        if self.exact and not model.greenroom.bindings.is_token_wise(model):
            return f"{type(model).__name__}: not every layer is computed token by token"
        reason = try_batching(self, model)
        if reason and not self.exact:
            self.joined = True
            reason = try_batching(self, model) and reason
        return reason

    @property
    def device(self) -> torch.device:
        """Return the device of the model's keys and values."""
        device: torch.device = self._model.device
        return device

    def cache(self) -> Any:
        """Return an empty KV cache for a sequence; None if the model's forward makes its own."""
        if not self.has_dynamic_cache:
            return None
        return self._model.greenroom.setup.empty_cache(self._model.config)

    def can_batch(self, lengths: Sequence[int]) -> bool:
        """Return whether sequences with these numbers of new tokens can share one pass."""
        if len(lengths) == 1:
            return True
        return not self.sequential_reason and (not self.exact or max(lengths) == 1)

    def __call__(
        self,
        ids: Sequence[Sequence[int]],
        caches: list[Any],
        scored: Sequence[bool] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> list[Tensor]:
        """Run one forward pass with the new tokens of several sequences.

        `ids` has the new token ids of each sequence. Their keys and values are appended to
        `caches`. Returns each sequence's logits after its last token, [vocabulary]; if the
        sequence's flag in `scored` is set, after each of its new tokens, [new tokens, vocabulary].
        `options` are further arguments of the model's forward, and replace those of the pass.
        """
        if len(ids) == 1:
            return self._run_one(ids[0], caches, scored is not None and scored[0], options)
        lengths = [len(each) for each in ids]
        keep = [n if scored is not None and scored[i] else 1 for i, n in enumerate(lengths)]
        cache = BatchedCache(caches, lengths, exact=self.exact, joined=self.joined)
        logits = self._run_batch(ids, cache, keep, options)
        if scored is None or not any(scored):
            return list(logits)
        parts = zip(logits.split(keep), scored, strict=True)
        return [part if each else part[-1] for part, each in parts]

    def _run_one(
        self, ids: Sequence[int], caches: list[Any], scored: bool, options: Mapping[str, Any]
    ) -> list[Tensor]:
        out = self._pass(ids, caches[0], logits_to_keep=len(ids) if scored else 1, **options)
        caches[0] = out.past_key_values
        return [out.logits[0] if scored else out.logits[0, -1]]

    def _run_batch(
        self,
        ids: Sequence[Sequence[int]],
        cache: BatchedCache,
        keep: Sequence[int],
        options: Mapping[str, Any],
    ) -> Tensor:
        """Return a batched pass's logits after the last `keep` tokens of each sequence.

        They are concatenated: [sum(keep), vocabulary].
        """
        model = self._model
        positions: list[int] = []
        rows: list[int] = []
        for each, start, count in zip(ids, cache.starts, keep, strict=True):
            positions += range(start, start + len(each))
            rows += range(len(positions) - count, len(positions))
        experts = model.greenroom.bindings.batch_invariant() if self.exact else nullcontext()
        with self._attending(), self._exact_head(), experts:
            out = self._pass(
                [token for each in ids for token in each],
                cache,
                logits_to_keep=torch.tensor(rows, device=model.device),
                batched_cache=cache,
                **{"position_ids": torch.tensor([positions], device=model.device), **options},
            )
        logits: Tensor = out.logits[0]
        return logits if len(logits) == len(rows) else logits[rows]

    def _pass(self, tokens: Sequence[int], cache: Any, **options: Any) -> Any:
        model = self._model
        ids = torch.tensor([tokens], device=model.device)
        return model(input_ids=ids, past_key_values=cache, use_cache=True, **options)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Give the model the attention functions for batched passes, for one context."""
        names = [config._attn_implementation_internal for config in self._configs]
        try:
            for config, name in zip(self._configs, names, strict=True):
                config._attn_implementation_internal = ATTENTION[name]
            yield
        finally:
            for config, name in zip(self._configs, names, strict=True):
                config._attn_implementation_internal = name

    @contextmanager
    def _exact_head(self) -> Iterator[None]:
        """With `exact`, compute the output head as for one token, for one context.

        A compiled head gives each of a few tokens the bits of one token; others get one at a time.
        """
        head = self._model.get_output_embeddings()
        if not self.exact or head is None:
            yield
            return
        before, forward = head.__dict__.get("forward"), head.forward
        few = 1 if before is None else FEW
        head.forward = lambda x: torch.cat([forward(each) for each in x.split(few, 1)], 1)
        try:
            yield
        finally:
            del head.forward
            if before is not None:
                head.forward = before


def _configs(model: nn.Module) -> list[Any]:
    """Return all configs in a model that name its attention function."""
    configs = {id(module.config): module.config for module in model.modules()
               if hasattr(module, "config")}  # fmt: skip
    return [c for c in configs.values() if getattr(c, "_attn_implementation_internal", None)]


def unbatchable_reason(model: Any, configs: Sequence[Any]) -> str:
    """Return the reason in a model's config why it cannot batch sequences, or "".

    `configs` are the model's configs that name an attention implementation.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder model"
    if not has_dynamic_cache(model):
        return f"the KV cache of {name} does not store keys and values token by token"
    if others := {c._attn_implementation_internal for c in configs} - set(ATTENTION):
        return f"{name} computes attention by {', '.join(sorted(others))}, not by sdpa or eager"
    text = model.config.get_text_config()
    if others := set(getattr(text, "layer_types", None) or ()) - LAYERS:
        return f"{name} has layers of type {', '.join(sorted(others))}"
    if getattr(text, "attention_chunk_size", None):
        return f"{name} has chunked attention"
    return ""


def has_dynamic_cache(model: Any) -> bool:
    """Return whether a model's KV cache is a DynamicCache of plain or sliding-window layers."""
    kind = model.greenroom.setup.keys_values.kind.name
    if model.config.is_encoder_decoder or kind == OFFLOADED:
        return False
    if not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config).layers
    return {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


@torch.inference_mode()
def try_batching(batch: Batch, model: Any) -> str:
    """Try batched passes without experts, and return why a model cannot batch, or "".

    It cannot if the batched passes raise an error, or if their logits differ from those of
    sequential passes by more than rounding; with `batch.exact`, if one bit differs. No expert is
    read from disk.
    """
    batch.sequential_reason = ""
    random = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = [torch.randint(0, vocabulary, (n,), generator=random).tolist() for n in (7, 12, 5)]
    ends = [(3, 6, 7), (9, 11, 12), (3, 4, 5)]  # of each sequence's parts: prompts, then tokens
    try:
        with model.greenroom.hooks.without_experts():
            expected = [
                _read_parts(batch, [each], [end]) for each, end in zip(ids, ends, strict=True)
            ]
            batched = _read_parts(batch, ids, ends)
    except Exception as error:  # a model's own code fails in its own way
        return f"a batched pass of {type(model).__name__} fails: {str(error)[:200]!r}"
    for place in range(3):
        for each, (single, *_) in zip(batched[place], (e[place] for e in expected), strict=True):
            if not is_near(each, single, model.dtype):
                return f"{type(model).__name__} mixes tokens of different sequences in a batch"
            if batch.exact and not torch.equal(each, single):
                return f"{type(model).__name__}: a token's bits depend on other tokens of its pass"
    return ""


def is_near(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Check that logits differ by no more than the rounding of a model in `dtype`."""
    near = 1e-3 if dtype is torch.float32 else 5e-2
    return bool((logits - expected).float().norm() <= near * expected.float().norm())


def _read_parts(
    batch: Batch, ids: Sequence[list[int]], ends: Sequence[tuple[int, ...]]
) -> list[list[Tensor]]:
    """Return the logits after each part of some sequences; `ends` has the parts' ends."""
    caches, begins, logits = [batch.cache() for _ in ids], [0] * len(ids), []
    for part in zip(*ends, strict=True):
        new = [each[a:b] for each, a, b in zip(ids, begins, part, strict=True)]
        if batch.can_batch([len(each) for each in new]):
            logits.append(batch(new, caches))
        else:
            logits.append([batch([each], caches[i : i + 1])[0] for i, each in enumerate(new)])
        begins = list(part)
    return logits
