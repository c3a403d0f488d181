"""A hub on this machine: the part of huggingface.co's API that huggingface_hub 2.4 asks for.

    server = HubServer()
    server.add("tiny/moe", {"config.json": b"{}", "model.safetensors": weights})
    with server.serving():
        ...                       # HF_ENDPOINT=server.url, or `use(monkeypatch, server, cache)`

Files with a suffix of LFS have a SHA-256 and lie behind a redirect, as the hub has them; others
have git's SHA-1. `python -m tests.hub_server FOLDER [PORT]` serves FOLDER/owner/name/... by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LFS = (".safetensors", ".gguf", ".greenroom")
API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+))?$")
RESOLVE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)$")
CDN = re.compile(r"/cdn/([\w.-]+/[\w.-]+)/(.+)$")


@dataclass
class Faults:
    """What goes wrong.

    status:    of every answer about a repository, with `code` as the header X-Error-Code
    break_off: bytes of a large file after which an answer ends; `breaks` says how many answers
    checksum:  the SHA-256 that the hub names for large files
    length:    bytes added to the length that the hub names for large files
    total:     bytes added to the length that the answers name
    pause:     seconds before every answer with a large file's bytes
    ranges:    whether ranges of large files are served
    """

    status: int = 0
    code: str = ""
    break_off: int | None = None
    breaks: int = 1 << 30
    checksum: str | None = None
    length: int = 0
    total: int = 0
    pause: float = 0.0
    ranges: bool = True


@dataclass
class HubServer:
    """A hub with repositories: name -> path -> content. `asked` are (method, path, range)."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Add a repository, or make a commit in it; returns the commit."""
        digest = hashlib.sha1(name.encode())
        for path in sorted(files):
            digest.update(path.encode() + hashlib.sha256(files[path]).digest())
        commit = digest.hexdigest()
        self.repositories[f"{name}@{commit}"] = {"README.md": name.encode(), **files}
        self.revisions.setdefault(name, {})["main"] = commit
        return commit

    def commit_of(self, name: str, revision: str) -> str | None:
        known = self.revisions.get(name, {})
        commit = known.get(revision, revision)
        return commit if f"{name}@{commit}" in self.repositories else None

    def weights_asked(self) -> list[str]:
        """Ranges of large files whose bytes were requested."""
        return [
            bounds for method, path, bounds in self.asked if method == "GET" and "/cdn/" in path
        ]

    @contextlib.contextmanager
    def serving(self) -> Iterator[HubServer]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        server.daemon_threads = True
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, server: HubServer, cache: Path) -> None:
    """Make huggingface_hub ask this server, with a cache of its own, and Greenroom never wait."""
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("greenroom.hf.checkpoint.hub.transfer.PAUSE_S", 0.001)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("range", "")))
        faults = self.hub.faults
        if path == "/":
            self._send(200, b"")
        elif faults.status:
            self._send(faults.status, b"{}", {"X-Error-Code": faults.code})
        elif match := API.match(unquote(urlsplit(self.path).path)):
            self._api(match[1], match[2] or "revision", match[3] or "main")
        elif match := RESOLVE.match(path):
            self._resolve(match[1], match[2], match[3], body)
        elif match := CDN.match(path):
            self._cdn(match[1], match[2], body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.hub.commit_of(name, revision)
        if commit is None:
            code = "RevisionNotFound" if name in self.hub.revisions else "RepoNotFound"
            self._send(404, b"{}", {"X-Error-Code": code})
            return None
        return commit, self.hub.repositories[f"{name}@{commit}"]

    def _api(self, name: str, kind: str, revision: str) -> None:
        if (found := self._files(name, revision)) is None:
            return
        commit, files = found
        rows = [self._row(path, data, kind) for path, data in sorted(files.items())]
        self._json(rows if kind == "tree" else {"id": name, "sha": commit, "siblings": rows})

    def _row(self, path: str, data: bytes, kind: str) -> dict[str, Any]:
        faults = self.hub.faults
        size = len(data) + faults.length * path.endswith(LFS)
        sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        row: dict[str, Any] = {"size": size}
        row |= {"type": "file", "path": path, "oid": sha1} if kind == "tree" else {
            "rfilename": path, "blobId": sha1
        }  # fmt: skip
        if path.endswith(LFS):
            digest = faults.checksum or hashlib.sha256(data).hexdigest()
            key = "oid" if kind == "tree" else "sha256"
            row["lfs"] = {key: digest, "size": size, "pointerSize": 130}
        return row

    def _resolve(self, name: str, revision: str, path: str, body: bool) -> None:
        if (found := self._files(name, revision)) is None:
            return
        commit, files = found
        if path not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        row = self._row(path, files[path], "tree")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{row["oid"]}"'}
        if "lfs" in row:
            headers |= {
                "X-Linked-Etag": f'"{row["lfs"]["oid"]}"', "X-Linked-Size": str(row["size"]),
                "Location": f"http://localhost:{self.hub.port}/cdn/{name}/{commit}/{path}",
            }  # fmt: skip
            self._send(302, b"", headers)
        else:
            self._send(200, files[path], headers)

    def _cdn(self, name: str, rest: str, body: bool) -> None:
        commit, _, path = rest.partition("/")
        data, faults = self.hub.repositories[f"{name}@{commit}"][path], self.hub.faults
        time.sleep(faults.pause)
        total, bounds = len(data) + faults.total, self.headers.get("range")
        if bounds is None or not faults.ranges:
            self._send(200, data)
            return
        first, last = map(int, bounds.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{total}"}
        if faults.break_off is not None and faults.breaks > 0 and len(part) > faults.break_off:
            faults.breaks -= 1
            self._send(206, part, headers, keep=faults.break_off)
            return
        self._send(206, part, headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, keep: int = -1
    ) -> None:
        """Send an answer; with `keep`, only so many of its bytes, and close the connection."""
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data if keep < 0 else data[:keep])
            if keep >= 0:
                self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


def main(root: Path, port: int) -> None:
    server = HubServer(port=port)
    for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*")
                 if p.is_file()}  # fmt: skip
        server.add(folder.relative_to(root).as_posix(), files)
    with server.serving():
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["0"])[0]))
