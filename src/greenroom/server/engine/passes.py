"""Runs batched forward passes, repeats failed ones, and counts expert requests and hits.

A failed pass is tried again. If it fails again, each of its requests is tried alone, so that only
requests whose experts cannot be read, or whose tokens make a kernel fail, end with an error. Keys
and values of the failed pass are removed first. If a request alone fails with an unexpected
exception, a pass of one token shows whether the engine itself is broken.
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
from greenroom.hf.pictures.tower import pass_options
from greenroom.runtime.cuda.engine import device_errors
from greenroom.server.engine.batches import Share, to_grid
from greenroom.server.engine.drafts import Drafts
from greenroom.server.engine.failures import PASSES_THROUGH, RequestFailed, as_error, contain_errors
from greenroom.server.engine.journal import Journal, Pass
from greenroom.server.engine.sequence import Sequence

RETRY_S = 0.05  # a read that failed is tried again after this long

Outcome = list[tuple[Sequence, Tensor | GreenroomError]]


class PassRunner:
    """Runs the forward passes of one model, and repeats failed ones.

    `chunk` is the number of tokens of a prefill chunk. `passes` and `tokens` count successful
    passes and their tokens, `faults` the passes whose first attempt failed. Only
    `interrupt_if_unwanted` may be called from any thread.
    """

    def __init__(
        self,
        greenroom: Any,
        batch: Batch,
        chunk: int,
        journal: Journal | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self._greenroom, self._driver, self._batch = greenroom, greenroom.driver, batch
        self._chunk, self._journal, self._drafts = chunk, journal, drafts
        # Requests of the last pass, if it could have drafts, and their computed tokens after it.
        self._timed: list[tuple[Sequence, int]] = []
        self._lock = threading.Lock()
        self._current: list[Sequence] = []
        self.passes = self.tokens = self.faults = 0

    @property
    def speculation(self) -> str:
        """Describe speculation, as the end of the start-up line; "" where it is off."""
        return "" if self._drafts is None else f", {self._drafts.description}"

    def interrupt_if_unwanted(self) -> None:
        """Interrupt the current forward pass if all of its requests are cancelled."""
        with self._lock:
            if self._current and all(each.cancelled for each in self._current):
                self._driver.interrupt()

    def run(self, shares: Many[Share]) -> Outcome:
        """Compute tokens of several requests; return their next logits or their errors.

        Logits are of the request's last token, [vocabulary]. The result leaves out cancelled
        requests, and requests without an error whose prompt is not complete yet. ClosedError or
        RequestFailed is raised if the engine cannot compute any more.
        """
        shares = [share for share in shares if not share[0].cancelled]
        outcome = self._attempt(shares, drafts=self._drafts)
        if isinstance(outcome, GreenroomError):
            self.faults += 1
            time.sleep(RETRY_S)
            outcome = self._attempt([self._current_share(share) for share in shares])
        if not isinstance(outcome, GreenroomError):
            return outcome
        done: Outcome = []
        for share in shares:
            if len(shares) > 1:
                outcome = self._attempt([self._current_share(share)])
            if isinstance(outcome, RequestFailed):
                self._check_engine()
            done += [(share[0], outcome)] if isinstance(outcome, GreenroomError) else outcome
        return done

    def record_tokens(self) -> None:
        """Record the draft tokens of the last pass that were right, after they were sampled."""
        timed, self._timed = self._timed, []
        right = 0
        for each, computed in timed:
            right += each.computed - computed
            if self._journal is not None:  # they have the bits of passes of their own
                self._journal.events += [
                    Pass(((each.number, at, 1),)) for at in range(computed, each.computed)
                ]
        self.tokens += right
        if self._drafts is not None and timed:
            self._drafts.record(len(timed) + right)

    def remember(self, sequence: Sequence) -> None:
        """Remember the text of an ended request, for drafts of later ones."""
        sequence.drafter = None
        if self._drafts is not None and sequence.computed:
            self._drafts.remember(sequence)

    def _attempt(
        self, shares: list[Share], drafts: Drafts | None = None
    ) -> Outcome | GreenroomError:
        """Run one forward pass; return its error if it fails. A ClosedError is raised instead."""
        try:
            return self._run(shares, drafts)
        except (ClosedError, *PASSES_THROUGH):
            raise
        except BaseException as error:
            return as_error(error)

    def _check_engine(self) -> None:
        """Compute one token without a request. Raises RequestFailed if the engine is broken."""
        self._driver.resume()
        try:
            with device_errors():
                self._batch([[0]], [self._batch.cache()])
        except Exception as error:
            if isinstance(failure := as_error(error), RequestFailed | ClosedError):
                raise failure from error

    def _run(self, shares: list[Share], drafts: Drafts | None) -> Outcome:
        if not self._begin([sequence for sequence, _ in shares]):
            return []
        ids = [each.ids[each.computed : each.computed + count] for each, count in shares]
        caches = [each.cache for each, _ in shares]
        scored = [each.scores is not None for each, _ in shares]
        before = self._driver.scheduler.view.counted()
        try:
            with device_errors():
                if drafts is not None:
                    drafts.follow(shares)
                begin = time.perf_counter()
                has_drafts = drafts is not None and drafts.choose(shares)
                self._set_variants(shares)
                if drafts is not None and has_drafts:
                    logits = drafts.verify(caches)
                else:
                    logits = self._batch(ids, caches, scored, _picture_options(shares, ids))
        except BaseException as error:
            self._remove_incomplete([each for each, _ in shares])
            for each, _ in shares:
                each.draft = []
            if isinstance(error, Interrupted):
                return []
            raise
        finally:
            self._set_variants([])
            with self._lock:
                self._current = []
        counts = self._driver.scheduler.view.counted()
        if drafts is not None and drafts.time(begin):
            self._timed = [(each, each.computed + 1) for each, _ in shares]
        self._note(shares, caches, counts.requests - before.requests, counts.hits - before.hits)
        results = [_score(*each) for each in zip(shares, logits, strict=True)]
        return [
            (each, result)
            for (each, _), result in zip(shares, results, strict=True)
            if each.pending == 0 or isinstance(result, GreenroomError)
        ]

    def _set_variants(self, shares: list[Share]) -> None:
        """Set the model's variant for each token of a pass; without shares, the model itself."""
        if (variants := self._greenroom.variants) is not None:
            counts = [(each, count + len(each.draft)) for each, count in shares]
            variants.use([each.variant for each, count in counts for _ in range(count)])

    def _begin(self, sequences: list[Sequence]) -> bool:
        """Begin a forward pass; return False if all of its requests are cancelled."""
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

    def _remove_incomplete(self, sequences: list[Sequence]) -> None:
        """Remove the keys and values that an incomplete forward pass stored."""
        for each in sequences:
            if not kv.truncate(each.cache, each.computed):
                each.restart(self._batch.cache())

    def _current_share(self, share: Share) -> Share:
        """Return a share as it is now; a restarted sequence computes its first tokens first."""
        sequence, count = share
        if count <= sequence.pending and sequence.computed:
            return share
        return sequence, to_grid(sequence, self._chunk)


def _picture_options(shares: Many[Share], ids: Many[list[int]]) -> dict[str, Any]:
    """Return the arguments of a forward pass for pictures; none if no request has any."""
    if all(each.pictures is None for each, _ in shares):
        return {}
    parts = [
        None if each.pictures is None else each.pictures.part(each.computed, count)
        for each, count in shares
    ]
    return pass_options(ids, [each.computed for each, _ in shares], parts)


def _score(share: Share, logits: Tensor) -> Tensor | GreenroomError:
    """Return the logits [vocabulary] of a request's last token in a forward pass.

    If the request wants log-probabilities of its prompt, they are stored.
    """
    sequence, count = share
    if sequence.scores is None:
        return logits
    failed: list[GreenroomError] = []
    with contain_errors(failed.append), device_errors():
        sequence.scores.add(logits, sequence.computed - count)
    return failed[0] if failed else logits[-1]
