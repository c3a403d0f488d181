"""Requests of a batch file: each line is checked before the model is loaded.

requests = read_requests(Path("requests.jsonl"), "demo")
body = requests[0].read(file)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from greenroom.errors import UsageError
from greenroom.json_file import printable, show_value

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ID = "batch_req_"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch file, without its body, which stays in the file.

    custom_id: the user's name of the request
    path:      path of the API
    digest:    of path and body, as an id
    offset:    first byte of the line in the file
    """

    custom_id: str
    path: str
    digest: str
    offset: int

    def read(self, file: BinaryIO) -> bytes:
        """Read the request's body as JSON; UsageError if the file has changed."""
        file.seek(self.offset)
        try:
            content = json.loads(file.readline())
        except ValueError:
            content = {}
        if digest_of(content) != self.digest:
            raise UsageError(
                f"the request {show_value(self.custom_id)} has changed while the batch ran"
            )
        return json.dumps(content["body"]).encode()


def digest_of(content: Any) -> str:
    """Return a request's id: a digest of the path and the body of its line."""
    if not isinstance(content, dict):
        return ""
    text = json.dumps([content.get("url"), content.get("body")], sort_keys=True)
    return ID + hashlib.sha256(text.encode()).hexdigest()[:24]


def read_requests(path: Path, model: str, adapters: Sequence[str] = ()) -> list[BatchRequest]:
    """Read and check a batch file: one JSON object a line, in OpenAI's format.

    Each request must have the name `model`, or one of `adapters`. UsageError names the first wrong
    line.
    """
    requests, lines, offset = list[BatchRequest](), dict[str, int](), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        request = _request(line, offset, (model, *adapters))
                    except ValueError as error:
                        raise UsageError(f"{path}, line {number}: {error}") from error
                    first = lines.setdefault(request.custom_id, number)
                    if first != number:
                        raise UsageError(
                            f"{path}, line {number}: line {first} has the same custom_id"
                            f" {show_value(request.custom_id)}"
                        )
                    requests.append(request)
                offset += len(line)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not requests:
        raise UsageError(f"{path} has no requests")
    return requests


def _request(line: bytes, offset: int, models: Sequence[str]) -> BatchRequest:
    """Make a request of a line; ValueError says what is wrong with the line."""
    try:
        content = json.loads(line)
        digest = digest_of(content)
    except (ValueError, RecursionError) as error:
        raise ValueError("not a JSON object") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    name, body = content.get("custom_id"), content.get("body")
    if not isinstance(name, str) or not name:
        raise ValueError("custom_id must be a text")
    if content.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {show_value(content['method'])}")
    if content.get("url") not in PATHS:
        raise ValueError(
            f"url must be one of {', '.join(PATHS)}, got {show_value(content.get('url'))}"
        )
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    if body.get("stream"):
        raise ValueError("a batch has no streams: leave out stream")
    if not isinstance(named := body.get("model"), str):
        raise ValueError("model must be a text")
    if named not in models:
        advice = "" if len(models) > 1 else f": give --model-name {printable(named)}"
        answering = " or ".join(map(repr, models))
        raise ValueError(f"the model is {show_value(named)}, but {answering} answers{advice}")
    return BatchRequest(name, content["url"], digest, offset)
