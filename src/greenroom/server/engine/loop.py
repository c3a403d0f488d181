"""Continuous batching: one thread computes forward passes for requests that come and go.

    while there are requests:
        admit waiting requests that have room; reuse cached prefixes
        for each pass of the round: compute it, sample a token for each answer, send it

The engine of transformers (generation/continuous_batching) is not used: it allocates all blocks of
keys and values at the start, outside of any budget; its paged cache costs time for each token; its
samplers cannot be seeded for each request; and a failed pass ends its thread. The use of
transformers in a pass is in hf/kv/batch.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from greenroom.config import OFF, ServeConfig
from greenroom.errors import ClosedError, GreenroomError, UnsupportedModel
from greenroom.hf.kv.batch import Batch
from greenroom.hf.pictures.reader import PictureReader
from greenroom.runtime.kernels.dense.stored import weight_matrix
from greenroom.server.engine.admission import Admission
from greenroom.server.engine.batches import compose, split
from greenroom.server.engine.drafts import Drafts
from greenroom.server.engine.failures import contain_errors
from greenroom.server.engine.journal import Journal
from greenroom.server.engine.kv_memory import kv_limit
from greenroom.server.engine.passes import PassRunner
from greenroom.server.engine.prompts.setup import open_prompt_store
from greenroom.server.engine.requests import Busy, Listener, Request
from greenroom.server.engine.sequence import Sequence
from greenroom.server.engine.snapshot import Totals, model_stats, snapshot
from greenroom.server.engine.tokens.grammar import Grammars
from greenroom.server.engine.tokens.reader import end_ids
from greenroom.server.engine.tokens.sampling import Sampler
from greenroom.server.engine.tokens.scores import PromptScores

DETACH_S = 30.0  # in which a failed engine must have detached its model
LOADING_S = 5.0  # after which clients may try again while the model is loading

Progress = Callable[[float, str], None]


class LoadedModel(NamedTuple):
    """A model with an attached expert cache, its tokenizer, and a description of the memory."""

    model: Any
    tokenizer: Any
    summary: str = ""


Load = Callable[[Progress], LoadedModel]

log = logging.getLogger(__name__)


class ContinuousEngine:
    """Answers many requests at once by continuous batching; its public methods are thread-safe.

    `load` loads the model in the engine's thread; `journal` records every forward pass."""

    def __init__(
        self, load: Load, config: ServeConfig, context: int, journal: Journal | None = None
    ) -> None:
        self.config, self.context, self.journal = config, context, journal
        self.model: Any = None
        self.greenroom: Any = None  # of the model; it stays here after the model is detached
        self.was_ready = False
        self.failure: BaseException | None = None  # why its state is "failed"
        self.final: dict[str, Any] | None = None  # the last statistics, once the model is detached
        self.tokenizer: Any = None  # set once the state is "ready", as all fields below
        self.model_type: str | None = None  # of the model's config
        self.end_ids: tuple[int, ...] = ()  # end an answer, unless the request has others
        self.summary = ""  # one line about the use of memory
        self.drafts: Drafts | None = None  # where speculation is on
        self.pictures: PictureReader | None = None
        self.totals = Totals()
        self._load, self._numbers, self._changed = load, 0, threading.Condition()
        self._state: tuple[str, float, str] = ("loading", 0.0, "")
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stop_by: float | None = None  # when requests that still run are stopped
        self._thread = threading.Thread(target=self._main, name="greenroom-engine", daemon=True)
        self._thread.start()

    # ---- from any thread

    def submit(self, request: Request, listener: Listener) -> Sequence:
        """Queue a request to the engine; return its Sequence, which can be cancelled.

        `listener` gets the answer's events, in the engine's thread. Raises Busy, TooLong,
        UsageError, or ClosedError."""
        self._check_open()
        sequence = self._sequence(request, listener)
        with self._changed:
            self._check_open()
            free = max(0, self.config.max_batch - len(self._running))
            if len(self._waiting) >= self.config.max_queue + free:
                raise Busy(
                    f"the queue is full: {len(self._waiting)} requests wait already (--max-queue);"
                    " try again later",
                    self._retry_s(),
                )
            sequence.number, self._numbers = self._numbers, self._numbers + 1
            self._waiting.append(sequence)
            if self.journal is not None:
                self.journal.requests[sequence.number] = request
            self._changed.notify_all()
        return sequence

    def _check_open(self) -> None:
        name, _, why = self._state
        if name == "loading":
            raise Busy("the model is loading: try again later", LOADING_S)
        if name != "ready":
            what = "has failed" if name == "failed" else "is stopping"
            raise ClosedError(f"the engine {what}" + (f": {why}" if why else ""))

    def _sequence(self, request: Request, listener: Listener) -> Sequence:
        """Make the Sequence of a request. UsageError or TooLong if it cannot be answered."""
        vocabulary = self._vocabulary
        request.check(vocabulary, self.context)
        grammar = None if request.grammar is None else self._grammars(request.grammar)
        scores = None if request.prompt_logprobs is None else PromptScores(
            request.ids, request.prompt_logprobs, vocabulary, self.model.dtype.itemsize
        )  # fmt: skip
        return Sequence(
            number=-1,
            request=request,
            listener=listener,
            sampler=Sampler(request, self.model.generation_config, vocabulary, grammar),
            end_ids=frozenset(self.end_ids if request.end_ids is None else request.end_ids),
            max_kv_bytes=self.greenroom.setup.keys_values.total_bytes(request.length),
            on_cancel=self._cancel,
            scores=scores,
        )

    def _retry_s(self) -> float:
        """Estimate the seconds until a request's place is free, from the average answer time."""
        return max(1.0, self.totals.usual_s * (len(self._waiting) + 1) / self.config.max_batch)

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.cancelled = True
            self._changed.notify_all()
        self.passes.interrupt_if_unwanted()

    def state(self) -> tuple[str, float, str]:
        """Return the engine's state by name, its loading progress, and a text.

        The states are loading, ready, failed and stopping; the progress is from 0 to 1. The text
        says what is being loaded or why the engine failed; else it is empty.
        """
        name, progress, why = self._state
        if name in ("ready", "stopping") and not self._thread.is_alive() and self._stop_by is None:
            return "failed", progress, "the engine's thread has ended"
        return name, progress, why

    def stats(self) -> dict[str, Any]:
        """Return JSON-ready statistics of the engine, as `snapshot` makes them."""
        return snapshot(self)

    def sequences(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running and the waiting requests of this moment."""
        return list(self._running), list(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def resize(self, cache: str | int) -> int:
        """Resize the expert cache, also while answers run; return its number of slots."""
        self._check_open()
        slots = int(self.greenroom.resize(cache))
        self._wake()  # further slots may be free
        return slots

    def _wake(self) -> None:
        """Let the engine's thread look for work again."""
        with self._changed:
            self._changed.notify_all()

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, give accepted ones `grace_s` seconds, and wait for the engine's end.

        A second call waits too, and may shorten the time."""
        with self._changed:
            by = time.monotonic() + grace_s
            self._stop_by = by if self._stop_by is None else min(by, self._stop_by)
            if self._state[0] in ("ready", "loading"):
                self._state = ("stopping", self._state[1], "")
            self._changed.notify_all()
        self._thread.join(DETACH_S if self._state[0] == "failed" else None)

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
        model, tokenizer, summary = self._load(self._progress)
        self.model, self.greenroom = model, (greenroom := model.greenroom)
        greenroom.on_growth, setup = self._wake, greenroom.setup
        self.context, self._block = setup.context, setup.prompt_block
        chunk = min(self.config.prefill_chunk, self._block)
        config = self.config = replace(self.config, prefill_chunk=chunk)
        if model.config.is_encoder_decoder:
            raise UnsupportedModel(
                f"{type(model).__name__} is an encoder-decoder model, which cannot be served:"
                " use `greenroom run`"
            )
        self._vocabulary = int(weight_matrix(model.get_output_embeddings()).shape[0])
        self.end_ids, self.model_type = end_ids(model), model.config.model_type
        self._grammars = Grammars(tokenizer, self._vocabulary, self.end_ids)
        self._grammars.prepare()
        self.batch = Batch(model, exact=config.batch_invariant)
        if self.batch.sequential_reason:
            log.warning("requests are computed one after another: %s", self.batch.sequential_reason)
        self.drafts = Drafts(model) if config.speculate != OFF else None
        self.passes = PassRunner(greenroom, self.batch, chunk, self.journal, self.drafts)
        self.pictures = PictureReader(model, self.context, config.picture_tokens)
        limit, prompts = kv_limit(greenroom, config), open_prompt_store(model, config, self._wake)
        self.admission = Admission(greenroom, self.batch, config, limit, self.journal, prompts)
        limits = self.admission.describe_limits(self.passes.speculation)
        self.summary = "\n".join(filter(None, (summary, limits, self.pictures.description)))
        self.tokenizer = tokenizer
        with self._changed:
            self.was_ready = True
            if self._state[0] == "loading":
                self._state = ("ready", 1.0, "")

    def _progress(self, share: float, what: str) -> None:
        with self._changed:
            if self._state[0] == "loading":
                self._state = ("loading", share, what)

    def _round(self) -> bool:
        """Run one round of the engine: admit, compute, sample, send. False where it must stop."""
        with self._changed:
            if not self._await():
                return False
            admitted = self.admission.admit(self._waiting, self._running)
            self._running += admitted
        self._drop_ended()
        for each in (*admitted, *self.admission.loaded_sequences(self._running)):
            self._prepare(each)
        ready, config = self.admission.ready_sequences(self._running), self.config
        planned = compose(ready, config.prefill_chunk, self._block, config.batch_invariant)
        for shares in split(planned, self.batch.can_batch):
            for sequence, logits in self.passes.run(shares):
                self._answer(sequence, logits)
            self.passes.record_tokens()
        self._drop_ended()
        self.greenroom.reconfigure(idle=not (self._running or self._waiting))
        return True

    def _prepare(self, sequence: Sequence) -> None:
        """Give an admitted sequence its keys and values, or begin to read them from disk."""
        if sequence.finished:
            return
        with self._contain_errors_of(sequence):
            self.admission.prepare(sequence, self._running)

    def _await(self) -> bool:
        """Wait, with the lock held, until the engine has work. False where there will be none."""
        waiting, running = self._waiting, self._running
        while not (
            self.admission.ready_sequences(running)
            or self.admission.loaded_sequences(running)
            or self._ended_sequences((*waiting, *running))
            or (waiting and self.admission.can_begin(waiting[0], running))
        ):
            if self._stop_by is not None and not waiting and not running:
                return False
            if not (waiting or running or self.config.no_idle_prefetch):
                self.greenroom.prefetch_idle()
            self._changed.wait(self._until_next())
        return True

    def _until_next(self) -> float | None:
        """Return the seconds until the engine's next deadline; None if there is none."""
        now = time.monotonic()
        times = [each.deadline for each in (*self._waiting, *self._running)]
        if self._stop_by is not None:
            times.append(self._stop_by)
        delay_s = self.admission.delay_s(self._running)
        if delay_s > 0 or self.admission.ready_sequences(self._running):  # it has just ended
            times.append(now + delay_s)
        least = min(times, default=float("inf"))
        return None if least == float("inf") else max(0.0, least - now)

    def _ended_sequences(self, sequences: Any) -> list[tuple[Sequence, str]]:
        """Return the sequences that end now, each with its reason."""
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
            ended = self._ended_sequences((*self._waiting, *self._running))
        for each, reason in ended:
            self._finish(each, reason)

    def _answer(self, sequence: Sequence, logits: torch.Tensor | GreenroomError) -> None:
        """Sample a sequence's next tokens from its logits, or end it with the pass's error."""
        reason = ""
        with self._contain_errors_of(sequence):
            if isinstance(logits, GreenroomError):
                raise logits
            reason = sequence.answer(logits)
        if reason:
            self._finish(sequence, reason)

    @contextmanager
    def _contain_errors_of(self, sequence: Sequence) -> Iterator[None]:
        """End a request with the error that its own work raises; ClosedError ends the engine."""

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
        """End a sequence: free its place, cache its prefix, send the result."""
        if sequence.finished:
            return
        sequence.finished = True
        with self._changed:
            for queue in (self._waiting, self._running):
                if sequence in queue:
                    queue.remove(sequence)
        result = sequence.result(reason, error)
        with self._contain_errors_of(sequence):
            if sequence.admitted is not None:
                self.admission.release(sequence, keep=reason != "error")
                self.passes.remember(sequence)
        self.totals.add(result)
        with self._contain_errors_of(sequence):
            sequence.send_result(result)

    def _fail(self, error: BaseException) -> None:
        """End all requests with an error, because the engine cannot compute any more."""
        if not isinstance(error, GreenroomError):
            log.error("the engine failed", exc_info=error)
        elif self.was_ready:  # before that, the caller that waits for the model reports the error
            log.error("%s", error)
        with self._changed:
            self.failure = error
            self._state = ("failed", self._state[1], str(error) or repr(error))
        closed = ClosedError(f"the engine failed: {error!r}")
        closed.__cause__ = error
        for each in (*self._waiting, *self._running):
            self._finish(each, "error", closed)

    def _leave(self) -> None:
        """End all requests, write prompts, save the engine's statistics, close the expert cache."""
        for each in (*self._waiting, *self._running):
            self._finish(each, "stopping")
        if self.greenroom is None:
            return
        try:
            if self.was_ready:
                self.admission.close()
                self.final = model_stats(self)
        finally:
            self.greenroom.close()
