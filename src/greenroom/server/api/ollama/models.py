"""Ollama's descriptions of the served model, and refusals of work on other models."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from greenroom import __version__
from greenroom.runtime.memory.system import rss_bytes
from greenroom.server.engine.model_facts import ModelFacts, model_facts
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import StrictModel
from greenroom.server.http.route_helpers import openapi_body, read_body
from greenroom.server.http.service import Service

NEVER = "2999-12-31T00:00:00Z"  # when the model is unloaded
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
REFUSED = ("pull", "push", "create", "copy", "delete", "embed", "embeddings", "blobs/{digest}")


class OllamaShowRequest(StrictModel):
    """Request body of Ollama's show; `name` is the older name of `model`."""

    model: Annotated[str, Field(max_length=512)] | None = None
    name: Annotated[str, Field(max_length=512)] | None = None
    verbose: bool | None = None
    # Supported only with their neutral values:
    system: Literal[""] | None = None
    template: Literal[""] | None = None
    options: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> OllamaShowRequest:
        if not (self.model or self.name):
            raise ValueError("model is missing")
        return self


BODIES = (OllamaShowRequest,)


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": re.split(r"\.dev|\+", __version__)[0]}  # numbers alone: clients parse it

    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        modified = {"modified_at": _time(service.created)}
        return {"models": [_entry(service, name) | modified for name in service.models]}

    @routes.get("/api/ps")
    async def running() -> dict[str, Any]:
        facts = model_facts(service.engine)
        if facts is None:
            return {"models": []}
        memory = {"size": rss_bytes() + facts.gpu_bytes, "size_vram": facts.gpu_bytes}
        more = {"context_length": service.engine.context, "expires_at": NEVER}
        return {"models": [_entry(service, name) | memory | more for name in service.models]}

    @routes.post("/api/show", openapi_extra=openapi_body(OllamaShowRequest))
    async def show(request: Request) -> dict[str, Any]:
        body = await read_body(request, service, OllamaShowRequest)
        service.variant_of(body.model or body.name or "")
        return _description(service)

    for name in REFUSED:
        _add_refusal(routes, name)
    return routes


def _add_refusal(routes: APIRouter, name: str) -> None:
    methods = ["GET", "HEAD", "POST", "DELETE"]

    @routes.api_route(f"/api/{name}", methods=methods, include_in_schema=False)
    async def refuse() -> None:
        what = name.partition("/")[0]
        work = "compute embeddings" if what.startswith("embed") else f"do {what}"
        raise ApiError(501, f"this server has one model, and does not {work}")


def _entry(service: Service, name: str) -> dict[str, Any]:
    """Describe a served model in an Ollama list; sizes only once it is loaded."""
    entry: dict[str, Any] = {"name": name, "model": name}
    facts = model_facts(service.engine)
    if facts is not None:
        entry |= {"size": facts.nbytes, "digest": facts.digest, "details": _details(facts)}
    return entry


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": facts.file_format,
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": rounded_count(facts.parameters),
        "quantization_level": facts.stored_type,
    }


def _description(service: Service) -> dict[str, Any]:
    dialogue = service.dialogue()  # ApiError 503 before the model is loaded
    capabilities = ["completion"]
    capabilities += ["tools"] * dialogue.supports_tools
    capabilities += ["thinking"] * dialogue.supports_reasoning
    templates = dialogue.tokenizer.chat_template or ""
    shown: dict[str, Any] = {
        "template": templates if isinstance(templates, str) else templates.get("default", ""),
        "capabilities": capabilities,
        "modified_at": _time(service.created),
        "model_info": {},
    }
    facts = model_facts(service.engine)
    if facts is not None:
        shown["details"] = _details(facts)
        shown["model_info"] = {
            "general.architecture": facts.architecture,
            "general.parameter_count": facts.parameters,
            f"{facts.architecture}.context_length": service.engine.context,
            f"{facts.architecture}.expert_count": facts.experts,
        }
    return shown


def rounded_count(count: int) -> str:
    """Write a number of parameters as Ollama does, such as 30.5B."""
    for unit, letter in UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
