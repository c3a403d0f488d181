"""Links of the OpenAPI document: the requests that follow from a response.

A conversation goes on with what the server has said. The name of a model and the id of a request
are parts of other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "$response.body#/model"
HELLO, NEXT = {"role": "user", "content": "Hello"}, {"role": "user", "content": "And then?"}


@dataclass(frozen=True)
class Link:
    """A request that follows from a response; its values may be OpenAPI's runtime expressions."""

    name: str
    method: str
    path: str
    body: dict[str, Any] | None = None
    parameters: dict[str, str] = field(default_factory=dict)

    def as_json(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return OpenAPI's link object."""
        link: dict[str, Any] = {
            "operationId": document["paths"][self.path][self.method]["operationId"]
        }
        if self.body is not None:
            link["requestBody"] = self.body
        if self.parameters:
            link["parameters"] = self.parameters
        return link


def turns(path: str) -> list[Any]:
    """Return a conversation whose second message is part of a response."""
    return [HELLO, f"$response.body#/{path}", NEXT]


def first_answers(name: str) -> tuple[Link, ...]:
    """Return the first request to each API that answers, with an expression for the model."""
    chat = {"model": name, "messages": [HELLO]}
    return (
        Link("chat", "post", "/v1/chat/completions", chat),
        Link("complete", "post", "/v1/completions", {"model": name, "prompt": "Hello"}),
        Link("respond", "post", "/v1/responses", {"model": name, "input": "Hello"}),
        Link("message", "post", "/v1/messages", {**chat, "max_tokens": 16}),
        Link("ollamaChat", "post", "/api/chat", {**chat, "stream": False}),
        Link("ollamaGenerate", "post", "/api/generate",
             {"model": name, "prompt": "Hello", "stream": False}),
    )  # fmt: skip


CANCEL = Link("cancel", "post", "/v1/admin/cancel", {"request": "$response.header.x-request-id"})
CONVERSATION = {
    "model": MODEL,
    "messages": [HELLO, {"role": "assistant", "content": "$response.body#/content"}, NEXT],
}
OPERATORS = tuple(
    Link(path.rpartition("/")[2], "get", path)
    for path in ("/v1/stats", "/metrics", "/health", "/api/ps", "/api/version")
)
# The path of a request, and what follows from its response.
LINKS: dict[tuple[str, str], tuple[Link, ...]] = {
    ("get", "/v1/models"): (
        Link("model", "get", "/v1/models/{name}", parameters={"name": "$response.body#/data/0/id"}),
        *first_answers("$response.body#/data/0/id"),
    ),
    ("get", "/api/tags"): (
        Link("show", "post", "/api/show", {"model": "$response.body#/models/0/model"}),
        *first_answers("$response.body#/models/0/model"),
    ),
    ("post", "/v1/chat/completions"): (
        Link("goOn", "post", "/v1/chat/completions",
             {"model": MODEL, "messages": turns("choices/0/message")}),
        CANCEL,
    ),
    ("post", "/v1/completions"): (
        Link("goOn", "post", "/v1/completions",
             {"model": MODEL, "prompt": "Hello {$response.body#/choices/0/text}"}),
        CANCEL,
    ),
    ("post", "/v1/responses"): (
        Link("goOn", "post", "/v1/responses", {"model": MODEL, "input": "$response.body#/output"}),
        CANCEL,
    ),
    ("post", "/v1/messages"): (
        Link("goOn", "post", "/v1/messages", {**CONVERSATION, "max_tokens": 16}),
        Link("count", "post", "/v1/messages/count_tokens", CONVERSATION),
        CANCEL,
    ),
    ("post", "/api/chat"): (
        Link("goOn", "post", "/api/chat",
             {"model": MODEL, "messages": turns("message"), "stream": False}),
        CANCEL,
    ),
    ("post", "/api/generate"): (
        Link("goOn", "post", "/api/generate",
             {"model": MODEL, "prompt": "Hello {$response.body#/response}", "stream": False}),
        CANCEL,
    ),
    ("post", "/v1/admin/cache"): OPERATORS,
    ("post", "/v1/admin/devices"): OPERATORS,
}  # fmt: skip


def add_links(document: dict[str, Any]) -> None:
    """Add all links to an OpenAPI document."""
    for (method, path), links in LINKS.items():
        response = document["paths"][path][method]["responses"]["200"]
        response["links"] = {each.name: each.as_json(document) for each in links}
