"""The service that all HTTP requests share: one serving engine, its limits, metrics, log."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from greenroom.config import Amount, ServeConfig
from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.engine.failures import contain_errors
from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.engine.requests import Busy
from greenroom.server.engine.start import BODIES
from greenroom.server.http.bodies import BodyBudget
from greenroom.server.http.errors import ApiError
from greenroom.server.http.metrics import Metrics
from greenroom.server.http.pixels import PixelBudget
from greenroom.server.http.request_log import RequestLog, RequestRecord

WORKERS = 2  # threads that render templates and tokenise, for small requests
SMALL_BYTES = 32 << 10  # of a body; larger bodies share one other thread
Result = TypeVar("Result")


class Service:
    """A serving engine with its limits, metrics and log, for all HTTP requests.

    `name` is the model's name for clients, `key` the API key that they must send, or None, and
    `adapters` the names of the model's other variants.
    """

    def __init__(
        self,
        engine: ContinuousEngine,
        config: ServeConfig,
        name: str,
        key: str | None = None,
        log: RequestLog | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self.engine, self.config, self.name, self.key = engine, config, name, key
        self.models = name, *adapters  # by the number of the variant
        self.log = log or RequestLog(config.log_format)
        self.metrics = Metrics(engine, self.models)
        self.created = int(time.time())
        nbytes = Amount.parse(config.max_body, "--max-body").nbytes
        assert nbytes is not None  # ServeConfig has checked it
        self.max_body = nbytes
        self.bodies = BodyBudget(BODIES * nbytes)
        self.pixels = PixelBudget()
        self.most_answers = config.max_batch + config.max_queue
        self._workers = ThreadPoolExecutor(WORKERS, "greenroom-prompts")
        self._large = ThreadPoolExecutor(1, "greenroom-large-prompts")
        self._preparing = 0
        self._dialogue: Dialogue | None = None
        self._lock = threading.Lock()

    def variant_of(self, name: str) -> int:
        """Return the number of the model's variant that a client names; 0 is the model itself.

        The name may end in ":latest", the tag that clients of Ollama's API add. ApiError 404 if no
        such model is served.
        """
        for number, each in enumerate(self.models):
            if each in (name, name.removesuffix(":latest")):
                return number
        raise ApiError(
            404,
            f"the model {name[:80]!r} does not exist: this server has"
            f" {', '.join(map(repr, self.models))}",
            param="model",
            code="model_not_found",
        )

    async def prepare(
        self,
        make: Callable[[Dialogue], Result],
        record: RequestRecord,
        discard: Callable[[Result], object] = lambda result: None,
    ) -> Result:
        """Run `make`, which prepares a request, on a worker thread.

        Tokenizers and grammars take long for large requests; neither the event loop nor small
        requests wait for them. If the caller is cancelled, `discard` gets a result that comes
        later. Busy if too many requests are being prepared, ApiError 503 while the model loads, 504
        if the request's time is over.
        """
        if self._preparing >= self.most_answers:
            raise Busy("too many requests are being prepared: try again later", retry_after_s=1.0)
        self._preparing += 1
        large = record.body_bytes > SMALL_BYTES
        future = (self._large if large else self._workers).submit(self._contained, make)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.left_s(record))
        except BaseException as error:
            if not future.cancel():
                future.add_done_callback(
                    lambda late: None if late.exception() else discard(late.result())
                )
            if isinstance(error, asyncio.TimeoutError | TimeoutError):
                raise self.too_slow() from None
            raise
        finally:
            self._preparing -= 1

    def left_s(self, record: RequestRecord) -> float:
        """Return the seconds that the answer to a request may still take."""
        return max(0.001, record.began + self.config.timeout - time.monotonic())

    def too_slow(self) -> ApiError:
        most = f"{self.config.timeout:g} seconds"
        return ApiError(504, f"the answer took longer than the limit of {most} (--timeout)")

    def _contained(self, make: Callable[[Dialogue], Result]) -> Result:
        with contain_errors():
            return make(self.dialogue())
        raise AssertionError  # for mypy: `contain_errors` raises

    def warm(self) -> Future[Dialogue]:
        """Begin to load the model's chat template, which may take seconds."""
        return self._workers.submit(self._contained, lambda dialogue: dialogue)

    def dialogue(self) -> Dialogue:
        """Return the model's chat template and parsers; ApiError 503 if the model is not ready."""
        state, progress, _ = self.engine.state()
        if state == "loading":
            raise ApiError(503, f"the model is loading ({progress:.0%})", retry_after_s=5)
        if state != "ready":
            why = "is stopping" if state == "stopping" else "has failed"
            raise ApiError(503, f"the server {why}", retry_after_s=30)
        with self._lock:
            if self._dialogue is None:
                engine = self.engine
                self._dialogue = Dialogue(
                    engine.tokenizer, engine.model_type, engine.context, engine.pictures
                )
            return self._dialogue

    def close(self) -> None:
        for each in (self._workers, self._large):
            each.shutdown(wait=True, cancel_futures=True)
        if self._dialogue is not None:
            self._dialogue.close()
