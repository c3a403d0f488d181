"""HTTP routes of the live page: its files, and the frames that it draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from greenroom.server.http.service import Service
from greenroom.server.page.assets import DATA, HEADERS, Asset, assets
from greenroom.server.page.broadcast import Broadcast
from greenroom.server.page.live import EngineFrames

STREAM = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def router(service: Service) -> APIRouter:
    """Make the routes of the live page; its data need the API key, its files do not."""
    routes = APIRouter(include_in_schema=False)
    source = EngineFrames(service.engine, service.name, controls=service.key is not None)
    broadcast = Broadcast(source)

    def add_file(path: str, asset: Asset) -> None:
        @routes.api_route(path, methods=["GET", "HEAD"])
        async def file() -> Response:
            return Response(asset.content, media_type=asset.media_type, headers=HEADERS)

    for path, asset in assets().items():
        add_file(path, asset)

    @routes.get(DATA)
    async def live() -> FrameStream:
        place = broadcast.join()
        return FrameStream(broadcast.events(place), broadcast, place)

    return routes


class FrameStream(StreamingResponse):
    """HTTP response of frames, as server-sent events; its page stops to watch at the end."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        broadcast: Broadcast,
        place: asyncio.Queue[bytes | None],
    ) -> None:
        super().__init__(events, headers=STREAM, media_type="text/event-stream")
        self._broadcast, self._place = broadcast, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._broadcast.leave(self._place)
