"""The ASGI app: all HTTP APIs over one engine.

app = create_app(Service(engine, config, "demo"))
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from greenroom import __version__
from greenroom.config import ServeConfig
from greenroom.errors import GreenroomError
from greenroom.server.api import chat, completions, messages, operations, responses
from greenroom.server.api.ollama import answers as ollama_answers
from greenroom.server.api.ollama import models as ollama_models
from greenroom.server.http.errors import ApiError, as_api_error
from greenroom.server.http.route_helpers import REF
from greenroom.server.http.service import Service
from greenroom.server.page import routes
from greenroom.server.page.assets import assets
from greenroom.server.web.links import add_links
from greenroom.server.web.middleware import (
    CheckMiddleware,
    KeyCheck,
    LoggingMiddleware,
    head_error,
    response,
)

APIS = (
    chat, completions, responses, messages, operations, ollama_answers, ollama_models,
)  # fmt: skip


def create_app(service: Service) -> ASGIApp:
    """Make the ASGI app of a service: all routes, the key check, request ids and the log."""
    app: ASGIApp = CheckMiddleware(api(service), key_check(service.config, service.key))
    if service.config.allowed_origins is not None:
        origins = [origin.strip() for origin in service.config.allowed_origins.split(",")]
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return LoggingMiddleware(CheckMiddleware(app, head_error), service.log)


def key_check(config: ServeConfig, key: str | None) -> KeyCheck:
    """Make the check of a server's API key; files of the live page need no key."""
    return KeyCheck(key, config.host, () if config.no_page else assets())


def api(service: Service) -> FastAPI:
    """Make the FastAPI app: routes of all APIs, errors in each API's format."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    # No documentation pages: they would load scripts from other servers.
    app = FastAPI(
        title="Greenroom", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    for each in APIS:
        app.include_router(each.router(service))
    if not service.config.no_page:
        app.include_router(routes.router(service))
    for kind in (GreenroomError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
    app.state.log = service.log
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        path = request.url.path[:80]
        texts = {
            404: f"the server has no path {path}",
            405: f"{path} does not accept the method {request.method}",
        }
        error = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
    api_error = as_api_error(error)
    if api_error.status >= 500 and api_error is not error and isinstance(error, GreenroomError):
        request.app.state.log.log_failure(request.state.record.id, error)
    return response(api_error, request.scope)


def _document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of request bodies and with links.

    FastAPI does not read these schemas.
    """
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        models = [(model, "validation") for each in APIS for model in each.BODIES]
        _, schemas = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        keys = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["components"]["securitySchemes"] = keys
        document["security"] = [{}, {"bearer": []}, {"key": []}]
        add_links(document)
        app.openapi_schema = document
    return app.openapi_schema
