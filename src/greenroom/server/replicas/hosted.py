"""The server without a socket, for a process that belongs to another program."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from greenroom.config import LoadConfig, ServeConfig
from greenroom.config.values import adapter_names
from greenroom.errors import GreenroomError
from greenroom.server.chat.local import wait_until_loaded
from greenroom.server.engine.start import start
from greenroom.server.http.service import Service
from greenroom.server.replicas.responses import Answer
from greenroom.server.web.app import create_app
from greenroom.server.web.calls import Call, call_app


class HostedServer:
    """A server of one model, which answers calls in place of HTTP.

    `name` stands in its answers, `model_name` is the model's name for clients, who may also name an
    adapter. The constructor waits until the model is loaded; GreenroomError if that fails.
    """

    def __init__(
        self, name: str, model: str, model_name: str, load: LoadConfig, config: ServeConfig,
        key: str | None,
    ) -> None:  # fmt: skip
        if load.threads is None:  # the other program may have set the default of all libraries
            load = replace(load, threads=len(os.sched_getaffinity(0)))
        self._name = name
        adapters = adapter_names(load.adapter, model_name)
        self._engine = start(model, load, config, variants=True)
        self._service = Service(self._engine, config, model_name, key, adapters=adapters)
        try:
            wait_until_loaded(self._engine, lambda share: None)
            self._service.warm().result()
        except BaseException:
            self.close()
            raise
        self._service.log.log_message(self._engine.summary)
        self._app = create_app(self._service)

    async def answer(self, call: Call, **routing: object) -> AsyncGenerator[Any]:
        """Yield name, status and headers of a response, then parts of its body.

        `routing` is for the program that chooses among servers; it has no effect here.
        """
        async with aclosing(call_app(self._app, call)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    yield self._name, message["status"], message["headers"]
                else:
                    yield message.get("body", b"")

    async def answer_at_once(self, call: Call) -> Answer:
        (name, status, headers), *parts = [part async for part in self.answer(call)]
        return name, status, headers, b"".join(parts)

    def check(self) -> None:
        """Raise GreenroomError if the model has failed."""
        state, _, why = self._engine.state()
        if state != "ready":
            raise GreenroomError(why or f"the model is {state}")

    def close(self) -> None:
        self._engine.stop(0.0)
        self._service.close()
