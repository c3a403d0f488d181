"""Continuous batching: one thread that computes, for requests that come and go at any time.

    while there are requests:
        let in those that wait and have room; share what was read before
        for each pass of the round: compute it, choose a token for each answer, tell its listener

transformers has an engine of its own for this (generation/continuous_batching). It is not used: its
keys and values are blocks that are allocated once and for all, outside of any budget; each token
pays for its paged cache, while ours takes a compiled path; its processors cannot be seeded a
request; and a failed pass ends its thread. What a pass needs of transformers is in hf/kv/batch.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from greenroom.config import ServeConfig, show_bytes
from greenroom.errors import (
    ClosedError,
    GreenroomError,
    UnsupportedModel,
)
from greenroom.hf.kv.batch import Batch
from greenroom.runtime.kernels.dense.stored import weight_matrix
from greenroom.server.engine.admission import Admission
from greenroom.server.engine.batches import compose, split
from greenroom.server.engine.failures import contain_errors
from greenroom.server.engine.journal import Journal
from greenroom.server.engine.kv_memory import kv_limit
from greenroom.server.engine.passes import PassRunner
from greenroom.server.engine.requests import Busy, Listener, Request
from greenroom.server.engine.sequence import Sequence
from greenroom.server.engine.snapshot import Totals, model_stats, snapshot
from greenroom.server.engine.tokens.grammar import Grammars
from greenroom.server.engine.tokens.sampling import Sampler
from greenroom.server.engine.tokens.scores import PromptScores

LEAVE_S = 30.0  # in which an engine that failed must have let go of its model
LOADING_S = 5.0  # after which somebody who came while the model was loading may try again

Progress = Callable[[float, str], None]


class LoadedModel(NamedTuple):
    """A model with its cache of experts; `summary` says what was placed where."""

    model: Any
    tokenizer: Any
    summary: str = ""


Load = Callable[[Progress], LoadedModel]

log = logging.getLogger(__name__)


class ContinuousEngine:
    """Answers many requests at once; every public method may be called from any thread.

    `load` runs in the engine's thread; `journal` notes every pass.
    """

    def __init__(
        self, load: Load, config: ServeConfig, context: int, journal: Journal | None = None
    ) -> None:
        self.config, self.context, self.journal = config, context, journal
        self.model: Any = None
        self.greenroom: Any = None  # the model's, also when it was detached
        self.was_ready = False  # was it ready once?
        self.failure: BaseException | None = None  # why its state is "failed"
        self.final: dict[str, Any] | None = None  # what was counted, once the model is given back
        self.tokenizer: Any = None  # the model's, once the state is "ready", as all below
        self.model_type: str | None = None  # of its config
        self.end_ids: tuple[int, ...] = ()  # end an answer where a request says nothing
        self.summary = ""  # one line that says what was placed where
        self.totals = Totals()
        self._load = load
        self._changed = threading.Condition()
        self._state: tuple[str, float, str] = ("loading", 0.0, "")
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._numbers = 0
        self._stop_by: float | None = None  # when those that still run are given up
        self._thread = threading.Thread(target=self._main, name="greenroom-engine", daemon=True)
        self._thread.start()

    # ---- from any thread

    def submit(self, request: Request, listener: Listener) -> Sequence:
        """Queue a request, which can be cancelled. Raises Busy, TooLong, UsageError, or
        ClosedError."""
        self._check_open()
        made = self._sequence(request, listener)
        with self._changed:
            self._check_open()
            if len(self._waiting) >= self.config.max_queue + self._free():
                raise Busy(
                    f"{len(self._waiting)} requests wait already (--max-queue)", self._retry_s()
                )
            made.number, self._numbers = self._numbers, self._numbers + 1
            self._waiting.append(made)
            if self.journal is not None:
                self.journal.requests[made.number] = request
            self._changed.notify_all()
        return made

    def _free(self) -> int:
        """Places that are free now: who takes one does not wait."""
        return max(0, self.config.max_batch - len(self._running))

    def _check_open(self) -> None:
        name, _, why = self._state
        if name == "loading":
            raise Busy("the model is loading", LOADING_S)
        if name != "ready":
            raise ClosedError(f"the server is {name}" + (f": {why}" if why else ""))

    def _sequence(self, request: Request, listener: Listener) -> Sequence:
        """UsageError or TooLong, where a request cannot be answered."""
        vocabulary = self._vocabulary
        request.check(vocabulary, self.context)
        grammar = None if request.grammar is None else self._grammars(request.grammar)
        ends = self.end_ids if request.end_ids is None else request.end_ids
        scores = None if request.prompt_logprobs is None else PromptScores(
            request.ids, request.prompt_logprobs, vocabulary, self.model.dtype.itemsize
        )  # fmt: skip
        return Sequence(
            number=-1,
            request=request,
            listener=listener,
            sampler=Sampler(request, self.model.generation_config, vocabulary, grammar),
            end_ids=frozenset(ends),
            max_kv_bytes=self.greenroom.setup.keys_values.total_bytes(request.length),
            on_cancel=self._cancel,
            scores=scores,
        )

    def _retry_s(self) -> float:
        """When a place is likely to be free: what answers took so far, shared by the places."""
        ahead = len(self._waiting) + 1
        return max(1.0, self.totals.usual_s * ahead / self.config.max_batch)

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.cancelled = True
            self._changed.notify_all()
        self.passes.interrupt_if_unwanted()

    def state(self) -> tuple[str, float, str]:
        """("loading" | "ready" | "failed" | "stopping", progress from 0 to 1, why)."""
        name, progress, why = self._state
        if name in ("ready", "stopping") and not self._thread.is_alive() and self._stop_by is None:
            return "failed", progress, "its thread has ended"
        return name, progress, why

    def stats(self) -> dict[str, Any]:
        """JSON-ready; `snapshot` says what is in it."""
        return snapshot(self)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def resize(self, cache: str | int) -> int:
        """Give the expert cache another size, while answers run; slots it has now. BudgetError."""
        self._check_open()
        return int(self.greenroom.resize(cache))

    def stop(self, grace_s: float) -> None:
        """Take no more, give those that run or wait `grace_s` to end, save what was learned. A
        second call waits too."""
        with self._changed:
            by = time.monotonic() + grace_s
            self._stop_by = by if self._stop_by is None else min(by, self._stop_by)
            if self._state[0] in ("ready", "loading"):
                self._state = ("stopping", self._state[1], "")
            self._changed.notify_all()
        self._thread.join(LEAVE_S if self._state[0] == "failed" else None)

    # ---- the engine's thread

    def _main(self) -> None:
        try:
            self._begin()
            with torch.inference_mode():
                while self._round():
                    pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._leave()

    def _begin(self) -> None:
        self.model, tokenizer, summary = self._load(self._progress)
        self.greenroom = greenroom = self.model.greenroom
        config = self.config
        if self.model.config.is_encoder_decoder:
            raise UnsupportedModel(
                f"{type(self.model).__name__} is an encoder-decoder, which is not served:"
                " `greenroom run` answers with it"
            )
        self.context = greenroom.setup.context
        self._vocabulary = int(weight_matrix(self.model.get_output_embeddings()).shape[0])
        self.end_ids, self.model_type = end_ids(self.model), self.model.config.model_type
        self._grammars = Grammars(tokenizer, self._vocabulary, self.end_ids)
        self._grammars.prepare()
        self.batch = Batch(self.model, exact=config.batch_invariant)
        if self.batch.sequential_reason:
            log.warning("requests are computed one after another: %s", self.batch.sequential_reason)
        self.passes = PassRunner(greenroom, self.batch, config.prefill_chunk, self.journal)
        limit = kv_limit(greenroom, config)
        self.admission = Admission(greenroom, self.batch, config, limit, self.journal)
        self.summary = f"{summary}\n{self._limits(limit)}" if summary else self._limits(limit)
        self.tokenizer = tokenizer
        with self._changed:
            self.was_ready = True
            if self._state[0] == "loading":
                self._state = ("ready", 1.0, "")

    def _limits(self, limit: int) -> str:
        """What was decided about requests, for the start-up line."""
        one = "one after another" if self.batch.sequential_reason else "together"
        exact = ", each as if it were alone" if self.config.batch_invariant else ""
        return (
            f"up to {self.config.max_batch} requests {one}{exact}, with"
            f" {show_bytes(limit)} for their keys and values, of which"
            f" {show_bytes(self.admission.prefixes.limit)} may keep what was read"
        )

    def _progress(self, share: float, what: str) -> None:
        with self._changed:
            if self._state[0] == "loading":
                self._state = ("loading", share, what)

    def _round(self) -> bool:
        """Let in, compute, choose, tell. False where there is nothing more to do for good."""
        with self._changed:
            if not self._await():
                return False
            let_in = self.admission.admit(self._waiting, self._running)
            self._running += let_in
        self._drop_ended()
        for each in let_in:
            self._prepare(each)
        ready, config = self.admission.ready_sequences(self._running), self.config
        planned = compose(ready, config.prefill_chunk, config.batch_invariant)
        for shares in split(planned, self.batch.can_batch):
            for sequence, found in self.passes.run(shares):
                self._answer(sequence, found)
        self._drop_ended()
        return True

    def _prepare(self, sequence: Sequence) -> None:
        """Give a sequence that is let in what it begins with."""
        if sequence.finished:
            return
        with self._contain_errors_of(sequence):
            self.admission.prepare(sequence, self._running)

    def _await(self) -> bool:
        """Until there is something to do, with the lock held. False: never again."""
        waiting, running = self._waiting, self._running
        while not (
            self.admission.ready_sequences(running)
            or self._ended_sequences((*waiting, *running))
            or (waiting and self.admission.can_begin(waiting[0], running))
        ):
            if self._stop_by is not None and not waiting and not running:
                return False
            self._changed.wait(self._until_next())
        return True

    def _until_next(self) -> float | None:
        """Seconds until somebody's time is up."""
        now = time.monotonic()
        times = [each.deadline for each in (*self._waiting, *self._running)]
        if self._stop_by is not None:
            times.append(self._stop_by)
        if (delay_s := self.admission.delay_s(self._running)) > 0:
            times.append(now + delay_s)
        least = min(times, default=float("inf"))
        return None if least == float("inf") else max(0.0, least - now)

    def _ended_sequences(self, sequences: Any) -> list[tuple[Sequence, str]]:
        """Those that end now, and why."""
        now = time.monotonic()
        over = self._stop_by is not None and self._stop_by <= now
        reasons = (
            (each, "cancelled" if each.cancelled
             else "timeout" if each.deadline <= now
             else "stopping" if over else "")
            for each in sequences
        )  # fmt: skip
        return [(each, reason) for each, reason in reasons if reason]

    def _drop_ended(self) -> None:
        with self._changed:
            gone = self._ended_sequences((*self._waiting, *self._running))
        for each, reason in gone:
            self._finish(each, reason)

    def _answer(self, sequence: Sequence, found: torch.Tensor | GreenroomError) -> None:
        """A pass has given a sequence its next logits, or has failed for it."""
        reason = ""
        with self._contain_errors_of(sequence):
            if isinstance(found, GreenroomError):
                raise found
            token = sequence.sampler(found) if sequence.request.max_new_tokens else None
            sequence.send_scores()
            reason = "length" if token is None else sequence.add_token(token)
        if reason:
            self._finish(sequence, reason)

    @contextmanager
    def _contain_errors_of(self, sequence: Sequence) -> Iterator[None]:
        """What one request's own work raises ends that request; ClosedError ends the engine."""

        def give_up(error: GreenroomError) -> None:
            if isinstance(error, ClosedError) and not sequence.finished:
                raise error
            if sequence.finished:
                name = sequence.request.name
                log.error("the end of request %r failed: %s", name, error, exc_info=error)
            else:
                self._finish(sequence, "error", error)

        with contain_errors(give_up):
            yield

    def _finish(self, sequence: Sequence, reason: str, error: GreenroomError | None = None) -> None:
        """A sequence ends: its place is free, and what it read is kept for others."""
        if sequence.finished:
            return
        sequence.finished = True
        with self._changed:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            if sequence in self._running:
                self._running.remove(sequence)
        result = sequence.result(reason, error)
        with self._contain_errors_of(sequence):
            if sequence.admitted is not None:
                self.admission.release(sequence, keep=reason != "error")
        self.totals.add(result)
        with self._contain_errors_of(sequence):
            sequence.listener(result)

    def _fail(self, error: BaseException) -> None:
        """Nothing can be computed any more: everybody is told so."""
        if not isinstance(error, GreenroomError):
            log.error("the engine failed", exc_info=error)
        elif self.was_ready:  # before, who waits for the model says why there is none
            log.error("%s", error)
        with self._changed:
            self.failure = error
            self._state = ("failed", self._state[1], str(error) or repr(error))
        own = ClosedError(f"the engine failed: {error!r}")
        own.__cause__ = error
        for each in (*self._waiting, *self._running):
            self._finish(each, "error", own)

    def _leave(self) -> None:
        """Save what was learned, give the memory back."""
        for each in (*self._waiting, *self._running):
            self._finish(each, "stopping")
        if self.greenroom is None:
            return
        try:
            if self.was_ready:
                self.final = model_stats(self)
        finally:
            self.greenroom.detach()


def end_ids(model: Any) -> tuple[int, ...]:
    """The tokens with which a model ends an answer."""
    own = model.generation_config.eos_token_id
    if own is None:
        own = getattr(model.config.get_text_config(), "eos_token_id", None)
    if own is None:
        return ()
    return tuple(own) if isinstance(own, list | tuple) else (int(own),)
