"""Errors as HTTP clients see them, in the format of the API that they called.

Internal messages may name files: clients get the kind of error, and the log has the details.
"""

from __future__ import annotations

from typing import Any

from greenroom.errors import (
    ClosedError,
    DeviceError,
    GreenroomError,
    ModelError,
    StoreError,
    TooLong,
    UsageError,
)
from greenroom.server.engine.failures import RequestFailed
from greenroom.server.engine.requests import Busy, NotFinite

CLIENT_CLOSED = 499  # nginx's status for a client that disconnected
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"

OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}
ANTHROPIC = {**OPENAI, 408: "invalid_request_error", 503: "overloaded_error"}
CLIENT, SERVER = "invalid_request_error", {"openai": "server_error", "anthropic": "api_error"}


class ApiError(GreenroomError):
    """An error that a client gets as an HTTP response.

    `param` names the wrong parameter. `code` is OpenAI's code of the error, or None. Clients may
    try again after `retry_after_s` seconds. If `close` is true, the connection is closed and the
    rest of the request is not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_s, self.close = retry_after_s, close

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.close:
            headers["connection"] = "close"
        return headers

    def body(self, path: str, request_id: str) -> dict[str, Any]:
        """Return the body of the HTTP response, in the format of the API at `path`."""
        if path.startswith(ANTHROPIC_PATH):
            kind = _kind(ANTHROPIC, self.status, SERVER["anthropic"])
            error = {"type": kind, "message": str(self)}
            return {"type": "error", "error": error, "request_id": request_id}
        if path.startswith(OLLAMA_PATH):
            return {"error": str(self)}
        kind = _kind(OPENAI, self.status, SERVER["openai"])
        details = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": details}


def _kind(table: dict[int, str], status: int, server: str) -> str:
    return table.get(status, CLIENT if status < 500 else server)


def as_api_error(error: Exception) -> ApiError:
    """Convert any error to the ApiError that a client gets, without names of files."""
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, Busy):
        return ApiError(429, message, retry_after_s=error.retry_after_s)
    if isinstance(error, TooLong):
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, UsageError):
        return ApiError(400, message)
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is stopping, or its model has failed", retry_after_s=5)
    if isinstance(error, StoreError):
        return ApiError(500, "the server could not read a part of the model: try again")
    if isinstance(error, DeviceError):
        return ApiError(500, "the server's device ran out of memory, or a copy failed: try again")
    if isinstance(error, RequestFailed | NotFinite):
        return ApiError(500, f"{message}; the server's log has details under this request's id")
    return ApiError(500, "the request failed in the server; the server's log has details")


def failure_cause(failure: BaseException | None) -> str:
    """Describe why the serving engine failed, in a few words without names of files."""
    if failure is None:
        return "the engine's thread has ended"
    kinds = {
        StoreError: "reading a part of the model failed",
        MemoryError: "there was not enough memory",
        DeviceError: "the device ran out of memory, or a copy failed",
        ModelError: "the model is not supported or damaged",
        UsageError: "an option is not valid",
    }
    reason = next((text for kind, text in kinds.items() if isinstance(failure, kind)), None)
    return f"{reason or 'an unexpected error'} ({type(failure).__name__})"
