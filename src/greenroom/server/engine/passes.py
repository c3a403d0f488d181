"""A pass of the engine: run, put right where it failed, and counted for whom it was for.

A pass that fails is tried again; if that fails too, each of its requests by itself, so that only
those end with an error whose own experts cannot be had, or whose own tokens make a kernel fail.
What the failed pass left of keys and values is taken back first. Where a request alone makes it
fail in a way that nobody expected, a pass of one token tells whether the engine itself is broken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Many
from typing import Any

from torch import Tensor

from greenroom.errors import ClosedError, GreenroomError, Interrupted
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.batch import Batch
from greenroom.runtime.cuda.engine import device_errors
from greenroom.server.engine.batches import Share, to_grid
from greenroom.server.engine.failures import PASSES_THROUGH, RequestFailed, as_error, contain_errors
from greenroom.server.engine.journal import Journal, Pass
from greenroom.server.engine.sequence import Sequence

RETRY_S = 0.05  # a read that failed is tried again after this long

Outcome = list[tuple[Sequence, Tensor | GreenroomError]]


class PassRunner:
    """The passes of one model. `interrupt_unless` may be called from any thread."""

    def __init__(
        self, greenroom: Any, batch: Batch, chunk: int, journal: Journal | None = None
    ) -> None:
        self._greenroom, self._driver, self._batch = greenroom, greenroom.driver, batch
        self._chunk, self._journal = chunk, journal
        self._lock = threading.Lock()
        self._current: list[Sequence] = []
        self.passes = self.tokens = self.faults = 0

    def interrupt_if_unwanted(self) -> None:
        """End the pass under way where nobody waits for it any more."""
        with self._lock:
            if self._current and all(each.cancelled for each in self._current):
                self._driver.interrupt()

    def run(self, shares: Many[Share]) -> Outcome:
        """Compute these tokens. What follows each sequence: logits [V], where all of its tokens
        are computed, or why it cannot go on; nothing for those in between, or cancelled."""
        shares = [share for share in shares if not share[0].cancelled]
        found = self._attempt(shares)
        if isinstance(found, GreenroomError):
            self.faults += 1
            time.sleep(RETRY_S)
            found = self._attempt([self._again(share) for share in shares])
        if not isinstance(found, GreenroomError):
            return found
        done: Outcome = []
        for share in shares:
            if len(shares) > 1:
                found = self._attempt([self._again(share)])
            if isinstance(found, RequestFailed):
                self._check_engine()
            done += [(share[0], found)] if isinstance(found, GreenroomError) else found
        return done

    def _attempt(self, shares: list[Share]) -> Outcome | GreenroomError:
        """One pass, or why it failed. ClosedError where no pass can succeed any more."""
        try:
            return self._run(shares)
        except (ClosedError, *PASSES_THROUGH):
            raise
        except BaseException as error:
            return as_error(error)

    def _check_engine(self) -> None:
        """Compute one token that belongs to nobody. RequestFailed where not even that can be had:
        then the engine is broken, and not the request."""
        self._driver.resume()
        try:
            with device_errors():
                self._batch([[0]], [self._batch.cache()])
        except Exception as error:
            if isinstance(found := as_error(error), RequestFailed | ClosedError):
                raise found from error

    def _run(self, shares: list[Share]) -> Outcome:
        if not self._begin([sequence for sequence, _ in shares]):
            return []
        ids = [each.ids[each.computed : each.computed + count] for each, count in shares]
        caches = [each.cache for each, _ in shares]
        scored = [each.scores is not None for each, _ in shares]
        before = self._driver.scheduler.view.counted()
        try:
            with device_errors():
                logits = self._batch(ids, caches, scored)
        except BaseException as error:
            self._take_back([each for each, _ in shares])
            if isinstance(error, Interrupted):
                return []
            raise
        finally:
            with self._lock:
                self._current = []
        counts = self._driver.scheduler.view.counted()
        self._note(shares, caches, counts.requests - before.requests, counts.hits - before.hits)
        found = [_score(*each) for each in zip(shares, logits, strict=True)]
        return [
            (each, after)
            for (each, _), after in zip(shares, found, strict=True)
            if each.pending == 0 or isinstance(after, GreenroomError)
        ]

    def _begin(self, sequences: list[Sequence]) -> bool:
        """Is there anybody whom the pass is for?"""
        with self._lock:
            if all(each.cancelled for each in sequences):
                return False
            self._current = sequences
            self._driver.resume()
        self._greenroom.hooks.announce_prompts(sum(not each.begun for each in sequences))
        return True

    def _note(self, shares: list[Share], caches: list[Any], requests: int, hits: int) -> None:
        if self._journal is not None:
            numbers = tuple((each.number, each.computed, count) for each, count in shares)
            self._journal.events.append(Pass(numbers))
        self.passes += 1
        for (each, count), cache in zip(shares, caches, strict=True):
            on_grid = each.computed % self._chunk == 0 and each.exact == each.computed
            if on_grid and count == self._chunk:
                each.exact += count
            each.cache, each.begun = cache, True
            each.computed += count
            each.requests += requests
            each.hits += hits
            self.tokens += count

    def _take_back(self, sequences: list[Sequence]) -> None:
        """Forget what a pass that did not end has left of keys and values."""
        for each in sequences:
            if not kv.truncate(each.cache, each.computed):
                each.restart(self._batch.cache())

    def _again(self, share: Share) -> Share:
        """A share as it is now: a sequence that was begun again reads its first tokens first."""
        sequence, count = share
        if count <= sequence.pending and sequence.computed:
            return share
        return sequence, to_grid(sequence, self._chunk)


def _score(share: Share, logits: Tensor) -> Tensor | GreenroomError:
    """Logits [V] after the last token of a share. A prompt that is scored takes its scores."""
    sequence, count = share
    if sequence.scores is None:
        return logits
    failed: list[GreenroomError] = []
    with contain_errors(failed.append), device_errors():
        sequence.scores.add(logits, sequence.computed - count)
    return failed[0] if failed else logits[-1]
