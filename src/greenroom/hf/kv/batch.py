"""Several sequences in one pass, each with keys and values of its own.

transformers' continuous batching keeps all keys and values in blocks of one tensor, made once, and
knows nothing of a budget that experts share; one token then takes neither our compiled layers nor a
cache that grows in place. So a batch is put together here: the tokens of all sequences lie one
after another, [1, T], as one prompt would. Whatever looks at one token alone need not know; the
attention of a layer (`ATTENTION`, in place of the model's own) takes each sequence by itself; and
the experts are called once for all of them, so that one fetch serves all who need it.

Batching is tried out when a `Batch` is made (`try_batching`), without the experts. Where a model
cannot batch (states of a recurrence, sparse attention, a cache of another kind), each sequence has
a pass of its own, one after another, with the same scheduling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from greenroom.hf.kv.kinds import DYNAMIC
from greenroom.runtime.kernels.dense.attention import BATCHED_ATTENTION as SDPA

ATTENTION = {"sdpa": SDPA, "eager": "greenroom_eager"}  # in place of the model's own
LAYERS = {"full_attention", "sliding_attention"}  # kinds of attention that are known

Attend = Callable[..., tuple[Tensor, Any]]


class BatchedCache(Cache):
    """The keys and values of the sequences of one pass, which has `lengths` tokens of each.

    `exact`: every token is to be computed as if it were alone. `now` are keys and values of each
    sequence in the layer that was last updated; `joined` ones go through the layer, which makes
    more of them before its attention (multi-head latent attention).
    """

    def __init__(
        self,
        caches: Sequence[Any],
        lengths: Sequence[int],
        *,
        exact: bool,
        joined: bool,
    ) -> None:
        super().__init__(layers=[])
        self.caches, self.lengths = list(caches), list(lengths)
        self.exact, self._joined = exact, joined
        # One token of each, which has others before it? Else the compiled layers do not know it.
        self.one_token_each = max(lengths) == 1 and all(length_of(cache) for cache in caches)
        self.now: list[tuple[Tensor, Tensor]] = []
        self._given: Any = None  # what positions were asked of last, which all layers are given
        self._positions: list[tuple[Tensor, Tensor]] = []

    def positions(self, given: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines [1, T, width] of the pass: those of each token, [1, 1, width]."""
        if self._given is not given:
            cos, sin = (each.split(1, 1) for each in given)
            self._given, self._positions = given, list(zip(cos, sin, strict=True))
        return self._positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New keys and values [1, heads, T, width] go to their sequences. They come back as given,
        since `now` is what attention is over; or `joined`: [1, heads, all tokens, width]."""
        parts = zip(
            self.caches,
            key_states.split(self.lengths, 2),
            value_states.split(self.lengths, 2),
            strict=True,
        )
        self.now = [cache.update(k, v, layer_idx, *args, **kwargs) for cache, k, v in parts]
        if self._joined:
            keys, values = zip(*self.now, strict=True)
            return torch.cat(keys, 2), torch.cat(values, 2)
        return key_states, value_states

    def over(self, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the attention of each sequence is over, where it was given these."""
        if not self._joined:
            return self.now
        tokens = [k.shape[2] for k, _ in self.now]
        return list(zip(key.split(tokens, 2), value.split(tokens, 2), strict=True))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The most that any of them has; positions are given, nothing is computed from it."""
        return max(length_of(cache) for cache in self.caches)


def length_of(cache: Any) -> int:
    """Tokens in a cache; 0 where there is none."""
    return 0 if cache is None else int(cache.get_seq_length())


def _own_attention(module: nn.Module, name: str) -> Attend:
    """What a model computes attention with where we do not."""
    own: Attend
    if name == "eager":  # every modelling file has one
        own = sys.modules[type(module).__module__].eager_attention_forward
    else:
        own = ALL_ATTENTION_FUNCTIONS[name]
    return own


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
        own = _own_attention(module, name)
        if batched_cache is None:
            return own(module, query, key, value, attention_mask, **kwargs)
        window, found = kwargs.get("sliding_window"), []
        over = batched_cache.over(key, value)
        for q, (k, v) in zip(query.split(batched_cache.lengths, 2), over, strict=True):
            mask = causal(q.shape[2], k.shape[2], window, q)
            if mask is not None and name == "eager":  # it adds the mask to the scores
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(
                    ~mask, torch.finfo(q.dtype).min
                )
            elif mask is not None and window is None and q.shape[2] == k.shape[2]:
                mask = None  # causal by itself
            found.append(own(module, q, k, v, mask, **kwargs)[0])
        return torch.cat(found, 1), None

    return attend


for _own, _ours in ATTENTION.items():
    ALL_ATTENTION_FUNCTIONS.register(_ours, _attention_of(_own))


def causal(new: int, tokens: int, window: int | None, like: Tensor) -> Tensor | None:
    """[1, 1, new, tokens]: what each of the last `new` of them looks at; None where that is all."""
    if new == 1 and (window is None or tokens <= window):
        return None
    rows = torch.arange(tokens - new, tokens, device=like.device)[:, None]
    columns = torch.arange(tokens, device=like.device)[None]
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return mask[None, None]


class Batch:
    """The passes of one model for many sequences.

    `apart` says why sequences cannot lie together, "" where they can. With `exact` every token
    is computed as if its sequence were alone: only single tokens lie together then, and only
    where all layers around the experts are known token by token. `plain`: keys and values are of
    the usual kind, each token's by itself.
    """

    def __init__(self, model: PreTrainedModel, *, exact: bool = False) -> None:
        self._model: Any = model
        self._configs = _configs(model)
        self.exact, self.joined = exact, False
        self.has_dynamic_cache = has_dynamic_cache(model)
        self.sequential_reason = self._why_apart()

    def _why_apart(self) -> str:
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

    def cache(self) -> Any:
        """An empty cache for a sequence; None where the model makes its own."""
        return DynamicCache(config=self._model.config) if self.has_dynamic_cache else None

    def can_batch(self, lengths: Sequence[int]) -> bool:
        """Can sequences with so many new tokens each be in one pass? With `exact` those that begin
        with a single token cannot."""
        if len(lengths) == 1:
            return True
        return not self.sequential_reason and (not self.exact or max(lengths) == 1)

    def __call__(
        self, ids: Sequence[Sequence[int]], caches: list[Any], scored: Sequence[bool] | None = None
    ) -> list[Tensor]:
        """A pass: the new tokens of each sequence, which follow those in its cache.

        Logits [V] after the last token of each, or [new tokens, V] of those that are `scored`;
        `caches` have the new tokens then.
        """
        if len(ids) == 1:
            return self._alone(ids[0], caches, scored is not None and scored[0])
        lengths = [len(each) for each in ids]
        keep = [n if scored is not None and scored[i] else 1 for i, n in enumerate(lengths)]
        cache = BatchedCache(caches, lengths, exact=self.exact, joined=self.joined)
        logits = self._together(ids, cache, keep)
        if scored is None or not any(scored):
            return list(logits)
        parts = zip(logits.split(keep), scored, strict=True)
        return [part if each else part[-1] for part, each in parts]

    def _alone(self, ids: Sequence[int], caches: list[Any], scored: bool) -> list[Tensor]:
        out = self._pass(ids, caches[0], logits_to_keep=len(ids) if scored else 1)
        caches[0] = out.past_key_values
        return [out.logits[0] if scored else out.logits[0, -1]]

    def _together(
        self, ids: Sequence[Sequence[int]], cache: BatchedCache, keep: Sequence[int]
    ) -> Tensor:
        """Logits [sum(keep), V]: after the last so many tokens of each sequence."""
        model = self._model
        positions: list[int] = []
        rows: list[int] = []
        for each, own, count in zip(ids, cache.caches, keep, strict=True):
            had = length_of(own)
            positions += range(had, had + len(each))
            rows += range(len(positions) - count, len(positions))
        experts = model.greenroom.bindings.batch_invariant() if self.exact else nullcontext()
        with self._attending(), self._head_by_tokens(), experts:
            out = self._pass(
                [token for each in ids for token in each],
                cache,
                position_ids=torch.tensor([positions], device=model.device),
                logits_to_keep=torch.tensor(rows, device=model.device),
                batched_cache=cache,
            )
        logits: Tensor = out.logits[0]
        return logits if len(logits) == len(rows) else logits[rows]

    def _pass(self, tokens: Sequence[int], cache: Any, **options: Any) -> Any:
        model = self._model
        ids = torch.tensor([tokens], device=model.device)
        return model(input_ids=ids, past_key_values=cache, use_cache=True, **options)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Attention is ours for the while."""
        own = [config._attn_implementation_internal for config in self._configs]
        try:
            for config, name in zip(self._configs, own, strict=True):
                config._attn_implementation_internal = ATTENTION[name]
            yield
        finally:
            for config, name in zip(self._configs, own, strict=True):
                config._attn_implementation_internal = name

    @contextmanager
    def _head_by_tokens(self) -> Iterator[None]:
        """Where bits must be those of one token, the head takes one at a time."""
        head = self._model.get_output_embeddings()
        if not self.exact or head is None:
            yield
            return
        before, forward = head.__dict__.get("forward"), head.forward
        head.forward = lambda x: torch.cat([forward(each) for each in x.split(1, 1)], 1)
        try:
            yield
        finally:
            del head.forward
            if before is not None:
                head.forward = before


