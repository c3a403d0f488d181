"""Forward passes that verify drafts: the next tokens of a sequence, computed before they are known.

A draft is a guess of the tokens that will follow. One pass computes the last token of a sequence
and its draft, as if they were tokens of several sequences: each is a row of its own, whose keys and
values are appended before it attends to itself and to the tokens before it. So each row has the
bits that its token has in a pass of its own, and the logits tell which draft tokens are right.

On a GPU matrix products of several rows round differently from those of one. There a row's logits
are those of its token within rounding, so that a token may change now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from greenroom.hf.kv.batch import Batch, is_near
from greenroom.hf.kv.batched_cache import length_of
from greenroom.hf.kv.cache import has_all_tokens, make_growing, make_room, truncate
from greenroom.hf.mtp.layer import mtp_layer_of
from greenroom.runtime.kernels.dense.accelerate import FEW

MOST_ROWS = FEW  # tokens of a pass: for so many, compiled layers give the bits of one token
TRIED = 4  # tokens of each sequence in the trial


class DraftPass:
    """Runs forward passes whose tokens have the bits of single-token passes, on a GPU nearly.

    obstacle: why the model cannot do that; "" if it can. Then no pass may be run.
    """

    def __init__(self, model: Any) -> None:
        self._on_a_gpu = model.greenroom.setup.cuda
        self._batch, self._mtp = Batch(model, exact=not self._on_a_gpu), mtp_layer_of(model)
        approximated = model.greenroom.setup.approximation is not None
        self.obstacle = (
            "misses are approximated or routers biased, so the output depends on the expert cache"
            * approximated
            or self._batch.sequential_reason
            or self._find_obstacle(model)
        )

    @property
    def description(self) -> str:
        """Describe speculation in a few words, for the start-up line."""
        if self.obstacle:
            return f"no speculation: {self.obstacle}"
        rounding = ", which may change last bits" * self._on_a_gpu
        return f"speculation by {'lookup' if self._mtp is None else 'an MTP layer'}{rounding}"

    def __call__(self, ids: Sequence[Sequence[int]], caches: Sequence[Any]) -> list[Tensor]:
        """Return the logits after each new token of some sequences: [new tokens, vocabulary] each.

        `ids` has the new tokens of each sequence, together at most `MOST_ROWS`; `caches` are the
        KV caches, which must not be empty, and get all of these tokens.
        """
        for each, cache in zip(ids, caches, strict=True):
            make_growing(cache, in_blocks=self._on_a_gpu)
            make_room(cache, length_of(cache) + len(each), lambda: None)
        rows = [[token] for each in ids for token in each]
        of_rows = [cache for each, cache in zip(ids, caches, strict=True) for _ in each]
        logits = torch.stack(self._batch(rows, of_rows))
        return list(logits.split([len(each) for each in ids]))

    @torch.inference_mode()
    def _find_obstacle(self, model: Any) -> str:
        """Compare a pass of two sequences' next tokens with passes of one token, without experts.

        No expert is read.
        """
        name, batch = type(model).__name__, self._batch
        random = torch.Generator().manual_seed(1)
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (2, 7 + TRIED), generator=random).tolist()
        with model.greenroom.hooks.without_experts():
            caches, expected = [], []
            for each in ids:
                cache = [batch.cache()]
                batch([each[:7]], cache)
                expected.append(torch.cat([batch([[token]], cache)[0][None] for token in each[7:]]))
                caches += cache
            if not all(has_all_tokens(cache, 7 + TRIED) for cache in caches):
                return f"the KV cache of {name} cannot drop its last tokens"
            for cache in caches:
                truncate(cache, 7)
            logits = self([each[7:] for each in ids], caches)
        same = partial(is_near, dtype=model.dtype) if self._on_a_gpu else torch.equal
        if not all(map(same, logits, expected)):
            return f"{name}: a token's bits depend on the tokens after it"
        return ""
