"""HTTP routes for operators: health, metrics, statistics, models, the expert cache's size."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from greenroom.server.api.shared.resizes import CacheResizer
from greenroom.server.http.errors import ApiError, failure_cause
from greenroom.server.http.params import StrictModel
from greenroom.server.http.route_helpers import openapi_body, read_body
from greenroom.server.http.service import Service


class CacheSize(StrictModel):
    """Request body with the expert cache's new size: a share (50%), or bytes (2GiB)."""

    cache: Annotated[str, Field(min_length=1, max_length=32)]


class Devices(StrictModel):
    """Request body with the devices that are to have experts, as `--device` names them."""

    devices: Annotated[str, Field(min_length=1, max_length=256)]


class CancelledRequest(StrictModel):
    """Request body with the id of the request to cancel, as in the header `x-request-id`."""

    request: Annotated[str, Field(min_length=1, max_length=64)]


BODIES = (CacheSize, Devices, CancelledRequest)


def router(service: Service) -> APIRouter:
    routes, resizes = APIRouter(), CacheResizer(service.engine.resize)
    changes = CacheResizer(lambda device: service.engine.greenroom.use_devices(device))

    @routes.get("/health")
    async def health() -> JSONResponse:
        state, progress, _ = service.engine.state()
        health: dict[str, Any] = {"status": state}
        if state == "loading":
            health["progress"] = round(progress, 3)
        if state == "failed":
            health["why"] = failure_cause(service.engine.failure)
        return JSONResponse(health, 200 if state == "ready" else 503)

    @routes.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type=service.metrics.CONTENT_TYPE)

    @routes.get("/v1/stats")
    async def stats() -> JSONResponse:
        counts = dict(await asyncio.to_thread(service.engine.stats))
        if isinstance(counts.get("state"), dict):  # its "why" may name files; the log has it
            counts["state"] = {k: v for k, v in counts["state"].items() if k != "why"}
        return JSONResponse(counts)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        models = [_model(service, name) for name in service.models]
        return {"object": "list", "data": models, "has_more": False,
                "first_id": models[0]["id"], "last_id": models[-1]["id"]}  # fmt: skip

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(service, service.models[service.variant_of(name)])

    @routes.post("/v1/admin/cache", openapi_extra=openapi_body(CacheSize))
    async def resize(request: Request) -> dict[str, Any]:
        check_has_key(service)
        body = await read_body(request, service, CacheSize)
        service.dialogue()  # ApiError 503 before the model is loaded
        return {"slots": await resizes(body.cache)}

    @routes.post("/v1/admin/devices", openapi_extra=openapi_body(Devices))
    async def devices(request: Request) -> dict[str, Any]:
        check_has_key(service)
        body = await read_body(request, service, Devices)
        service.dialogue()
        return {"slots": await changes(body.devices), "devices": service.engine.greenroom.devices}

    @routes.post("/v1/admin/cancel", openapi_extra=openapi_body(CancelledRequest))
    async def cancel(request: Request) -> dict[str, Any]:
        check_has_key(service)
        body = await read_body(request, service, CancelledRequest)
        running, waiting = service.engine.sequences()
        answers = [each for each in (*running, *waiting) if each.request.name == body.request]
        if not answers:
            raise ApiError(404, f"no request {body.request[:64]!r} is running or waiting")
        for each in answers:
            each.cancel()
        return {"cancelled": len(answers)}

    return routes


def check_has_key(service: Service) -> None:
    """Check that the server has an API key, for routes that change it; else ApiError 403."""
    if service.key is None:
        raise ApiError(403, "this route needs an API key: start the server with --api-key-file")


def _model(service: Service, name: str) -> dict[str, Any]:
    """Describe a served model in the forms of OpenAI and of Anthropic."""
    created_at = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "greenroom",
        "type": "model",
        "display_name": name,
        "created_at": created_at,
    }