def _configs(model: nn.Module) -> list[Any]:
    """The configs that say how attention is computed."""
    found = {id(module.config): module.config for module in model.modules()
             if hasattr(module, "config")}  # fmt: skip
    return [c for c in found.values() if getattr(c, "_attn_implementation_internal", None)]


def unbatchable_reason(model: Any, configs: Sequence[Any]) -> str:
    """Why a model's sequences cannot lie together, as far as it can be told without a pass."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    if not has_dynamic_cache(model):
        return f"keys and values of {name} are not kept token by token"
    if others := {c._attn_implementation_internal for c in configs} - set(ATTENTION):
        return f"{name} computes attention by {', '.join(sorted(others))}"
    text = model.config.get_text_config()
    if others := set(getattr(text, "layer_types", None) or ()) - LAYERS:
        return f"{name} has layers of {', '.join(sorted(others))}"
    if getattr(text, "attention_chunk_size", None):
        return f"{name} looks at chunks of its context"
    return ""


def has_dynamic_cache(model: Any) -> bool:
    """Are keys and values of the usual kind? Then an empty cache is made for each sequence."""
    if model.config.is_encoder_decoder or model.greenroom.setup.keys_values.kind.name != DYNAMIC:
        return False
    if not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config).layers
    return {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


@torch.inference_mode()
def try_batching(batch: Batch, model: Any) -> str:
    """Why sequences cannot lie together: what they give together differs from each by itself by
    more than rounding, or fails. Without experts: it takes no time, and reads nothing."""
    batch.sequential_reason = ""
    random = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = [torch.randint(0, vocabulary, (n,), generator=random).tolist() for n in (7, 12, 5)]
    ends = [(3, 6, 7), (9, 11, 12), (3, 4, 5)]  # of each sequence's parts: prompts, then tokens
    near = 1e-3 if model.dtype is torch.float32 else 5e-2
    try:
        with model.greenroom.hooks.without_experts():
            wanted = [_in_parts(batch, [each], [end]) for each, end in zip(ids, ends, strict=True)]
            found = _in_parts(batch, ids, ends)
    except Exception as error:  # a model's own code fails in its own way
        return f"{type(model).__name__} takes one sequence at a time: {str(error)[:200]!r}"
    for place in range(3):
        for each, (alone, *_) in zip(found[place], (w[place] for w in wanted), strict=True):
            if not (each - alone).float().norm() <= near * alone.float().norm():
                return f"{type(model).__name__} does not know whose token it is"
            if batch.exact and not torch.equal(each, alone):
                return f"{type(model).__name__}: a token's bits depend on those beside it"
    return ""


def _in_parts(
    batch: Batch, ids: Sequence[list[int]], ends: Sequence[tuple[int, ...]]
) -> list[list[Tensor]]:
    """The logits of sequences that are read in parts, which end there."""
    caches, begins, found = [batch.cache() for _ in ids], [0] * len(ids), []
    for part in zip(*ends, strict=True):
        given = [each[a:b] for each, a, b in zip(ids, begins, part, strict=True)]
        if batch.can_batch([len(each) for each in given]):
            found.append(batch(given, caches))
        else:
            found.append([batch([each], caches[i : i + 1])[0] for i, each in enumerate(given)])
        begins = list(part)
    return found
