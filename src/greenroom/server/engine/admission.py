"""Admission of waiting requests, and reuse of cached prompt prefixes by admitted ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

from greenroom.config import Amount, ServeConfig, show_bytes
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.batch import Batch
from greenroom.hf.kv.stored import add_tokens
from greenroom.server.engine.journal import DISK, Journal, PrefixReuse
from greenroom.server.engine.prefixes import (
    MIN_TOKENS,
    Ids,
    PrefixCache,
    PrefixEntry,
    as_ids,
    common_prefix,
)
from greenroom.server.engine.prompts.store import PromptStore
from greenroom.server.engine.sequence import Sequence

WORTH = 64  # shared tokens that are worth waiting for: another request computes them, or a read
SAVE_S = 10.0  # in which prompts that wait are still written when the server ends


class Admission:
    """Admits requests in order of arrival, within the limits of batch size and KV-cache memory.

    At most `config.max_batch` requests run at a time. Each running request reserves the bytes of
    its keys and values at its greatest length: the prompt and the longest answer. The prefix cache
    gets the rest of `limit` bytes, but at most `limit * config.prefix_share`. `prompts` is the
    prompt cache on disk.
    """

    def __init__(
        self,
        greenroom: Any,
        batch: Batch,
        config: ServeConfig,
        limit: int,
        journal: Journal | None = None,
        prompts: PromptStore | None = None,
    ) -> None:
        self._greenroom, self._batch, self._config = greenroom, batch, config
        self._journal, self.limit, self.prompts = journal, limit, prompts
        share = Amount.parse(config.prefix_share, "--prefix-share").of(limit)
        self.prefixes = PrefixCache(0 if config.no_prefix_reuse else share)
        self.reserved = 0
        if prompts is not None:
            prompts.is_busy = lambda: self.reserved > 0

    def describe_limits(self, speculation: str) -> str:
        """Describe the limits of requests and speculation, for the start-up line."""
        config, disk = self._config, ""
        requests = f"up to {config.max_batch} requests together"
        if config.max_batch == 1:
            requests = "one request at a time"
        elif self._batch.sequential_reason:
            requests = f"up to {config.max_batch} requests one after another"
        exact = ", each as if it were alone" if config.batch_invariant else ""
        if (prompts := self.prompts) is not None:
            folder = prompts.folder
            disk = (
                f"\nprompt cache: {len(folder)} files of this model in {folder.path},"
                f" {show_bytes(folder.nbytes)} of {show_bytes(folder.limit)} in use"
            )
        return (
            f"{requests}{exact}, with {show_bytes(self.limit)} for their keys and values,"
            f" {show_bytes(self.prefixes.limit)} of it for prompt prefixes{speculation}{disk}"
        )

    def close(self) -> None:
        """Write the prompts that wait for it, and close the prompt cache on disk."""
        if self.prompts is not None:
            self.prompts.close(SAVE_S)

    # ---- admission

    def admit(self, waiting: deque[Sequence], running: Many[Sequence]) -> list[Sequence]:
        """Admit requests from the front of the queue, until the first that cannot begin.

        Admitted requests leave `waiting`, and their KV-cache memory is reserved.
        """
        chosen: list[Sequence] = []
        while waiting and self.can_begin(waiting[0], (*running, *chosen)):
            each = waiting.popleft()
            each.admitted = time.monotonic()
            self.reserved += each.max_kv_bytes
            chosen.append(each)
        return chosen

    def can_begin(self, sequence: Sequence, running: Many[Sequence]) -> bool:
        """Can a waiting request begin now? Always, if no request is running.

        Otherwise it needs a place in the batch and KV-cache memory; the memory of cached prefixes
        counts as free, since they can be evicted. A request also waits while a running request is
        about to compute a long prefix of its prompt.
        """
        if len(running) >= self._config.max_batch:
            return False
        if running and self.reserved + sequence.max_kv_bytes > self.limit:
            return False
        return not self._waits_for_prefix(sequence, running)

    def _waits_for_prefix(self, sequence: Sequence, running: Many[Sequence]) -> bool:
        """Is a running request about to compute a long prefix of this prompt?"""
        reading = [each for each in running if each.computed < each.prompt
                   and each.variant == sequence.variant]  # fmt: skip
        if not reading or not self._reuses(sequence) or not self._batch.has_dynamic_cache:
            return False
        ids = sequence.prefix_keys()
        sources = (*self._sources(running, sequence.variant), _NOTHING)
        cached = max(self._usable(source, ids) for source in sources)
        coming = max(common_prefix(each.prefix_keys(), ids) for each in reading)
        return self._cut(min(coming, ids.size - 1)) >= cached + WORTH

    def ready_sequences(self, running: Many[Sequence]) -> list[Sequence]:
        """Return the running requests whose tokens the next forward passes compute.

        Prompts that have not begun are left out while `delay_s` is above 0. They wait for other
        prompts, to be computed in one batch with them.
        """
        now = self.delay_s(running) <= 0
        return [each for each in running if each.load is None and (now or each.begun)]

    def loaded_sequences(self, running: Many[Sequence]) -> list[Sequence]:
        """Return the running requests whose prefix was read from disk, to be prepared again."""
        return [each for each in running if each.load is not None and each.load.done]

    def delay_s(self, running: Many[Sequence]) -> float:
        """Return the seconds that new prompts still wait for others, to be batched with them.

        The wait ends after `--batch-delay` milliseconds, if `--max-batch` requests run, or if
        another prompt is being computed. The value is then 0 or negative.
        """
        fresh = [each.admitted or 0.0 for each in running if not each.begun and each.load is None]
        reading = any(each.begun and each.computed < each.prompt for each in running)
        if not fresh or reading or len(running) >= self._config.max_batch:
            return 0.0
        return min(fresh) + self._config.batch_delay / 1e3 - time.monotonic()

    # ---- keys and values

    def prepare(self, sequence: Sequence, running: Many[Sequence]) -> None:
        """Make an admitted request's KV cache, filled with the longest reusable prefix.

        The prefix comes from the prefix cache or from a running request. If the prompt begins with
        all tokens of an entry of the prefix cache, the entry itself is used; otherwise its common
        part is copied. If much more is on disk, the request gets a `load`, and is prepared again
        once the load is done; if it has failed, without the disk.
        """
        is_new = sequence.load is None
        if not is_new and self._take_loaded(sequence):
            return
        sequence.cache = self._batch.cache()
        ids, variant = sequence.prefix_keys(), sequence.variant
        sources = list(self._sources(running, variant)) if self._reuses(sequence) else []
        best = max((*sources, _NOTHING), key=lambda source: self._usable(source, ids))
        tokens, is_cached = self._usable(best, ids), best in self.prefixes
        if is_new and self._reuses(sequence) and self._begin_load(sequence, ids, tokens):
            return
        takes_over = is_cached and tokens == best.ids.size
        if takes_over:
            sequence.cache = self.prefixes.pop(best)
            if self.prompts is not None:
                self.prompts.drop_save(best)
        elif is_cached:
            self.prefixes.touch(best)
        self._make_room()
        if not tokens:
            return
        if not takes_over:
            self._reserve(tokens)
            self._greenroom.setup.make_growing(sequence.cache)
            kv.copy_tokens(best.cache, tokens, sequence.cache)
        saved = tuple(each for each in best.saved if each.end <= tokens)
        self._reuse(sequence, best.number, tokens, min(tokens, best.exact), saved)

    def _reuse(
        self, sequence: Sequence, source: int, tokens: int, exact: int, saved: tuple[Any, ...]
    ) -> None:
        """Record that a request's first tokens have their keys and values."""
        sequence.computed = sequence.reused = tokens
        sequence.exact, sequence.saved = exact, saved
        if self._journal is not None:
            self._journal.events.append(PrefixReuse(sequence.number, source, tokens))

    def _reserve(self, tokens: int) -> None:
        """Remove expert slots to make room for the keys and values of tokens."""
        if (slot_budget := self._greenroom.slot_budget) is not None:
            slot_budget.reserve(self._greenroom.setup.keys_values.held_bytes(tokens))

    def _begin_load(self, sequence: Sequence, ids: Ids, cached: int) -> bool:
        """Begin to read a prompt's prefix from disk, if more than `cached` tokens are there."""
        if self.prompts is None:
            return False
        match = self.prompts.find(ids, cached + WORTH, self._cut_tokens, sequence.variant)
        if not match.tokens:
            return False
        self._make_room()
        self._reserve(match.tokens)
        greenroom, windows = self._greenroom, self.prompts.folder.windows
        last, device = match.segments[-1].blocks, self._batch.device
        room = add_tokens(sequence.cache, match.tokens, last, windows, greenroom.setup, device)
        if (slot_budget := greenroom.slot_budget) is not None:
            slot_budget.track(sequence.cache)
        sequence.load = self.prompts.load(match, sequence.cache, room)
        return True

    def _take_loaded(self, sequence: Sequence) -> bool:
        """Take over the keys and values that were read from disk; False if they are too few."""
        load, sequence.load = sequence.load, None
        assert load is not None
        tokens, cache = self._cut(load.tokens), load.release()
        if tokens < MIN_TOKENS or not kv.truncate(cache, tokens):
            return False
        saved = tuple(each for each in load.match.segments if each.end <= tokens)
        exact = tokens if self._config.batch_invariant else 0
        self._reuse(sequence, DISK, tokens, exact, saved)
        return True

    def _reuses(self, sequence: Sequence) -> bool:
        """May a request reuse keys and values of other requests?

        They come without logits, which the log-probabilities of a prompt need.
        """
        return sequence.scores is None and not self._config.no_prefix_reuse

    def _sources(self, running: Many[Sequence], variant: int) -> Iterator[PrefixEntry]:
        """Yield the prefixes that a request to a variant of the model may reuse."""
        for each in running:
            if each.computed and each.variant == variant:
                yield PrefixEntry(
                    each.computed_keys(),
                    each.cache,
                    0,
                    each.exact,
                    each.number,
                    each.saved,
                    variant,
                )
        yield from (each for each in self.prefixes if each.variant == variant)

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
        return tokens // self._cut_tokens * self._cut_tokens

    @property
    def _cut_tokens(self) -> int:
        return self._config.prefill_chunk if self._config.batch_invariant else 1

    def release(self, sequence: Sequence, keep: bool) -> None:
        """Free the KV-cache memory that an ended request had reserved.

        With `keep`, the request's keys and values go to the prefix cache, and to that on disk.
        """
        self.reserved -= sequence.max_kv_bytes
        cache, sequence.cache = sequence.cache, None
        if sequence.load is not None and self.prompts is not None:
            self.prompts.cancel_load(sequence.load)
            sequence.load = None
        if keep and cache is not None and sequence.computed:
            entry = PrefixEntry(
                sequence.computed_keys(), cache, kv.held_bytes(cache), sequence.exact,
                sequence.number, sequence.saved, sequence.variant,
            )  # fmt: skip
            self.prefixes.add(entry)
            if self.prompts is not None:
                self.prompts.save(entry)
            self._make_room()

    def _make_room(self) -> None:
        room = self.limit - self.reserved
        self.prefixes.shrink(room)
        if self.prompts is not None:
            self.prompts.limit_pending(room - self.prefixes.nbytes, self.prefixes)


_NOTHING = PrefixEntry(as_ids(()), None)
