"""Admission of waiting requests, and their first keys and values from the prefix cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

from greenroom.config import Amount, ServeConfig
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.batch import Batch
from greenroom.server.engine.journal import Journal, PrefixReuse
from greenroom.server.engine.prefixes import (
    MIN_TOKENS,
    Ids,
    PrefixCache,
    PrefixEntry,
    as_ids,
    common_prefix,
)
from greenroom.server.engine.sequence import Sequence

WORTH = 64  # shared tokens for which it pays to wait until another request has computed them


class Admission:
    """Admits requests in their order of arrival, while there are places and KV-cache memory.

    Each running request reserves the keys and values of its greatest length. The rest of `limit`
    bytes is for the prefix cache.
    """

    def __init__(
        self,
        greenroom: Any,
        batch: Batch,
        config: ServeConfig,
        limit: int,
        journal: Journal | None = None,
    ) -> None:
        self._greenroom, self._batch, self._config = greenroom, batch, config
        self._journal, self.limit = journal, limit
        share = Amount.parse(config.prefix_share, "--prefix-share").of(limit)
        self.prefixes = PrefixCache(0 if config.no_prefix_reuse else share)
        self.reserved = 0

    # ---- admission

    def admit(self, waiting: deque[Sequence], running: Many[Sequence]) -> list[Sequence]:
        """Admit waiting requests in order, until the first that cannot begin."""
        chosen: list[Sequence] = []
        while waiting and self.can_begin(waiting[0], (*running, *chosen)):
            each = waiting.popleft()
            each.admitted = time.monotonic()
            self.reserved += each.max_kv_bytes
            chosen.append(each)
        return chosen

    def can_begin(self, sequence: Sequence, running: Many[Sequence]) -> bool:
        """Is there a place and KV-cache memory for a request? Cached prefixes count as free."""
        if len(running) >= self._config.max_batch:
            return False
        if running and self.reserved + sequence.max_kv_bytes > self.limit:
            return False
        return not self._waits_for_prefix(sequence, running)

    def _waits_for_prefix(self, sequence: Sequence, running: Many[Sequence]) -> bool:
        """Is a running request about to compute a long prefix of this prompt?"""
        reading = [each for each in running if each.computed < each.prompt]
        if not reading or not self._reuses(sequence) or not self._batch.has_dynamic_cache:
            return False
        ids = as_ids(sequence.request.ids)
        cached = max(self._usable(source, ids) for source in (*self._sources(running), _NOTHING))
        coming = max(common_prefix(as_ids(each.request.ids), ids) for each in reading)
        return self._cut(min(coming, ids.size - 1)) >= cached + WORTH

    def ready_sequences(self, running: Many[Sequence]) -> list[Sequence]:
        """Return the sequences that the next forward passes compute.

        Prompts that have not begun wait for others for `delay_s`, to be computed together.
        """
        if self.delay_s(running) <= 0:
            return list(running)
        return [each for each in running if each.begun]

    def delay_s(self, running: Many[Sequence]) -> float:
        """Return the seconds that new prompts still wait for others to be computed with them.

        They wait until `--batch-delay` is over, no place is free, or another prompt is under way.
        """
        fresh = [each.admitted or 0.0 for each in running if not each.begun]
        reading = any(each.begun and each.computed < each.prompt for each in running)
        if not fresh or reading or len(running) >= self._config.max_batch:
            return 0.0
        return min(fresh) + self._config.batch_delay / 1e3 - time.monotonic()

    # ---- keys and values

    def prepare(self, sequence: Sequence, running: Many[Sequence]) -> None:
        """Give a sequence its KV cache, which begins with the longest cached prefix."""
        sequence.cache = self._batch.cache()
        ids = as_ids(sequence.ids)
        sources = list(self._sources(running)) if self._reuses(sequence) else []
        best = max((*sources, _NOTHING), key=lambda source: self._usable(source, ids))
        tokens, is_cached = self._usable(best, ids), best in self.prefixes
        takes_over = is_cached and tokens == best.ids.size
        if takes_over:
            sequence.cache = self.prefixes.pop(best)
        elif is_cached:
            self.prefixes.touch(best)
        self._make_room()
        if not tokens:
            return
        if not takes_over:
            if (slot_budget := self._greenroom.slot_budget) is not None:
                slot_budget.reserve(self._greenroom.setup.keys_values.held_bytes(tokens))
            kv.make_growing(sequence.cache, self._greenroom.setup.context + 1)
            kv.copy_tokens(best.cache, tokens, sequence.cache)
        sequence.computed = sequence.reused = tokens
        sequence.exact = min(tokens, best.exact)
        if self._journal is not None:
            self._journal.events.append(PrefixReuse(sequence.number, best.number, tokens))

    def _reuses(self, sequence: Sequence) -> bool:
        """May a sequence reuse keys and values? They come without logits, which scores need."""
        return sequence.scores is None and not self._config.no_prefix_reuse

    def _sources(self, running: Many[Sequence]) -> Iterator[PrefixEntry]:
        for each in running:
            if each.computed:
                yield PrefixEntry(each.computed_ids(), each.cache, 0, each.exact, each.number)
        yield from self.prefixes

    def _usable(self, source: PrefixEntry, ids: Ids) -> int:
        """Return the number of cached tokens whose keys and values a prompt can reuse.

        The last token is always computed, for its logits.
        """
        tokens = min(common_prefix(source.ids, ids), ids.size - 1)
        if self._config.batch_invariant:
            tokens = self._cut(min(tokens, source.exact))
        if tokens < MIN_TOKENS:
            return 0
        if tokens == source.ids.size and source in self.prefixes:
            return tokens
        return (
            tokens
            if self._batch.has_dynamic_cache and kv.has_all_tokens(source.cache, tokens)
            else 0
        )

    def _cut(self, tokens: int) -> int:
        """Round a number of tokens down to complete prefill chunks.

        A request that is computed alone has complete chunks too.
        """
        chunk = self._config.prefill_chunk if self._config.batch_invariant else 1
        return tokens // chunk * chunk

    def release(self, sequence: Sequence, keep: bool) -> None:
        """Free the KV-cache memory of a sequence that has ended; keep its prefix for others."""
        self.reserved -= sequence.max_kv_bytes
        cache, sequence.cache = sequence.cache, None
        if keep and cache is not None and sequence.computed:
            ids, nbytes = sequence.computed_ids(), kv.held_bytes(cache)
            self.prefixes.add(PrefixEntry(ids, cache, nbytes, sequence.exact, sequence.number))
            self._make_room()

    def _make_room(self) -> None:
        self.prefixes.shrink(self.limit - self.reserved)


_NOTHING = PrefixEntry(as_ids(()), None)
