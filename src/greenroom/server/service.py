"""One model as its clients share it: what every request needs, whatever API it came by."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from greenroom.config import Amount, ServeConfig
from greenroom.hf.dialogue import Dialogue
from greenroom.server.errors import ApiError
from greenroom.server.failures import contained
from greenroom.server.metrics import Metrics
from greenroom.server.requests import Busy, Engine
from greenroom.server.served import RequestLog

WORKERS = 2  # threads that render templates and tokenise
Made = TypeVar("Made")


class Service:
    """An engine, its limits, and what is counted. `key` is what clients must give, if anything."""

    def __init__(
        self,
        engine: Engine,
        config: ServeConfig,
        name: str,
        key: str | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.engine, self.config, self.name, self.key = engine, config, name, key
        self.log = log or RequestLog(config.log_format)
        self.metrics = Metrics(engine, name)
        self.created = int(time.time())
        nbytes = Amount.parse(config.max_body, "--max-body").nbytes
        assert nbytes is not None  # ServeConfig has checked it
        self.max_body = nbytes
        self.most_answers = config.max_batch + config.max_queue
        self._workers = ThreadPoolExecutor(WORKERS, "greenroom-prompts")
        self._preparing = 0
        self._dialogue: Dialogue | None = None
        self._lock = threading.Lock()

    def check_model(self, name: str) -> None:
        """ApiError 404 where a client asks for another model: there is one."""
        if name != self.name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist here: this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def prepare(self, make: Callable[[Dialogue], Made]) -> Made:
        """Run `make` on a thread for prompts. Busy where too many wait for one, 503 while loading.

        Templates and tokenizers take long over long prompts; the event loop does not wait for them.
        """
        if self._preparing >= self.most_answers:
            raise Busy("too many requests wait to be read", retry_after_s=1.0)
        self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._workers, self._contained, make)
        finally:
            self._preparing -= 1

    def _contained(self, make: Callable[[Dialogue], Made]) -> Made:
        with contained():
            return make(self.dialogue())
        raise AssertionError  # for mypy: `contained` raises

    def dialogue(self) -> Dialogue:
        """The model's, once it is loaded; ApiError 503 before."""
        state, progress, _ = self.engine.state()
        if state == "loading":
            raise ApiError(503, f"the model is loading ({progress:.0%})", retry_after_s=5)
        if state != "ready":
            why = "is stopping" if state == "stopping" else "has failed"
            raise ApiError(503, f"the server {why}", retry_after_s=30)
        with self._lock:
            if self._dialogue is None:
                self._dialogue = Dialogue(self.engine.tokenizer, self.engine.model_type)
            return self._dialogue

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
